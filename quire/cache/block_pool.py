"""The block pool of one KV group: free blocks and a reference count per block.

The prefix index is a special owner. A block that only the index owns is idle: its KV can be found again, and the block
can be evicted.
"""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np


class BlockPool:
    """Equal blocks, numbered from 0. Allocating and freeing a block is O(1).

    Free blocks form a stack: the block freed last, which may still be in the CPU's caches, is allocated first.
    Invariant: a block is on the stack exactly if its reference count is 0.
    """

    __slots__ = ("_free", "_indexed", "_refs", "left_index", "num_blocks", "num_idle")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_idle = 0
        self._free = list(range(num_blocks))
        self._refs = [0] * num_blocks
        self._indexed = bytearray(num_blocks)
        self.left_index: list[int] | None = None  # see `watch_index`

    def watch_index(self) -> None:
        """Collect the blocks that leave the index in `left_index`, which the caller clears."""
        self.left_index = []

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Free blocks and idle blocks."""
        return len(self._free) + self.num_idle

    def num_refs(self, block: int) -> int:
        """Number of owners of a block, the index included."""
        return self._refs[block]

    def num_refs_without_index(self, block: int) -> int:
        """Number of owners of a block, the index excluded."""
        return self._refs[block] - self._indexed[block]

    def is_indexed(self, block: int) -> bool:
        """Whether the index owns a block."""
        return bool(self._indexed[block])

    def is_idle(self, block: int) -> bool:
        """Whether only the index owns a block."""
        return self._refs[block] == 1 and bool(self._indexed[block])

    @property
    def free_blocks(self) -> Sequence[int]:
        """The blocks without an owner. Read-only."""
        return self._free

    @property
    def indexed_blocks(self) -> np.ndarray:
        """Blocks that the index owns, ascending."""
        return np.flatnonzero(np.frombuffer(self._indexed, np.uint8))

    def allocate(self) -> int:
        """Allocate a free block, with one owner. There must be one."""
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def allocate_many(self, count: int) -> list[int]:
        """Allocate `count` free blocks, in the order of repeated `allocate`. There must be that many."""
        blocks = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def incr_ref(self, block: int) -> None:
        """Add an owner to a block that has one. Raises ValueError for a free block."""
        refs = self._refs[block]
        if refs == 1:
            self.num_idle -= self._indexed[block]
        elif not refs:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._refs[block] = refs + 1

    def decr_ref(self, block: int) -> None:
        """Remove an owner, and free the block if it was the last. Raises ValueError for a free block.

        The index must use `leave_index`: ValueError if it is the last owner.
        """
        refs = self._refs[block] - 1
        if refs == 0:
            if self._indexed[block]:
                raise ValueError(f"block {block} is owned by the index, which must use `leave_index`")
            self._free.append(block)
        elif refs == 1:
            self.num_idle += self._indexed[block]
        elif refs < 0:
            raise ValueError(f"block {block} is free already")
        self._refs[block] = refs

    def enter_index(self, block: int) -> None:
        """Add the index as an owner of a block that has one. Raises ValueError if the block is free or indexed."""
        if self._indexed[block]:
            raise ValueError(f"block {block} is in the index already")
        if not self._refs[block]:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._refs[block] += 1
        self._indexed[block] = 1

    def leave_index(self, block: int) -> None:
        """Remove the index as an owner, and free the block if it was the last. Raises ValueError if it is none."""
        if not self._indexed[block]:
            raise ValueError(f"block {block} is not in the index")
        self.num_idle -= self._refs[block] == 1
        self._indexed[block] = 0
        if self.left_index is not None:
            self.left_index.append(block)
        self.decr_ref(block)

    def check(self, owners: Counter[int], indexed: Collection[int] = ()) -> list[str]:
        """Errors of the counts. owners: references per block, with those of the index. indexed: blocks of the index."""
        wrong = [
            f"block {block} has {refs} references and {owners[block]} owners"
            for block, refs in enumerate(self._refs)
            if refs != owners[block]
        ]
        unowned = {block for block, refs in enumerate(self._refs) if refs == 0}
        if unowned != set(self._free) or len(self._free) != len(unowned):
            wrong.append(f"free stack has {len(self._free)} entries for {len(unowned)} unowned blocks")
        flagged = {block for block, flag in enumerate(self._indexed) if flag}
        if flagged != set(indexed):
            wrong.append(f"blocks {sorted(flagged ^ set(indexed))} are in the index or flagged as such, but not both")
        num_idle = sum(self._refs[block] == 1 for block in flagged)
        if num_idle != self.num_idle:
            wrong.append(f"{self.num_idle} blocks are counted as idle, but {num_idle} are idle")
        return wrong

    def repair(self, owners: Counter[int], indexed: Collection[int] = ()) -> None:
        """Set the counts, the free stack and the indexed blocks from `owners` and `indexed`."""
        self._refs = [owners[block] for block in range(self.num_blocks)]
        self._free = [block for block, refs in enumerate(self._refs) if refs == 0]
        self._indexed = bytearray(self.num_blocks)
        for block in indexed:
            self._indexed[block] = 1
        self.num_idle = sum(self._refs[block] == 1 for block in set(indexed))


class Pools(list[BlockPool]):
    """The block pools of all KV groups."""

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(pool.num_blocks for pool in self)

    @property
    def num_free(self) -> int:
        """Free blocks of all groups."""
        return sum(pool.num_free for pool in self)

    @property
    def num_idle(self) -> int:
        """Idle blocks of all groups."""
        return sum(pool.num_idle for pool in self)

    @property
    def num_available(self) -> int:
        """Free and idle blocks of all groups."""
        return sum(pool.num_available for pool in self)
