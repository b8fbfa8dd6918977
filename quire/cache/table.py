"""The block table of one sequence: where each of its tokens lives."""

ABSENT = -1  # in place of a block that lies wholly before its group's window


class BlockTable:
    """Per group, the blocks that hold positions [0, block_size), [block_size, 2 block_size), ...

    `capacity` counts the leading positions that need nothing more before they are written: below it
    every position has a block (or needs none any more), and one that nobody else would see changed. Sharing
    lowers it to the first position of a shared tail that is still unwritten, so that the next write there
    asks first. `firsts` says, per group, where blocks begin that are not absent.
    """

    __slots__ = ("blocks", "capacity", "firsts")

    def __init__(self, num_groups: int) -> None:
        self.blocks: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.firsts = [0] * num_groups
        self.capacity = 0

    def __len__(self) -> int:
        """Blocks of the longest list, absent ones among them."""
        return max(map(len, self.blocks))

    def resolve(self, position: int, block_size: int, group: int = 0) -> tuple[int, int]:
        """(block, slot) of a position."""
        index, slot = divmod(position, block_size)
        return self.blocks[group][index], slot
