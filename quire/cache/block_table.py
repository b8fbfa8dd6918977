"""The block table of one sequence: where each of its tokens lives."""

from collections.abc import Sequence
from sys import maxsize

from quire.cache.retention import ANYHOW
from quire.core.request import Namespace

ABSENT = -1  # in place of a block that lies wholly before its group's window

_NAMESPACE = Namespace()


class BlockTable:
    """Per group, the blocks that hold positions [0, block_size), [block_size, 2 block_size), ...

    `capacity` counts the leading positions that need nothing more before they are written: below it
    every position has a block (or needs none any more), and one that nobody else would see changed. Sharing
    lowers it to the first position of a shared tail that is still unwritten, so that the next write there
    asks first. `firsts` says, per group, where blocks begin that are not absent.

    The leading `num_indexed` blocks are the prefix index's own, and `place` is where in the index they end.
    As soon as `due` positions are written, another block may enter it. `launched` positions were written
    before the step that is being planned: what they hold can be copied by it.
    """

    __slots__ = (
        "based_on",
        "blocks",
        "capacity",
        "due",
        "firsts",
        "keep",
        "launched",
        "namespace",
        "num_found",
        "num_indexed",
        "num_public",
        "place",
        "tokens",
    )

    def __init__(
        self,
        num_groups: int,
        tokens: Sequence[int] = (),
        namespace: Namespace = _NAMESPACE,
    ) -> None:
        """tokens: those known of the sequence, a list that grows with it."""
        self.blocks: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.firsts = [0] * num_groups
        self.capacity = 0
        self.tokens = tokens
        self.namespace = namespace
        self.place: object = None  # what the index makes of it
        self.num_indexed = 0
        self.num_found = 0  # leading blocks that were in the index when the table began
        self.num_public = 0  # leading blocks that hold a public prefix
        self.due = maxsize
        self.launched = 0
        self.keep = ANYHOW  # what is asked for the KV that it leaves behind
        self.based_on = -1  # the newest step whose failure would make void what the table found in the index

    def __len__(self) -> int:
        """Blocks of the longest list, absent ones among them."""
        return max(map(len, self.blocks))

    def resolve(self, position: int, block_size: int, group: int = 0) -> tuple[int, int]:
        """(block, slot) of a position."""
        index, slot = divmod(position, block_size)
        return self.blocks[group][index], slot
