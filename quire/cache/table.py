"""The block table of one sequence: where each of its tokens lives."""


class BlockTable:
    """Per group, the blocks that hold positions [0, block_size), [block_size, 2 block_size), ...

    `capacity` counts the leading positions that need nothing more before they are written: below it
    every position has a block, and one that nobody else would see changed. Sharing lowers it to the
    first position of a shared tail that is still unwritten, so that the next write there asks first.
    """

    __slots__ = ("blocks", "capacity")

    def __init__(self, num_groups: int) -> None:
        self.blocks: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.capacity = 0

    def __len__(self) -> int:
        return len(self.blocks[0])

    def resolve(self, position: int, block_size: int, group: int = 0) -> tuple[int, int]:
        """(block, slot) of a position."""
        index, slot = divmod(position, block_size)
        return self.blocks[group][index], slot
