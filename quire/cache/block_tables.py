"""The block tables of all sequences: growth, trimming, release, and the eviction that these need."""

from collections.abc import Sequence
from sys import maxsize
from typing import NamedTuple

from quire.cache.block_pool import BlockPool, Pools
from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.copies import Copies
from quire.cache.host_pool import SwapSpace
from quire.cache.in_flight import InFlight
from quire.cache.prefix.eviction_by_cost import Seconds, seconds_by_default
from quire.cache.prefix.hash_index import HashIndex
from quire.cache.prefix.index import NOTHING_FOUND, Cause, Found, GivenUp, NoIndex, PrefixIndex
from quire.cache.prefix.radix_index import RadixTree
from quire.config import CacheConfig
from quire.core.explanation import Miss

NOBODY = Cause()


class Tables:
    """Block tables by sequence id, and the other owners of blocks."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.pools = Pools(BlockPool(group.num_blocks) for group in config.groups)
        self._windowed = [i for i, group in enumerate(config.groups) if group.window]
        self.by_id: dict[int, BlockTable] = {}
        self.in_flight = InFlight(self.pools)
        self.copies = Copies(self.pools, self.in_flight.let_go)
        self.swap = SwapSpace(config)
        self.recompute_seconds: Seconds = seconds_by_default
        self.index = self._new_index()
        self.num_evicted_before = 0  # by earlier indexes that were replaced
        self.given_up: dict[str, GivenUp] = {}  # evictions by request id, since they were last taken

    def add(self, seq_id: int, table: BlockTable) -> BlockTable:
        """Register the table of a sequence and return it. Raises ValueError if the sequence has one."""
        if seq_id in self.by_id:
            raise ValueError(f"sequence {seq_id} has a table already")
        self.by_id[seq_id] = table
        return table

    def note_due(self, table: BlockTable) -> None:
        """Set `due` to the number of tokens at which the next block may enter the index."""
        table.due = maxsize if self.config.prefix_index == "none" else (table.num_indexed + 1) * self.block_size

    def begin_index_again(self) -> None:
        """Replace an inconsistent index by an empty one."""
        self.num_evicted_before += self.index.num_evicted
        self.index = self._new_index()
        for table in self.by_id.values():
            table.num_found = 0
            self.index.enter(table, NOTHING_FOUND)
            self.note_due(table)

    def needed(self, table: BlockTable, num_tokens: int, reserve: int = 0) -> list[int]:
        """See KVCache."""
        if num_tokens <= table.capacity:
            return [0] * len(self.pools)
        index = table.capacity // self.block_size
        return [
            max(0, self.config.num_blocks(group, num_tokens, reserve) - len(blocks))
            + self.is_shared(group, blocks, index)
            for group, blocks in enumerate(table.blocks)
        ]

    def grow(
        self,
        table: BlockTable,
        num_tokens: int,
        *,
        reserve: int = 0,
        spare: Sequence[int] | None = None,
        cause: Cause = NOBODY,
    ) -> list[int] | None:
        """See KVCache."""
        needed, enough = self.needed(table, num_tokens, reserve), True
        for group, pool in enumerate(self.pools):
            wanted = needed[group] + (spare[group] if spare else 0)
            if wanted > pool.num_free:
                enough = False
                if wanted > pool.num_available:
                    return None
        if not enough and not self.make_room(needed, cause):
            return None
        firsts = []
        index, rest = divmod(table.capacity, self.block_size)
        for group, (pool, blocks, new) in enumerate(zip(self.pools, table.blocks, needed, strict=True)):
            copied = new > 0 and self.is_shared(group, blocks, index)
            firsts.append(index if copied else len(blocks))
            if copied:
                blocks[index] = self.copies.make(group, blocks[index], rest)  # which takes over the table's reference
            blocks += pool.take_many(new - copied)
        table.capacity = max(table.capacity, min(map(len, table.blocks)) * self.block_size)
        return firsts

    def yield_pin(self) -> bool:
        """End the weakest pin. Returns False if there is none."""
        return self.index.wishes is not None and self.index.wishes.yield_one()

    def make_room(self, needed: Sequence[int], cause: Cause) -> bool:
        """Evict until `needed` blocks of each group are free. Returns whether they are."""
        for group, pool in enumerate(self.pools):
            if needed[group] > pool.num_free:
                self.evict(group, needed[group] - pool.num_free, cause)
        return all(pool.num_free >= count for pool, count in zip(self.pools, needed, strict=True))

    def evict(self, group: int, count: int, cause: Cause) -> None:
        """Evict up to `count` blocks of a group and record the cause."""
        num_blocks = self.index.evict(group, count, cause)
        if not num_blocks:
            return
        reason, before = self.index.take_reason(), self.given_up.get(cause.request_id)
        if before is None:
            self.given_up[cause.request_id] = GivenUp(cause, num_blocks, reason)
        else:
            self.given_up[cause.request_id] = before._replace(num_blocks=before.num_blocks + num_blocks)

    def is_shared(self, group: int, blocks: list[int], index: int) -> bool:
        """Whether the block at `index` exists and is in other tables, which must not see a write to it.

        `index` is that of the table's `capacity`. Two owners do not count. A pending copy of the block is made before
        the step's writes and reads positions before `capacity`. The prefix index exposes no positions behind that.
        """
        if index >= len(blocks):
            return False
        return self.pools[group].users(blocks[index]) - self.copies.held(group)[blocks[index]] > 1

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """See KVCache."""
        for group in self._windowed:
            blocks, first = table.blocks[group], table.firsts[group]
            seen = min(self.config.first_seen(group, num_tokens), len(blocks))
            for index in range(first, seen):
                self.in_flight.let_go(group, blocks[index])
                blocks[index] = ABSENT
            table.firsts[group] = max(first, seen)

    def release(self, seq_id: int, num_tokens: int) -> None:
        """See KVCache."""
        table = self.by_id.pop(seq_id)
        self.swap.forget_arrival(seq_id)
        for group, blocks in enumerate(table.blocks):
            for block in self.copies.cancel(group, blocks):
                num_tokens = min(num_tokens, blocks.index(block) * self.block_size)
        entered = self.index.leave(table, num_tokens)
        self.in_flight.doubt([table.blocks[0][i] for i in entered])
        for group, (blocks, first) in enumerate(zip(table.blocks, table.firsts, strict=True)):
            for block in reversed(blocks[first:]):
                self.in_flight.let_go(group, block)

    def _new_index(self) -> PrefixIndex:
        if self.config.prefix_index == "none":
            return NoIndex()
        if self.config.prefix_index == "hash":
            return HashIndex(self.config, self.pools, self.in_flight.fresh)
        return RadixTree(self.config, self.pools, self.in_flight.fresh, lambda *counts: self.recompute_seconds(*counts))


class Admission(NamedTuple):
    """The block table of an admitted sequence."""

    table: BlockTable
    num_tokens: int  # leading tokens whose KV need not be computed
    num_shared_blocks: int
    num_copied_tokens: int
    miss: Miss | None  # why the prefix match ended; None if the host pool had more tokens than the index
    num_swapped_tokens: int = 0  # of `num_tokens`, those that are copied from the host pool
    num_swapped_bytes: int = 0

    @property
    def arriving(self) -> bool:
        """Whether the planned step copies some of its KV from the host. That KV is valid once the step is collected."""
        return self.num_swapped_tokens > 0


class Room(NamedTuple):
    """The arguments of KVCache.admit that say how many blocks the sequence needs, and `cause`."""

    num_tokens: int
    limit: int
    most: int
    spare: Sequence[int] | None
    cause: Cause


def fitting(config: CacheConfig, pools: Sequence[BlockPool], found: Found, room: Room) -> Found | None:
    """`found`, or the part of it with which there are enough blocks for the sequence. None if there are not enough.

    If the blocks are too few for both a partly matching block and its copy, the copy is left out: waiting might never
    make space for both.
    """
    if _has_room(config, pools, found, room):
        return found
    if not found.partial:
        return None
    num_tokens = len(found.blocks[0]) * config.block_size
    less = found._replace(num_tokens=num_tokens, partial=())
    if any(ABSENT in blocks[config.first_seen(g, num_tokens) :] for g, blocks in enumerate(found.blocks)):
        less = NOTHING_FOUND._replace(num_public=found.num_public)  # the next query would attend to absent blocks
    return less if _has_room(config, pools, less, room) else None


def _has_room(config: CacheConfig, pools: Sequence[BlockPool], found: Found, room: Room) -> bool:
    """Whether enough blocks are available beside those of `found`, which are not idle once they are shared."""
    num_shared = len(found.blocks[0]) if found.blocks else 0
    stop = min(room.limit, found.num_tokens + room.most)
    needed, taken = [], []
    for group in range(len(pools)):
        needed.append(config.num_blocks(group, stop, room.num_tokens) - num_shared)
        shared = found.blocks[group][config.first_seen(group, found.num_tokens) :] if found.blocks else ()
        taken.append([*shared, *found.partial[group : group + 1]])
    return is_room(pools, needed, taken, room.spare)


def is_room(
    pools: Sequence[BlockPool], needed: Sequence[int], taken: Sequence[Sequence[int]], spare: Sequence[int] | None
) -> bool:
    """Whether each group has `needed` plus `spare` blocks available if the blocks of `taken` cannot be evicted."""
    for group, (pool, some) in enumerate(zip(pools, taken, strict=True)):
        wanted = needed[group] + (spare[group] if spare else 0)
        if wanted + len(some) <= pool.num_available:
            continue  # enough even if all of them are idle
        if wanted > pool.num_available - sum(block != ABSENT and pool.is_idle(block) for block in some):
            return False
    return True
