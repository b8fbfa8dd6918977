"""KVCache: the KV cache methods that the scheduler calls.

Owners of a block, always by reference count:
  a table       from `admit`, `grow`, `fork` or `branch` until `release`, or until `trim` finds it before its window
  the index     from `record` or `release` until the block is evicted, or a failed step did not write it
  a step        for a block that a table released while the step was in flight; until the step is over
  a pin         from `release` until the pin ends, see Wishes
  a copy        for its two blocks, from `admit`, `grow` or `branch` until a step with the Move has succeeded

Blocks of the host pool have other owners: see SwapSpace. No bytes are copied here: a copy is a Move in the next Step.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from quire.cache.audit import Audit, sharing
from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.block_tables import NOBODY, Admission, Room, Tables, fitting
from quire.cache.prefix.eviction_by_cost import Seconds
from quire.cache.prefix.index import NOTHING_FOUND, Cause, Found, GivenUp, PrefixIndex
from quire.cache.retention import ANYHOW, Keep
from quire.cache.swap_planner import Swapping
from quire.config import CacheConfig
from quire.core.events import Event
from quire.core.request import NO_NAMESPACE, Namespace
from quire.core.step import Move


class Beginnings:
    """Creation of block tables. KVCache has methods of the same names with their documentation."""

    def __init__(self, tables: Tables, swapping: Swapping) -> None:
        self._tables = tables
        self._swapping = swapping
        self._size = tables.block_size

    def open(self, seq_id: int, table: BlockTable) -> BlockTable:
        """Register an empty table."""
        self._tables.add(seq_id, table)
        self._tables.index.enter(table, NOTHING_FOUND)
        self._tables.note_due(table)
        return table

    def admit(
        self, seq_id: int, tokens: Sequence[int], namespace: Namespace, reusable: int, room: Room
    ) -> Admission | None:
        """Create a table with the prefix match, or with more KV from the host pool.

        If there are not enough blocks and nothing else runs (`room.spare` is None and no step is in flight), pins end,
        the weakest first.
        """

        def new() -> BlockTable:  # one per attempt, because a failed attempt may have changed it
            return BlockTable(len(self._tables.pools), tokens, namespace)

        while (admission := self._try(seq_id, new(), reusable, room)) is None:
            if room.spare is not None or self._tables.in_flight.newest is not None or not self._tables.yield_pin():
                return None
        return admission

    def _try(self, seq_id: int, table: BlockTable, reusable: int, room: Room) -> Admission | None:
        tables, tokens, namespace = self._tables, table.tokens, table.namespace
        found = tables.index.find(namespace, tokens[:reusable]) if reusable > 0 else NOTHING_FOUND
        reach = self._swapping.reach(seq_id, reusable)
        if reach > found.num_tokens:
            return self._swapping.back(seq_id, table, found, reach, room)
        admission = self._with_found(seq_id, table, found, reusable, room)
        if admission is not None:
            tables.swap.drop(seq_id)
        return admission

    def fork(self, seq_id: int, new_id: int, num_tokens: int, tokens: Sequence[int]) -> BlockTable:
        """Create a table that shares all blocks of another one."""
        parent = self._tables.by_id[seq_id]
        child = self._share(parent, new_id, -(-num_tokens // self._size), num_tokens, tokens)
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
        spare: Sequence[int],
        cause: Cause,
    ) -> BlockTable | None:
        """Create a table that shares whole blocks of another one and copies the last partial block."""
        tables = self._tables
        parent = tables.by_id[seq_id]
        whole, rest = divmod(num_tokens, self._size)
        for group, pool in enumerate(tables.pools):
            if parent.firsts[group] > tables.config.first_seen(group, num_tokens):
                return None
            if tables.config.num_blocks(group, num_tokens, reserve) - whole + spare[group] > pool.num_available:
                return None
        if rest and not tables.make_room([1] * len(tables.pools), cause):
            return None
        child = self._share(parent, new_id, whole, num_tokens, tokens)
        if rest:
            for group, pool in enumerate(tables.pools):
                source = parent.blocks[group][whole]
                pool.hold(source)
                child.blocks[group].append(tables.copies.make(group, source, rest))
            tables.in_flight.base_on_newest(child)  # a step in flight may write the source of this copy
        child.capacity = (whole + bool(rest)) * self._size
        tables.trim(child, num_tokens)
        return child

    def _with_found(self, seq_id: int, table: BlockTable, found: Found, reusable: int, room: Room) -> Admission | None:
        """Share the whole blocks of the prefix match, and copy the block in which it ends."""
        tables = self._tables
        fits = fitting(tables.config, tables.pools, found, room)
        if fits is None:
            return None
        found, num_shared = fits, len(fits.blocks[0]) if fits.blocks else 0
        start = found.num_tokens
        miss = tables.index.why(table.namespace, table.tokens, found, reusable)
        tables.add(seq_id, table)
        self._begin_with(table, found, num_shared)
        copied = self._copy_partial(table, found, start, room.cause)
        stop, reserve = min(room.limit, start + room.most), room.num_tokens
        if not copied or tables.grow(table, stop, reserve=reserve, cause=room.cause) is None:
            tables.release(seq_id, 0)
            return None
        return Admission(table, start, num_shared, start - num_shared * self._size, miss)

    def _begin_with(self, table: BlockTable, found: Found, num_shared: int) -> None:
        """Share the whole blocks of the prefix match that the next query attends to."""
        tables = self._tables
        table.num_found = num_shared
        for group, some in enumerate(found.blocks):
            first = table.firsts[group] = min(tables.config.first_seen(group, found.num_tokens), num_shared)
            table.blocks[group].extend([ABSENT] * first + some[first:])
            for block in some[first:]:
                tables.pools[group].hold(block)
        table.capacity = num_shared * self._size
        tables.index.enter(table, found)
        tables.note_due(table)
        if num_shared:
            tables.in_flight.base(table, found.blocks[0])

    def _copy_partial(self, table: BlockTable, found: Found, num_tokens: int, cause: Cause) -> bool:
        """Plan the copy of the block in which the match ends. Returns False if there is no block for it."""
        if not found.partial:
            return True
        tables = self._tables
        for pool, source in zip(tables.pools, found.partial, strict=True):
            pool.hold(source)
        if not tables.make_room([1] * len(tables.pools), cause):
            for group, source in enumerate(found.partial):
                tables.in_flight.let_go(group, source)
            return False
        for group, source in enumerate(found.partial):
            copy = tables.copies.make(group, source, num_tokens - table.capacity)
            table.blocks[group].append(copy)
        table.capacity += self._size
        tables.in_flight.base_on_newest(table)  # a step in flight may write the source
        return True

    def _share(
        self, parent: BlockTable, new_id: int, num_blocks: int, num_tokens: int, tokens: Sequence[int]
    ) -> BlockTable:
        """A table that shares the first `num_blocks` blocks of `parent`, of which `num_tokens` positions count."""
        tables = self._tables
        child = tables.add(new_id, BlockTable(len(tables.pools), tokens, parent.namespace))
        child.keep = parent.keep
        child.firsts = [min(first, num_blocks) for first in parent.firsts]
        for pool, ours, theirs, first in zip(tables.pools, parent.blocks, child.blocks, child.firsts, strict=True):
            theirs += ours[:num_blocks]
            for block in theirs[first:]:
                pool.hold(block)
        child.num_indexed = min(parent.num_indexed, num_tokens // self._size)
        child.num_found = min(parent.num_found, num_blocks)
        child.based_on, child.launched = parent.based_on, num_tokens
        tables.index.follow(parent, child)
        tables.note_due(child)
        return child


class KVCache:
    """Block pools of all groups, block tables, the prefix index, the host pool, and blocks of steps in flight."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self._parts = Tables(config)
        self.pools = self._parts.pools
        self.host_pools = self._parts.swap.pools
        self.windowed = [i for i, group in enumerate(config.groups) if group.window]
        self._in_flight, self._copies, self._swap = self._parts.in_flight, self._parts.copies, self._parts.swap
        self._swapping = Swapping(self._parts)
        self._beginnings = Beginnings(self._parts, self._swapping)
        self._audit = Audit(self.pools, self._parts.by_id, self._in_flight, self._copies)

    @property
    def index(self) -> PrefixIndex:
        """The prefix index. A repair may replace it."""
        return self._parts.index

    @property
    def num_evicted(self) -> int:
        """Blocks evicted since the start."""
        return self._parts.num_evicted_before + self.index.num_evicted

    @property
    def num_copied_tokens(self) -> int:
        """Tokens whose KV was copied from block to block, since the start."""
        return self._copies.num_tokens

    @property
    def num_swapped_out_blocks(self) -> int:
        """Blocks copied to the host pool since the start."""
        return self._swap.num_blocks_out

    @property
    def num_swapped_in_blocks(self) -> int:
        """Blocks copied from the host pool since the start."""
        return self._swap.num_blocks_in

    @property
    def tables(self) -> Mapping[int, BlockTable]:
        """Tables of all sequences, by id. Read-only."""
        return MappingProxyType(self._parts.by_id)

    @property
    def num_pinned(self) -> int:
        """Pinned blocks of all groups."""
        wishes = self.index.wishes
        return 0 if wishes is None else sum(len(wishes.pinned(group)) for group in range(len(self.pools)))

    def at(self, now: float) -> None:
        """Advance the clock: expired retention no longer protects blocks."""
        if self.index.wishes is not None:
            self.index.wishes.at(now)

    def end_program(self, tenant: str, program: str, branch: str | None) -> None:
        """End a branch of a program (None: all branches): no request will continue from its KV."""
        if self.index.wishes is not None:
            self.index.wishes.end_program(tenant, program, branch)

    def predict_with(self, recompute_seconds: Seconds) -> None:
        """Set the prediction for eviction by cost: seconds to compute so many tokens behind so many others."""
        self._parts.recompute_seconds = recompute_seconds

    def take_events(self) -> list[Event]:
        """Events of pins since the last call."""
        wishes = self.index.wishes
        if wishes is None or not wishes.events:
            return []
        events, wishes.events = wishes.events, []
        return events

    def take_given_up(self) -> list[GivenUp]:
        """Evictions since the last call, one entry per request, in the order of their first eviction."""
        given_up, self._parts.given_up = self._parts.given_up, {}
        return list(given_up.values())

    # Creation of tables

    def open(
        self,
        seq_id: int,
        tokens: Sequence[int] = (),
        namespace: Namespace = NO_NAMESPACE,
        *,
        keep: Keep = ANYHOW,
    ) -> BlockTable:
        """Create an empty table for a new sequence.

        tokens: its known tokens, a list that grows with it. keep: the retention of its KV, and of tables forked or
        branched from it.
        """
        table = self._beginnings.open(seq_id, BlockTable(len(self.pools), tokens, namespace))
        table.keep = keep
        return table

    def admit(  # noqa: PLR0913  # all but the first three are keyword-only
        self,
        seq_id: int,
        tokens: Sequence[int],
        namespace: Namespace,
        *,
        reusable: int,
        limit: int,
        most: int,
        spare: Sequence[int] | None = None,
        cause: Cause = NOBODY,
        keep: Keep = ANYHOW,
    ) -> Admission | None:
        """Create a table that begins with the prefix match of the leading `reusable` tokens.

        Behind the match, `most` positions can be written, up to `limit`. Groups without a window get blocks for all
        `tokens`. `spare` blocks of each group remain available. Whole blocks are shared, and the block in which the
        match ends is copied. Returns None if there are not enough blocks; then no table has changed, but blocks may
        have been evicted and pins ended.

        A swapped sequence also gets the KV that the host pool has behind the whole blocks of the match. The planned
        step copies it, so nothing may be computed from it before that step is collected.
        """
        room = Room(len(tokens), limit, most, spare, cause)
        admission = self._beginnings.admit(seq_id, tokens, namespace, reusable, room)
        if admission is not None:
            admission.table.keep = keep
        return admission

    def fork(self, seq_id: int, new_id: int, num_tokens: int, tokens: Sequence[int] = ()) -> BlockTable:
        """Create a table for `new_id` that shares the blocks of the first `num_tokens` positions of `seq_id`.

        These positions are all that `seq_id` has written, or whole blocks. The first write behind them copies the block
        in which they end (copy-on-write).
        """
        return self._beginnings.fork(seq_id, new_id, num_tokens, tokens)

    def branch(
        self,
        seq_id: int,
        new_id: int,
        num_tokens: int,
        *,
        tokens: Sequence[int] = (),
        reserve: int,
        spare: Sequence[int],
        cause: Cause = NOBODY,
    ) -> BlockTable | None:
        """Create a table for `new_id` with the first `num_tokens` positions of `seq_id`, which may have written more.

        Whole blocks are shared, and the last partial block is copied at once. Returns None if there are not enough
        blocks for `reserve` positions with `spare` blocks of each group left, or if a window has passed blocks that the
        next position attends to.
        """
        return self._beginnings.branch(
            seq_id, new_id, num_tokens, tokens=tokens, reserve=reserve, spare=spare, cause=cause
        )

    # Swapping

    def swap_out(self, num_valid: Mapping[int, int]) -> bool:
        """Copy the leading positions of sequences to the host pool. Shared blocks are copied once.

        num_valid: positions per sequence. Call `release` for the sequences next: the Moves read the blocks before
        anything later in the Step writes them. Returns False if the host pool has too few blocks; then nothing has
        changed.
        """
        return self._swapping.out(num_valid)

    def swap_bytes(self, num_valid: Mapping[int, int]) -> dict[int, int]:
        """Bytes that `swap_out` would copy, by sequence. A block that several share counts for the first of them."""
        return self._swapping.measure(num_valid)

    @property
    def swapped(self) -> Mapping[int, object]:
        """Sequences whose KV is in the host pool, or is being copied there. Read-only."""
        return MappingProxyType(self._swap.records)

    def is_leaving(self, seq_id: int) -> bool:
        """Whether the KV of a sequence is being copied to the host. It cannot be admitted before that is done."""
        return self._swap.is_leaving(seq_id)

    def forget_swapped(self, seq_id: int) -> None:
        """Free the host blocks of a sequence that will not resume."""
        self._swap.drop(seq_id)

    # Growth and release

    def grow(
        self,
        table: BlockTable,
        num_tokens: int,
        *,
        reserve: int = 0,
        spare: Sequence[int] | None = None,
        cause: Cause = NOBODY,
    ) -> list[int] | None:
        """Make positions up to `num_tokens` writable, with evictions if blocks are short. All or nothing.

        reserve: groups without a window get blocks for that many positions. spare: blocks of each group that remain
        available. Returns per group the first table index that changed (the length of the table if none did), or None
        if there are not enough blocks.
        """
        return self._parts.grow(table, num_tokens, reserve=reserve, spare=spare, cause=cause)

    def record(self, table: BlockTable, start: int, stop: int) -> list[int] | None:
        """Record that the planned step writes [start, stop), behind positions that earlier steps wrote.

        Whole blocks of known tokens enter the index. Where the index has the block already, the table takes that block
        instead of its own. Returns per group the first table index that changed, or None if none did.
        """
        num_blocks = min(stop, len(table.tokens)) // self.block_size
        if num_blocks <= table.num_indexed:
            return None
        added = self.index.add(table, num_blocks, start)
        self._parts.note_due(table)
        self._in_flight.record(table, added.entered, start, self.block_size)
        for group, block in added.let_go:
            self._in_flight.let_go(group, block)
        if added.changed_from is None:
            return None
        self._in_flight.base(table, table.blocks[0][added.changed_from : table.num_indexed])
        self._in_flight.base_on_newest(table)  # after a rollback it would write to a block of the index
        return [max(added.changed_from, first) for first in table.firsts]

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Release the blocks that no query from position `num_tokens` on attends to."""
        self._parts.trim(table, num_tokens)

    def needed(self, table: BlockTable, num_tokens: int, reserve: int = 0) -> list[int]:
        """Blocks per group that `grow` would allocate."""
        return self._parts.needed(table, num_tokens, reserve)

    def release(self, seq_id: int, num_tokens: int = 0) -> None:
        """Delete the table of a sequence and release its blocks. Steps in flight own them until they are over.

        num_tokens: leading positions whose KV is that of the table's tokens; the index keeps them.
        """
        self._parts.release(seq_id, num_tokens)

    def fits_once_collected(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether `grow` will find enough blocks once the steps in flight are over."""
        if self._in_flight.newest is None:
            return False
        needed = self.needed(table, num_tokens)
        for group, pool in enumerate(self.pools):
            retired, held = self._in_flight.retired(group), self._copies.held(group)
            coming = sum(pool.users(block) == count + held[block] for block, count in retired.items())
            if pool.num_available + coming < needed[group]:
                return False
        return True

    def flush(self, cause: Cause = NOBODY) -> int:
        """End all pins and evict all idle blocks. Returns the number of freed blocks."""
        if self.index.wishes is not None:
            self.index.wishes.end_pins()
        idle = self.pools.num_idle
        for group, pool in enumerate(self.pools):
            self._parts.evict(group, pool.num_idle, cause)
        return idle - self.pools.num_idle

    # Steps

    @property
    def has_urgent_moves(self) -> bool:
        """Whether the next step has Moves that cannot wait for a step with chunks."""
        return self._copies.to_host_or_back

    def launched(self, step_id: int) -> list[Move]:
        """The Moves of this step, which was planned last. Blocks released from now on belong to it until it is over."""
        self._in_flight.launch(step_id)
        self._swap.launched(step_id)
        return self._copies.launched(step_id)

    def collected(self, step_id: int) -> None:
        """The step has succeeded: its copies are made, and it owns no blocks any more."""
        self._in_flight.end(step_id)
        self._copies.collected(step_id)
        self._swap.ended(step_id)

    def failed(self, step_id: int) -> list[int]:
        """The step has failed: the blocks that it and later steps wrote leave the index.

        Its copies go to the next step if their targets still have an owner. KV that it or a later step copied to the
        host is dropped. Returns the sequences that must start again, because their tables depend on KV that was never
        written or copied.
        """
        self._swap.failed(step_id)
        void = self._in_flight.forget_writes(step_id)
        if void:
            self.index.void(void, self.tables.values())
            for table in self.tables.values():
                self._parts.note_due(table)
        self._in_flight.end(step_id)
        missed = self._copies.failed(step_id)
        if self._in_flight.newest is None:
            missed = []  # the next step makes these copies before any chunk reads them
        return [
            seq_id
            for seq_id, table in self.tables.items()
            if table.based_on >= step_id or any(block in table.blocks[group] for group, block in missed)
        ]

    # Checks

    def sharing(self, seq_ids: Sequence[int]) -> tuple[int, int]:
        """Blocks of group 0 of these sequences, counted per table, and those not from the index, counted once."""
        return sharing([self.tables[seq_id] for seq_id in seq_ids])

    def check(self) -> list[str]:
        """Errors of the reference counts and of the index; empty if there are none."""
        return self._audit.check(self.index) + self._swap.check()

    def repair(self) -> None:
        """Replace an inconsistent index by an empty one, and set the reference counts to the number of owners."""
        if self._audit.faults(self.index):
            self._parts.begin_index_again()
        self._audit.repair(self.index)
        self._swap.repair()
