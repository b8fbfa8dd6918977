"""A Step while it is being put together."""

from quire.core.step import Chunks, Move, Opens, Step, Writes
from quire.sched.sequence import Sequence


class StepBuilder:
    """Rows opened, blocks given and chunks planned so far, as plain lists."""

    __slots__ = ("blocks", "chunks", "entries", "id", "num_tokens", "opened", "reset")

    def __init__(self, step_id: int, num_groups: int, *, reset: bool) -> None:
        self.id = step_id
        self.reset = reset
        self.opened: list[Sequence] = []
        self.blocks: list[list[tuple[int, int, list[int]]]] = [[] for _ in range(num_groups)]
        self.chunks: list[tuple[int, ...]] = []
        self.entries: list[tuple[Sequence, int, int]] = []  # sequence, start, epoch
        self.num_tokens = 0

    def open(self, seq: Sequence) -> None:
        """The runner meets a sequence: all it knows of tokens and blocks travels."""
        self.opened.append(seq)
        self.give_blocks(seq, 0)

    def give_blocks(self, seq: Sequence, first: int) -> None:
        """The table of a sequence changed from index `first` on."""
        assert seq.table is not None
        for spans, blocks in zip(self.blocks, seq.table.blocks, strict=True):
            if first < len(blocks):
                spans.append((seq.row, first, blocks[first:]))

    def build(self, moves: list[Move]) -> Step:
        """The step."""
        tokens = Writes.of([(seq.row, 0, seq.tokens) for seq in self.opened])
        return Step(
            self.id,
            self.reset,
            _opens(self.opened),
            tokens,
            [Writes.of(spans) for spans in self.blocks],
            moves,
            Chunks.of(self.chunks),
        )


def _opens(sequences: list[Sequence]) -> Opens:
    params = [seq.request.params for seq in sequences]
    return Opens.of(
        rows=[seq.row for seq in sequences],
        seq_ids=[seq.id for seq in sequences],
        seeds=[seq.request.seed for seq in sequences],
        sample_indices=[seq.index for seq in sequences],
        temperatures=[p.temperature for p in params],
        top_ps=[p.top_p for p in params],
        top_ks=[max(p.top_k, 0) for p in params],
        min_ps=[p.min_p for p in params],
        num_logprobs=[-1 if p.logprobs is None else p.logprobs for p in params],
    )
