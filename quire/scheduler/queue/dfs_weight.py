"""Depth-first order through the radix tree, the heaviest subtree first: SGLang's `dfs-weight`."""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise

from quire.scheduler.queue.fcfs import RankedQueue
from quire.scheduler.queue.prefix_aware import PrefixAwareQueue, PrefixMatches
from quire.scheduler.sequence import Sequence


@dataclass(slots=True)
class _Node:
    """A node of the radix tree with the waiting sequences at and below it, as of their last match."""

    id: int
    weight: int = 0  # waiting sequences whose match ends here or below
    children: "dict[int, _Node]" = field(default_factory=dict)
    waiting: RankedQueue = field(default_factory=RankedQueue)
    heap: list[tuple[int, int]] = field(default_factory=list)  # heap of (-weight, id), partly outdated

    def heaviest(self) -> "_Node":
        """The heaviest child; of equal ones, the older node. There must be a child."""
        while True:
            weight, number = self.heap[0]
            spot = self.children.get(number)
            if spot is not None and spot.weight == -weight:
                return spot
            heappop(self.heap)

    def change_weight(self, child: "_Node", change: int) -> None:
        """Change the weight of a child, and remove it if its weight is 0."""
        child.weight += change
        if not child.weight:
            del self.children[child.id]
            return
        heappush(self.heap, (-child.weight, child.id))
        if len(self.heap) > 2 * len(self.children) + 8:
            self.heap = [(-one.weight, one.id) for one in self.children.values()]
            heapify(self.heap)


class DepthFirstQueue(PrefixAwareQueue):
    """From the root, go to the child with the most waiting sequences at or below it, until there is no child.

    The sequences that wait at the node reached come next, by rank. Of equal children the older node is first. A
    sequence waits at the node where its match ended at its last update, so weights are outdated after nodes split.
    """

    def __init__(self, matches: PrefixMatches) -> None:
        super().__init__(matches)
        self._root = _Node(0)
        self._paths: dict[int, tuple[int, ...]] = {}
        self._cached_head: Sequence | None = None  # cached until the order changes

    def head_of_new(self) -> Sequence | None:
        """See PrefixAwareQueue."""
        if self._cached_head is None:
            spot = self._root
            while spot.children:
                spot = spot.heaviest()
            self._cached_head = spot.waiting.head
        return self._cached_head

    def insert_new(self, seq: Sequence) -> None:
        """See PrefixAwareQueue."""
        path = self._paths[seq.id] = self.matches.path(seq)
        spot = self._root
        for number in path:
            if number not in spot.children:
                spot.children[number] = _Node(number)
            above, spot = spot, spot.children[number]
            above.change_weight(spot, 1)
        spot.waiting.put(seq)
        self._cached_head = None

    def remove_new(self, seq: Sequence) -> None:
        """See PrefixAwareQueue."""
        spots = [self._root]
        for number in self._paths.pop(seq.id):
            spots.append(spots[-1].children[number])
        spots[-1].waiting.remove(seq)
        for above, spot in pairwise(spots):
            above.change_weight(spot, -1)
            if not spot.weight:
                break
        self._cached_head = None

    def reposition(self, seq: Sequence) -> None:
        """See PrefixAwareQueue."""
        if self.matches.path(seq) != self._paths[seq.id]:
            super().reposition(seq)
