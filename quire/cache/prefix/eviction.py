"""Orders in which leaves are given up, and a heap of leaves in such an order. The order by worth is in worth.py.

An order gives a leaf its standing: what has the least goes first. A standing may rise at any time, at no cost: the
heap looks again when a leaf comes up. Where it may have fallen the heap is told (`renew`).
"""

from heapq import heapify, heappop, heappush
from typing import Protocol

from quire.cache.prefix.radix_node import Clock, Node
from quire.cache.retention import priority_at

_MOST_RETURNED = 2  # leaves that were in use and are looked at again, in a call of `evict`


class Order(Protocol):
    """A strategy."""

    def standing(self, leaf: Node) -> tuple[int, ...]:
        """What has less is given up first; of equals the older node."""

    def used(self, node: Node) -> None:
        """A node was used, just now."""

    def given_up(self, leaf: Node) -> None:
        """Blocks of a leaf are about to leave."""

    def reason(self, leaf: Node) -> dict[str, float]:
        """In numbers, why it goes now."""


class LeastRecent:
    """lru: what was used last goes last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def standing(self, leaf: Node) -> tuple[int, ...]:
        """See Order."""
        return (leaf.tick,)

    def used(self, node: Node) -> None:
        """See Order."""

    def given_up(self, leaf: Node) -> None:
        """See Order."""

    def reason(self, leaf: Node) -> dict[str, float]:
        """See Order."""
        return {"age": self._clock.tick - leaf.tick}


class LeastFrequent:
    """lfu: what sequences began with least often, with dynamic ageing (LFU-DA: Arlitt et al., 2000).

    At each use a node is lifted to its hits, counted from the level of what was given up last: what was popular
    long ago is overtaken by what is used now.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._level = 0

    def standing(self, leaf: Node) -> tuple[int, ...]:
        """See Order. Of equals the one that was used longest ago."""
        return leaf.uses.level, leaf.tick

    def used(self, node: Node) -> None:
        """See Order."""
        node.uses.level = self._level + node.uses.hits

    def given_up(self, leaf: Node) -> None:
        """See Order."""
        self._level = max(self._level, leaf.uses.level)

    def reason(self, leaf: Node) -> dict[str, float]:
        """See Order."""
        return {"age": self._clock.tick - leaf.tick, "hits": leaf.uses.hits, "level": leaf.uses.level}


class LeastWanted:
    """priority: what requests asked for counts (Retention.priority), then recency."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def standing(self, leaf: Node) -> tuple[int, ...]:
        """See Order."""
        return priority_at(leaf.marks, leaf.end, self._clock.now), leaf.tick

    def used(self, node: Node) -> None:
        """See Order."""

    def given_up(self, leaf: Node) -> None:
        """See Order."""

    def reason(self, leaf: Node) -> dict[str, float]:
        """See Order."""
        return {"age": self._clock.tick - leaf.tick, "priority": priority_at(leaf.marks, leaf.end, self._clock.now)}


class Leaves(Protocol):
    """All leaves that may be given up, in some order."""

    def __contains__(self, node: Node) -> bool:
        """Whether it is among them."""

    def add(self, node: Node) -> None:
        """It may be given up; one that is there already stays."""

    def renew(self, node: Node) -> None:
        """If it is there: its standing may have fallen."""

    def discard(self, node: Node) -> None:
        """It has left the tree."""

    def set_aside(self, node: Node) -> None:
        """It came up and somebody uses it: not to be looked at again at once."""

    def begin(self) -> None:
        """Blocks are needed: some of those that were set aside are looked at again."""

    def pop(self) -> Node | None:
        """Take out the first one; those set aside come last."""

    def used(self, node: Node, *, hit: bool) -> None:
        """It was used just now. hit: a sequence begins with it."""

    def given_up(self, leaf: Node, num_blocks: int) -> None:
        """So many blocks at the end of one that was taken out are about to leave."""

    def num_at_once(self, leaf: Node) -> int:
        """Blocks at its end that are given up together: then its standing is another, or it is compared again."""

    @property
    def asks_for_misses(self) -> bool:
        """Whether there is anything to learn from what prompts ask for in vain."""

    def missed(self, root_key: object, data: bytes, first: int, at: int) -> None:
        """The whole blocks of a prompt from index `at` on are not there. first: where their root begins."""

    def reason(self, leaf: Node) -> dict[str, float]:
        """In numbers, why it goes now."""


class Aside:
    """Leaves that came up while somebody used them. Nobody says when that ends: a few are looked at in each call."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}

    def __contains__(self, node: Node) -> bool:
        return node.id in self._nodes

    def put(self, node: Node) -> None:
        """It is in use."""
        self._nodes[node.id] = node

    def discard(self, node: Node) -> None:
        """It need not be remembered here."""
        self._nodes.pop(node.id, None)

    def some(self) -> list[Node]:
        """A few, those that wait longest."""
        return [self._nodes.pop(next(iter(self._nodes))) for _ in range(min(_MOST_RETURNED, len(self._nodes)))]

    def pop(self) -> Node | None:
        """The one that waits longest."""
        return self._nodes.pop(next(iter(self._nodes))) if self._nodes else None


class OrderedLeaves:
    """Leaves by their standing: a heap whose entries are put right when they come up. See Leaves."""

    asks_for_misses = False

    def __init__(self, order: Order) -> None:
        self.order = order
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._members: dict[int, tuple[tuple[int, ...], int, Node]] = {}  # their latest entries, by id
        self._aside = Aside()

    def __contains__(self, node: Node) -> bool:
        return node.id in self._members or node in self._aside

    def __len__(self) -> int:
        return len(self._members)

    def add(self, node: Node) -> None:
        """See Leaves."""
        if node.id not in self._members:
            self._aside.discard(node)
            self._push(node)

    def renew(self, node: Node) -> None:
        """See Leaves."""
        if node.id in self._members:
            self._push(node)

    def discard(self, node: Node) -> None:
        """See Leaves."""
        self._aside.discard(node)
        if self._members.pop(node.id, None) is not None:
            self._compact()

    def set_aside(self, node: Node) -> None:
        """See Leaves."""
        if node.id not in self._members:
            self._aside.put(node)

    def begin(self) -> None:
        """See Leaves."""
        for node in self._aside.some():
            self.add(node)

    def pop(self) -> Node | None:
        """See Leaves."""
        node = self.first()
        if node is None:
            return self._aside.pop()
        heappop(self._heap)
        del self._members[node.id]
        return node

    def first(self) -> Node | None:
        """The one that `pop` would take out, of those that were not set aside."""
        while self._heap:
            entry = self._heap[0]
            known, number, node = entry
            if self._members.get(number) is not entry:
                heappop(self._heap)
            elif self.order.standing(node) > known:
                heappop(self._heap)
                self._push(node)
            else:
                return node
        return None

    def used(self, node: Node, *, hit: bool) -> None:
        """See Leaves."""
        del hit
        self.order.used(node)

    def given_up(self, leaf: Node, num_blocks: int) -> None:
        """See Leaves."""
        del num_blocks
        self.order.given_up(leaf)

    def num_at_once(self, leaf: Node) -> int:
        """See Leaves."""
        return leaf.num_alike

    def missed(self, root_key: object, data: bytes, first: int, at: int) -> None:
        """See Leaves."""

    def reason(self, leaf: Node) -> dict[str, float]:
        """See Leaves."""
        return self.order.reason(leaf)

    def _push(self, node: Node) -> None:
        entry = self._members[node.id] = (self.order.standing(node), node.id, node)
        heappush(self._heap, entry)
        self._compact()

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = list(self._members.values())
            heapify(self._heap)
