"""Builder of a Step: rows, table changes, chunks."""

from collections.abc import Mapping
from collections.abc import Sequence as Listing

import msgspec
from msgspec import UNSET

from quire.cache.states import StateBlocks
from quire.core.step import (
    PARAMETER_COLUMNS,
    Chunk,
    ChunkOutput,
    Chunks,
    Move,
    NewRows,
    Step,
    TableUpdates,
    TokenListKind,
    TokenLists,
)
from quire.scheduler.adapters import AdapterSlots
from quire.scheduler.sequence import Sequence
from quire.speculation.drafters import Proposal

TokenList = tuple[int, TokenListKind, Mapping[int, float] | Listing[int]]


_NUM_FIELDS = len(Chunk._fields)
_NONE, _SAMPLE, _POOL = int(ChunkOutput.NONE), int(ChunkOutput.SAMPLE), int(ChunkOutput.POOL)


class ScheduledChunk(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A planned chunk, kept until its step is committed."""

    seq: Sequence
    start: int
    stop: int
    epoch: int  # of the sequence when the chunk was planned
    num_prompt_outputs: int  # number of its last positions with prompt logprobs or pooled states in the result
    proposal: Proposal | None = None  # its drafts: its last positions

    @property
    def drafts(self) -> Listing[int]:
        """The draft tokens at its last positions."""
        return () if self.proposal is None else self.proposal.tokens

    @property
    def forced(self) -> Listing[int]:
        """Indices of the drafts that the constraint forces."""
        return () if self.proposal is None else self.proposal.forced

    @property
    def is_valid(self) -> bool:
        """Whether the result of the chunk still counts for the sequence."""
        return self.seq.epoch == self.epoch


class StepBuilder:
    """The opened rows, table changes and chunks of a Step so far, as plain lists."""

    __slots__ = (
        "_num_beyond",
        "_states",
        "blocks",
        "chunks",
        "id",
        "new_rows",
        "num_drafts",
        "num_indexed_tokens",
        "num_proposals",
        "reset",
        "scheduled",
        "swapped_in",
        "tokens",
    )

    def __init__(self, step_id: int, num_groups: int, states: StateBlocks | None = None, *, reset: bool) -> None:
        self.id = step_id
        self.reset = reset
        self.new_rows: list[Sequence] = []
        self.swapped_in: list[Sequence] = []  # opened sequences whose KV is swapped in
        self.tokens: list[tuple[int, int, list[int]]] = []
        self.blocks: list[list[tuple[int, int, list[int]]]] = [[] for _ in range(num_groups)]
        self.chunks: list[int] = []  # the fields of each chunk, in the order of Chunks
        self.scheduled: list[ScheduledChunk] = []
        self.num_drafts = 0
        self.num_proposals = 0  # sequences whose drafters were asked
        self.num_indexed_tokens = 0  # for proposals
        self._num_beyond = 0  # tokens of chunks beyond their first
        self._states = states

    def count_proposal(self, num_indexed: int) -> None:
        """Count a sequence whose drafters were asked, and the tokens that were indexed for it."""
        self.num_proposals += 1
        self.num_indexed_tokens += num_indexed

    def add_row(self, seq: Sequence) -> None:
        """Send all tokens and blocks of a sequence to the runner."""
        assert seq.table is not None
        self.new_rows.append(seq)
        self.tokens.append((seq.row, 0, seq.tokens))
        self.update_table(seq, seq.table.firsts)

    def add_chunk(self, seq: Sequence, start: int, stop: int, num_prompt_outputs: int) -> None:
        """Schedule the chunk [start, stop) of a sequence. It samples a token if it ends behind the last known token.

        num_prompt_outputs: number of its last positions with prompt logprobs or pooled states in the result.
        """
        self._schedule_state(seq, start, stop)
        samples = seq.schedule(stop, self.id)
        output = _SAMPLE if samples else _POOL if num_prompt_outputs and seq.is_pooling else _NONE
        self.chunks += (seq.row, seq.id, start, stop, 0, num_prompt_outputs + samples, output)
        self.scheduled.append(ScheduledChunk(seq, start, stop, seq.epoch, num_prompt_outputs))
        self._num_beyond += stop - start - 1

    def add_token(self, seq: Sequence, start: int) -> None:
        """Schedule the position `start` of a sequence without prompt outputs. The same as `add_chunk` for it."""
        stop = start + 1
        self._schedule_state(seq, start, stop)
        samples = seq.schedule(stop, self.id)
        self.chunks += (seq.row, seq.id, start, stop, 0, samples, samples)
        self.scheduled.append(ScheduledChunk(seq, start, stop, seq.epoch, 0))

    def _schedule_state(self, seq: Sequence, start: int, stop: int) -> None:
        if self._states is not None and seq.table is not None:
            self._states.schedule(seq.table, start, stop, len(seq.tokens))

    def add_drafts(self, place: int, proposal: Proposal) -> None:
        """Extend the chunk at index `place`, which samples behind the last known token, by drafts."""
        chunk, count = self.scheduled[place], len(proposal.tokens)
        seq, stop = chunk.seq, chunk.stop + count
        self.tokens.append((seq.row, chunk.stop, list(proposal.tokens)))
        seq.schedule_drafts(count)
        if self._states is not None and seq.table is not None:
            self._states.extend(seq.table, count)
        self.scheduled[place] = ScheduledChunk(seq, chunk.start, stop, chunk.epoch, chunk.num_prompt_outputs, proposal)
        at = place * _NUM_FIELDS
        self.chunks[at + 3 : at + 6] = (stop, count, count + 1)
        self._num_beyond += count
        self.num_drafts += count

    def add_swapped_in(self, seq: Sequence) -> None:
        """Mark a sequence whose KV this step swaps in."""
        seq.begin_swap_in()
        self.swapped_in.append(seq)

    def rewrite_tokens(self, seq: Sequence, first: int) -> None:
        """Send the tokens of a sequence from position `first` again, because the runner has other ones."""
        self.tokens.append((seq.row, first, seq.tokens[first:]))

    def update_table(self, seq: Sequence, firsts: Listing[int]) -> None:
        """Send the block table of a sequence, in each group from table index `firsts[group]`."""
        assert seq.table is not None
        for spans, blocks, first in zip(self.blocks, seq.table.blocks, firsts, strict=True):
            if first < len(blocks):
                spans.append((seq.row, first, blocks[first:]))

    @property
    def num_tokens(self) -> int:
        """Positions that the step computes."""
        return len(self.scheduled) + self._num_beyond

    def build(self, moves: list[Move], adapters: AdapterSlots) -> Step:
        """The finished Step with `moves`, and with the adapters that the runner does not know yet."""
        return Step(
            self.id,
            self.reset,
            _new_rows(self.new_rows, adapters),
            TableUpdates.of(self.tokens),
            [TableUpdates.of(spans) for spans in self.blocks],
            moves,
            Chunks.of_values(self.chunks),
            adapters.take_unsent(every=self.reset),
            UNSET if self._states is None else self._states.take_chunks(),
        )


_NO_ROWS = NewRows.of(rows=[])


def _new_rows(sequences: list[Sequence], adapters: AdapterSlots) -> NewRows:
    if not sequences:
        return _NO_ROWS
    params = [seq.request.params for seq in sequences]
    lists = [one for seq in sequences for one in _lists(seq)]
    return NewRows.of(
        rows=[seq.row for seq in sequences],
        seq_ids=[seq.id for seq in sequences],
        seeds=[seq.request.seed for seq in sequences],
        sample_indices=[seq.index for seq in sequences],
        top_ks=[max(p.top_k, 0) for p in params],
        num_logprobs=[seq.num_logprobs for seq in sequences],
        num_prompt_logprobs=[-1 if p.prompt_logprobs is None else p.prompt_logprobs for p in params],
        prompt_lens=[len(seq.request.prompt) for seq in sequences],
        min_lens=[len(seq.request.prompt) + p.min_tokens for seq, p in zip(sequences, params, strict=True)],
        poolings=[seq.request.pooling for seq in sequences],
        adapters=[adapters.slot_of(seq.request.adapter) for seq in sequences],
        adapter_starts=[seq.request.namespace.adapter_start for seq in sequences],
        lists=TokenLists.of(lists),
        **{column: [getattr(p, name) for p in params] for column, name in PARAMETER_COLUMNS.items()},
    )


def _lists(seq: Sequence) -> list[TokenList]:
    request, params = seq.request, seq.request.params
    lists: list[TokenList] = [(seq.row, TokenListKind.BAD_WORD, word) for word in request.bad_words]
    if params.logit_bias:
        lists.append((seq.row, TokenListKind.BIAS, params.logit_bias))
    if params.allowed_token_ids is not None:
        lists.append((seq.row, TokenListKind.ALLOWED, params.allowed_token_ids))
    # with ignore_eos, too, eos tokens end a constrained output
    ends = seq.stop_ids.union(request.eos_token_ids) if seq.constrained else seq.stop_ids
    if params.min_tokens and ends:
        lists.append((seq.row, TokenListKind.END, sorted(ends)))
    if params.no_repeat_ngram_size:
        lists.append((seq.row, TokenListKind.NO_REPEAT, [params.no_repeat_ngram_size, *sorted(ends)]))
    if params.logprob_token_ids:
        lists.append((seq.row, TokenListKind.LOGPROB, params.logprob_token_ids))
    return lists
