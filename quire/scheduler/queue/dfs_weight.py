"""Depth first over the radix tree, the heaviest subtree first: SGLang's `dfs-weight`."""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise

from quire.scheduler.queue.fcfs import Ranked
from quire.scheduler.queue.prefix_aware import ByMatch, Matches
from quire.scheduler.sequence import Sequence


@dataclass(slots=True)
class _Spot:
    """A node of the radix tree, as those who wait below it saw it."""

    id: int
    weight: int = 0  # sequences whose match ends here or below
    below: "dict[int, _Spot]" = field(default_factory=dict)
    here: Ranked = field(default_factory=Ranked)
    order: list[tuple[int, int]] = field(default_factory=list)  # heap of those below, old weights among them

    def heaviest(self) -> "_Spot":
        """Of those below, of equals the older one. There is one."""
        while True:
            weight, number = self.order[0]
            spot = self.below.get(number)
            if spot is not None and spot.weight == -weight:
                return spot
            heappop(self.order)

    def weigh(self, spot: "_Spot", change: int) -> None:
        """A spot below it has become heavier or lighter; without weight it is none."""
        spot.weight += change
        if not spot.weight:
            del self.below[spot.id]
            return
        heappush(self.order, (-spot.weight, spot.id))
        if len(self.order) > 2 * len(self.below) + 8:
            self.order = [(-one.weight, one.id) for one in self.below.values()]
            heapify(self.order)


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
                spot = spot.heaviest()
            self._first = spot.here.head
        return self._first

    def enter(self, seq: Sequence) -> None:
        """See ByMatch."""
        path = self._paths[seq.id] = self.matches.path(seq)
        spot = self._top
        for number in path:
            if number not in spot.below:
                spot.below[number] = _Spot(number)
            above, spot = spot, spot.below[number]
            above.weigh(spot, 1)
        spot.here.put(seq)
        self._first = None

    def leave(self, seq: Sequence) -> None:
        """See ByMatch."""
        spots = [self._top]
        for number in self._paths.pop(seq.id):
            spots.append(spots[-1].below[number])
        spots[-1].here.remove(seq)
        for above, spot in pairwise(spots):
            above.weigh(spot, -1)
            if not spot.weight:
                break
        self._first = None

    def moved(self, seq: Sequence) -> None:
        """See ByMatch."""
        if self.matches.path(seq) != self._paths[seq.id]:
            super().moved(seq)
