"""The block table of one sequence."""

from collections.abc import Sequence
from sys import maxsize

from quire.cache.retention import NO_RETENTION
from quire.core.request import Namespace

ABSENT = -1  # instead of a block that lies wholly before the window of its group

_NAMESPACE = Namespace()


class BlockTable:
    """Per group, the blocks that hold positions [0, block_size), [block_size, 2 block_size), ...

    All positions below `capacity` can be written without an allocation: each has a block, or lies before the window,
    and no other table sees the write. A fork lowers `capacity` to the first unwritten position of a shared, partly
    filled block, so that the next write there goes through `grow`. `firsts` is, per group, the index of the first block
    that is not ABSENT.

    The prefix index owns the first `num_indexed` blocks; `index_handle` is the position in the index where they end.
    Once `next_insert_at` tokens are written, another block may enter the index. The first `num_launched` positions were
    written before the step that is being planned, so this step can copy them.
    """

    __slots__ = (
        "blocks",
        "capacity",
        "depends_on_step",
        "firsts",
        "index_handle",
        "namespace",
        "next_insert_at",
        "num_indexed",
        "num_launched",
        "num_matched",
        "num_public",
        "retention",
        "tokens",
    )

    def __init__(
        self,
        num_groups: int,
        tokens: Sequence[int] = (),
        namespace: Namespace = _NAMESPACE,
    ) -> None:
        """tokens: the known tokens of the sequence, a list that grows with it."""
        self.blocks: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.firsts = [0] * num_groups
        self.capacity = 0
        self.tokens = tokens
        self.namespace = namespace
        self.index_handle: object = None  # of a type that the index chooses
        self.num_indexed = 0
        self.num_matched = 0  # whole blocks of the prefix match
        self.num_public = 0  # leading blocks that hold a public prefix
        self.next_insert_at = maxsize
        self.num_launched = 0
        self.retention = NO_RETENTION  # retention of its KV
        self.depends_on_step = (
            -1
        )  # the newest step whose failure invalidates KV that the table was created from; -1: none

    def __len__(self) -> int:
        """Blocks of the longest list, absent ones included."""
        return max(map(len, self.blocks))

    def resolve(self, position: int, block_size: int, group: int = 0) -> tuple[int, int]:
        """(block, slot) of a position."""
        index, slot = divmod(position, block_size)
        return self.blocks[group][index], slot
