"""Step and StepResult, the data that passes between control plane and execution.

A Step says what a runner computes next. It is a delta: the tokens and the block table of a sequence are sent when its
row opens; later Steps have only what was appended. A runner has one fixed row per running sequence. A `reset` step
empties all rows first and opens them again. Data is columnar: one numpy array per field, one entry per row or chunk.
`docs/step.md` shows a full example.

Tokens that the runner sampled are not sent back. It writes the token sampled at the end of a chunk to position `stop`
of that row. The next chunk reads it there, and may be launched before the control plane has the token. Of a chunk with
drafts it writes none: the control plane decides which of the sampled tokens count, and the next Step writes the last.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from itertools import chain
from struct import pack
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from quire.core import codec


class ChunkOutput(IntEnum):
    """The output of a chunk."""

    NONE = 0  # only KV
    SAMPLE = 1  # one token after its last position, and one after each position before a draft
    POOL = 2  # pooled hidden states of its last `num_logits` positions


_SAMPLE = int(ChunkOutput.SAMPLE)  # comparing an array with a member of an enum takes far longer


class Pooling(IntEnum):
    """How the hidden states of a sequence are pooled. A chunk yields a part, and `combine` puts parts together."""

    NONE = 0  # no pooling: the sequence generates tokens
    LAST = 1  # the state of the last position
    MEAN = 2  # the mean over all positions; a part is a sum
    CLASS = 3  # the logits of the classification head at the last position
    CLS = 4  # the state of the first position, where encoders have a token of this name
    MAX = 5  # the largest number of each dimension
    MEAN_SQRT_LEN = 6  # the sum over all positions, divided by the square root of their number; a part is a sum
    WEIGHTED_MEAN = 7  # the mean with weights 1, 2, 3, ...; a part is a weighted sum

    @property
    def is_of_last_position(self) -> bool:
        """Whether it needs the hidden state of the last position only."""
        return self in (Pooling.LAST, Pooling.CLASS)

    def combine(self, before: np.ndarray | None, part: np.ndarray) -> np.ndarray:
        """The part of all positions so far, from that of the positions `before` and that of the chunk behind them."""
        if before is None or self.is_of_last_position:
            return part
        if self is Pooling.CLS:
            return before
        combined: np.ndarray = np.maximum(before, part) if self is Pooling.MAX else before + part
        return combined

    def whole(self, part: np.ndarray, num_positions: int) -> np.ndarray:
        """The pooled state of a sequence, from the part of all its positions."""
        if self is Pooling.MEAN:
            return part / num_positions
        if self is Pooling.MEAN_SQRT_LEN:
            return part / math.sqrt(num_positions)
        if self is Pooling.WEIGHTED_MEAN:
            return part / (num_positions * (num_positions + 1) / 2)
        return part


class TokenListKind(IntEnum):
    """What sampling does with a list of tokens of a row."""

    BIAS = 0  # added to the logits: `weights`
    ALLOWED = 1  # only these may be sampled
    BAD_WORD = 2  # this sequence of tokens may not be sampled; one list per sequence
    END = 3  # may not be sampled at positions below the row's `min_lens`
    LOGPROB = 4  # tokens whose logprobs are reported for each sampled token
    NO_REPEAT = 5  # a size: no sequence of so many tokens may occur twice; then tokens that may repeat nevertheless


class Chunk(NamedTuple):
    """Positions [start, stop) of one sequence, computed in one step.

    The last `num_drafts` positions hold draft tokens, which the Step writes. Logits are computed at the last
    `num_logits` positions. Tokens are sampled from the last `num_drafts + 1` of them. Other logits give the logprobs of
    the next prompt tokens.
    """

    row: int
    seq_id: int
    start: int
    stop: int
    num_drafts: int
    num_logits: int
    output: ChunkOutput

    def __str__(self) -> str:
        drafts = f", {self.num_drafts} drafts" if self.num_drafts else ""
        output = f" -> {self.output.name.lower()}" if self.output else ""
        return f"row {self.row} seq {self.seq_id} [{self.start}:{self.stop}){drafts}{output}"


class Chunks(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The chunks of a step: one array per field, all of shape (number of chunks,).

    Each chunk has at least one position. Properties are computed once, so the arrays must not be written to.
    """

    rows: np.ndarray  # int32
    seq_ids: np.ndarray  # int64
    starts: np.ndarray  # int32
    stops: np.ndarray  # int32
    num_drafts: np.ndarray  # int32
    num_logits: np.ndarray  # int32
    outputs: np.ndarray  # uint8

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Chunk]:
        columns = (self.rows, self.seq_ids, self.starts, self.stops, self.num_drafts, self.num_logits, self.outputs)
        for row, seq_id, start, stop, drafts, logits, output in zip(*(c.tolist() for c in columns), strict=True):
            yield Chunk(row, seq_id, start, stop, drafts, logits, ChunkOutput(output))

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, ...]]) -> "Chunks":
        """Chunks from tuples in the order of the fields."""
        return cls.of_values(list(chain.from_iterable(chunks)))

    @classmethod
    def of_values(cls, values: Sequence[int]) -> "Chunks":
        """Chunks from the fields of the first chunk, then those of the second, and so on."""
        table = np.frombuffer(pack(f"{len(values)}q", *values), np.int64).reshape(-1, 7)
        rows, _, starts, stops, num_drafts, num_logits, outputs = table.T.astype(np.int32, order="C")
        return cls(rows, table[:, 1].copy(), starts, stops, num_drafts, num_logits, outputs.astype(np.uint8))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of positions of each chunk, int32."""
        lengths: np.ndarray = self.stops - self.starts
        return lengths

    @cached_property
    def ends(self) -> np.ndarray:
        """End of each chunk as an index into all tokens of the step, int64."""
        return self.lengths.cumsum(dtype=np.int64)

    @cached_property
    def num_tokens(self) -> int:
        """Positions of all chunks."""
        return int(self.lengths.sum())

    @cached_property
    def token_positions(self) -> np.ndarray:
        """The position of each token of the step, int64. Chunks are concatenated."""
        positions: np.ndarray
        if self.num_tokens == len(self):
            positions = self.starts.astype(np.int64)
        else:
            positions = np.arange(self.num_tokens) + np.repeat(self.stops - self.ends, self.lengths)
        return positions

    @cached_property
    def token_rows(self) -> np.ndarray:
        """The row of each token of the step, int64."""
        rows = self.rows.astype(np.int64)
        return rows if self.num_tokens == len(self) else np.repeat(rows, self.lengths)

    @cached_property
    def samples(self) -> np.ndarray:
        """Which chunks sample, bool."""
        found: np.ndarray = self.outputs == _SAMPLE
        return found

    @cached_property
    def have_drafts(self) -> bool:
        """Whether some chunk has drafts."""
        return bool(self.num_drafts.any())

    @cached_property
    def only_samples(self) -> bool:
        """Whether all logits are sampled from."""
        return bool((self.num_logits == self.num_samples).all())

    @cached_property
    def num_samples(self) -> np.ndarray:
        """Number of tokens that each chunk samples, int32."""
        counts: np.ndarray = (self.num_drafts + 1) * self.samples
        return counts

    @property
    def num_attention_pairs(self) -> float:
        """Number of (token, attended token) pairs."""
        starts, stops = self.starts.astype(np.float64), self.stops.astype(np.float64)
        return float(((stops - starts) * (starts + stops + 1)).sum()) / 2


class StateChunks(msgspec.Struct, frozen=True, eq=False):
    """The state blocks of a step's chunks: one entry per chunk, and the snapshots that chunks write.

    A block stands behind position `settled` when the step begins, and behind `settles` when it ends. The inputs of
    positions from there to the end of the chunk stay beside the state, because these tokens may be replaced.
    """

    blocks: np.ndarray  # int32
    settled: np.ndarray  # int32: at most `starts`
    settles: np.ndarray  # int32: from `starts` to `stops`
    snapshot_chunks: np.ndarray  # int32, one per snapshot: index of the chunk
    snapshot_positions: np.ndarray  # int32: position that the snapshot is to stand behind, at most `settles`
    snapshot_blocks: np.ndarray  # int32

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, int, int]], snapshots: Sequence[tuple[int, int, int]]) -> "StateChunks":
        """From (block, settled, settles) of each chunk, and (chunk, position, block) of each snapshot."""
        columns = np.array(chunks, np.int32).reshape(-1, 3).T.copy()
        return cls(*columns, *np.array(snapshots, np.int32).reshape(-1, 3).T.copy())


class TableUpdates(msgspec.Struct, frozen=True, eq=False):
    """Spans to write into a table: span i puts `lengths[i]` values into row `rows[i]`, from column `starts[i]` on."""

    rows: np.ndarray  # int32, one per span
    starts: np.ndarray  # int32, one per span
    lengths: np.ndarray  # int32, one per span
    values: np.ndarray  # int32, of all spans, concatenated

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, Sequence[int]]]) -> "TableUpdates":
        """Table updates from (row, start, values) spans."""
        if not spans:
            return _NO_UPDATES
        values: list[int] = []
        for _, _, span in spans:
            values += span
        return cls(
            np.array([row for row, _, _ in spans], np.int32),
            np.array([start for _, start, _ in spans], np.int32),
            np.array([len(span) for _, _, span in spans], np.int32),
            np.array(values, np.int32),
        )

    def apply(self, table: np.ndarray) -> None:
        """Write the spans into `table` (num_rows, width). A later span replaces what an earlier one wrote."""
        if len(self.rows) <= _FEW_SPANS:
            end = 0
            for row, start, length in zip(self.rows.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True):
                table[row, start : start + length] = self.values[end : end + length]
                end += length
            return
        ends = np.cumsum(self.lengths)
        columns = np.arange(len(self.values)) + np.repeat(self.starts - (ends - self.lengths), self.lengths)
        table[np.repeat(self.rows, self.lengths), columns] = self.values


_FEW_SPANS = 8  # written one after the other, which takes less time than an index of all their values
_NO_INTEGERS = np.zeros(0, np.int32)
_NO_UPDATES = TableUpdates(_NO_INTEGERS, _NO_INTEGERS, _NO_INTEGERS, _NO_INTEGERS)


class TokenLists(msgspec.Struct, frozen=True, eq=False):
    """Token lists of opened rows: list i belongs to row `rows[i]` and has kind `kinds[i]` and `lengths[i]` entries."""

    rows: np.ndarray  # int32, one per list
    kinds: np.ndarray  # uint8, TokenListKind, one per list
    lengths: np.ndarray  # int32, one per list
    tokens: np.ndarray  # int32, of all lists, concatenated
    weights: np.ndarray  # float32, one per token; 0 for kinds without weights

    def __iter__(self) -> Iterator[tuple[int, TokenListKind, np.ndarray, np.ndarray]]:
        """(row, kind, tokens, weights) of each list."""
        ends = np.cumsum(self.lengths).tolist()
        for row, kind, length, end in zip(
            self.rows.tolist(), self.kinds.tolist(), self.lengths.tolist(), ends, strict=True
        ):
            yield row, TokenListKind(kind), self.tokens[end - length : end], self.weights[end - length : end]

    @classmethod
    def of(cls, lists: Sequence[tuple[int, TokenListKind, Mapping[int, float] | Sequence[int]]]) -> "TokenLists":
        """Lists from (row, kind, tokens) triples. A mapping has the weights of its tokens."""
        if not lists:
            return _NO_LISTS
        tokens: list[int] = []
        weights: list[float] = []
        for _, _, entries in lists:
            tokens += entries
            weights += entries.values() if isinstance(entries, Mapping) else [0.0] * len(entries)
        return cls(
            np.array([row for row, _, _ in lists], np.int32),
            np.array([kind for _, kind, _ in lists], np.uint8),
            np.array([len(entries) for _, _, entries in lists], np.int32),
            np.array(tokens, np.int32),
            np.array(weights, np.float32),
        )


_NO_LISTS = TokenLists(_NO_INTEGERS, np.zeros(0, np.uint8), _NO_INTEGERS, _NO_INTEGERS, np.zeros(0, np.float32))


class NewRows(msgspec.Struct, frozen=True, eq=False):
    """Rows that a sequence opens in this step, with its sampling parameters."""

    rows: np.ndarray  # int32
    seq_ids: np.ndarray  # int64
    seeds: np.ndarray  # uint64, Philox key
    sample_indices: np.ndarray  # int32, index of the sequence in its request
    temperatures: np.ndarray  # float32, 0 is greedy
    top_ps: np.ndarray  # float32, 1: off
    top_ks: np.ndarray  # int32, 0: off
    min_ps: np.ndarray  # float32, 0: off
    num_logprobs: np.ndarray  # int32, top logprobs to report per sampled token; -1: no logprobs
    num_prompt_logprobs: np.ndarray  # int32, the same for tokens of the prompt
    prompt_lens: np.ndarray  # int32, prompt tokens; presence and frequency penalties count only later tokens
    min_lens: np.ndarray  # int32, END tokens of the row are not sampled at positions below this one
    presence_penalties: np.ndarray  # float32, 0: off
    frequency_penalties: np.ndarray  # float32, 0: off
    repetition_penalties: np.ndarray  # float32, 1: off
    deterministic: np.ndarray  # uint8, 1: outputs may not depend on the other sequences of the step
    poolings: np.ndarray  # uint8, Pooling
    adapters: np.ndarray  # int32, slot of an adapter; 0: the model alone
    adapter_starts: np.ndarray  # int32, first position at which the adapter applies
    lists: TokenLists

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, *, lists: TokenLists | None = None, **columns: Sequence[float]) -> "NewRows":
        """New rows from one list per field. Columns that are left out have their neutral value."""
        size = len(columns["rows"])
        arrays = {
            name: np.array(columns.get(name, [neutral] * size), kind) for name, (kind, neutral) in _COLUMNS.items()
        }
        return cls(**arrays, lists=TokenLists.of([]) if lists is None else lists)


_COLUMNS: dict[str, tuple[type[np.generic], float]] = {  # dtype and neutral value
    "rows": (np.int32, 0),
    "seq_ids": (np.int64, 0),
    "seeds": (np.uint64, 0),
    "sample_indices": (np.int32, 0),
    "temperatures": (np.float32, 0),
    "top_ps": (np.float32, 1),
    "top_ks": (np.int32, 0),
    "min_ps": (np.float32, 0),
    "num_logprobs": (np.int32, -1),
    "num_prompt_logprobs": (np.int32, -1),
    "prompt_lens": (np.int32, 0),
    "min_lens": (np.int32, 0),
    "presence_penalties": (np.float32, 0),
    "frequency_penalties": (np.float32, 0),
    "repetition_penalties": (np.float32, 1),
    "deterministic": (np.uint8, 0),
    "poolings": (np.uint8, 0),
    "adapters": (np.int32, 0),
    "adapter_starts": (np.int32, 0),
}


# Columns of NewRows that have the value of a sampling parameter as it is.
PARAMETER_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "temperatures": "temperature",
        "top_ps": "top_p",
        "min_ps": "min_p",
        "presence_penalties": "presence_penalty",
        "frequency_penalties": "frequency_penalty",
        "repetition_penalties": "repetition_penalty",
        "deterministic": "deterministic",
    }
)


class Move(msgspec.Struct, frozen=True):
    """A copy of blocks: `pairs` of (source block, target block) of one group.

    `num_tokens` is the number of leading tokens of each block that are valid. Before the chunks of its Step write KV, a
    move within the device is done and a move to the host has read its blocks. A move to or from the host is done when a
    StepResult has its id in `done_moves`.
    """

    id: int
    group: int
    source: str  # tier: "device" or "host"
    target: str
    pairs: list[tuple[int, int]]
    num_tokens: int

    def __str__(self) -> str:
        pairs = ", ".join(f"{a}->{b}" for a, b in self.pairs)
        return f"move {self.id} group {self.group} {self.source}->{self.target} {self.num_tokens} tokens: {pairs}"


class Step(msgspec.Struct, frozen=True, eq=False):
    """What a runner does next, in this order: reset, adapters, opens, token writes, block writes, moves, chunks."""

    id: int
    reset: bool  # clear all rows first
    opens: NewRows
    tokens: TableUpdates  # known tokens, into a table of rows x positions
    blocks: list[TableUpdates]  # per group: block ids, into a table of rows x table indices
    moves: list[Move]
    chunks: Chunks
    adapters: list[tuple[int, str]] = []  # (slot, digest) of loaded adapters that slots get; of a reset step: of all
    states: StateChunks | msgspec.UnsetType = msgspec.UNSET  # only of models with recurrent states

    @property
    def num_tokens(self) -> int:
        """Positions that this step computes."""
        return self.chunks.num_tokens

    def __str__(self) -> str:
        head = f"step {self.id}: {len(self.chunks)} chunks, {self.num_tokens} tokens"
        lines = [head + (", reset" if self.reset else "")]
        lines += [f"  slot {slot} gets adapter {digest[:12]}" for slot, digest in self.adapters]
        for row, seq, slot in zip(self.opens.rows, self.opens.seq_ids, self.opens.adapters, strict=True):
            lines.append(f"  open row {row} seq {seq}" + (f", adapter in slot {slot}" if slot else ""))
        lines += [f"  {move}" for move in self.moves]
        lines += [f"  {chunk}" for chunk in self.chunks]
        return "\n".join(lines)


class SamplingMasks(msgspec.Struct, frozen=True, eq=False):
    """Sampling masks of a step, computed after the previous commit. They are derived, so the journal has none."""

    rows: np.ndarray  # int32: constrained rows
    positions: np.ndarray  # int32: of the tokens to be sampled in these rows
    masks: np.ndarray  # uint32 (len(rows), words): bit t%32 of word t//32 allows token t

    @classmethod
    def empty(cls) -> "SamplingMasks":
        """The masks of a step without constrained rows."""
        return cls(_NO_INTEGERS, _NO_INTEGERS, np.zeros((0, 0), np.uint32))


class Logprobs(msgspec.Struct, frozen=True, eq=False):
    """Logprobs per token: of the token, then of the row's most likely tokens, then of the row's LOGPROB list.

    Entries that a row did not request are padding at its end: id -1, value -inf. The rank of a token without logprobs
    is 0.
    """

    ids: np.ndarray  # int32 (num tokens, widest row)
    values: np.ndarray  # float32, natural logarithm, of the model's logits before penalties, bias and temperature
    ranks: np.ndarray  # int32 (num tokens,), of the token itself; 1 is the most likely

    def slice(self, start: int, stop: int) -> "Logprobs":
        """The logprobs of tokens [start, stop)."""
        return Logprobs(self.ids[start:stop], self.values[start:stop], self.ranks[start:stop])

    def without(self, places: Sequence[int], stop: int) -> "Logprobs":
        """The logprobs of the first `stop` tokens except for those at `places`."""
        if not places:
            return self.slice(0, stop)
        kept = np.delete(np.arange(stop), places)
        return Logprobs(self.ids[kept], self.values[kept], self.ranks[kept])


class StepResult(msgspec.Struct, frozen=True, eq=False):
    """The result of a step. Chunk i has `counts[i]` of the `tokens`, which are concatenated.

    A result waits for tokens only, so that Moves of its step may not be done yet. The result of a step without chunks
    waits for all Moves so far. A result may have ids of Moves of failed steps.

    Token -1: no token could be sampled, because the row's logits were not finite or its request allowed no token.
    `error`: the whole step failed, and nothing that it would have written is valid.
    """

    step_id: int
    seconds: float
    counts: np.ndarray  # int32, per chunk
    tokens: np.ndarray  # int32
    logprobs: Logprobs | None = None  # of `tokens`; None if no row of the step requests logprobs
    prompt_logprobs: Logprobs | None = None  # of the prompt tokens after the logits that no token was sampled from
    pooled: np.ndarray | None = None  # float32 (chunks that pool, hidden_size), or number of classes for Pooling.CLASS
    done_moves: list[int] = []  # ids of moves of this and earlier steps, to and from the host, that are done now
    swap_seconds: tuple[float, float] = (0.0, 0.0)  # of those to the host, and from it; not part of `seconds`
    captured: bool = False  # whether a step was captured while this one ran, so that it took longer than usual
    proposals: list[list[int]] = []  # per chunk, drafts of the runner behind its last token; empty if it has none
    error: str = ""

    @classmethod
    def failed(cls, step_id: int, error: str) -> "StepResult":
        """The result of a step that failed."""
        return cls(step_id, 0.0, np.zeros(0, np.int32), np.zeros(0, np.int32), error=error)


def to_bytes(step: Step) -> bytes:
    """The canonical bytes of a step: equal steps have equal bytes."""
    return codec.encode(step)


def from_bytes(data: bytes) -> Step:
    """The step of these bytes; inverse of `to_bytes`."""
    return codec.decode(data, Step)
