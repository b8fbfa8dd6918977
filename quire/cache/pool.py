"""Blocks of one KV group and how many owners each has. Knows nothing about tokens or sequences."""

from collections import Counter


class BlockPool:
    """Equal blocks, numbered from 0. Every operation is O(1).

    Free blocks form a stack, so that a block just given back, still warm in the caches, is the next
    one taken. Invariant: a block is on the stack exactly when its reference count is zero.
    """

    __slots__ = ("_free", "_refs", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def refs(self, block: int) -> int:
        """Owners of a block."""
        return self._refs[block]

    def take(self) -> int:
        """A free block, with one owner. The caller has made sure that there is one."""
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more owner for a block that has one."""
        if not self._refs[block]:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._refs[block] += 1

    def drop(self, block: int) -> None:
        """One owner less; the last one frees the block."""
        refs = self._refs[block] - 1
        if refs < 0:
            raise ValueError(f"block {block} is free already")
        self._refs[block] = refs
        if refs == 0:
            self._free.append(block)

    def check(self, owners: Counter[int]) -> list[str]:
        """Complaints where counts and free stack do not add up to `owners` (references per block)."""
        wrong = [
            f"block {block} has {refs} references and {owners[block]} owners"
            for block, refs in enumerate(self._refs)
            if refs != owners[block]
        ]
        unowned = {block for block, refs in enumerate(self._refs) if refs == 0}
        if unowned != set(self._free) or len(self._free) != len(unowned):
            wrong.append(f"free stack has {len(self._free)} entries for {len(unowned)} unowned blocks")
        return wrong

    def repair(self, owners: Counter[int]) -> None:
        """Make counts and free stack what `owners` says."""
        self._refs = [owners[block] for block in range(self.num_blocks)]
        self._free = [block for block, refs in enumerate(self._refs) if refs == 0]
