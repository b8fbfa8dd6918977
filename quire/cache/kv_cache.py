"""KVCache: the few verbs with which the scheduler speaks about memory.

Who owns a block, always by reference count:
  a table       from `admit`, `grow`, `fork` or `branch` until `release`, or until `trim` finds it behind its window
  the index     from `record` or `release` until it is evicted, or found to have never been written
  a step        a block that a table let go of while steps were in flight; until it is over
  a copy        its two blocks, from `admit`, `grow` or `branch` until a step that carries the Move has succeeded
Nothing here touches bytes: a block that must be copied becomes a Move, which the next Step carries.
"""

from collections.abc import Mapping, Sequence
from sys import maxsize
from types import MappingProxyType

from quire.cache.admission import Admission, Room, fitting
from quire.cache.audit import Audit, sharing
from quire.cache.copies import Copies
from quire.cache.hashed import HashIndex
from quire.cache.in_flight import InFlight
from quire.cache.index import NOTHING_FOUND, Cause, Found, PrefixIndex
from quire.cache.no_index import NoIndex
from quire.cache.pool import BlockPool, Pools
from quire.cache.radix import RadixTree
from quire.cache.table import ABSENT, BlockTable
from quire.config import CacheConfig
from quire.core.namespace import NO_NAMESPACE, Namespace
from quire.core.step import Move

_INDEXES: dict[str, type[HashIndex] | type[RadixTree]] = {"hash": HashIndex, "radix": RadixTree}
_NOBODY = Cause()


class KVCache:
    """Block pools of all groups, the tables of live sequences, the prefix index, and what steps in flight own."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.pools = Pools(BlockPool(group.num_blocks) for group in config.groups)
        self.windowed = [i for i, group in enumerate(config.groups) if group.window]
        self._tables: dict[int, BlockTable] = {}
        self._in_flight = InFlight(self.pools)
        self._copies = Copies(self.pools, self._in_flight.let_go)
        self._audit = Audit(self.pools, self._tables, self._in_flight, self._copies)
        self.index = self._new_index()
        self._num_evicted = 0  # by indexes before this one

    @property
    def num_evicted(self) -> int:
        """Blocks that the index gave up, since the start."""
        return self._num_evicted + self.index.num_evicted

    @property
    def num_copied_tokens(self) -> int:
        """Tokens whose KV was copied from block to block, since the start."""
        return self._copies.num_tokens

    @property
    def tables(self) -> Mapping[int, BlockTable]:
        """Of all live sequences, by id. To look at, not to change."""
        return MappingProxyType(self._tables)

    # How a table begins

    def open(self, seq_id: int, tokens: Sequence[int] = (), namespace: Namespace = NO_NAMESPACE) -> BlockTable:
        """An empty table for a new sequence. tokens: those known of it, a list that grows with it."""
        table = self._add_table(seq_id, BlockTable(len(self.pools), tokens, namespace))
        self.index.enter(table, NOTHING_FOUND)
        self._note_due(table)
        return table

    def admit(
        self,
        seq_id: int,
        tokens: Sequence[int],
        namespace: Namespace,
        *,
        reusable: int,
        limit: int,
        most: int,
        spare: Sequence[int] | None = None,
        cause: Cause = _NOBODY,
    ) -> Admission | None:
        """A table that begins with what the index has of the leading `reusable` tokens.

        Behind that, up to `most` positions can be written, below `limit`. Groups without a window have blocks for
        all `tokens`, and `spare` blocks of each group are left. Whole blocks are shared, and one that the match ends
        in is copied. None where blocks are short; then nothing has changed.
        """
        found = self.index.find(namespace, tokens[:reusable]) if reusable > 0 else NOTHING_FOUND
        fits = fitting(self.config, self.pools, found, Room(len(tokens), limit, most, spare))
        if fits is None:
            return None
        found, num_shared = fits, len(fits.blocks[0]) if fits.blocks else 0
        start = found.num_tokens
        miss = self.index.why(namespace, tokens, found, reusable)
        table = self._add_table(seq_id, BlockTable(len(self.pools), tokens, namespace))
        self._begin_with(table, found, num_shared)
        copied = self._copy_partial(table, found, start, cause)
        if not copied or self.grow(table, min(limit, start + most), reserve=len(tokens), cause=cause) is None:
            self.release(seq_id)
            return None
        return Admission(table, start, num_shared, start - num_shared * self.block_size, miss)

    def fork(self, seq_id: int, new_id: int, num_tokens: int, tokens: Sequence[int] = ()) -> BlockTable:
        """A table for `new_id` that shares the blocks of the first `num_tokens` positions of `seq_id`.

        They are all that `seq_id` has written, or whole blocks: nobody writes between them and its end.
        Whoever writes first behind them copies the block that they end in.
        """
        parent = self._tables[seq_id]
        child = self._share(parent, new_id, -(-num_tokens // self.block_size), num_tokens, tokens)
        if num_tokens % self.block_size:
            parent.capacity = min(parent.capacity, num_tokens)
        child.capacity = num_tokens
        return child

    def branch(
        self,
        seq_id: int,
        new_id: int,
        num_tokens: int,
        *,
        tokens: Sequence[int] = (),
        reserve: int,
        spare: Sequence[int],
        cause: Cause = _NOBODY,
    ) -> BlockTable | None:
        """A table for `new_id` with the first `num_tokens` positions of `seq_id`, which may have written more.

        Whole blocks are shared, and the one that they end in is copied at once. None where blocks are short
        (for `reserve` positions, with `spare` of each group left), or have left the window of the next position.
        """
        parent = self._tables[seq_id]
        whole, rest = divmod(num_tokens, self.block_size)
        for group, pool in enumerate(self.pools):
            if parent.firsts[group] > self.config.first_seen(group, num_tokens):
                return None
            if self.config.num_blocks(group, num_tokens, reserve) - whole + spare[group] > pool.num_available:
                return None
        if rest and not self._make_room([1] * len(self.pools), cause):
            return None
        child = self._share(parent, new_id, whole, num_tokens, tokens)
        if rest:
            for group, pool in enumerate(self.pools):
                source = parent.blocks[group][whole]
                pool.hold(source)
                child.blocks[group].append(self._copies.make(group, source, rest))
            self._in_flight.base_on_newest(child)  # which may make the copy that is copied here
        child.capacity = (whole + bool(rest)) * self.block_size
        self.trim(child, num_tokens)
        return child

    # How it grows and ends

    def grow(
        self,
        table: BlockTable,
        num_tokens: int,
        *,
        reserve: int = 0,
        spare: Sequence[int] | None = None,
        cause: Cause = _NOBODY,
    ) -> list[int] | None:
        """Make positions up to `num_tokens` writable, by evicting where blocks are short. All or nothing.

        reserve: positions for which groups without a window get their blocks at once. spare: blocks of each
        group that have to be left. Returns, for each group, the first index at which the table changed (its
        length when only the right to write did), or None when there are not enough blocks.
        """
        needed, enough = self.needed(table, num_tokens, reserve), True
        for group, pool in enumerate(self.pools):
            wanted = needed[group] + (spare[group] if spare else 0)
            if wanted > pool.num_free:
                enough = False
                if wanted > pool.num_available:
                    return None
        if not enough and not self._make_room(needed, cause):
            return None
        firsts = []
        index, rest = divmod(table.capacity, self.block_size)
        for group, (pool, blocks, new) in enumerate(zip(self.pools, table.blocks, needed, strict=True)):
            copied = new > 0 and self._is_shared(group, blocks, index)
            firsts.append(index if copied else len(blocks))
            if copied:
                blocks[index] = self._copies.make(group, blocks[index], rest)  # which takes over the table's reference
            blocks += pool.take_many(new - copied)
        table.capacity = max(table.capacity, min(map(len, table.blocks)) * self.block_size)
        return firsts

    def record(self, table: BlockTable, start: int, stop: int) -> list[int] | None:
        """The step that is being planned writes [start, stop); earlier ones wrote what comes before.

        Whole blocks of known tokens enter the index, and where it has them already, the table takes its blocks.
        Returns, for each group, the first index at which the table changed, or None.
        """
        num_blocks = min(stop, len(table.tokens)) // self.block_size
        if num_blocks <= table.num_indexed:
            return None
        added = self.index.add(table, num_blocks, start)
        self._note_due(table)
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
        for group in self.windowed:
            blocks, first = table.blocks[group], table.firsts[group]
            seen = min(self.config.first_seen(group, num_tokens), len(blocks))
            for index in range(first, seen):
                self._in_flight.let_go(group, blocks[index])
                blocks[index] = ABSENT
            table.firsts[group] = max(first, seen)

    def needed(self, table: BlockTable, num_tokens: int, reserve: int = 0) -> list[int]:
        """Blocks, per group, that `grow` would take."""
        if num_tokens <= table.capacity:
            return [0] * len(self.pools)
        index = table.capacity // self.block_size
        return [
            max(0, self.config.num_blocks(group, num_tokens, reserve) - len(blocks))
            + self._is_shared(group, blocks, index)
            for group, blocks in enumerate(table.blocks)
        ]

    def release(self, seq_id: int, num_tokens: int = 0) -> None:
        """The sequence lets go of its blocks. Steps in flight keep them until they are over.

        num_tokens: leading positions that hold what its tokens say; the index keeps them.
        """
        table = self._tables.pop(seq_id)
        for group, blocks in enumerate(table.blocks):
            for block in self._copies.cancel(group, blocks):
                num_tokens = min(num_tokens, blocks.index(block) * self.block_size)
        entered = self.index.leave(table, num_tokens)
        self._in_flight.doubt([table.blocks[0][i] for i in entered])
        for group, (blocks, first) in enumerate(zip(table.blocks, table.firsts, strict=True)):
            for block in reversed(blocks[first:]):
                self._in_flight.let_go(group, block)

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

    def flush(self, cause: Cause = _NOBODY) -> int:
        """Evict all that nobody uses; how many blocks were freed."""
        idle = self.pools.num_idle
        for group, pool in enumerate(self.pools):
            self.index.evict(group, pool.num_idle, cause)
        return idle - self.pools.num_idle

    # Steps

    def launched(self, step_id: int) -> list[Move]:
        """The copies that this step carries. Blocks that are let go of from now on belong to it until it is over."""
        self._in_flight.launch(step_id)
        return self._copies.launched(step_id)

    def collected(self, step_id: int) -> None:
        """A step has succeeded: its copies are made, and it owns nothing any more."""
        self._in_flight.end(step_id)
        self._copies.collected(step_id)

    def failed(self, step_id: int) -> list[int]:
        """A step has failed: what it wrote leaves the index, with what later steps wrote.

        Its copies are still to be made, by the next one, where anybody is left who wants them. Returns the
        sequences that began with something that was never written: they have to begin again.
        """
        void = self._in_flight.forget_writes(step_id)
        if void:
            self.index.void(void, self._tables.values())
            for table in self._tables.values():
                self._note_due(table)
        self._in_flight.end(step_id)
        missed = self._copies.failed(step_id)
        if self._in_flight.newest is None:
            missed = []  # made before anybody reads them
        return [
            seq_id
            for seq_id, table in self._tables.items()
            if table.based_on >= step_id or any(block in table.blocks[group] for group, block in missed)
        ]

    # Looking

    def sharing(self, seq_ids: Sequence[int]) -> tuple[int, int]:
        """Blocks of group 0 that some sequences would have without sharing, and those they took themselves."""
        return sharing([self._tables[seq_id] for seq_id in seq_ids])

    def check(self) -> list[str]:
        """Complaints where reference counts and owners do not add up; empty when all is well."""
        return self._audit.check(self.index)

    def repair(self) -> None:
        """Make the reference counts what the owners say. For a live engine, after it has logged `check`."""
        if self._audit.faults(self.index):  # an index that cannot be trusted is begun again
            self._num_evicted += self.index.num_evicted
            self.index = self._new_index()
            for table in self._tables.values():
                table.num_found = 0
                self.index.enter(table, NOTHING_FOUND)
                self._note_due(table)
        self._audit.repair(self.index)

    # Parts of the above

    def _new_index(self) -> PrefixIndex:
        if self.config.prefix_index == "none":
            return NoIndex()
        return _INDEXES[self.config.prefix_index](self.config, self.pools, self._in_flight.fresh)

    def _add_table(self, seq_id: int, table: BlockTable) -> BlockTable:
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id} has a table already")
        self._tables[seq_id] = table
        return table

    def _note_due(self, table: BlockTable) -> None:
        table.due = maxsize if self.config.prefix_index == "none" else (table.num_indexed + 1) * self.block_size

    def _begin_with(self, table: BlockTable, found: Found, num_shared: int) -> None:
        """Share the whole blocks that were found, as far as the next query sees them."""
        table.num_found = num_shared
        for group, some in enumerate(found.blocks):
            first = table.firsts[group] = min(self.config.first_seen(group, found.num_tokens), num_shared)
            table.blocks[group].extend([ABSENT] * first + some[first:])
            for block in some[first:]:
                self.pools[group].hold(block)
        table.capacity = num_shared * self.block_size
        self.index.enter(table, found)
        self._note_due(table)
        if num_shared:
            self._in_flight.base(table, found.blocks[0])

    def _copy_partial(self, table: BlockTable, found: Found, num_tokens: int, cause: Cause) -> bool:
        """Copy the block that a match ends in. False where there is no block for it."""
        if not found.partial:
            return True
        for pool, source in zip(self.pools, found.partial, strict=True):
            pool.hold(source)
        if not self._make_room([1] * len(self.pools), cause):
            for group, source in enumerate(found.partial):
                self._in_flight.let_go(group, source)
            return False
        for group, source in enumerate(found.partial):
            copy = self._copies.make(group, source, num_tokens - table.capacity)
            table.blocks[group].append(copy)
        table.capacity += self.block_size
        self._in_flight.base_on_newest(table)  # a sequence that is running may have written it just now
        return True

    def _make_room(self, needed: Sequence[int], cause: Cause) -> bool:
        """Evict until so many blocks of each group are free."""
        for group, pool in enumerate(self.pools):
            if needed[group] > pool.num_free:
                self.index.evict(group, needed[group] - pool.num_free, cause)
        return all(pool.num_free >= count for pool, count in zip(self.pools, needed, strict=True))

    def _is_shared(self, group: int, blocks: list[int], index: int) -> bool:
        """Whether the block at `index` exists and is in other tables, whose sequences must not see it change.

        Asked about the block at a table's `capacity`. A copy of it that is still to be made does not count:
        it is made before the step's writes, and what it copies lies before `capacity`. Nor does the index, which
        says nothing about what lies behind that.
        """
        if index >= len(blocks):
            return False
        return self.pools[group].users(blocks[index]) - self._copies.held(group)[blocks[index]] > 1

    def _share(
        self, parent: BlockTable, new_id: int, num_blocks: int, num_tokens: int, tokens: Sequence[int]
    ) -> BlockTable:
        """A table with the leading blocks of another, of which `num_tokens` positions are shared."""
        child = self._add_table(new_id, BlockTable(len(self.pools), tokens, parent.namespace))
        child.firsts = [min(first, num_blocks) for first in parent.firsts]
        for pool, ours, theirs, first in zip(self.pools, parent.blocks, child.blocks, child.firsts, strict=True):
            theirs += ours[:num_blocks]
            for block in theirs[first:]:
                pool.hold(block)
        child.num_indexed = min(parent.num_indexed, num_tokens // self.block_size)
        child.num_found = min(parent.num_found, num_blocks)
        child.based_on, child.launched = parent.based_on, num_tokens
        self.index.follow(parent, child)
        self._note_due(child)
        return child
