"""KVCache: the block tables of all sequences, the prefix index, the host pool, and the blocks of steps in flight.

Owners of a block, always by reference count:
  a table       from `admit`, `grow`, `fork` or `branch` until `release`, or until `trim` finds it before its window
  the index     from `cache_blocks` or `release` until the block is evicted, or a failed step did not write it
  a step        for a block that a table released while the step was in flight; until the step is over
  a pin         from `release` until the pin ends, see RetentionMarks
  a copy        for its two blocks, from `admit`, `grow` or `branch` until a step with the Move has succeeded

Blocks of recurrent states belong to StateBlocks, which is None for models that have none. Their Moves have the number
of KV groups as their group.

Blocks of the host pool have other owners: see HostPool. No bytes are copied here: a copy is a Move in the next Step.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from quire.cache.admission_check import Admission, AdmissionLimits, fitting_match, has_available_blocks
from quire.cache.audit import RefCountAudit, count_shared_blocks
from quire.cache.block_pool import BlockPool, Pools
from quire.cache.block_table import BlockTable, Snapshot
from quire.cache.copies import PendingMoves
from quire.cache.evictor import Evictor
from quire.cache.host_pool import HostPool, SwapRecord
from quire.cache.in_flight import InFlight
from quire.cache.manager import NO_CAUSE
from quire.cache.prefix.eviction import RecomputeSeconds, default_recompute_seconds
from quire.cache.prefix.index import NO_MATCH, EvictionCause, EvictionRecord, PrefixIndex, PrefixMatch
from quire.cache.prefix.new_index import new_index
from quire.cache.retention import NO_RETENTION, SequenceRetention
from quire.cache.states import StateBlocks
from quire.cache.swap_planner import SwapPlanner
from quire.config import CacheConfig
from quire.core.events import Event
from quire.core.request import NO_NAMESPACE, Namespace
from quire.core.step import Move


class KVCache:
    """Block pools of all groups, block tables, the prefix index, the host pool, and blocks of steps in flight."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self._has_index = config.prefix_index != "none"
        self.windowed = config.dropping
        self.pools = self._new_pools(config)
        pools = [*self.pools, *(BlockPool(group.num_blocks) for group in config.pools[len(config.groups) :])]
        self._tables: dict[int, BlockTable] = {}  # by sequence id
        self.tables: Mapping[int, BlockTable] = MappingProxyType(self._tables)
        self._in_flight = InFlight(pools)
        self.copies = PendingMoves(pools, self._in_flight.deferred_decr_ref)
        self.states: StateBlocks | None = None
        if config.states is not None:
            about = (config, pools[-1], self.pools[0], self.copies, self._in_flight)
            self.states = StateBlocks(*about, lambda: self.index, lambda *counts: self._recompute_seconds(*counts))
        self._host_pool = HostPool(config)
        self.host_pools = self._host_pool.pools
        self._swap_planner = SwapPlanner(config, self.tables, self._host_pool, self.copies)
        self._audit = RefCountAudit(self.pools, self._tables, self._in_flight, self.copies, self.states)
        self._recompute_seconds: RecomputeSeconds = default_recompute_seconds
        self.index = self._new_index()  # a repair may replace it
        self._evictor = Evictor(self.pools, self.index)

    @property
    def num_evicted(self) -> int:
        """See KVCacheManager."""
        return self._evictor.num_evicted

    @property
    def num_copied_tokens(self) -> int:
        """See KVCacheManager."""
        return self.copies.num_tokens

    @property
    def num_swapped_out_blocks(self) -> int:
        """See KVCacheManager."""
        return self._host_pool.num_blocks_out

    @property
    def num_swapped_in_blocks(self) -> int:
        """See KVCacheManager."""
        return self._host_pool.num_blocks_in

    @property
    def num_pinned(self) -> int:
        """See KVCacheManager."""
        retention = self.index.retention
        return 0 if retention is None else sum(len(retention.pin_refs(group)) for group in range(len(self.pools)))

    def advance_clock(self, now: float) -> None:
        """See KVCacheManager."""
        if self.index.retention is not None:
            self.index.retention.advance_clock(now)
        if self.states is not None:
            self.states.advance_clock(now)

    def end_program(self, tenant: str, program: str, branch: str | None) -> None:
        """See KVCacheManager."""
        if self.index.retention is not None:
            self.index.retention.end_program(tenant, program, branch)
        for table in self._tables.values():
            hints, owner = table.retention.program, table.namespace.tenant
            if hints is not None and (owner, hints.id) == (tenant, program) and branch in (None, hints.branch):
                table.end_program()

    def set_recompute_seconds(self, recompute_seconds: RecomputeSeconds) -> None:
        """See KVCacheManager."""
        self._recompute_seconds = recompute_seconds

    def take_pin_events(self) -> list[Event]:
        """See KVCacheManager."""
        events, retention = [], self.index.retention
        if retention is not None and retention.events:
            events, retention.events = retention.events, events
        return events

    def take_evictions(self) -> list[EvictionRecord]:
        """See KVCacheManager."""
        return self._evictor.take()

    # Creation of tables

    def new_table(
        self,
        seq_id: int,
        tokens: Sequence[int] = (),
        namespace: Namespace = NO_NAMESPACE,
        *,
        retention: SequenceRetention = NO_RETENTION,
    ) -> BlockTable:
        """Create an empty table for a new sequence. tokens: its known tokens, a list that grows with it."""
        table = self._register(seq_id, BlockTable(len(self.pools), tokens, namespace, retention))
        self.index.register(table, NO_MATCH)
        return table

    def admit(  # noqa: PLR0913  # all but the first three are keyword-only
        self,
        seq_id: int,
        tokens: Sequence[int],
        namespace: Namespace,
        *,
        reusable: int,
        limit: int,
        max_new_positions: int,
        watermark_blocks: Sequence[int] | None = None,
        cause: EvictionCause = NO_CAUSE,
        retention: SequenceRetention = NO_RETENTION,
    ) -> Admission | None:
        """See KVCacheManager."""
        limits = AdmissionLimits(len(tokens), limit, max_new_positions, watermark_blocks, cause)
        while True:
            table = BlockTable(len(self.pools), tokens, namespace, retention)  # a failed attempt may have changed it
            admission = self._try_admit(seq_id, table, reusable, limits)
            is_alone = watermark_blocks is None and self._in_flight.is_empty
            pins = self.index.retention
            if admission is not None or not is_alone or pins is None or not pins.end_weakest_pin():
                return admission

    def fork(self, seq_id: int, new_id: int, num_tokens: int, tokens: Sequence[int] = ()) -> BlockTable:
        """See KVCacheManager."""
        return self._share_blocks(seq_id, new_id, -(-num_tokens // self.block_size), num_tokens, tokens)

    def branch(
        self,
        seq_id: int,
        new_id: int,
        num_tokens: int,
        *,
        tokens: Sequence[int] = (),
        reserve: int,
        watermark_blocks: Sequence[int],
        cause: EvictionCause = NO_CAUSE,
    ) -> BlockTable | None:
        """See KVCacheManager."""
        parent = self._tables[seq_id]
        whole, rest = divmod(num_tokens, self.block_size)
        if rest and not self.config.shares_partial_blocks:
            return None
        if self.states is not None and not self.states.can_branch(parent, num_tokens):
            return None
        for group, pool in enumerate(self.pools):
            if parent.firsts[group] > self.config.first_attended_block(group, num_tokens):
                return None
            needed = self.config.num_blocks(group, num_tokens, reserve) - whole + watermark_blocks[group]
            if needed > pool.num_available:
                return None
        if rest and not self._evictor.until_free([1] * len(self.pools), cause):
            return None
        child = self._share_blocks(seq_id, new_id, whole, num_tokens, tokens)
        if self.states is not None and child.state is None:
            self.states.begin(child, num_tokens, self.states.find(parent, num_tokens))
        if rest:
            sources = [blocks[whole] for blocks in parent.blocks]
            for pool, source in zip(self.pools, sources, strict=True):
                pool.incr_ref(source)
            self._append_copies(child, sources, rest)
        if self.states is not None:
            child.limit_capacity(num_tokens)  # it may share its state block: see StateBlocks.fork
        self.trim(child, num_tokens)
        return child

    def _register(self, seq_id: int, table: BlockTable) -> BlockTable:
        """Register the table of a sequence and return it. Raises ValueError if the sequence has one."""
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id} has a table already")
        self._tables[seq_id] = table
        return table

    def _try_admit(self, seq_id: int, table: BlockTable, reusable: int, limits: AdmissionLimits) -> Admission | None:
        """Create a table with the prefix match, or with more KV from the host pool. None without enough blocks."""
        found = self.index.match_prefix(table.namespace, table.tokens[:reusable]) if reusable > 0 else NO_MATCH
        matched, snapshot = self._usable(found, table.tokens)
        num_swapped = self._swap_planner.num_swapped_tokens(seq_id, reusable)
        if num_swapped > matched.num_tokens:
            return self._admit_swapped(seq_id, table, matched, num_swapped, limits)
        match = fitting_match(self.config, self.pools, matched, limits)
        if match is None or (self.states is not None and not self.states.pool.num_available):
            return None
        start, num_shared = match.num_tokens, len(match.blocks[0]) if match.blocks else 0
        if self.states is not None and start == matched.num_tokens < found.num_tokens >= self.block_size:
            miss = self.states.explain_miss(table, found, start, self._tables.values())
        else:
            miss = self.index.explain_miss(table.namespace, table.tokens, match, reusable)
        self._register(seq_id, table)
        self._share_match(table, match, start)
        if self.states is not None:
            self.states.begin(table, start, snapshot if start else None)
            self.states.want(table, found.num_tokens, *self.states.positions_of_turns(table.tokens))
        copied = not match.partial or self._copy_partial(table, match, limits.cause)
        stop = min(limits.limit, start + limits.max_new_positions)
        if not copied or self.grow(table, stop, reserve=limits.num_tokens, cause=limits.cause) is None:
            self.release(seq_id)
            return None
        self._host_pool.drop_record(seq_id)
        settled = snapshot.settled if start and snapshot is not None else None
        about = table, start, num_shared, start - num_shared * self.block_size, miss
        return Admission(*about, num_kv_tokens=found.num_tokens, state_position=settled)

    def match_prefix(self, namespace: Namespace, tokens: Sequence[int]) -> PrefixMatch:
        """See KVCacheManager."""
        return self._usable(self.index.match_prefix(namespace, tokens), tokens)[0]

    def _usable(self, found: PrefixMatch, tokens: Sequence[int]) -> tuple[PrefixMatch, Snapshot | None]:
        """The part of a prefix match of `tokens` that a sequence can continue behind, and the snapshot there."""
        return (found, None) if self.states is None else self.states.match(found, tokens)

    def _admit_swapped(
        self, seq_id: int, table: BlockTable, match: PrefixMatch, num_tokens: int, limits: AdmissionLimits
    ) -> Admission | None:
        """Create a table from the whole blocks of `match` and the KV that the host pool has behind them.

        num_tokens: leading positions of both together, more than `match` has. Returns None if there are not enough
        blocks; then the tables are unchanged.
        """
        num_shared = len(match.blocks[0]) if match.blocks else 0
        firsts, begins, homes, needed, shared = self._swap_planner.needs(seq_id, match, num_tokens, limits.num_tokens)
        has_blocks = has_available_blocks(self.pools, needed, shared, limits.watermark_blocks)
        if not has_blocks or (self.states is not None and not self.states.pool.num_available):
            return None
        self._register(seq_id, table)
        for pool, some in zip(self.pools, homes, strict=True):
            for block in some.values():
                pool.incr_ref(block)
        self._share_match(table, match._replace(num_tokens=num_shared * self.block_size, partial=()), num_tokens)
        if not self._evictor.until_free(needed, limits.cause):
            for group, some in enumerate(homes):
                for block in some.values():
                    self._in_flight.deferred_decr_ref(group, block)
            self.release(seq_id)
            return None
        fresh = [pool.allocate_many(count) for pool, count in zip(self.pools, needed, strict=True)]
        about = num_shared, begins, homes, fresh, num_tokens, self.states
        blocks, num_bytes = self._swap_planner.swap_in(seq_id, table, *about)
        table.append(blocks, self.block_size)
        for group, first in enumerate(firsts):
            table.trim(group, first)
        self._in_flight.depend_on_planned(table)
        return Admission(table, num_tokens, num_shared, 0, None, num_tokens - num_shared * self.block_size, num_bytes)

    def _share_match(self, table: BlockTable, match: PrefixMatch, num_tokens: int) -> None:
        """Share the whole blocks of a prefix match that the query at position `num_tokens` attends to."""
        firsts = [self.config.first_attended_block(group, num_tokens) for group in range(len(self.pools))]
        table.begin_with(match.blocks, firsts, self.block_size)
        self._incr_refs(table)
        self.index.register(table, match)
        if table.num_matched:
            self._in_flight.add_dependency(table, match.blocks[0])

    def _incr_refs(self, table: BlockTable) -> None:
        """Add a reference of a new table to each of its blocks."""
        for pool, blocks, first in zip(self.pools, table.blocks, table.firsts, strict=True):
            for block in blocks[first:]:
                pool.incr_ref(block)

    def _copy_partial(self, table: BlockTable, match: PrefixMatch, cause: EvictionCause) -> bool:
        """Plan the copy of the block in which the match ends. Returns False if there is no block for it."""
        for pool, source in zip(self.pools, match.partial, strict=True):
            pool.incr_ref(source)  # against its eviction
        if self._evictor.until_free([1] * len(self.pools), cause):
            self._append_copies(table, match.partial, match.num_tokens - table.capacity)
            return True
        for group, source in enumerate(match.partial):
            self._in_flight.deferred_decr_ref(group, source)
        return False

    def _append_copies(self, table: BlockTable, sources: Sequence[int], num_tokens: int) -> None:
        """Append a block to each group of a table, with copies of the leading `num_tokens` tokens of `sources`.

        The caller's references to the sources pass to the copies.
        """
        copies = [[self.copies.plan_copy(group, source, num_tokens)] for group, source in enumerate(sources)]
        table.append(copies, self.block_size)
        self._in_flight.depend_on_newest(table)  # a step in flight may write the source

    def _share_blocks(
        self, seq_id: int, new_id: int, num_blocks: int, num_tokens: int, tokens: Sequence[int]
    ) -> BlockTable:
        """A table that shares the first `num_blocks` blocks of another one, of which `num_tokens` positions count."""
        parent = self._tables[seq_id]
        child = self._register(new_id, parent.fork(num_blocks, num_tokens, self.block_size, tokens))
        self._incr_refs(child)
        if self.states is not None:
            self.states.fork(parent, child, num_tokens)
        self._in_flight.copy_dependencies(parent, child)
        self.index.register_fork(parent, child, min(parent.cursor.num_indexed, num_tokens // self.block_size))
        return child

    def swap_out(self, num_valid: Mapping[int, int]) -> bool:
        """See KVCacheManager."""
        return self._swap_planner.swap_out(num_valid)

    def swap_bytes(self, num_valid: Mapping[int, int]) -> dict[int, int]:
        """See KVCacheManager."""
        return self._swap_planner.swap_bytes(num_valid)

    @property
    def swapped(self) -> Mapping[int, SwapRecord]:
        """See KVCacheManager."""
        return MappingProxyType(self._host_pool.records)

    def is_swapping_out(self, seq_id: int) -> bool:
        """See KVCacheManager."""
        return self._host_pool.is_swapping_out(seq_id)

    def drop_swapped(self, seq_id: int) -> None:
        """See KVCacheManager."""
        self._host_pool.drop_record(seq_id)

    def grow(
        self,
        table: BlockTable,
        num_tokens: int,
        *,
        reserve: int = 0,
        watermark_blocks: Sequence[int] | None = None,
        cause: EvictionCause = NO_CAUSE,
    ) -> list[int] | None:
        """See KVCacheManager."""
        if self.states is not None and not self.states.own(table):
            return None
        if num_tokens == table.capacity + 1 and not (reserve or watermark_blocks) and self._append_blocks(table):
            return [len(blocks) - 1 for blocks in table.blocks]
        needed, enough = self.num_needed_blocks(table, num_tokens, reserve), True
        for group, pool in enumerate(self.pools):
            wanted = needed[group] + (watermark_blocks[group] if watermark_blocks else 0)
            if wanted > pool.num_free:
                enough = False
                if wanted > pool.num_available:
                    return None
        if not enough and not self._evictor.until_free(needed, cause):
            return None
        firsts, fresh = [], []
        index, rest = divmod(table.capacity, self.block_size)
        for group, (pool, blocks, new) in enumerate(zip(self.pools, table.blocks, needed, strict=True)):
            copied = new > 0 and self._is_shared(group, blocks, index)
            firsts.append(index if copied else len(blocks))
            if copied:  # the copy takes over the table's reference
                blocks[index] = self.copies.plan_copy(group, blocks[index], rest)
            fresh.append(pool.allocate_many(new - copied))
        table.append(fresh, self.block_size)
        return firsts

    def _append_blocks(self, table: BlockTable) -> bool:
        """Append a free block per group to a table whose blocks are all full. False, without a change, otherwise."""
        index, rest = divmod(table.capacity, self.block_size)
        if rest:
            return False
        for pool, blocks in zip(self.pools, table.blocks, strict=True):
            if len(blocks) != index or not pool.num_free:
                return False
        table.append([[pool.allocate()] for pool in self.pools], self.block_size)
        return True

    def grow_free(self, table: BlockTable) -> list[int] | None:
        """See KVCacheManager."""
        if table.capacity % self.block_size:
            return None  # the block is shared
        if not all(pool.num_free for pool in self.pools):
            return None
        return self.grow(table, table.capacity + 1)

    def append_slot(self, table: BlockTable, start: int) -> bool:
        """See KVCacheManager."""
        if start >= table.capacity or (self._has_index and (start + 1) // self.block_size > table.cursor.num_indexed):
            return False
        table.num_launched = start
        return True

    def cache_blocks(self, table: BlockTable, start: int, stop: int) -> list[int] | None:
        """See KVCacheManager."""
        table.num_launched = start
        cursor = table.cursor
        if stop // self.block_size <= cursor.num_indexed or not self._has_index:
            return None
        num_blocks = min(stop, len(table.tokens)) // self.block_size
        if num_blocks <= cursor.num_indexed:
            return None
        if num_blocks == cursor.num_indexed + 1 and self.index.extend(table):
            self._in_flight.record_insert(table, (num_blocks - 1,), start, self.block_size)
            return None
        added = self.index.insert(table, num_blocks, start)
        self._in_flight.record_insert(table, added.entered, start, self.block_size)
        for group, block in added.exchanged:
            self._in_flight.deferred_decr_ref(group, block)
        if added.changed_from is None:
            return None
        self._in_flight.add_dependency(table, table.blocks[0][added.changed_from : cursor.num_indexed])
        self._in_flight.depend_on_newest(table)  # after a rollback it would write to a block of the index
        return [max(added.changed_from, first) for first in table.firsts]

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """See KVCacheManager."""
        for group in self.windowed:
            gone = table.trim(group, self.config.first_attended_block(group, num_tokens))
            self._in_flight.deferred_decr_refs(group, gone)

    def num_needed_blocks(self, table: BlockTable, num_tokens: int, reserve: int = 0) -> list[int]:
        """Blocks per group that `grow` would allocate."""
        if num_tokens <= table.capacity:
            return [0] * len(self.pools)
        index = table.capacity // self.block_size
        return [
            max(0, self.config.num_blocks(group, num_tokens, reserve) - len(blocks))
            + self._is_shared(group, blocks, index)
            for group, blocks in enumerate(table.blocks)
        ]

    def _is_shared(self, group: int, blocks: list[int], index: int) -> bool:
        """Whether the block at `index` exists and is in other tables, which must not see a write to it.

        `index` is that of the table's `capacity`. Two owners do not count. A pending copy of the block is made before
        the step's writes and reads positions before `capacity`. The prefix index exposes no positions behind that.
        """
        if index >= len(blocks):
            return False
        return self.pools[group].num_refs_without_index(blocks[index]) - self.copies.held_refs(group)[blocks[index]] > 1

    def release(self, seq_id: int, num_tokens: int = 0, *, ended: bool = True) -> None:
        """See KVCacheManager."""
        table = self._tables.pop(seq_id)
        if not ended:
            table.clear_retention()
        self._host_pool.forget_swapped_in(seq_id)
        for group, blocks in enumerate(table.blocks):
            for block in self.copies.cancel(group, blocks):
                num_tokens = min(num_tokens, blocks.index(block) * self.block_size)
        entered = self.index.unregister(table, num_tokens)
        if self.states is not None:
            self.states.release(table, num_tokens)
        self._in_flight.record_written_by_any([table.blocks[0][i] for i in entered])
        for group, (blocks, first) in enumerate(zip(table.blocks, table.firsts, strict=True)):
            self._in_flight.deferred_decr_refs(group, blocks[first:][::-1])

    def fits_once_collected(self, table: BlockTable, num_tokens: int) -> bool:
        """See KVCacheManager."""
        if self._in_flight.is_empty:
            return False
        if self.states is not None and self.states.lacks_block(table):
            return bool(self._in_flight.retired(len(self.pools)))
        needed = self.num_needed_blocks(table, num_tokens)
        for group, pool in enumerate(self.pools):
            retired, held = self._in_flight.retired(group), self.copies.held_refs(group)
            coming = sum(pool.num_refs_without_index(block) == count + held[block] for block, count in retired.items())
            if pool.num_available + coming < needed[group]:
                return False
        return True

    def flush(self, cause: EvictionCause = NO_CAUSE) -> int:
        """See KVCacheManager."""
        if self.index.retention is not None:
            self.index.retention.end_pins()
        idle = self.pools.num_idle
        for group, pool in enumerate(self.pools):
            self._evictor.evict(group, pool.num_idle, cause)
        if self.states is not None:
            self.states.flush()
        return idle - self.pools.num_idle

    @property
    def has_urgent_moves(self) -> bool:
        """See KVCacheManager."""
        return self.copies.has_swaps

    def launched(self, step_id: int) -> list[Move]:
        """See KVCacheManager."""
        moves = self.copies.launched(step_id)
        self._in_flight.launch(step_id, moves)
        if self.states is not None:
            self.states.launched(step_id)
        self._host_pool.launched(step_id, moves)
        return moves

    def collected(self, step_id: int) -> None:
        """See KVCacheManager."""
        self._in_flight.end(step_id)
        self.copies.collected(step_id)

    def blocks_in_flight(self, group: int) -> Iterable[int]:
        """See KVCacheManager."""
        held = (block for block, count in self.copies.held_refs(group).items() if count)
        return (*self._in_flight.retired(group), *held)

    @property
    def has_moves_in_flight(self) -> bool:
        """See KVCacheManager."""
        return self.copies.has_swaps_in_flight

    def moves_done(self, move_ids: Sequence[int]) -> list[Move]:
        """See KVCacheManager."""
        moves = self.copies.end_swaps(move_ids)
        self._end_moves(moves)
        return moves

    def _end_moves(self, moves: Sequence[Move]) -> None:
        self._in_flight.end_moves(moves)
        self._host_pool.end_moves(moves)

    def is_swapping_in(self, table: BlockTable) -> bool:
        """See KVCacheManager."""
        return self._in_flight.is_arriving(table)

    def failed(self, step_id: int, starts: Mapping[int, int] = MappingProxyType({})) -> list[int]:
        """See KVCacheManager."""
        self._host_pool.failed(step_id)
        self._end_moves(self.copies.fail_swaps(step_id))
        if unwritten := self._in_flight.pop_writes(step_id):
            self.index.invalidate(unwritten, self._tables.values())
        dependent = self._in_flight.dependent(step_id)
        self._in_flight.end(step_id)
        missed = self.copies.failed(step_id)
        if self._in_flight.newest is None:
            missed = []  # the next step makes these copies before any chunk reads them
        for seq_id, start in starts.items():
            table = self._tables.get(seq_id)
            if table is not None:
                table.num_launched = min(table.num_launched, start)
        void, rewound = ([], ()) if self.states is None else (self.states.failed(step_id, self._tables), [*starts])
        return [
            seq_id
            for seq_id, table in self._tables.items()
            if table in dependent
            or (seq_id not in rewound and (seq_id in void or any(table.has_block(*place) for place in missed)))
        ]

    @property
    def unwritten_blocks(self) -> set[int]:
        """See KVCacheManager."""
        return self._in_flight.unwritten

    def sharing(self, seq_ids: Sequence[int]) -> tuple[int, int]:
        """See KVCacheManager."""
        return count_shared_blocks([self._tables[seq_id] for seq_id in seq_ids])

    def check(self) -> list[str]:
        """See KVCacheManager."""
        of_states = [] if self.states is None else self.states.check(self._tables.values())
        return self._audit.check(self.index) + self._host_pool.check() + of_states

    def repair(self) -> None:
        """See KVCacheManager."""
        if self._audit.index_errors(self.index):
            self.index = self._new_index()
            self._evictor.replace_index(self.index)
            if self.states is not None:
                self.states.clear()
            for table in self._tables.values():
                table.leave_index()
                self.index.register(table, NO_MATCH)
        self._audit.repair(self.index)
        self._host_pool.repair()

    def _new_index(self) -> PrefixIndex:
        planned = self._in_flight.planned_writes
        return new_index(self.config, self.pools, planned, lambda *counts: self._recompute_seconds(*counts))

    def _new_pools(self, config: CacheConfig) -> Pools:
        return Pools(BlockPool(group.num_blocks) for group in config.groups)
