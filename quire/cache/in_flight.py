"""What steps in flight own: blocks that tables let go of meanwhile, and the truth of what they write."""

from collections import Counter
from collections.abc import Iterable, Sequence

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT, BlockTable


class InFlight:
    """Steps that are launched and not over, oldest first."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools
        self._retired: dict[int, list[tuple[int, int]]] = {}  # step -> (group, block), owned until it is over
        self._written: dict[int, set[int]] = {}  # step -> blocks of group 0 in the index that it writes
        self.fresh: dict[int, int] = {}  # those that the step that is being planned writes -> tokens that were there
        self._on_fresh: list[BlockTable] = []  # tables that rely on that step

    @property
    def newest(self) -> int | None:
        """The step launched last, unless it is over."""
        return next(reversed(self._written), None)

    def launch(self, step_id: int) -> None:
        """The step that was being planned begins."""
        self._written[step_id] = set(self.fresh)
        self._retired[step_id] = []
        for table in self._on_fresh:
            table.based_on = step_id
        self.fresh.clear()
        self._on_fresh.clear()

    def let_go(self, group: int, block: int) -> None:
        """A reference is given back as soon as no step in flight may need the block."""
        newest = self.newest
        if newest is None:
            self._pools[group].drop(block)
        else:
            self._retired[newest].append((group, block))

    def record(self, table: BlockTable, entered: Iterable[int], num_written: int, block_size: int) -> None:
        """Blocks of a table entered the index, by their places. Earlier steps wrote the first `num_written` tokens."""
        newest, blocks, fresh = self.newest, table.blocks[0], self.fresh
        first, there = divmod(num_written, block_size)
        for i in entered:
            block = blocks[i]
            if block == ABSENT:
                continue
            if i >= first:
                fresh[block] = there if i == first else 0
            elif newest is not None:
                self._written[newest].add(block)

    def doubt(self, blocks: Iterable[int]) -> None:
        """Blocks entered the index; any step in flight may have written them."""
        for written in self._written.values():
            written.update(blocks)

    def base(self, table: BlockTable, blocks: Sequence[int]) -> None:
        """A table relies on blocks of the index: it has to begin again should a step fail that writes one of them."""
        unknown = ABSENT in blocks  # of other groups there may be blocks
        for step_id, written in self._written.items():
            if written and (unknown or not written.isdisjoint(blocks)):
                table.based_on = max(table.based_on, step_id)
        if self.fresh and (unknown or not self.fresh.keys().isdisjoint(blocks)):
            self._on_fresh.append(table)

    def base_on_planned(self, table: BlockTable) -> None:
        """A table relies on what the step that is being planned brings from the host."""
        self._on_fresh.append(table)

    def base_on_newest(self, table: BlockTable) -> None:
        """A table relies on what any step in flight may have written, and the one that is being planned did not."""
        table.based_on = max(table.based_on, -1 if self.newest is None else self.newest)

    def end(self, step_id: int) -> None:
        """A step is over: it owns nothing any more."""
        self._written.pop(step_id, None)
        for group, block in self._retired.pop(step_id, ()):
            self._pools[group].drop(block)

    def forget_writes(self, step_id: int) -> set[int]:
        """Blocks that a step wrote, or one launched after it: of no step any more."""
        void: set[int] = set()
        for later, blocks in self._written.items():
            if later >= step_id:
                void |= blocks
                blocks.clear()
        return void

    def retired(self, group: int) -> Counter[int]:
        """References that steps own, per block."""
        return Counter(block for owned in self._retired.values() for g, block in owned if g == group)
