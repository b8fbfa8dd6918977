"""Depth first over the radix tree, the heaviest subtree first: SGLang's `dfs-weight`."""

from dataclasses import dataclass, field
from itertools import pairwise

from quire.sched.queues.by_match import ByMatch
from quire.sched.queues.matches import Matches
from quire.sched.queues.ranked import Ranked
from quire.sched.sequence import Sequence


@dataclass(slots=True)
class _Spot:
    """A node of the radix tree, as those who wait below it saw it."""

    id: int
    weight: int = 0  # sequences whose match ends here or below
    below: "dict[int, _Spot]" = field(default_factory=dict)
    here: Ranked = field(default_factory=Ranked)


class DepthFirst(ByMatch):
    """From the top, go down to the child with the most waiting sequences below it, as long as there is one.

    Those who wait at the node that is reached come by arrival. Of equal children the older node is first. A sequence
    stands where its match ended when it was last looked at; where nodes have parted since, weights lag behind.
    """

    def __init__(self, matches: Matches) -> None:
        super().__init__(matches)
        self._top = _Spot(0)
        self._paths: dict[int, tuple[int, ...]] = {}
        self._first: Sequence | None = None  # as long as nobody moves

    def first(self) -> Sequence | None:
        """See ByMatch."""
        if self._first is None:
            spot = self._top
            while spot.below:
                spot = max(spot.below.values(), key=_weight)
            self._first = spot.here.head
        return self._first

    def enter(self, seq: Sequence) -> None:
        """See ByMatch."""
        path = self._paths[seq.id] = self.matches.path(seq)
        spot = self._top
        for number in path:
            if number not in spot.below:
                spot.below[number] = _Spot(number)
            spot = spot.below[number]
            spot.weight += 1
        spot.here.put(seq)
        self._first = None

    def leave(self, seq: Sequence) -> None:
        """See ByMatch."""
        spots = [self._top]
        for number in self._paths.pop(seq.id):
            spots.append(spots[-1].below[number])
        spots[-1].here.remove(seq)
        for above, spot in pairwise(spots):
            spot.weight -= 1
            if not spot.weight:
                del above.below[spot.id]
                break
        self._first = None

    def moved(self, seq: Sequence) -> None:
        """See ByMatch."""
        if self.matches.path(seq) != self._paths[seq.id]:
            super().moved(seq)


def _weight(spot: _Spot) -> tuple[int, int]:
    return spot.weight, -spot.id
