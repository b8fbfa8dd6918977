"""Blocks of steps in flight: blocks that tables released meanwhile, and blocks whose KV these steps write.

A Move from the host may be in flight longer than its step. It owns the target blocks that their table released.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT, BlockTable
from quire.core.step import Move


class InFlight:
    """Steps that are launched and not over, oldest first."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools
        self._retired: dict[int, list[tuple[int, int]]] = {}  # step -> (group, block) that it owns until it is over
        self._arriving: dict[tuple[int, int], int] = {}  # (group, block) -> Move in flight that writes it from the host
        self._retired_targets: dict[
            int, list[tuple[int, int]]
        ] = {}  # Move -> (group, block) that it owns until its end
        self._written: dict[int, set[int]] = {}  # step -> indexed blocks of group 0 that it writes
        self.planned_writes: dict[
            int, int
        ] = {}  # indexed block that the planned step writes -> tokens that it had before
        self._dependent: dict[int, set[BlockTable]] = {}  # step -> tables with KV that is lost if it fails
        self._dependent_on_planned: set[BlockTable] = set()

    @property
    def newest(self) -> int | None:
        """The step launched last, if it is still in flight."""
        return next(reversed(self._written), None)

    @property
    def is_empty(self) -> bool:
        """Whether no step and no Move from the host is in flight."""
        return not (self._written or self._arriving)

    def has_step(self, step_id: int) -> bool:
        """Whether a step is in flight."""
        return step_id in self._written

    @property
    def unwritten(self) -> set[int]:
        """The indexed blocks of group 0 that the planned step and those in flight write."""
        return set(self.planned_writes).union(*self._written.values())

    def launch(self, step_id: int, moves: Iterable[Move]) -> None:
        """The step that was being planned is launched, with these Moves."""
        for move in moves:
            if move.source == "host":
                self._arriving.update(((move.group, block), move.id) for _, block in move.pairs)
        self._written[step_id] = set(self.planned_writes)
        self._retired[step_id] = []
        self._dependent[step_id], self._dependent_on_planned = self._dependent_on_planned, set()
        self.planned_writes.clear()

    def deferred_decr_ref(self, group: int, block: int) -> None:
        """Drop a reference once the steps that are in flight now, and a Move that writes the block, are over."""
        newest = self.newest
        if self._arriving and (group, block) in self._arriving:
            self._retired_targets.setdefault(self._arriving[group, block], []).append((group, block))
        elif newest is None:
            self._pools[group].decr_ref(block)
        else:
            self._retired[newest].append((group, block))

    def deferred_decr_refs(self, group: int, blocks: Sequence[int]) -> None:
        """Drop one reference to each of some blocks, as `deferred_decr_ref` does."""
        newest = self.newest
        if newest is None or self._arriving:
            for block in blocks:
                self.deferred_decr_ref(group, block)
        else:
            self._retired[newest] += [(group, block) for block in blocks]

    def is_arriving(self, table: BlockTable) -> bool:
        """Whether a Move in flight writes a block of a table."""
        if not self._arriving:
            return False
        state = table.state
        if state is not None and (len(table.blocks), state.block) in self._arriving:
            return True
        return any((group, block) in self._arriving for group, blocks in enumerate(table.blocks) for block in blocks)

    def end_moves(self, moves: Iterable[Move]) -> None:
        """Moves to or from the host are over."""
        for move in moves:
            if move.source == "host":
                for _, block in move.pairs:
                    del self._arriving[move.group, block]
                for place in self._retired_targets.pop(move.id, ()):
                    self.deferred_decr_ref(*place)

    def record_insert(self, table: BlockTable, entered: Iterable[int], num_written: int, block_size: int) -> None:
        """Record that blocks of a table entered the index.

        entered: their table indices. num_written: tokens that earlier steps wrote; the planned step writes the others.
        """
        newest, blocks, fresh = self.newest, table.blocks[0], self.planned_writes
        first, there = divmod(num_written, block_size)
        for i in entered:
            block = blocks[i]
            if block == ABSENT:
                continue
            if i >= first:
                fresh[block] = there if i == first else 0
            elif newest is not None:
                self._written[newest].add(block)

    def record_written_by_any(self, blocks: Iterable[int]) -> None:
        """Record that blocks entered the index which any step in flight may have written."""
        for written in self._written.values():
            written.update(blocks)

    def add_dependency(self, table: BlockTable, blocks: Sequence[int]) -> None:
        """Record that a table uses blocks of the index: it must start again if a step that writes one of them fails."""
        unknown = ABSENT in blocks  # other groups may have blocks there, which are not recorded
        for step_id, written in self._written.items():
            if written and (unknown or not written.isdisjoint(blocks)):
                self._dependent[step_id].add(table)
        if self.planned_writes and (unknown or not self.planned_writes.keys().isdisjoint(blocks)):
            self._dependent_on_planned.add(table)

    def depend_on_planned(self, table: BlockTable) -> None:
        """Record that a table depends on KV that the planned step copies from the host."""
        self._dependent_on_planned.add(table)

    def depend_on_newest(self, table: BlockTable) -> None:
        """Record that a table depends on KV that any step in flight may have written, but not the planned step."""
        if self.newest is not None:
            self._dependent[self.newest].add(table)

    def copy_dependencies(self, parent: BlockTable, child: BlockTable) -> None:
        """Record that a table depends on the steps that another one depends on."""
        for tables in [*self._dependent.values(), self._dependent_on_planned]:
            if parent in tables:
                tables.add(child)

    def dependent(self, step_id: int) -> set[BlockTable]:
        """Tables that depend on this step or a later one."""
        return set().union(*(tables for later, tables in self._dependent.items() if later >= step_id))

    def end(self, step_id: int) -> None:
        """The step is over: drop its references."""
        self._written.pop(step_id, None)
        self._dependent.pop(step_id, None)
        for group, block in self._retired.pop(step_id, ()):
            self._pools[group].decr_ref(block)

    def pop_writes(self, step_id: int) -> set[int]:
        """The indexed blocks that this step or a later one writes. They are not recorded as written any more."""
        void: set[int] = set()
        for later, blocks in self._written.items():
            if later >= step_id:
                void |= blocks
                blocks.clear()
        return void

    def retired(self, group: int) -> Counter[int]:
        """References that steps and Moves in flight own, per block."""
        retired = chain(self._retired.values(), self._retired_targets.values())
        return Counter(block for owned in retired for g, block in owned if g == group)
