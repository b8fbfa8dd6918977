"""Pins: the blocks that are held for wishes, and how many may be held, by all and by one tenant. Knows no marks.

A pin is an owner of blocks as any other, by reference count: what it holds is not idle, so that nobody plans with it.
It holds the path to a place from its beginning: of each position the blocks of all groups, or none and nothing behind
it. So nothing that is idle ever lies before something pinned, and what is idle can be evicted.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT
from quire.cache.prefix.radix_node import Node
from quire.cache.retention import Wish

MOST_PINNED = 0.5  # share of each pool's blocks
MOST_OF_TENANT = 0.25  # of one with a name. The nameless tenant of a server without keys has all that there is

Held = list[list[int]]  # the beginning of a path: its blocks of each group, ABSENT where a window has passed


class Pins:
    """What is held for each wish, and each place where it counts."""

    def __init__(self, pools: Sequence[BlockPool], key_bytes: int) -> None:
        """key_bytes: of a block."""
        self._pools = pools
        self._size = key_bytes
        self._held: dict[Wish, dict[int, Held]] = {}  # by the id of the node where the path ends
        self._counts: list[Counter[int]] = [Counter() for _ in pools]  # how many paths hold a block
        self._by_tenant: dict[str, list[Counter[int]]] = {}

    def references(self, group: int) -> Counter[int]:
        """That pins hold, per block."""
        return self._counts[group]

    @property
    def weakest(self) -> Wish | None:
        """The wish that yields first."""
        return min(self._held, key=lambda wish: wish.strength, default=None)

    @property
    def wishes(self) -> list[Wish]:
        """All for which something is held."""
        return list(self._held)

    def num_blocks(self, wish: Wish) -> int:
        """Blocks of all groups that are held for a wish."""
        places = self._held.get(wish, {}).values()
        return sum(len({*(b for held in places for b in held[g])} - {ABSENT}) for g in range(len(self._pools)))

    # Holding

    def hold(self, wish: Wish, node: Node) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """Hold the whole blocks up to the end of a node, from the first one, as far as they may be.

        Returns those that could not be held, and where there are any those that are: as (group, block).
        """
        paths = self._paths(node)
        before = self._held.get(wish, {}).get(node.id, [[] for _ in paths])
        num_known = len(before[0])
        goes_on = all(old == path[:num_known] for old, path in zip(before, paths, strict=True))
        start = num_known if goes_on else 0
        stop = self._take(wish.tenant, paths, start)
        if not goes_on:
            self._drop(wish.tenant, before)
        if stop:
            self._held.setdefault(wish, {})[node.id] = [path[:stop] for path in paths]
        else:
            self._forget(wish, node)
        refused = set(_blocks_of([path[stop:] for path in paths]))
        return refused, set(_blocks_of([path[:stop] for path in paths])) if refused else set()

    def _paths(self, node: Node) -> Held:
        """Whole blocks up to the end of a node."""
        is_tail = len(node.edge) < self._size
        whole = node.parent if is_tail else node
        return [[] if whole is None else whole.path_blocks(group) for group in range(len(self._pools))]

    def _take(self, tenant: str, paths: Held, start: int) -> int:
        """Hold positions from `start` on; the first one that could not be held."""
        ours = self._by_tenant.setdefault(tenant, [Counter() for _ in self._pools])
        share = MOST_OF_TENANT if tenant else MOST_PINNED
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
                pool.hold(block)
                all_[block] += 1
                own[block] += 1
            at += 1
        self._tidy(tenant)
        return at

    def _tidy(self, tenant: str) -> None:
        if not any(self._by_tenant.get(tenant, ())):
            self._by_tenant.pop(tenant, None)

    # Letting go

    def moved(self, wish: Wish, node: Node, other: Node) -> None:
        """What is held up to a node is held up to another from now on; of two paths the longer one."""
        places = self._held.get(wish, {})
        held = places.pop(node.id, None)
        if held is None:
            return
        before = places.get(other.id)
        if before is not None and len(before[0]) > len(held[0]):
            held, before = before, held
        places[other.id] = held
        if before is not None:
            self._drop(wish.tenant, before)

    def let_go(self, wish: Wish, node: Node) -> None:
        """Of what is held up to a node."""
        held = self._held.get(wish, {}).get(node.id)
        if held is not None:
            self._forget(wish, node)
            self._drop(wish.tenant, held)

    def let_all_go(self, wish: Wish) -> None:
        """Of all that is held for a wish."""
        for held in self._held.pop(wish, {}).values():
            self._drop(wish.tenant, held)

    def void(self) -> None:
        """Blocks have left the index for which there was no eviction: paths with such blocks are let go."""
        for wish, places in list(self._held.items()):
            for number, held in list(places.items()):
                if any(not self._pools[group].is_indexed(block) for group, block in _blocks_of(held)):
                    del places[number]
                    self._drop(wish.tenant, held)
            if not places:
                del self._held[wish]

    def _forget(self, wish: Wish, node: Node) -> None:
        places = self._held.get(wish)
        if places is not None:
            places.pop(node.id, None)
            if not places:
                del self._held[wish]

    def _drop(self, tenant: str, held: Held) -> None:
        for group, block in _blocks_of(held):  # there may be none: a window has passed all of them
            self._pools[group].drop(block)
            for counts in (self._counts[group], self._by_tenant[tenant][group]):
                counts[block] -= 1
                if not counts[block]:
                    del counts[block]
        self._tidy(tenant)

    # Looking

    def is_held(self, node: Node, i: int) -> bool:
        """Whether a block at place `i` of a node is held, in any group."""
        return any(blocks[i] in counts for blocks, counts in zip(node.blocks, self._counts, strict=True))

    def faults(self, node: Node, windowed: Collection[int]) -> Iterator[str]:
        """Complaints where something is idle beside or before what is held: it would never be evicted.

        Blocks of groups with a window leave from anywhere.
        """
        for i in range(len(node.blocks[0])):
            above, at = (node, i - 1) if i else (node.parent, -1)
            if not self.is_held(node, i):
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


def _blocks_of(held: Held) -> Iterator[tuple[int, int]]:
    """Group and block."""
    return ((group, block) for group, blocks in enumerate(held) for block in blocks if block != ABSENT)
