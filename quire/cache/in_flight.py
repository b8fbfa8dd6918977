"""Blocks of steps in flight: blocks that tables released meanwhile, and blocks whose KV these steps write."""

from collections import Counter
from collections.abc import Iterable, Sequence

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT, BlockTable


class InFlight:
    """Steps that are launched and not over, oldest first."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools
        self._retired: dict[int, list[tuple[int, int]]] = {}  # step -> (group, block) that it owns until it is over
        self._written: dict[int, set[int]] = {}  # step -> indexed blocks of group 0 that it writes
        self.planned_writes: dict[
            int, int
        ] = {}  # indexed block that the planned step writes -> tokens that it had before
        self._depending_on_planned: list[BlockTable] = []  # tables that depend on the planned step

    @property
    def newest(self) -> int | None:
        """The step launched last, if it is still in flight."""
        return next(reversed(self._written), None)

    def launch(self, step_id: int) -> None:
        """The step that was being planned is launched."""
        self._written[step_id] = set(self.planned_writes)
        self._retired[step_id] = []
        for table in self._depending_on_planned:
            table.depends_on_step = step_id
        self.planned_writes.clear()
        self._depending_on_planned.clear()

    def deferred_decr_ref(self, group: int, block: int) -> None:
        """Drop a reference once the steps that are in flight now are over."""
        newest = self.newest
        if newest is None:
            self._pools[group].decr_ref(block)
        else:
            self._retired[newest].append((group, block))

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
                table.depends_on_step = max(table.depends_on_step, step_id)
        if self.planned_writes and (unknown or not self.planned_writes.keys().isdisjoint(blocks)):
            self._depending_on_planned.append(table)

    def depend_on_planned(self, table: BlockTable) -> None:
        """Record that a table depends on KV that the planned step copies from the host."""
        self._depending_on_planned.append(table)

    def depend_on_newest(self, table: BlockTable) -> None:
        """Record that a table depends on KV that any step in flight may have written, but not the planned step."""
        table.depends_on_step = max(table.depends_on_step, -1 if self.newest is None else self.newest)

    def end(self, step_id: int) -> None:
        """The step is over: drop its references."""
        self._written.pop(step_id, None)
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
        """References that steps in flight own, per block."""
        return Counter(block for owned in self._retired.values() for g, block in owned if g == group)
