"""KVCache: the few verbs with which the scheduler speaks about memory.

Who owns a block, always by reference count:
  a table       from `grow`, `fork` or `branch` until `release`, or until `trim` finds it behind its window
  a step        a block that a table let go of while steps were in flight; until it is over
  a copy        its source, from `grow` or `branch` until a step that carries the Move has succeeded
Nothing here touches bytes: a block that must be copied becomes a Move, which the next Step carries.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from quire.cache.pool import BlockPool
from quire.cache.table import ABSENT, BlockTable
from quire.config import CacheConfig
from quire.core.step import Move


class KVCache:
    """Block pools of all groups, the tables of live sequences, and what steps in flight still own."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.pools = [BlockPool(group.num_blocks) for group in config.groups]
        self.windowed = [i for i, group in enumerate(config.groups) if group.window]
        self._tables: dict[int, BlockTable] = {}
        self._retired: dict[int, list[tuple[int, int]]] = {}  # step id -> (group, block)
        self._moves: list[Move] = []  # copies for the next step to carry
        self._carried: dict[int, list[Move]] = {}  # step id -> copies that it carries
        self._sources: list[Counter[int]] = [Counter() for _ in self.pools]  # references that copies hold
        self._last_move = 0
        self._newest_step: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_free(self) -> int:
        """Free blocks of all groups."""
        return sum(pool.num_free for pool in self.pools)

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
        Whoever writes first behind them copies the block that they end in.
        """
        parent, child = self._tables[seq_id], self.open(new_id)
        self._share(parent, child, -(-num_tokens // self.block_size))
        if num_tokens % self.block_size:
            parent.capacity = min(parent.capacity, num_tokens)
        child.capacity = num_tokens
        return child

    def branch(
        self, seq_id: int, new_id: int, num_tokens: int, *, reserve: int, spare: Sequence[int]
    ) -> BlockTable | None:
        """A table for `new_id` with the first `num_tokens` positions of `seq_id`, which may have written more.

        Whole blocks are shared, and the one that they end in is copied at once. None where blocks are short
        (for `reserve` positions, with `spare` of each group left), or have left the window of the next position.
        """
        parent = self._tables[seq_id]
        whole, rest = divmod(num_tokens, self.block_size)
        for group, pool in enumerate(self.pools):
            if parent.firsts[group] > self._first_seen(group, num_tokens):
                return None
            if self._length(group, num_tokens, reserve) - whole + spare[group] > pool.num_free:
                return None
        child = self.open(new_id)
        self._share(parent, child, whole)
        if rest:
            for group, pool in enumerate(self.pools):
                source = parent.blocks[group][whole]
                pool.hold(source)
                child.blocks[group].append(self._copy(group, source, rest))
        child.capacity = (whole + bool(rest)) * self.block_size
        self.trim(child, num_tokens)
        return child

    def grow(
        self, table: BlockTable, num_tokens: int, *, reserve: int = 0, spare: Sequence[int] | None = None
    ) -> list[int] | None:
        """Make positions up to `num_tokens` writable. All or nothing.

        reserve: positions for which groups without a window get their blocks at once. spare: blocks of each
        group that have to be left. Returns, for each group, the first index at which the table changed (its
        length when only the right to write did), or None when there are not enough free blocks.
        """
        needed = self.needed(table, num_tokens, reserve)
        for group, pool in enumerate(self.pools):
            if needed[group] + (spare[group] if spare else 0) > pool.num_free:
                return None
        firsts = []
        index, rest = divmod(table.capacity, self.block_size)
        for group, (pool, blocks, new) in enumerate(zip(self.pools, table.blocks, needed, strict=True)):
            copied = new > 0 and self._is_shared(group, blocks, index)
            firsts.append(index if copied else len(blocks))
            if copied:
                blocks[index] = self._copy(group, blocks[index], rest)  # the table's reference passes to the copy
            blocks += [pool.take() for _ in range(new - copied)]
        table.capacity = max(table.capacity, min(map(len, table.blocks)) * self.block_size)
        return firsts

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Let go of the blocks that no query from position `num_tokens` on sees."""
        for group in self.windowed:
            blocks, first = table.blocks[group], table.firsts[group]
            seen = min(self._first_seen(group, num_tokens), len(blocks))
            for index in range(first, seen):
                self._let_go(group, blocks[index])
                blocks[index] = ABSENT
            table.firsts[group] = max(first, seen)

    def needed(self, table: BlockTable, num_tokens: int, reserve: int = 0) -> list[int]:
        """Blocks, per group, that `grow` would take."""
        if num_tokens <= table.capacity:
            return [0] * len(self.pools)
        index = table.capacity // self.block_size
        return [
            max(0, self._length(group, num_tokens, reserve) - len(blocks)) + self._is_shared(group, blocks, index)
            for group, blocks in enumerate(table.blocks)
        ]

    def release(self, seq_id: int) -> None:
        """The sequence lets go of its blocks. Steps in flight keep them until they are over."""
        table = self._tables.pop(seq_id)
        self._cancel_copies(table)
        for group, (blocks, first) in enumerate(zip(table.blocks, table.firsts, strict=True)):
            for block in reversed(blocks[first:]):
                self._let_go(group, block)

    def fits_once_collected(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether `grow` will find enough blocks when the steps in flight are over."""
        if not self._retired:
            return False
        needed = self.needed(table, num_tokens)
        for group, pool in enumerate(self.pools):
            retired = Counter(block for blocks in self._retired.values() for g, block in blocks if g == group)
            coming = sum(pool.refs(block) == count for block, count in retired.items())
            if pool.num_free + coming < needed[group]:
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
            self._forget(move)

    def failed(self, step_id: int) -> None:
        """A step has failed: its copies are still to be made, by the next one, where anybody is left who wants them."""
        self._over(step_id)
        carried = self._carried.pop(step_id, [])
        wanted = [move for move in carried if self.pools[move.group].refs(move.pairs[0][1])]
        for move in carried:
            if move not in wanted:
                self._forget(move)
        self._moves = wanted + self._moves

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
                owners.update(table.blocks[group][table.firsts[group] :])
            for retired in self._retired.values():
                owners.update(block for owned, block in retired if owned == group)
            owners.update(self._sources[group])
            yield owners

    def _length(self, group: int, num_tokens: int, reserve: int) -> int:
        """Of the table of a group that has blocks for `num_tokens`, and for `reserve` where it has no window."""
        if group not in self.windowed:
            num_tokens = max(num_tokens, reserve)
        return -(-num_tokens // self.block_size)

    def _first_seen(self, group: int, position: int) -> int:
        """Index of the first block that a query at `position` sees."""
        window = self.config.groups[group].window
        return max(0, position - window + 1) // self.block_size if window else 0

    def _is_shared(self, group: int, blocks: list[int], index: int) -> bool:
        """Whether the block at `index` exists and is in other tables, whose sequences must not see it change.

        Asked about the block at a table's `capacity`. A copy of it that is still to be made does not count:
        it is made before the step's writes, and what it copies lies before `capacity`.
        """
        if index >= len(blocks):
            return False
        return self.pools[group].refs(blocks[index]) - self._sources[group][blocks[index]] > 1

    def _share(self, parent: BlockTable, child: BlockTable, num_blocks: int) -> None:
        child.firsts = [min(first, num_blocks) for first in parent.firsts]
        for pool, ours, theirs, first in zip(self.pools, parent.blocks, child.blocks, child.firsts, strict=True):
            theirs += ours[:num_blocks]
            for block in theirs[first:]:
                pool.hold(block)

    def _copy(self, group: int, source: int, num_tokens: int) -> int:
        """A new block that gets the leading tokens of `source`, a reference to which passes to the copy."""
        target = self.pools[group].take()
        self._last_move += 1
        self._moves.append(Move(self._last_move, group, "device", "device", [(source, target)], num_tokens))
        self._sources[group][source] += 1
        return target

    def _cancel_copies(self, table: BlockTable) -> None:
        """Copies that no step carries yet, into blocks that only this table has, are not needed any more."""
        for move in list(self._moves):
            target = move.pairs[0][1]
            if target in table.blocks[move.group] and self.pools[move.group].refs(target) == 1:
                self._moves.remove(move)
                self._forget(move)

    def _forget(self, move: Move) -> None:
        """A copy is made, or will not be: it lets go of its source."""
        source = move.pairs[0][0]
        self._sources[move.group][source] -= 1
        self._let_go(move.group, source)

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
