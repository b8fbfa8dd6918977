"""KVCache: the few verbs with which the scheduler speaks about memory.

Who owns a block, always by reference count:
  a table       from `admit`, `grow`, `fork` or `branch` until `release`, or until `trim` finds it behind its window
  the index     from `record` or `release` until it is evicted, or found to have never been written
  a step        a block that a table let go of while steps were in flight; until it is over
  a pin         from `release` until it ends, see Wishes
  a copy        its two blocks, from `admit`, `grow` or `branch` until a step that carries the Move has succeeded
Blocks of the host pool have owners of their own: see SwapSpace.
Nothing here touches bytes: a block that must be copied becomes a Move, which the next Step carries.
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
    """See KVCache, which has verbs of the same names."""

    def __init__(self, tables: Tables, swapping: Swapping) -> None:
        self._tables = tables
        self._swapping = swapping
        self._size = tables.block_size

    def open(self, seq_id: int, table: BlockTable) -> BlockTable:
        """An empty one."""
        self._tables.add(seq_id, table)
        self._tables.index.enter(table, NOTHING_FOUND)
        self._tables.note_due(table)
        return table

    def admit(
        self, seq_id: int, tokens: Sequence[int], namespace: Namespace, reusable: int, room: Room
    ) -> Admission | None:
        """With what the index has, or what the host has behind that. Where nothing else runs, pins yield to it."""

        def new() -> BlockTable:  # for each try, since one that fails may have filled it
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
        """With the blocks of another, shared."""
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
        """With whole blocks of another, shared, and a copy of the one that they end in."""
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
            tables.in_flight.base_on_newest(child)  # which may make the copy that is copied here
        child.capacity = (whole + bool(rest)) * self._size
        tables.trim(child, num_tokens)
        return child

    def _with_found(self, seq_id: int, table: BlockTable, found: Found, reusable: int, room: Room) -> Admission | None:
        """Share whole blocks that were found, and copy the one that the match ends in."""
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
        """Share the whole blocks that were found, as far as the next query sees them."""
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
        """Copy the block that a match ends in. False where there is no block for it."""
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
        tables.in_flight.base_on_newest(table)  # a sequence that is running may have written it just now
        return True

    def _share(
        self, parent: BlockTable, new_id: int, num_blocks: int, num_tokens: int, tokens: Sequence[int]
    ) -> BlockTable:
        """A table with the leading blocks of another, of which `num_tokens` positions are shared."""
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
    """Block pools of all groups, the tables of live sequences, the prefix index, and what steps in flight own."""

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
        """What finds blocks by their tokens."""
        return self._parts.index

    @property
    def num_evicted(self) -> int:
        """Blocks that the index gave up, since the start."""
        return self._parts.num_evicted_before + self.index.num_evicted

    @property
    def num_copied_tokens(self) -> int:
        """Tokens whose KV was copied from block to block, since the start."""
        return self._copies.num_tokens

    @property
    def num_swapped_out_blocks(self) -> int:
        """Blocks that were copied to the host pool, since the start."""
        return self._swap.num_blocks_out

    @property
    def num_swapped_in_blocks(self) -> int:
        """Blocks that were copied from the host pool, since the start."""
        return self._swap.num_blocks_in

    @property
    def tables(self) -> Mapping[int, BlockTable]:
        """Of all live sequences, by id. To look at, not to change."""
        return MappingProxyType(self._parts.by_id)

    @property
    def num_pinned(self) -> int:
        """Blocks of all groups that pins hold."""
        wishes = self.index.wishes
        return 0 if wishes is None else sum(len(wishes.pinned(group)) for group in range(len(self.pools)))

    def at(self, now: float) -> None:
        """It is so late now: what was to be kept until then may go."""
        if self.index.wishes is not None:
            self.index.wishes.at(now)

    def end_program(self, tenant: str, program: str, branch: str | None) -> None:
        """Nobody goes on from what a branch of a program left; None: any of its branches."""
        if self.index.wishes is not None:
            self.index.wishes.end_program(tenant, program, branch)

    def predict_with(self, recompute_seconds: Seconds) -> None:
        """What eviction by cost goes by: seconds to compute so many tokens behind so many others."""
        self._parts.recompute_seconds = recompute_seconds

    def take_events(self) -> list[Event]:
        """What became of pins since the last call."""
        wishes = self.index.wishes
        if wishes is None or not wishes.events:
            return []
        events, wishes.events = wishes.events, []
        return events

    def take_given_up(self) -> list[GivenUp]:
        """What was evicted since the last call: for whom and why, in the order in which it began."""
        given_up, self._parts.given_up = self._parts.given_up, {}
        return list(given_up.values())

    # How a table begins

    def open(
        self,
        seq_id: int,
        tokens: Sequence[int] = (),
        namespace: Namespace = NO_NAMESPACE,
        *,
        keep: Keep = ANYHOW,
    ) -> BlockTable:
        """An empty table for a new sequence. tokens: those known of it, a list that grows with it.

        keep: what is asked for the KV that it, and what is forked or branched from it, leaves behind.
        """
        table = self._beginnings.open(seq_id, BlockTable(len(self.pools), tokens, namespace))
        table.keep = keep
        return table

    def admit(  # noqa: PLR0913  # two of them say who it is for and what is asked, all are given by name
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
        """A table that begins with what the index has of the leading `reusable` tokens.

        Behind that, up to `most` positions can be written, below `limit`. Groups without a window have blocks for
        all `tokens`, and `spare` blocks of each group are left. Whole blocks are shared, and one that the match ends
        in is copied. None where blocks are short; then nothing has changed.
        Of a sequence that was swapped out, what the host has behind whole blocks that were found is on its way then:
        nothing may be computed from it before the step that is being planned is collected.
        """
        room = Room(len(tokens), limit, most, spare, cause)
        admission = self._beginnings.admit(seq_id, tokens, namespace, reusable, room)
        if admission is not None:
            admission.table.keep = keep
        return admission

    def fork(self, seq_id: int, new_id: int, num_tokens: int, tokens: Sequence[int] = ()) -> BlockTable:
        """A table for `new_id` that shares the blocks of the first `num_tokens` positions of `seq_id`.

        They are all that `seq_id` has written, or whole blocks: nobody writes between them and its end.
        Whoever writes first behind them copies the block that they end in.
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
        """A table for `new_id` with the first `num_tokens` positions of `seq_id`, which may have written more.

        Whole blocks are shared, and the one that they end in is copied at once. None where blocks are short
        (for `reserve` positions, with `spare` of each group left), or have left the window of the next position.
        """
        return self._beginnings.branch(
            seq_id, new_id, num_tokens, tokens=tokens, reserve=reserve, spare=spare, cause=cause
        )

    # How a sequence leaves for the host, and whether it has

    def swap_out(self, num_valid: Mapping[int, int]) -> bool:
        """Copy leading positions of some sequences, so many of each, to the host pool. Blocks they share go once.

        To be followed by their `release`: the Moves read the blocks before anything that the Step does later. False
        where the host pool has no room; then nothing has changed.
        """
        return self._swapping.out(num_valid)

    def swap_bytes(self, num_valid: Mapping[int, int]) -> dict[int, int]:
        """Bytes that `swap_out` would copy, by sequence: blocks that several share count for the first of them."""
        return self._swapping.measure(num_valid)

    @property
    def swapped(self) -> Mapping[int, object]:
        """Sequences whose KV is in the host pool, or on its way there. To look at."""
        return MappingProxyType(self._swap.records)

    def is_leaving(self, seq_id: int) -> bool:
        """Whether a sequence's KV is on its way to the host: it cannot be admitted before that is over."""
        return self._swap.is_leaving(seq_id)

    def forget_swapped(self, seq_id: int) -> None:
        """A sequence that was swapped out does not come back."""
        self._swap.drop(seq_id)

    # How it grows and ends

    def grow(
        self,
        table: BlockTable,
        num_tokens: int,
        *,
        reserve: int = 0,
        spare: Sequence[int] | None = None,
        cause: Cause = NOBODY,
    ) -> list[int] | None:
        """Make positions up to `num_tokens` writable, by evicting where blocks are short. All or nothing.

        reserve: positions for which groups without a window get their blocks at once. spare: blocks of each
        group that have to be left. Returns, for each group, the first index at which the table changed (its
        length when only the right to write did), or None when there are not enough blocks.
        """
        return self._parts.grow(table, num_tokens, reserve=reserve, spare=spare, cause=cause)

    def record(self, table: BlockTable, start: int, stop: int) -> list[int] | None:
        """The step that is being planned writes [start, stop); earlier ones wrote what comes before.

        Whole blocks of known tokens enter the index, and where it has them already, the table takes its blocks.
        Returns, for each group, the first index at which the table changed, or None.
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
        self._in_flight.base_on_newest(table)  # rolled back, it would write to what it has in exchange
        return [max(added.changed_from, first) for first in table.firsts]

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Let go of the blocks that no query from position `num_tokens` on sees."""
        self._parts.trim(table, num_tokens)

    def needed(self, table: BlockTable, num_tokens: int, reserve: int = 0) -> list[int]:
        """Blocks, per group, that `grow` would take."""
        return self._parts.needed(table, num_tokens, reserve)

    def release(self, seq_id: int, num_tokens: int = 0) -> None:
        """The sequence lets go of its blocks. Steps in flight keep them until they are over.

        num_tokens: leading positions that hold what its tokens say; the index keeps them.
        """
        self._parts.release(seq_id, num_tokens)

    def fits_once_collected(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether `grow` will find enough blocks when the steps in flight are over."""
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
        """Evict all that nobody uses, and what is pinned; how many blocks were freed."""
        if self.index.wishes is not None:
            self.index.wishes.end_pins()
        idle = self.pools.num_idle
        for group, pool in enumerate(self.pools):
            self._parts.evict(group, pool.num_idle, cause)
        return idle - self.pools.num_idle

    # Steps

    @property
    def has_urgent_moves(self) -> bool:
        """Whether the next step has Moves to carry that cannot wait for one with something to compute."""
        return self._copies.to_host_or_back

    def launched(self, step_id: int) -> list[Move]:
        """The Moves that this step carries. Blocks let go of from now on belong to it until it is over."""
        self._in_flight.launch(step_id)
        self._swap.launched(step_id)
        return self._copies.launched(step_id)

    def collected(self, step_id: int) -> None:
        """A step has succeeded: its copies are made, and it owns nothing any more."""
        self._in_flight.end(step_id)
        self._copies.collected(step_id)
        self._swap.ended(step_id)

    def failed(self, step_id: int) -> list[int]:
        """A step has failed: what it wrote leaves the index, with what later steps wrote.

        Its copies are still to be made, by the next one, where anybody is left who wants them; what it or a later one
        copied to the host is void. Returns the sequences that began with something that was never written, or was on
        its way from the host: they have to begin again.
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
            missed = []  # made before anybody reads them
        return [
            seq_id
            for seq_id, table in self.tables.items()
            if table.based_on >= step_id or any(block in table.blocks[group] for group, block in missed)
        ]

    # Looking

    def sharing(self, seq_ids: Sequence[int]) -> tuple[int, int]:
        """Blocks of group 0 that some sequences would have without sharing, and those they took themselves."""
        return sharing([self.tables[seq_id] for seq_id in seq_ids])

    def check(self) -> list[str]:
        """Complaints where reference counts and owners do not add up; empty when all is well."""
        return self._audit.check(self.index) + self._swap.check()

    def repair(self) -> None:
        """Make the reference counts what the owners say. For a live engine, after it has logged `check`."""
        if self._audit.faults(self.index):  # an index that cannot be trusted is begun again
            self._parts.begin_index_again()
        self._audit.repair(self.index)
        self._swap.repair()
