"""KVCache: the few verbs with which the scheduler speaks about memory.

Who owns a block, always by reference count:
  a table       from `grow` or `fork` until `release`
  a step        a block that a table let go of while steps were in flight; until it is over
  a copy        its source, from `grow` until a step that carries the Move has succeeded
Nothing here touches bytes: a block that must be copied becomes a Move, which the next Step carries.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from quire.cache.pool import BlockPool
from quire.cache.table import BlockTable
from quire.config import CacheConfig
from quire.core.step import Move


class KVCache:
    """Block pools of all groups, the tables of live sequences, and what steps in flight still own."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.pools = [BlockPool(group.num_blocks) for group in config.groups]
        self._tables: dict[int, BlockTable] = {}
        self._retired: dict[int, list[tuple[int, int]]] = {}  # step id -> (group, block)
        self._moves: list[Move] = []  # copies for the next step to carry
        self._carried: dict[int, list[Move]] = {}  # step id -> copies that it carries
        self._sources: list[Counter[int]] = [Counter() for _ in self.pools]  # references that copies hold
        self._last_move = 0
        self._newest_step: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the group that has fewest."""
        return min(pool.num_blocks for pool in self.pools)

    @property
    def num_free(self) -> int:
        """Free blocks of the group that has fewest."""
        return min(pool.num_free for pool in self.pools)

    @property
    def tables(self) -> Mapping[int, BlockTable]:
        """Of all live sequences, by id. To look at, not to change."""
        return MappingProxyType(self._tables)

    def open(self, seq_id: int) -> BlockTable:
        """An empty table for a new sequence."""
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id} has a table already")
        table = self._tables[seq_id] = BlockTable(len(self.pools))
        return table

    def fork(self, seq_id: int, new_id: int, num_tokens: int) -> BlockTable:
        """A table for `new_id` that shares the blocks of the first `num_tokens` positions of `seq_id`.

        They are all that `seq_id` has written, or whole blocks: nobody writes between them and its end.
        """
        parent, child = self._tables[seq_id], self.open(new_id)
        num_shared = -(-num_tokens // self.block_size)
        for pool, ours, theirs in zip(self.pools, parent.blocks, child.blocks, strict=True):
            theirs += ours[:num_shared]
            for block in theirs:
                pool.hold(block)
        if num_tokens % self.block_size:
            parent.capacity = min(parent.capacity, num_tokens)
        child.capacity = num_tokens
        return child

    def needed(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks, per group, that `grow` would take."""
        if num_tokens <= table.capacity:
            return 0
        new = max(0, -(-num_tokens // self.block_size) - len(table))
        return new + self._tail_is_shared(table)

    def grow(self, table: BlockTable, num_tokens: int) -> int | None:
        """Make positions up to `num_tokens` writable. All or nothing.

        Returns the first index at which the table changed (its length when only the right to write
        did), or None when there are not enough free blocks.
        """
        needed = self.needed(table, num_tokens)
        if needed > self.num_free:
            return None
        first = len(table)
        if needed and self._tail_is_shared(table):
            first = self._copy_tail(table)
            needed -= 1
        for pool, blocks in zip(self.pools, table.blocks, strict=True):
            blocks += [pool.take() for _ in range(needed)]
        table.capacity = max(table.capacity, len(table) * self.block_size)
        return first

    def release(self, seq_id: int) -> None:
        """The sequence lets go of its blocks. Steps in flight keep them until they are over."""
        table = self._tables.pop(seq_id)
        for group, blocks in enumerate(table.blocks):
            for block in reversed(blocks):
                self._let_go(group, block)

    def fits_once_collected(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether `grow` will find enough blocks when the steps in flight are over."""
        if not self._retired:
            return False
        needed = self.needed(table, num_tokens)
        for group, pool in enumerate(self.pools):
            retired = Counter(block for blocks in self._retired.values() for g, block in blocks if g == group)
            coming = sum(pool.refs(block) == count for block, count in retired.items())
            if pool.num_free + coming < needed:
                return False
        return True

    def launched(self, step_id: int) -> list[Move]:
        """The copies that this step carries. Blocks that are let go of from now on belong to it until it is over."""
        self._newest_step = step_id
        moves, self._moves = self._moves, []
        if moves:
            self._carried[step_id] = moves
        return moves

    def collected(self, step_id: int) -> None:
        """A step has succeeded: its copies are made, and it owns nothing any more."""
        self._over(step_id)
        for move in self._carried.pop(step_id, ()):
            for source, _ in move.pairs:
                self._sources[move.group][source] -= 1
                self._let_go(move.group, source)

    def failed(self, step_id: int) -> None:
        """A step has failed: its copies are still to be made, by the next one."""
        self._over(step_id)
        self._moves = self._carried.pop(step_id, []) + self._moves

    def check(self) -> list[str]:
        """Complaints where reference counts and owners do not add up; empty when all is well."""
        return [
            f"group {group}: {wrong}"
            for group, (pool, owners) in enumerate(zip(self.pools, self._owners(), strict=True))
            for wrong in pool.check(owners)
        ]

    def repair(self) -> None:
        """Make the reference counts what the owners say. For a live engine, after it has logged `check`."""
        for pool, owners in zip(self.pools, self._owners(), strict=True):
            pool.repair(owners)

    def _owners(self) -> Iterator[Counter[int]]:
        for group in range(len(self.pools)):
            owners: Counter[int] = Counter()
            for table in self._tables.values():
                owners.update(table.blocks[group])
            for retired in self._retired.values():
                owners.update(block for owned, block in retired if owned == group)
            owners.update(self._sources[group])
            yield owners

    def _tail_is_shared(self, table: BlockTable) -> bool:
        """Whether the block at `capacity` exists and is in other tables, whose sequences must not see it change.

        A copy of it that is still to be made does not count: it is made before the step's writes, and
        what it copies lies before `capacity`.
        """
        index = table.capacity // self.block_size
        if index >= len(table):
            return False
        groups = zip(self.pools, self._sources, table.blocks, strict=True)
        return any(pool.refs(blocks[index]) - sources[blocks[index]] > 1 for pool, sources, blocks in groups)

    def _copy_tail(self, table: BlockTable) -> int:
        """Give the table its own copy of the block at `capacity`; returns that block's index."""
        index, num_tokens = divmod(table.capacity, self.block_size)
        for group, (pool, blocks) in enumerate(zip(self.pools, table.blocks, strict=True)):
            source, target = blocks[index], pool.take()
            blocks[index] = target
            self._last_move += 1
            self._moves.append(Move(self._last_move, group, "device", "device", [(source, target)], num_tokens))
            self._sources[group][source] += 1  # the table's reference passes to the copy
        return index

    def _over(self, step_id: int) -> None:
        for group, block in self._retired.pop(step_id, ()):
            self.pools[group].drop(block)
        if step_id == self._newest_step:
            self._newest_step = None

    def _let_go(self, group: int, block: int) -> None:
        if self._newest_step is None:
            self.pools[group].drop(block)
        else:
            self._retired.setdefault(self._newest_step, []).append((group, block))
