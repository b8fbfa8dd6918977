"""KVCache: the KV cache methods that the scheduler calls.

Owners of a block, always by reference count:
  a table       from `admit`, `grow`, `fork` or `branch` until `release`, or until `trim` finds it before its window
  the index     from `cache_blocks` or `release` until the block is evicted, or a failed step did not write it
  a step        for a block that a table released while the step was in flight; until the step is over
  a pin         from `release` until the pin ends, see RetentionMarks
  a copy        for its two blocks, from `admit`, `grow` or `branch` until a step with the Move has succeeded

Blocks of the host pool have other owners: see HostPool. No bytes are copied here: a copy is a Move in the next Step.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from quire.cache.audit import RefCountAudit, count_shared_blocks
from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.block_tables import NO_CAUSE, Admission, AdmissionLimits, BlockTables, fitting_match
from quire.cache.prefix.eviction_by_cost import RecomputeSeconds
from quire.cache.prefix.index import NO_MATCH, EvictionCause, EvictionRecord, PrefixIndex, PrefixMatch
from quire.cache.retention import NO_RETENTION, SequenceRetention
from quire.cache.swap_planner import SwapPlanner
from quire.config import CacheConfig
from quire.core.events import Event
from quire.core.request import NO_NAMESPACE, Namespace
from quire.core.step import Move


class TableAllocator:
    """Creation of block tables. KVCache has methods of the same names with their documentation."""

    def __init__(self, tables: BlockTables, swapping: SwapPlanner) -> None:
        self._tables = tables
        self._swapping = swapping
        self._size = tables.block_size

    def new_table(self, seq_id: int, table: BlockTable) -> BlockTable:
        """Register an empty table."""
        self._tables.register(seq_id, table)
        self._tables.index.register(table, NO_MATCH)
        self._tables.update_next_insert(table)
        return table

    def admit(
        self, seq_id: int, tokens: Sequence[int], namespace: Namespace, reusable: int, limits: AdmissionLimits
    ) -> Admission | None:
        """Create a table with the prefix match, or with more KV from the host pool.

        If there are not enough blocks and nothing else runs (`limits.watermark_blocks` is None and no step is in
        flight), pins end, the weakest first.
        """

        def new() -> BlockTable:  # one per attempt, because a failed attempt may have changed it
            return BlockTable(len(self._tables.pools), tokens, namespace)

        while (admission := self._try_admit(seq_id, new(), reusable, limits)) is None:
            if (
                limits.watermark_blocks is not None
                or self._tables.in_flight.newest is not None
                or not self._tables.end_weakest_pin()
            ):
                return None
        return admission

    def _try_admit(self, seq_id: int, table: BlockTable, reusable: int, limits: AdmissionLimits) -> Admission | None:
        tables, tokens, namespace = self._tables, table.tokens, table.namespace
        found = tables.index.match_prefix(namespace, tokens[:reusable]) if reusable > 0 else NO_MATCH
        reach = self._swapping.num_swapped_tokens(seq_id, reusable)
        if reach > found.num_tokens:
            return self._swapping.swap_in(seq_id, table, found, reach, limits)
        admission = self._admit_with_match(seq_id, table, found, reusable, limits)
        if admission is not None:
            tables.host_pool.drop_record(seq_id)
        return admission

    def fork(self, seq_id: int, new_id: int, num_tokens: int, tokens: Sequence[int]) -> BlockTable:
        """Create a table that shares all blocks of another one."""
        parent = self._tables.by_id[seq_id]
        child = self._share_blocks(parent, new_id, -(-num_tokens // self._size), num_tokens, tokens)
        if num_tokens % self._size:
            parent.capacity = min(parent.capacity, num_tokens)
        child.capacity = num_tokens
        return child

    def branch(
        self,
        seq_id: int,
        new_id: int,
        num_tokens: int,
        *,
        tokens: Sequence[int],
        reserve: int,
        watermark_blocks: Sequence[int],
        cause: EvictionCause,
    ) -> BlockTable | None:
        """Create a table that shares whole blocks of another one and copies the last partial block."""
        tables = self._tables
        parent = tables.by_id[seq_id]
        whole, rest = divmod(num_tokens, self._size)
        for group, pool in enumerate(tables.pools):
            if parent.firsts[group] > tables.config.first_attended_block(group, num_tokens):
                return None
            if (
                tables.config.num_blocks(group, num_tokens, reserve) - whole + watermark_blocks[group]
                > pool.num_available
            ):
                return None
        if rest and not tables.evict_until_free([1] * len(tables.pools), cause):
            return None
        child = self._share_blocks(parent, new_id, whole, num_tokens, tokens)
        if rest:
            for group, pool in enumerate(tables.pools):
                source = parent.blocks[group][whole]
                pool.incr_ref(source)
                child.blocks[group].append(tables.copies.plan_copy(group, source, rest))
            tables.in_flight.depend_on_newest(child)  # a step in flight may write the source of this copy
        child.capacity = (whole + bool(rest)) * self._size
        tables.trim(child, num_tokens)
        return child

    def _admit_with_match(
        self, seq_id: int, table: BlockTable, match: PrefixMatch, reusable: int, limits: AdmissionLimits
    ) -> Admission | None:
        """Share the whole blocks of the prefix match, and copy the block in which it ends."""
        tables = self._tables
        fits = fitting_match(tables.config, tables.pools, match, limits)
        if fits is None:
            return None
        match, num_shared = fits, len(fits.blocks[0]) if fits.blocks else 0
        start = match.num_tokens
        miss = tables.index.explain_miss(table.namespace, table.tokens, match, reusable)
        tables.register(seq_id, table)
        self._share_match(table, match, num_shared)
        copied = self._copy_partial(table, match, start, limits.cause)
        stop, reserve = min(limits.limit, start + limits.max_new_positions), limits.num_tokens
        if not copied or tables.grow(table, stop, reserve=reserve, cause=limits.cause) is None:
            tables.release(seq_id, 0)
            return None
        return Admission(table, start, num_shared, start - num_shared * self._size, miss)

    def _share_match(self, table: BlockTable, match: PrefixMatch, num_shared: int) -> None:
        """Share the whole blocks of the prefix match that the next query attends to."""
        tables = self._tables
        table.num_matched = num_shared
        for group, some in enumerate(match.blocks):
            first = table.firsts[group] = min(tables.config.first_attended_block(group, match.num_tokens), num_shared)
            table.blocks[group].extend([ABSENT] * first + some[first:])
            for block in some[first:]:
                tables.pools[group].incr_ref(block)
        table.capacity = num_shared * self._size
        tables.index.register(table, match)
        tables.update_next_insert(table)
        if num_shared:
            tables.in_flight.add_dependency(table, match.blocks[0])

    def _copy_partial(self, table: BlockTable, match: PrefixMatch, num_tokens: int, cause: EvictionCause) -> bool:
        """Plan the copy of the block in which the match ends. Returns False if there is no block for it."""
        if not match.partial:
            return True
        tables = self._tables
        for pool, source in zip(tables.pools, match.partial, strict=True):
            pool.incr_ref(source)
        if not tables.evict_until_free([1] * len(tables.pools), cause):
            for group, source in enumerate(match.partial):
                tables.in_flight.deferred_decr_ref(group, source)
            return False
        for group, source in enumerate(match.partial):
            copy = tables.copies.plan_copy(group, source, num_tokens - table.capacity)
            table.blocks[group].append(copy)
        table.capacity += self._size
        tables.in_flight.depend_on_newest(table)  # a step in flight may write the source
        return True

    def _share_blocks(
        self, parent: BlockTable, new_id: int, num_blocks: int, num_tokens: int, tokens: Sequence[int]
    ) -> BlockTable:
        """A table that shares the first `num_blocks` blocks of `parent`, of which `num_tokens` positions count."""
        tables = self._tables
        child = tables.register(new_id, BlockTable(len(tables.pools), tokens, parent.namespace))
        child.retention = parent.retention
        child.firsts = [min(first, num_blocks) for first in parent.firsts]
        for pool, ours, theirs, first in zip(tables.pools, parent.blocks, child.blocks, child.firsts, strict=True):
            theirs += ours[:num_blocks]
            for block in theirs[first:]:
                pool.incr_ref(block)
        child.num_indexed = min(parent.num_indexed, num_tokens // self._size)
        child.num_matched = min(parent.num_matched, num_blocks)
        child.depends_on_step, child.num_launched = parent.depends_on_step, num_tokens
        tables.index.register_fork(parent, child)
        tables.update_next_insert(child)
        return child


class KVCache:
    """Block pools of all groups, block tables, the prefix index, the host pool, and blocks of steps in flight."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self._block_tables = BlockTables(config)
        self.pools = self._block_tables.pools
        self.host_pools = self._block_tables.host_pool.pools
        self.windowed = [i for i, group in enumerate(config.groups) if group.window]
        self._in_flight, self._copies, self._host_pool = (
            self._block_tables.in_flight,
            self._block_tables.copies,
            self._block_tables.host_pool,
        )
        self._swap_planner = SwapPlanner(self._block_tables)
        self._table_allocator = TableAllocator(self._block_tables, self._swap_planner)
        self._audit = RefCountAudit(self.pools, self._block_tables.by_id, self._in_flight, self._copies)

    @property
    def index(self) -> PrefixIndex:
        """The prefix index. A repair may replace it."""
        return self._block_tables.index

    @property
    def num_evicted(self) -> int:
        """Blocks evicted since the start."""
        return self._block_tables.num_evicted_before + self.index.num_evicted

    @property
    def num_copied_tokens(self) -> int:
        """Tokens whose KV was copied from block to block, since the start."""
        return self._copies.num_tokens

    @property
    def num_swapped_out_blocks(self) -> int:
        """Blocks copied to the host pool since the start."""
        return self._host_pool.num_blocks_out

    @property
    def num_swapped_in_blocks(self) -> int:
        """Blocks copied from the host pool since the start."""
        return self._host_pool.num_blocks_in

    @property
    def tables(self) -> Mapping[int, BlockTable]:
        """Tables of all sequences, by id. Read-only."""
        return MappingProxyType(self._block_tables.by_id)

    @property
    def num_pinned(self) -> int:
        """Pinned blocks of all groups."""
        retention = self.index.retention
        return 0 if retention is None else sum(len(retention.pin_refs(group)) for group in range(len(self.pools)))

    def advance_clock(self, now: float) -> None:
        """Advance the clock: expired retention no longer protects blocks."""
        if self.index.retention is not None:
            self.index.retention.advance_clock(now)

    def end_program(self, tenant: str, program: str, branch: str | None) -> None:
        """End a branch of a program (None: all branches): no request will continue from its KV."""
        if self.index.retention is not None:
            self.index.retention.end_program(tenant, program, branch)

    def set_recompute_seconds(self, recompute_seconds: RecomputeSeconds) -> None:
        """Set the prediction for eviction by cost: seconds to compute so many tokens behind so many others."""
        self._block_tables.recompute_seconds = recompute_seconds

    def take_pin_events(self) -> list[Event]:
        """Events of pins since the last call."""
        retention = self.index.retention
        if retention is None or not retention.events:
            return []
        events, retention.events = retention.events, []
        return events

    def take_evictions(self) -> list[EvictionRecord]:
        """Evictions since the last call, one entry per request, in the order of their first eviction."""
        evictions, self._block_tables.evictions = self._block_tables.evictions, {}
        return list(evictions.values())

    # Creation of tables

    def new_table(
        self,
        seq_id: int,
        tokens: Sequence[int] = (),
        namespace: Namespace = NO_NAMESPACE,
        *,
        retention: SequenceRetention = NO_RETENTION,
    ) -> BlockTable:
        """Create an empty table for a new sequence.

        tokens: its known tokens, a list that grows with it. retention: that of its KV, and of tables forked or
        branched from it.
        """
        table = self._table_allocator.new_table(seq_id, BlockTable(len(self.pools), tokens, namespace))
        table.retention = retention
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
        """Create a table that begins with the prefix match of the leading `reusable` tokens.

        Behind the match, `max_new_positions` positions can be written, up to `limit`. Groups without a window get
        blocks for all `tokens`. `watermark_blocks` blocks of each group remain available. Whole blocks are shared, and
        the block in which the match ends is copied. Returns None if there are not enough blocks; then no table has
        changed, but blocks may have been evicted and pins ended.

        A swapped sequence also gets the KV that the host pool has behind the whole blocks of the match. The planned
        step copies it, so nothing may be computed from it before that step is collected.
        """
        limits = AdmissionLimits(len(tokens), limit, max_new_positions, watermark_blocks, cause)
        admission = self._table_allocator.admit(seq_id, tokens, namespace, reusable, limits)
        if admission is not None:
            admission.table.retention = retention
        return admission

    def fork(self, seq_id: int, new_id: int, num_tokens: int, tokens: Sequence[int] = ()) -> BlockTable:
        """Create a table for `new_id` that shares the blocks of the first `num_tokens` positions of `seq_id`.

        These positions are all that `seq_id` has written, or whole blocks. The first write behind them copies the block
        in which they end (copy-on-write).
        """
        return self._table_allocator.fork(seq_id, new_id, num_tokens, tokens)

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
        """Create a table for `new_id` with the first `num_tokens` positions of `seq_id`, which may have written more.

        Whole blocks are shared, and the last partial block is copied at once. Returns None if there are not enough
        blocks for `reserve` positions with `watermark_blocks` blocks of each group left, or if a window has passed
        blocks that the next position attends to.
        """
        return self._table_allocator.branch(
            seq_id, new_id, num_tokens, tokens=tokens, reserve=reserve, watermark_blocks=watermark_blocks, cause=cause
        )

    # Swapping

    def swap_out(self, num_valid: Mapping[int, int]) -> bool:
        """Copy the leading positions of sequences to the host pool. Shared blocks are copied once.

        num_valid: positions per sequence. Call `release` for the sequences next: the Moves read the blocks before
        anything later in the Step writes them. Returns False if the host pool has too few blocks; then nothing has
        changed.
        """
        return self._swap_planner.swap_out(num_valid)

    def swap_bytes(self, num_valid: Mapping[int, int]) -> dict[int, int]:
        """Bytes that `swap_out` would copy, by sequence. A block that several share counts for the first of them."""
        return self._swap_planner.swap_bytes(num_valid)

    @property
    def swapped(self) -> Mapping[int, object]:
        """Sequences whose KV is in the host pool, or is being copied there. Read-only."""
        return MappingProxyType(self._host_pool.records)

    def is_swapping_out(self, seq_id: int) -> bool:
        """Whether the KV of a sequence is being copied to the host. It cannot be admitted before that is done."""
        return self._host_pool.is_swapping_out(seq_id)

    def drop_swapped(self, seq_id: int) -> None:
        """Free the host blocks of a sequence that will not resume."""
        self._host_pool.drop_record(seq_id)

    # Growth and release

    def grow(
        self,
        table: BlockTable,
        num_tokens: int,
        *,
        reserve: int = 0,
        watermark_blocks: Sequence[int] | None = None,
        cause: EvictionCause = NO_CAUSE,
    ) -> list[int] | None:
        """Make positions up to `num_tokens` writable, with evictions if blocks are short. All or nothing.

        reserve: groups without a window get blocks for that many positions. watermark_blocks: blocks of each group that
        remain available. Returns per group the first table index that changed (the length of the table if none did), or
        None if there are not enough blocks.
        """
        return self._block_tables.grow(
            table, num_tokens, reserve=reserve, watermark_blocks=watermark_blocks, cause=cause
        )

    def cache_blocks(self, table: BlockTable, start: int, stop: int) -> list[int] | None:
        """Record that the planned step writes [start, stop), behind positions that earlier steps wrote.

        Whole blocks of known tokens enter the index. Where the index has the block already, the table takes that block
        instead of its own. Returns per group the first table index that changed, or None if none did.
        """
        num_blocks = min(stop, len(table.tokens)) // self.block_size
        if num_blocks <= table.num_indexed:
            return None
        added = self.index.insert(table, num_blocks, start)
        self._block_tables.update_next_insert(table)
        self._in_flight.record_insert(table, added.entered, start, self.block_size)
        for group, block in added.exchanged:
            self._in_flight.deferred_decr_ref(group, block)
        if added.changed_from is None:
            return None
        self._in_flight.add_dependency(table, table.blocks[0][added.changed_from : table.num_indexed])
        self._in_flight.depend_on_newest(table)  # after a rollback it would write to a block of the index
        return [max(added.changed_from, first) for first in table.firsts]

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Release the blocks that no query from position `num_tokens` on attends to."""
        self._block_tables.trim(table, num_tokens)

    def num_needed_blocks(self, table: BlockTable, num_tokens: int, reserve: int = 0) -> list[int]:
        """Blocks per group that `grow` would allocate."""
        return self._block_tables.num_needed_blocks(table, num_tokens, reserve)

    def release(self, seq_id: int, num_tokens: int = 0) -> None:
        """Delete the table of a sequence and release its blocks. Steps in flight own them until they are over.

        num_tokens: leading positions whose KV is that of the table's tokens; the index keeps them.
        """
        self._block_tables.release(seq_id, num_tokens)

    def fits_once_collected(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether `grow` will find enough blocks once the steps in flight are over."""
        if self._in_flight.newest is None:
            return False
        needed = self.num_needed_blocks(table, num_tokens)
        for group, pool in enumerate(self.pools):
            retired, held = self._in_flight.retired(group), self._copies.held_refs(group)
            coming = sum(pool.num_refs_without_index(block) == count + held[block] for block, count in retired.items())
            if pool.num_available + coming < needed[group]:
                return False
        return True

    def flush(self, cause: EvictionCause = NO_CAUSE) -> int:
        """End all pins and evict all idle blocks. Returns the number of freed blocks."""
        if self.index.retention is not None:
            self.index.retention.end_pins()
        idle = self.pools.num_idle
        for group, pool in enumerate(self.pools):
            self._block_tables.evict(group, pool.num_idle, cause)
        return idle - self.pools.num_idle

    # Steps

    @property
    def has_urgent_moves(self) -> bool:
        """Whether the next step has Moves that cannot wait for a step with chunks."""
        return self._copies.has_swaps

    def launched(self, step_id: int) -> list[Move]:
        """The Moves of this step, which was planned last. Blocks released from now on belong to it until it is over."""
        self._in_flight.launch(step_id)
        self._host_pool.launched(step_id)
        return self._copies.launched(step_id)

    def collected(self, step_id: int) -> None:
        """The step has succeeded: its copies are made, and it owns no blocks any more."""
        self._in_flight.end(step_id)
        self._copies.collected(step_id)
        self._host_pool.ended(step_id)

    def failed(self, step_id: int) -> list[int]:
        """The step has failed: the blocks that it and later steps wrote leave the index.

        Its copies go to the next step if their targets still have an owner. KV that it or a later step copied to the
        host is dropped. Returns the sequences that must start again, because their tables depend on KV that was never
        written or copied.
        """
        self._host_pool.failed(step_id)
        void = self._in_flight.pop_writes(step_id)
        if void:
            self.index.invalidate(void, self.tables.values())
            for table in self.tables.values():
                self._block_tables.update_next_insert(table)
        self._in_flight.end(step_id)
        missed = self._copies.failed(step_id)
        if self._in_flight.newest is None:
            missed = []  # the next step makes these copies before any chunk reads them
        return [
            seq_id
            for seq_id, table in self.tables.items()
            if table.depends_on_step >= step_id or any(block in table.blocks[group] for group, block in missed)
        ]

    # Checks

    def sharing(self, seq_ids: Sequence[int]) -> tuple[int, int]:
        """Blocks of group 0 of these sequences, counted per table, and those not from the index, counted once."""
        return count_shared_blocks([self.tables[seq_id] for seq_id in seq_ids])

    def check(self) -> list[str]:
        """Errors of the reference counts and of the index; empty if there are none."""
        return self._audit.check(self.index) + self._host_pool.check()

    def repair(self) -> None:
        """Replace an inconsistent index by an empty one, and set the reference counts to the number of owners."""
        if self._audit.index_errors(self.index):
            self._block_tables.reset_index()
        self._audit.repair(self.index)
        self._host_pool.repair()
