"""Step and StepResult: the only data between mind and body.

A Step says what a runner computes next. It is a delta: a sequence's tokens and block table travel
once, when its row opens, and then only what was appended. Runners keep one fixed row per running
sequence; a `reset` step empties all rows first and opens them again. Everything is columnar: one
numpy array per field, one entry per row or chunk. `docs/step.md` shows one in full.

Tokens that the runner sampled itself are never sent back: it writes the token sampled at the end of
a chunk to position `stop` of that row, where the next chunk, possibly launched before anyone else
has seen the token, reads it.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec
import numpy as np

from quire.core import codec


class ChunkOutput(IntEnum):
    """What a chunk yields."""

    NONE = 0  # only KV
    SAMPLE = 1  # one token after its last position (more where drafts are accepted)
    POOL = 2  # hidden states of its last `num_logits` positions, pooled


class Pooling(IntEnum):
    """How hidden states of a sequence become one."""

    NONE = 0  # they do not: the sequence generates
    LAST = 1  # that of the last position
    MEAN = 2  # the mean over all positions; a chunk yields a sum


class ListKind(IntEnum):
    """What a list of tokens means to the sampling of a row."""

    BIAS = 0  # added to the logits: `weights`
    ALLOWED = 1  # nothing else may be sampled
    BAD_WORD = 2  # this sequence of tokens may not come up; one list for each
    END = 3  # may not be sampled before the row's `min_lens`
    LOGPROB = 4  # to be reported beside each sampled token


class Chunk(NamedTuple):
    """Positions [start, stop) of one sequence, computed in one step.

    The last `num_drafts` of them are guesses; logits are wanted at the last `num_logits`. Those that no
    token is sampled from say how likely the prompt's next tokens were.
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


class Chunks(msgspec.Struct, frozen=True, eq=False):
    """The chunks of a step, one array per field, all of one length."""

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
        """From tuples in the order of the fields."""
        table = np.array(chunks, dtype=np.int64).reshape(-1, 7).T
        types = (np.int32, np.int64, np.int32, np.int32, np.int32, np.int32, np.uint8)
        return cls(*(np.ascontiguousarray(column, dtype) for column, dtype in zip(table, types, strict=True)))


class Writes(msgspec.Struct, frozen=True, eq=False):
    """Spans to be written into a table of rows: span i puts `lengths[i]` values at (rows[i], starts[i]...)."""

    rows: np.ndarray  # int32, one per span
    starts: np.ndarray  # int32, one per span
    lengths: np.ndarray  # int32, one per span
    values: np.ndarray  # int32, of all spans in turn

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, Sequence[int]]]) -> "Writes":
        """From (row, start, values) spans."""
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
        """Write the spans into `table` (num_rows, width)."""
        if not len(self.values):
            return
        ends = np.cumsum(self.lengths)
        columns = np.arange(len(self.values)) + np.repeat(self.starts - (ends - self.lengths), self.lengths)
        table[np.repeat(self.rows, self.lengths), columns] = self.values


class Lists(msgspec.Struct, frozen=True, eq=False):
    """Lists of tokens that opened rows bring along: list i is of `kinds[i]` and has `lengths[i]` entries."""

    rows: np.ndarray  # int32, one per list
    kinds: np.ndarray  # uint8, ListKind, one per list
    lengths: np.ndarray  # int32, one per list
    tokens: np.ndarray  # int32, of all lists in turn
    weights: np.ndarray  # float32, one per token; 0 where the kind has none

    def __iter__(self) -> Iterator[tuple[int, ListKind, np.ndarray, np.ndarray]]:
        """(row, kind, tokens, weights) of each list."""
        ends = np.cumsum(self.lengths).tolist()
        for row, kind, length, end in zip(
            self.rows.tolist(), self.kinds.tolist(), self.lengths.tolist(), ends, strict=True
        ):
            yield row, ListKind(kind), self.tokens[end - length : end], self.weights[end - length : end]

    @classmethod
    def of(cls, lists: Sequence[tuple[int, ListKind, Mapping[int, float] | Sequence[int]]]) -> "Lists":
        """From (row, kind, tokens) triples; a mapping gives each token its weight."""
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


class Opens(msgspec.Struct, frozen=True, eq=False):
    """Rows that begin to hold a sequence, with what sampling needs to know about it."""

    rows: np.ndarray  # int32
    seq_ids: np.ndarray  # int64
    seeds: np.ndarray  # uint64, Philox key
    sample_indices: np.ndarray  # int32, which of a request's n sequences
    temperatures: np.ndarray  # float32, 0 is greedy
    top_ps: np.ndarray  # float32, 1 keeps all
    top_ks: np.ndarray  # int32, 0 keeps all
    min_ps: np.ndarray  # float32, 0 keeps all
    num_logprobs: np.ndarray  # int32, alternatives to report per sampled token; -1 reports nothing
    num_prompt_logprobs: np.ndarray  # int32, the same for tokens of the prompt
    prompt_lens: np.ndarray  # int32, tokens of the prompt: presence and frequency count those behind it
    min_lens: np.ndarray  # int32, positions below this one take none of the row's END tokens
    presence_penalties: np.ndarray  # float32, 0 is none
    frequency_penalties: np.ndarray  # float32, 0 is none
    repetition_penalties: np.ndarray  # float32, 1 is none
    deterministic: np.ndarray  # uint8, 1: outputs may not depend on who shares the step
    poolings: np.ndarray  # uint8, Pooling
    lists: Lists

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, *, lists: Lists | None = None, **columns: Sequence[float]) -> "Opens":
        """From one list per field. Columns left out ask for nothing."""
        size = len(columns["rows"])
        arrays = {
            name: np.array(columns.get(name, [neutral] * size), kind) for name, (kind, neutral) in _COLUMNS.items()
        }
        return cls(**arrays, lists=Lists.of([]) if lists is None else lists)


_COLUMNS: dict[str, tuple[type[np.generic], float]] = {  # type, and the value that asks for nothing
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
}


class Move(msgspec.Struct, frozen=True):
    """The only way bytes of blocks travel: `pairs` of (source block, target block) of one group.

    `num_tokens` counts the leading tokens of each block that matter. Device-to-device moves are done
    before the writes of the Step that carries them, and those to the host have read their blocks by then; those from
    the host are done when the Step's result is there.
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
    """What a runner does next. Order: reset, opens, writes, moves, then the chunks."""

    id: int
    reset: bool  # forget all rows first
    opens: Opens
    tokens: Writes  # rows x positions: known tokens
    blocks: list[Writes]  # per group, rows x table indices: block ids
    moves: list[Move]
    chunks: Chunks

    @property
    def num_tokens(self) -> int:
        """Positions that this step computes."""
        return int((self.chunks.stops - self.chunks.starts).sum())

    def __str__(self) -> str:
        head = f"step {self.id}: {len(self.chunks)} chunks, {self.num_tokens} tokens"
        lines = [head + (", reset" if self.reset else "")]
        lines += [f"  open row {row} seq {seq}" for row, seq in zip(self.opens.rows, self.opens.seq_ids, strict=True)]
        lines += [f"  {move}" for move in self.moves]
        lines += [f"  {chunk}" for chunk in self.chunks]
        return "\n".join(lines)


class Late(msgspec.Struct, frozen=True, eq=False):
    """What sampling a step needs and launching it could not know. Derived, so never journalled."""

    rows: np.ndarray  # int32: constrained rows
    masks: np.ndarray  # uint32 (num rows, words): bit t%32 of word t//32 allows token t

    @classmethod
    def nothing(cls) -> "Late":
        """No row is constrained."""
        return cls(np.zeros(0, np.int32), np.zeros((0, 0), np.uint32))


class Logprobs(msgspec.Struct, frozen=True, eq=False):
    """Of each token: itself first, then its row's number of most likely ones, then its row's LOGPROB list.

    What a row did not ask for, at the end, is padded: id -1, value -inf, rank 0.
    """

    ids: np.ndarray  # int32 (num tokens, widest row)
    values: np.ndarray  # float32, natural logarithm, of the model's own logits: before penalties, bias and temperature
    ranks: np.ndarray  # int32 (num tokens,) of the token itself: 1 is the most likely

    def slice(self, start: int, stop: int) -> "Logprobs":
        """Those of tokens [start, stop)."""
        return Logprobs(self.ids[start:stop], self.values[start:stop], self.ranks[start:stop])


class StepResult(msgspec.Struct, frozen=True, eq=False):
    """What came of a step. `counts[i]` of `tokens`, in turn, belong to chunk i.

    A token of -1 says that nothing could be sampled: the logits of its row were not finite, or its request
    allowed no token. `error` says that the whole step
    failed: nothing it would have written may be relied on.
    """

    step_id: int
    seconds: float
    counts: np.ndarray  # int32, per chunk
    tokens: np.ndarray  # int32
    logprobs: Logprobs | None = None  # of `tokens`; None when no row of the step asks
    prompt_logprobs: Logprobs | None = None  # of the prompt tokens behind logits that nothing was sampled from
    pooled: np.ndarray | None = None  # float32 (chunks that pool, hidden_size)
    swap_seconds: tuple[float, float] = (0.0, 0.0)  # that moves to the host took, and from it; not part of `seconds`
    error: str = ""

    @classmethod
    def failed(cls, step_id: int, error: str) -> "StepResult":
        """A step that could not be run."""
        return cls(step_id, 0.0, np.zeros(0, np.int32), np.zeros(0, np.int32), error=error)


def to_bytes(step: Step) -> bytes:
    """The canonical bytes of a step: equal steps have equal bytes."""
    return codec.encode(step)


def from_bytes(data: bytes) -> Step:
    """The inverse of `to_bytes`."""
    return codec.decode(data, Step)
