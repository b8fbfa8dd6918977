"""Beginnings: how a table comes to be, from nothing, from the index, from the host, or from another sequence's."""

from collections.abc import Sequence

from quire.cache.admission import Admission, Room, fitting
from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.block_tables import Tables
from quire.cache.prefix.index import NOTHING_FOUND, Cause, Found
from quire.cache.swap_planner import Swapping
from quire.core.request import Namespace


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
