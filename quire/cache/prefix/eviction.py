"""Eviction policies, and the heap of leaves in their order.

A policy gives each leaf an eviction key; the leaf with the lowest key is evicted first. A key may rise at no cost: the
heap corrects an entry when it reaches the top. When a key may fall, `update` must be called.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf, log2
from typing import Protocol

from quire.cache.prefix.radix_node import Clock, Node
from quire.cache.retention import DEFAULT_PRIORITY, NO_STAGE, priority_at

EvictionKey = tuple[float, ...]

_REQUEUED_PER_EVICTION = 2  # leaves set aside as in use that one call of `evict` checks again


class EvictionPolicy(Protocol):
    """An eviction policy."""

    def eviction_key(self, leaf: Node) -> EvictionKey:
        """The eviction key: the leaf with the lowest one is evicted first, the older node if they are equal."""

    def on_use(self, node: Node) -> None:
        """The node was used."""

    def on_evict(self, leaf: Node) -> None:
        """Blocks of a leaf are about to be evicted."""

    def reason(self, leaf: Node) -> dict[str, float]:
        """The figures of its eviction key, by name."""


class LRUPolicy:
    """lru: the least recently used leaf first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def eviction_key(self, leaf: Node) -> EvictionKey:
        """See EvictionPolicy."""
        return (leaf.tick,)

    def on_use(self, node: Node) -> None:
        """See EvictionPolicy."""

    def on_evict(self, leaf: Node) -> None:
        """See EvictionPolicy."""

    def reason(self, leaf: Node) -> dict[str, float]:
        """See EvictionPolicy."""
        return {"age": self._clock.tick - leaf.tick}


class LFUPolicy:
    """lfu: the leaf with the fewest hits first, with dynamic ageing (LFU-DA: Arlitt et al., 2000).

    The key is the hits of a leaf plus its level. A use sets the level of a node to the highest key of any evicted leaf.
    So a prefix in use now overtakes a prefix that was popular long ago.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._level = 0.0

    def eviction_key(self, leaf: Node) -> EvictionKey:
        """See EvictionPolicy. Of equal keys the least recently used first."""
        return leaf.level + leaf.uses.hits, leaf.tick

    def on_use(self, node: Node) -> None:
        """See EvictionPolicy."""
        node.level = self._level

    def on_evict(self, leaf: Node) -> None:
        """See EvictionPolicy."""
        self._level = max(self._level, leaf.level + leaf.uses.hits)

    def reason(self, leaf: Node) -> dict[str, float]:
        """See EvictionPolicy."""
        return {"age": self._clock.tick - leaf.tick, "hits": leaf.uses.hits, "level": leaf.level}


RecomputeSeconds = Callable[[int, int], float]  # (tokens to compute, tokens before them) -> seconds


def default_recompute_seconds(num_tokens: int, num_before: int) -> float:
    """A cost without a unit: the number of tokens, increased with the number of tokens that they attend to."""
    return num_tokens * (1 + (num_before + num_tokens / 2) / 16384)


_POINTS_TO_DOUBLE = 10  # of retention priority


def _expected_reuse(leaf: Node) -> float:
    return log2(leaf.uses.hits + 1) if leaf.uses.hits else leaf.uses.chance


class CostPolicy:
    """cost: greedy-dual size-frequency (GDSF: Cherkasova, 1998) on the last block of a leaf.

    The key is the level of the leaf, as in LFUPolicy, plus cost x reuse x priority. All blocks have the same size.
    The cost is the seconds to compute the block again, divided by the seconds of a block at position 0. So it has no
    unit, and the level stays valid when the predicted seconds change. The reuse is log2(hits + 1) with hits. Without,
    it is the share of the earlier parts behind the same part that had hits (`UseStats.chance`). Each 10 points of
    request priority above 50 double the product, and each 10 points below halve it.
    """

    def __init__(self, clock: Clock, seconds: RecomputeSeconds, block_size: int) -> None:
        """seconds: of the cost model. Where it predicts 0 or infinity, `default_recompute_seconds` applies."""
        self._clock = clock
        self._seconds = seconds
        self._block_size = block_size
        self._level = 0.0

    def eviction_key(self, leaf: Node) -> EvictionKey:
        """See EvictionPolicy. Of equal keys the least recently used first."""
        value = self._relative_cost(leaf) * _expected_reuse(leaf)
        asked = [mark for mark in leaf.marks if mark.hint.stage == NO_STAGE]  # program hints apply within a tenant only
        if asked:
            points = priority_at(asked, leaf.default_reach, leaf.end, self._clock.now) - DEFAULT_PRIORITY
            value *= 2 ** (points / _POINTS_TO_DOUBLE)
        return leaf.level + value, leaf.tick

    def on_use(self, node: Node) -> None:
        """See EvictionPolicy."""
        node.level = self._level

    def on_evict(self, leaf: Node) -> None:
        """See EvictionPolicy."""
        self._level = max(self._level, self.eviction_key(leaf)[0])

    def reason(self, leaf: Node) -> dict[str, float]:
        """See EvictionPolicy."""
        key, _ = self.eviction_key(leaf)
        cost, reuse = self._relative_cost(leaf), _expected_reuse(leaf)
        age, hits = self._clock.tick - leaf.tick, leaf.uses.hits
        return {"key": key, "level": leaf.level, "cost": cost, "reuse": reuse, "age": age, "hits": hits}

    def _relative_cost(self, leaf: Node) -> float:
        size = self._block_size
        before = (leaf.end - 1) * size
        first, last = self._seconds(size, 0), self._seconds(size, before)
        if not (0 < first < inf and 0 < last < inf):
            first, last = default_recompute_seconds(size, 0), default_recompute_seconds(size, before)
        return last / first


class PriorityPolicy:
    """priority: the leaf with the lowest priority (Retention.priority) first, then the least recently used."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def eviction_key(self, leaf: Node) -> EvictionKey:
        """See EvictionPolicy."""
        return priority_at(leaf.marks, leaf.default_reach, leaf.end, self._clock.now), leaf.tick

    def on_use(self, node: Node) -> None:
        """See EvictionPolicy."""

    def on_evict(self, leaf: Node) -> None:
        """See EvictionPolicy."""

    def reason(self, leaf: Node) -> dict[str, float]:
        """See EvictionPolicy."""
        priority = priority_at(leaf.marks, leaf.default_reach, leaf.end, self._clock.now)
        return {"age": self._clock.tick - leaf.tick, "priority": priority}


class EvictableLeaves(Protocol):
    """The leaves that may be evicted, in some order."""

    def __contains__(self, node: Node) -> bool:
        """Whether the node is among them."""

    def add(self, node: Node) -> None:
        """Add a leaf. Does nothing if it is there."""

    def update(self, node: Node) -> None:
        """Update the eviction key of a leaf that may have fallen. Does nothing if it is not there."""

    def discard(self, node: Node) -> None:
        """Remove a node that has left the tree."""

    def defer(self, node: Node) -> None:
        """Set a popped leaf aside because it is in use, so that it is not checked again at once."""

    def requeue_deferred(self) -> None:
        """Put some of the leaves that were set aside back. Called at the start of an eviction."""

    def pop(self) -> Node | None:
        """Remove and return the leaf to evict next; those set aside come last. None if there is none."""

    def on_use(self, node: Node) -> None:
        """The node was used."""

    def on_evict(self, leaf: Node) -> None:
        """Blocks at the end of a popped leaf are about to be evicted."""

    def reason(self, leaf: Node) -> dict[str, float]:
        """The figures of the eviction key of a leaf, by name."""


class DeferredLeaves:
    """Leaves that were popped while in use. No event reports the end of the use, so each call checks a few."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}

    def __contains__(self, node: Node) -> bool:
        return node.id in self._nodes

    def add(self, node: Node) -> None:
        """Add a leaf that is in use."""
        self._nodes[node.id] = node

    def discard(self, node: Node) -> None:
        """Remove a leaf, if it is there."""
        self._nodes.pop(node.id, None)

    def pop_some(self) -> list[Node]:
        """Remove and return the few that were added first."""
        return [self._nodes.pop(next(iter(self._nodes))) for _ in range(min(_REQUEUED_PER_EVICTION, len(self._nodes)))]

    def pop(self) -> Node | None:
        """Remove and return the one that was added first."""
        return self._nodes.pop(next(iter(self._nodes))) if self._nodes else None


class OrderedLeaves:
    """Leaves in the order of an eviction policy: a heap with entries corrected at the top. See EvictableLeaves."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._heap: list[tuple[EvictionKey, int, Node]] = []
        self._members: dict[int, tuple[EvictionKey, int, Node]] = {}  # the latest heap entry of each, by id
        self._deferred = DeferredLeaves()

    def __contains__(self, node: Node) -> bool:
        return node.id in self._members or node in self._deferred

    def __len__(self) -> int:
        return len(self._members)

    def add(self, node: Node) -> None:
        """See EvictableLeaves."""
        if node.id not in self._members:
            self._deferred.discard(node)
            self._push(node)

    def update(self, node: Node) -> None:
        """See EvictableLeaves."""
        if node.id in self._members:
            self._push(node)

    def discard(self, node: Node) -> None:
        """See EvictableLeaves."""
        self._deferred.discard(node)
        if self._members.pop(node.id, None) is not None:
            self._compact()

    def defer(self, node: Node) -> None:
        """See EvictableLeaves."""
        if node.id not in self._members:
            self._deferred.add(node)

    def requeue_deferred(self) -> None:
        """See EvictableLeaves."""
        for node in self._deferred.pop_some():
            self.add(node)

    def pop(self) -> Node | None:
        """See EvictableLeaves."""
        node = self.peek()
        if node is None:
            return self._deferred.pop()
        heappop(self._heap)
        del self._members[node.id]
        return node

    def peek(self) -> Node | None:
        """The leaf that `pop` would return, of those that are not set aside."""
        while self._heap:
            entry = self._heap[0]
            known, number, node = entry
            if self._members.get(number) is not entry:
                heappop(self._heap)
            elif self.policy.eviction_key(node) > known:
                heappop(self._heap)
                self._push(node)
            else:
                return node
        return None

    def on_use(self, node: Node) -> None:
        """See EvictableLeaves."""
        self.policy.on_use(node)

    def on_evict(self, leaf: Node) -> None:
        """See EvictableLeaves."""
        self.policy.on_evict(leaf)

    def reason(self, leaf: Node) -> dict[str, float]:
        """See EvictableLeaves."""
        return self.policy.reason(leaf)

    def _push(self, node: Node) -> None:
        entry = self._members[node.id] = (self.policy.eviction_key(node), node.id, node)
        heappush(self._heap, entry)
        self._compact()

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = list(self._members.values())
            heapify(self._heap)
