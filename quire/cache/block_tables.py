"""The block tables of all sequences: growth, trimming, release, and the eviction that these need."""

from collections.abc import Sequence
from sys import maxsize
from typing import NamedTuple

from quire.cache.block_pool import BlockPool, Pools
from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.copies import PendingMoves
from quire.cache.host_pool import HostPool
from quire.cache.in_flight import InFlight
from quire.cache.prefix.eviction_by_cost import RecomputeSeconds, default_recompute_seconds
from quire.cache.prefix.hash_index import HashIndex
from quire.cache.prefix.index import NO_MATCH, EvictionCause, EvictionRecord, NoIndex, PrefixIndex, PrefixMatch
from quire.cache.prefix.radix_index import RadixIndex
from quire.config import CacheConfig
from quire.core.explanation import Miss

NO_CAUSE = EvictionCause()


class BlockTables:
    """Block tables by sequence id, and the other owners of blocks."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.pools = Pools(BlockPool(group.num_blocks) for group in config.groups)
        self._windowed = [i for i, group in enumerate(config.groups) if group.window]
        self.by_id: dict[int, BlockTable] = {}
        self.in_flight = InFlight(self.pools)
        self.copies = PendingMoves(self.pools, self.in_flight.deferred_decr_ref)
        self.host_pool = HostPool(config)
        self.recompute_seconds: RecomputeSeconds = default_recompute_seconds
        self.index = self._new_index()
        self.num_evicted_before = 0  # by earlier indexes that were replaced
        self.evictions: dict[str, EvictionRecord] = {}  # evictions by request id, since they were last taken

    def register(self, seq_id: int, table: BlockTable) -> BlockTable:
        """Register the table of a sequence and return it. Raises ValueError if the sequence has one."""
        if seq_id in self.by_id:
            raise ValueError(f"sequence {seq_id} has a table already")
        self.by_id[seq_id] = table
        return table

    def update_next_insert(self, table: BlockTable) -> None:
        """Set `next_insert_at` to the number of tokens at which the next block may enter the index."""
        table.next_insert_at = (
            maxsize if self.config.prefix_index == "none" else (table.num_indexed + 1) * self.block_size
        )

    def reset_index(self) -> None:
        """Replace an inconsistent index by an empty one."""
        self.num_evicted_before += self.index.num_evicted
        self.index = self._new_index()
        for table in self.by_id.values():
            table.num_matched = 0
            self.index.register(table, NO_MATCH)
            self.update_next_insert(table)

    def num_needed_blocks(self, table: BlockTable, num_tokens: int, reserve: int = 0) -> list[int]:
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
        watermark_blocks: Sequence[int] | None = None,
        cause: EvictionCause = NO_CAUSE,
    ) -> list[int] | None:
        """See KVCache."""
        needed, enough = self.num_needed_blocks(table, num_tokens, reserve), True
        for group, pool in enumerate(self.pools):
            wanted = needed[group] + (watermark_blocks[group] if watermark_blocks else 0)
            if wanted > pool.num_free:
                enough = False
                if wanted > pool.num_available:
                    return None
        if not enough and not self.evict_until_free(needed, cause):
            return None
        firsts = []
        index, rest = divmod(table.capacity, self.block_size)
        for group, (pool, blocks, new) in enumerate(zip(self.pools, table.blocks, needed, strict=True)):
            copied = new > 0 and self.is_shared(group, blocks, index)
            firsts.append(index if copied else len(blocks))
            if copied:
                blocks[index] = self.copies.plan_copy(
                    group, blocks[index], rest
                )  # which takes over the table's reference
            blocks += pool.allocate_many(new - copied)
        table.capacity = max(table.capacity, min(map(len, table.blocks)) * self.block_size)
        return firsts

    def end_weakest_pin(self) -> bool:
        """End the weakest pin. Returns False if there is none."""
        return self.index.retention is not None and self.index.retention.end_weakest_pin()

    def evict_until_free(self, needed: Sequence[int], cause: EvictionCause) -> bool:
        """Evict until `needed` blocks of each group are free. Returns whether they are."""
        for group, pool in enumerate(self.pools):
            if needed[group] > pool.num_free:
                self.evict(group, needed[group] - pool.num_free, cause)
        return all(pool.num_free >= count for pool, count in zip(self.pools, needed, strict=True))

    def evict(self, group: int, count: int, cause: EvictionCause) -> None:
        """Evict up to `count` blocks of a group and record the cause."""
        num_blocks = self.index.evict(group, count, cause)
        if not num_blocks:
            return
        reason, before = self.index.take_reason(), self.evictions.get(cause.request_id)
        if before is None:
            self.evictions[cause.request_id] = EvictionRecord(cause, num_blocks, reason)
        else:
            self.evictions[cause.request_id] = before._replace(num_blocks=before.num_blocks + num_blocks)

    def is_shared(self, group: int, blocks: list[int], index: int) -> bool:
        """Whether the block at `index` exists and is in other tables, which must not see a write to it.

        `index` is that of the table's `capacity`. Two owners do not count. A pending copy of the block is made before
        the step's writes and reads positions before `capacity`. The prefix index exposes no positions behind that.
        """
        if index >= len(blocks):
            return False
        return self.pools[group].num_refs_without_index(blocks[index]) - self.copies.held_refs(group)[blocks[index]] > 1

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """See KVCache."""
        for group in self._windowed:
            blocks, first = table.blocks[group], table.firsts[group]
            seen = min(self.config.first_attended_block(group, num_tokens), len(blocks))
            for index in range(first, seen):
                self.in_flight.deferred_decr_ref(group, blocks[index])
                blocks[index] = ABSENT
            table.firsts[group] = max(first, seen)

    def release(self, seq_id: int, num_tokens: int) -> None:
        """See KVCache."""
        table = self.by_id.pop(seq_id)
        self.host_pool.forget_swapped_in(seq_id)
        for group, blocks in enumerate(table.blocks):
            for block in self.copies.cancel(group, blocks):
                num_tokens = min(num_tokens, blocks.index(block) * self.block_size)
        entered = self.index.unregister(table, num_tokens)
        self.in_flight.record_written_by_any([table.blocks[0][i] for i in entered])
        for group, (blocks, first) in enumerate(zip(table.blocks, table.firsts, strict=True)):
            for block in reversed(blocks[first:]):
                self.in_flight.deferred_decr_ref(group, block)

    def _new_index(self) -> PrefixIndex:
        if self.config.prefix_index == "none":
            return NoIndex()
        if self.config.prefix_index == "hash":
            return HashIndex(self.config, self.pools, self.in_flight.planned_writes)
        return RadixIndex(
            self.config, self.pools, self.in_flight.planned_writes, lambda *counts: self.recompute_seconds(*counts)
        )


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
    def is_swapping_in(self) -> bool:
        """Whether the planned step copies some of its KV from the host. That KV is valid once the step is collected."""
        return self.num_swapped_tokens > 0


class AdmissionLimits(NamedTuple):
    """The arguments of KVCache.admit that say how many blocks the sequence needs, and `cause`."""

    num_tokens: int
    limit: int
    max_new_positions: int
    watermark_blocks: Sequence[int] | None
    cause: EvictionCause


def fitting_match(
    config: CacheConfig, pools: Sequence[BlockPool], match: PrefixMatch, limits: AdmissionLimits
) -> PrefixMatch | None:
    """`match`, or the part of it with which there are enough blocks for the sequence. None if there are not enough.

    If the blocks are too few for both a partly matching block and its copy, the copy is left out: waiting might never
    make space for both.
    """
    if _has_blocks_for_match(config, pools, match, limits):
        return match
    if not match.partial:
        return None
    num_tokens = len(match.blocks[0]) * config.block_size
    less = match._replace(num_tokens=num_tokens, partial=())
    if any(ABSENT in blocks[config.first_attended_block(g, num_tokens) :] for g, blocks in enumerate(match.blocks)):
        less = NO_MATCH._replace(num_public=match.num_public)  # the next query would attend to absent blocks
    return less if _has_blocks_for_match(config, pools, less, limits) else None


def _has_blocks_for_match(
    config: CacheConfig, pools: Sequence[BlockPool], match: PrefixMatch, limits: AdmissionLimits
) -> bool:
    """Whether enough blocks are available beside those of `match`, which are not idle once they are shared."""
    num_shared = len(match.blocks[0]) if match.blocks else 0
    stop = min(limits.limit, match.num_tokens + limits.max_new_positions)
    needed, taken = [], []
    for group in range(len(pools)):
        needed.append(config.num_blocks(group, stop, limits.num_tokens) - num_shared)
        shared = match.blocks[group][config.first_attended_block(group, match.num_tokens) :] if match.blocks else ()
        taken.append([*shared, *match.partial[group : group + 1]])
    return has_available_blocks(pools, needed, taken, limits.watermark_blocks)


def has_available_blocks(
    pools: Sequence[BlockPool],
    needed: Sequence[int],
    in_use: Sequence[Sequence[int]],
    watermark_blocks: Sequence[int] | None,
) -> bool:
    """Whether each group has `needed` plus `watermark_blocks` blocks available without evicting those of `in_use`."""
    for group, (pool, some) in enumerate(zip(pools, in_use, strict=True)):
        wanted = needed[group] + (watermark_blocks[group] if watermark_blocks else 0)
        if wanted + len(some) <= pool.num_available:
            continue  # enough even if all of them are idle
        if wanted > pool.num_available - sum(block != ABSENT and pool.is_idle(block) for block in some):
            return False
    return True
