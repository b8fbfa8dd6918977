"""Rows of logprobs: what the engine reports of each token, as public objects."""

from array import array
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

from quire.core.step import Logprobs
from quire.engine.outputs import Logprob, LogprobRow
from quire.tokenizer.tokenizer import Tokenizer

Row = TypeVar("Row", bound=LogprobRow | None, covariant=True)

_FORCED = -1  # in place of a rank


def logprob_rows(logprobs: Logprobs, num_most_likely: int, tokenizer: Tokenizer) -> list[LogprobRow]:
    """One row per token. num_most_likely: number of columns after the sampled token that are the most likely tokens."""
    columns = zip(logprobs.ids.tolist(), logprobs.values.tolist(), logprobs.ranks.tolist(), strict=True)
    return [_logprob_row(ids, values, rank, num_most_likely, tokenizer) for ids, values, rank in columns]


def forced_logprob_row(token: int, tokenizer: Tokenizer) -> LogprobRow:
    """The row of a forced token: logprob 0, rank 1."""
    return {token: Logprob(0.0, 1, tokenizer.token_text(token), forced=True)}


def _logprob_row(
    ids: Sequence[int], values: Sequence[float], rank: int, num_most_likely: int, tokenizer: Tokenizer
) -> LogprobRow:
    row = {ids[0]: Logprob(values[0], rank, tokenizer.token_text(ids[0]))}
    for place, (token, value) in enumerate(zip(ids[1:], values[1:], strict=True), 1):
        if token >= 0 and token not in row:  # negative ids are padding
            row[token] = Logprob(value, place if place <= num_most_likely else None, tokenizer.token_text(token))
    return row


class LogprobRows(Sequence[Row]):
    """The rows of one sequence or prompt, kept as numbers: 8 bytes for each value. A row is built when it is read.

    num_most_likely: see `logprob_rows`.
    """

    def __init__(self, num_most_likely: int, tokenizer: Tokenizer) -> None:
        self._num_most_likely = num_most_likely
        self._tokenizer = tokenizer
        self._ids = array("i")
        self._values = array("f")
        self._ranks = array("i")  # of each row
        self._ends = array("I")  # of each row, as an index into the values

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        places = range(len(self))[place]
        return self._row(places) if isinstance(places, int) else [self._row(one) for one in places]

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self) and list(other) == list(self)

    __hash__ = None  # type: ignore[assignment]  # it changes

    @property
    def num_values(self) -> int:
        """Number of logprobs of all rows."""
        return len(self._ids)

    @property
    def num_bytes(self) -> int:
        """Memory that the rows take."""
        return 8 * (len(self._ids) + len(self._ranks))

    def append(self, logprobs: Logprobs | None, forced: Sequence[tuple[int, int]] = ()) -> None:
        """Append a row for each sampled token of `logprobs`, and one for each forced token.

        forced: (index among all of these rows, token), in ascending order.
        """
        begin = 0
        for count, (place, token) in enumerate(forced):
            if logprobs is not None and place - count > begin:
                self._append(logprobs.slice(begin, place - count))
            begin = place - count
            self._ids.append(token)
            self._values.append(0.0)
            self._ranks.append(_FORCED)
            self._ends.append(len(self._ids))
        if logprobs is not None:
            self._append(logprobs.slice(begin, len(logprobs.ranks)) if forced else logprobs)

    def extend(self, other: "LogprobRows[Row]") -> None:
        """Append all rows of another object."""
        offset = len(self._ids)
        self._ids += other._ids
        self._values += other._values
        self._ranks += other._ranks
        self._ends.extend([end + offset for end in other._ends])

    def append_unreported(self, count: int) -> None:
        """Append rows that are None."""
        self._ranks.extend([0] * count)
        self._ends.extend([len(self._ids)] * count)

    def chosen(self) -> Iterator[Row]:
        """The rows with the token itself alone."""
        for place in range(len(self)):
            yield self._row(place, 1)

    def _append(self, logprobs: Logprobs) -> None:
        size, width = logprobs.ids.shape
        if not size:
            return
        ids, values = logprobs.ids, logprobs.values
        if ids[-1, -1] < 0:  # padding, because the step has wider rows of others
            width = int((ids >= 0).sum(axis=1).max())
            ids, values = ids[:, :width], values[:, :width]
        first = len(self._ids) + width
        self._ids.frombytes(ids.tobytes())
        self._values.frombytes(values.tobytes())
        self._ranks.frombytes(logprobs.ranks.tobytes())
        self._ends.extend(range(first, first + size * width, width))

    def _row(self, place: int, most: int | None = None) -> Row:
        """A row, with its first `most` tokens."""
        begin, end = self._ends[place - 1] if place else 0, self._ends[place]
        if begin == end:
            return None  # type: ignore[return-value]  # of a type that includes None
        rank, tokenizer = self._ranks[place], self._tokenizer
        if rank == _FORCED:
            return forced_logprob_row(self._ids[begin], tokenizer)  # type: ignore[return-value]  # a row
        end = end if most is None else min(end, begin + most)
        ids, values = self._ids[begin:end].tolist(), self._values[begin:end].tolist()
        return _logprob_row(ids, values, rank, self._num_most_likely, tokenizer)  # type: ignore[return-value]  # a row
