"""The block table of one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from quire.cache.retention import NO_RETENTION, SequenceRetention
from quire.core.request import Namespace
from quire.core.scheduling_params import Retention

ABSENT = -1  # instead of a block that lies wholly before the window of its group

_NAMESPACE = Namespace()


@dataclass(slots=True, eq=False)
class Snapshot:
    """A state that sequences may start from, behind any position from `settled` to that of its last input."""

    block: int
    settled: int
    rest: tuple[int, ...]  # tokens behind the anchor's, up to the last input of the block
    seconds: float  # that it saves
    base: int  # position that a sequence would start from without it
    step: int  # that writes it
    anchor: int = ABSENT  # block of group 0 in the prefix index with the last whole block before `settled`
    uses: int = 1
    value: float = 0.0


@dataclass(slots=True, eq=False)
class LiveState:
    """The live state block of a table: see StateBlocks, which changes it.

    The block stands behind position `settled`, once the steps launched so far are over, and has the inputs of positions
    up to `stop`. `last_step` is the last step that writes it, or that wrote the snapshot of which it is a copy.
    """

    block: int
    settled: int = 0
    stop: int = 0
    last_step: int = -1
    wanted: tuple[int, ...] = ()  # positions, ascending, behind which the sequence is to leave snapshots
    last_snapshot: int = 0  # position of the snapshot behind which it computes
    begun: Snapshot | None = None  # from which it has started
    unindexed: list[Snapshot] = field(default_factory=list)  # whose prefix the index lacks yet


class IndexHandle:
    """A place in a prefix index, kept by a table or a prefix match. Each index has its own subclasses."""

    __slots__ = ()


class IndexCursor:
    """Where a table's blocks end in the prefix index. Only the index changes it.

    The index owns the first `num_indexed` blocks of the table. `handle` is the place in the index where they end.
    `num_public` leading blocks hold a public prefix.
    """

    __slots__ = ("handle", "num_indexed", "num_public")

    def __init__(self) -> None:
        self.handle: IndexHandle | None = None
        self.num_indexed = 0
        self.num_public = 0


class BlockTable:
    """Per group, the blocks that hold positions [0, block_size), [block_size, 2 block_size), ...

    All positions below `capacity` can be written without an allocation: each has a block, or lies before the window,
    and no other table sees the write. A fork lowers `capacity` to the first unwritten position of a shared, partly
    filled block, so that the next write there goes through `grow`. `firsts` is, per group, the index of the first block
    that is not ABSENT. The first `num_matched` blocks are from the prefix match. The first `num_launched` positions
    were written before the step that is being planned, so this step can copy them. `state` is its live block of
    recurrent states, of models that have some.
    """

    __slots__ = (
        "blocks",
        "capacity",
        "cursor",
        "firsts",
        "namespace",
        "num_launched",
        "num_matched",
        "retention",
        "state",
        "tokens",
    )

    def __init__(
        self,
        num_groups: int,
        tokens: Sequence[int] = (),
        namespace: Namespace = _NAMESPACE,
        retention: SequenceRetention = NO_RETENTION,
    ) -> None:
        """tokens: the known tokens of the sequence, a list that grows with it. retention: that of its KV."""
        self.blocks: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.firsts = [0] * num_groups
        self.capacity = 0
        self.tokens = tokens
        self.namespace = namespace
        self.retention = retention
        self.num_matched = 0
        self.num_launched = 0
        self.cursor = IndexCursor()
        self.state: LiveState | None = None

    def has_block(self, group: int, block: int) -> bool:
        """Whether it has a block; group: that of a Move, which is behind the KV groups for the block of its state."""
        if group == len(self.blocks):
            return self.state is not None and self.state.block == block
        return block in self.blocks[group]

    def __len__(self) -> int:
        """Blocks of the longest list, absent ones included."""
        return max(map(len, self.blocks))

    def resolve(self, position: int, block_size: int, group: int = 0) -> tuple[int, int]:
        """(block, slot) of a position."""
        index, slot = divmod(position, block_size)
        return self.blocks[group][index], slot

    # Transitions. Invariant of all: each group has as many blocks as the others up to `capacity`.

    def begin_with(self, matched: Sequence[Sequence[int]], firsts: Sequence[int], block_size: int) -> None:
        """Begin with the whole blocks of a prefix match, per group; those before `firsts` are left out."""
        assert not self.capacity, "the match begins the table"
        num_shared = len(matched[0]) if matched else 0
        self.firsts = [min(first, num_shared) for first in firsts]
        for blocks, some, first in zip(self.blocks, matched, self.firsts, strict=False):
            blocks += [ABSENT] * first
            blocks += some[first:]
        self.num_matched, self.capacity = num_shared, num_shared * block_size

    def append(self, blocks: Sequence[Sequence[int]], block_size: int) -> None:
        """Append writable blocks, per group. Shared blocks that are partly filled must have been replaced before."""
        for ours, some in zip(self.blocks, blocks, strict=True):
            ours += some
        self.capacity = max(self.capacity, min(map(len, self.blocks)) * block_size)

    def limit_capacity(self, position: int) -> None:
        """Let the next write behind `position` go through `grow`, because another table has the same state block."""
        self.capacity = min(self.capacity, position)

    def trim(self, group: int, stop: int) -> list[int]:
        """Make the blocks of a group before table index `stop` absent. Returns them."""
        blocks, first = self.blocks[group], self.firsts[group]
        gone = blocks[first:stop]
        blocks[first:stop] = [ABSENT] * len(gone)
        self.firsts[group] = first + len(gone)
        return gone

    def fork(self, num_blocks: int, num_tokens: int, block_size: int, tokens: Sequence[int]) -> "BlockTable":
        """A table of another sequence with the first `num_blocks` blocks, of which `num_tokens` positions count.

        If both then have a partly filled block, neither writes to it before `grow` has copied it.
        """
        child = BlockTable(len(self.blocks), tokens, self.namespace, self.retention)
        child.firsts = [min(first, num_blocks) for first in self.firsts]
        for ours, theirs in zip(self.blocks, child.blocks, strict=True):
            theirs += ours[:num_blocks]
        child.num_matched = min(self.num_matched, num_blocks)
        child.num_launched = num_tokens
        child.capacity = min(num_blocks * block_size, num_tokens)
        if num_blocks * block_size > num_tokens:
            self.capacity = min(self.capacity, num_tokens)
        return child

    def leave_index(self) -> None:
        """Forget the prefix match, because the index is replaced."""
        self.num_matched = 0

    def clear_retention(self) -> None:
        """Clear retention and program hints, which apply at the end of the sequence only."""
        self.retention = self.retention._replace(params=Retention(), program=None)

    def end_program(self) -> None:
        """Record that no request will continue the branch of a program."""
        program = self.retention.program
        assert program is not None, "the sequence belongs to no program"
        self.retention = self.retention._replace(program=structs.replace(program, expects_more=False))
