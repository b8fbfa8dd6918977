"""Pins: references that exclude blocks from eviction, with limits for all pins and per tenant.

A pin owns blocks by reference count, like a table. So pinned blocks are not idle, and the scheduler does not count them
as available. A pin covers a path from its first block: at each position the blocks of all groups, or none there and
none behind. So no idle block ever lies before a pinned one, and every idle block can be evicted.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT
from quire.cache.prefix.radix_node import Node
from quire.cache.retention import RetentionHint

MOST_PINNED = 0.5  # share of each pool's blocks
MOST_PINNED_PER_TENANT = 0.25  # of a named tenant. The unnamed tenant of a server without keys can pin MOST_PINNED

PinnedPath = list[list[int]]  # the first blocks of a path, per group; ABSENT before a window


class Pins:
    """Pinned blocks, per RetentionHint and per node."""

    def __init__(self, pools: Sequence[BlockPool], key_bytes: int) -> None:
        """key_bytes: bytes of a block's key."""
        self._pools = pools
        self._size = key_bytes
        self._pinned: dict[RetentionHint, dict[int, PinnedPath]] = {}  # by the id of the node at which the path ends
        self._counts: list[Counter[int]] = [Counter() for _ in pools]  # number of pinned paths per block
        self._by_tenant: dict[str, list[Counter[int]]] = {}

    def references(self, group: int) -> Counter[int]:
        """References of pins, per block."""
        return self._counts[group]

    @property
    def weakest(self) -> RetentionHint | None:
        """The pin that ends first if memory is short; None without pins."""
        return min(self._pinned, key=lambda hint: hint.strength, default=None)

    @property
    def hints(self) -> list[RetentionHint]:
        """All hints with pinned blocks."""
        return list(self._pinned)

    def num_blocks(self, hint: RetentionHint) -> int:
        """Blocks of all groups that are pinned for a hint."""
        places = self._pinned.get(hint, {}).values()
        return sum(len({*(b for held in places for b in held[g])} - {ABSENT}) for g in range(len(self._pools)))

    # Pinning

    def pin(self, hint: RetentionHint, node: Node) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """Pin the whole blocks from the root to the end of a node, from the first one on, within the limits.

        Returns the blocks that were not pinned and, only if there are any, those that are pinned, as (group, block).
        """
        paths = self._paths(node)
        before = self._pinned.get(hint, {}).get(node.id, [[] for _ in paths])
        num_known = len(before[0])
        goes_on = all(old == path[:num_known] for old, path in zip(before, paths, strict=True))
        start = num_known if goes_on else 0
        stop = self._pin_positions(hint.tenant, paths, start)
        if not goes_on:
            self._decr_refs(hint.tenant, before)
        if stop:
            self._pinned.setdefault(hint, {})[node.id] = [path[:stop] for path in paths]
        else:
            self._forget(hint, node)
        refused = set(_blocks_of([path[stop:] for path in paths]))
        return refused, set(_blocks_of([path[:stop] for path in paths])) if refused else set()

    def _paths(self, node: Node) -> PinnedPath:
        """Per group, the whole blocks from the root to the end of a node."""
        is_tail = len(node.edge) < self._size
        whole = node.parent if is_tail else node
        return [[] if whole is None else whole.path_blocks(group) for group in range(len(self._pools))]

    def _pin_positions(self, tenant: str, paths: PinnedPath, start: int) -> int:
        """Pin positions from `start` on. Returns the first position that was not pinned."""
        ours = self._by_tenant.setdefault(tenant, [Counter() for _ in self._pools])
        share = MOST_PINNED_PER_TENANT if tenant else MOST_PINNED
        rooms = [
            (pool, all_, own, int(pool.num_blocks * MOST_PINNED), int(pool.num_blocks * share))
            for pool, all_, own in zip(self._pools, self._counts, ours, strict=True)
        ]
        at = start
        while at < len(paths[0]):
            position = [(path[at], *room) for path, room in zip(paths, rooms, strict=True) if path[at] != ABSENT]
            if any(
                (block not in all_ and len(all_) >= most) or (block not in own and len(own) >= most_own)
                for block, _, all_, own, most, most_own in position
            ):
                break
            for block, pool, all_, own, _, _ in position:
                pool.incr_ref(block)
                all_[block] += 1
                own[block] += 1
            at += 1
        self._forget_unused_tenant(tenant)
        return at

    def _forget_unused_tenant(self, tenant: str) -> None:
        if not any(self._by_tenant.get(tenant, ())):
            self._by_tenant.pop(tenant, None)

    # Unpinning

    def move(self, hint: RetentionHint, node: Node, other: Node) -> None:
        """Move the pinned path of a node to another node. Of two paths there, the longer one is kept."""
        places = self._pinned.get(hint, {})
        held = places.pop(node.id, None)
        if held is None:
            return
        before = places.get(other.id)
        if before is not None and len(before[0]) > len(held[0]):
            held, before = before, held
        places[other.id] = held
        if before is not None:
            self._decr_refs(hint.tenant, before)

    def unpin(self, hint: RetentionHint, node: Node) -> None:
        """Unpin the path of one node."""
        held = self._pinned.get(hint, {}).get(node.id)
        if held is not None:
            self._forget(hint, node)
            self._decr_refs(hint.tenant, held)

    def unpin_all(self, hint: RetentionHint) -> None:
        """Unpin all paths of a hint."""
        for held in self._pinned.pop(hint, {}).values():
            self._decr_refs(hint.tenant, held)

    def unpin_invalid(self) -> None:
        """Unpin all paths with blocks that have left the index without an eviction."""
        for hint, places in list(self._pinned.items()):
            for number, held in list(places.items()):
                if any(not self._pools[group].is_indexed(block) for group, block in _blocks_of(held)):
                    del places[number]
                    self._decr_refs(hint.tenant, held)
            if not places:
                del self._pinned[hint]

    def _forget(self, hint: RetentionHint, node: Node) -> None:
        places = self._pinned.get(hint)
        if places is not None:
            places.pop(node.id, None)
            if not places:
                del self._pinned[hint]

    def _decr_refs(self, tenant: str, held: PinnedPath) -> None:
        for group, block in _blocks_of(held):  # none if a window has passed all of them
            self._pools[group].decr_ref(block)
            for counts in (self._counts[group], self._by_tenant[tenant][group]):
                counts[block] -= 1
                if not counts[block]:
                    del counts[block]
        self._forget_unused_tenant(tenant)

    # Checks

    def is_pinned(self, node: Node, i: int) -> bool:
        """Whether block `i` of a node is pinned, in any group."""
        return any(blocks[i] in counts for blocks, counts in zip(node.blocks, self._counts, strict=True))

    def node_errors(self, node: Node, windowed: Collection[int]) -> Iterator[str]:
        """Errors: idle blocks beside or before a pinned block, which could never be evicted.

        Groups with a window are excluded, because their blocks can leave any node.
        """
        for i in range(len(node.blocks[0])):
            above, at = (node, i - 1) if i else (node.parent, -1)
            if not self.is_pinned(node, i):
                continue
            idle = [
                group
                for one, j in ((node, i), (above, at))
                if one is not None and one.parent is not None
                for group, pool in enumerate(self._pools)
                if group not in windowed and one.blocks[group][j] != ABSENT and pool.is_idle(one.blocks[group][j])
            ]
            if idle:
                yield f"idle blocks of groups {idle} cannot be evicted before what a pin holds"


def _blocks_of(held: PinnedPath) -> Iterator[tuple[int, int]]:
    """(group, block) of all blocks."""
    return ((group, block) for group, blocks in enumerate(held) for block in blocks if block != ABSENT)
