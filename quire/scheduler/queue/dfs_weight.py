"""Depth-first order through the radix tree, the heaviest subtree first: SGLang's `dfs-weight`."""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise

from quire.scheduler.queue.fcfs import Ranked
from quire.scheduler.queue.prefix_aware import ByMatch, Matches
from quire.scheduler.sequence import Sequence


@dataclass(slots=True)
class _Spot:
    """A node of the radix tree with the waiting sequences at and below it, as of their last match."""

    id: int
    weight: int = 0  # waiting sequences whose match ends here or below
    below: "dict[int, _Spot]" = field(default_factory=dict)
    here: Ranked = field(default_factory=Ranked)
    order: list[tuple[int, int]] = field(default_factory=list)  # heap of (-weight, id), partly outdated

    def heaviest(self) -> "_Spot":
        """The heaviest child; of equal ones, the older node. There must be a child."""
        while True:
            weight, number = self.order[0]
            spot = self.below.get(number)
            if spot is not None and spot.weight == -weight:
                return spot
            heappop(self.order)

    def weigh(self, spot: "_Spot", change: int) -> None:
        """Change the weight of a child, and remove it if its weight is 0."""
        spot.weight += change
        if not spot.weight:
            del self.below[spot.id]
            return
        heappush(self.order, (-spot.weight, spot.id))
        if len(self.order) > 2 * len(self.below) + 8:
            self.order = [(-one.weight, one.id) for one in self.below.values()]
            heapify(self.order)


class DepthFirst(ByMatch):
    """From the root, go to the child with the most waiting sequences at or below it, until there is no child.

    The sequences that wait at the node reached come next, by rank. Of equal children the older node is first. A
    sequence waits at the node where its match ended at its last update, so weights are outdated after nodes split.
    """

    def __init__(self, matches: Matches) -> None:
        super().__init__(matches)
        self._top = _Spot(0)
        self._paths: dict[int, tuple[int, ...]] = {}
        self._first: Sequence | None = None  # cached until the order changes

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
