"""Sampling metadata of a runner's rows, from the steps that opened them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from quire.core.step import NewRows, SamplingMasks, TokenListKind
from quire.kernels.sampling_contract import History, LogitEdits, Masks, SamplingMetadata


class BadWords(NamedTuple):
    """Bad words of one row. Words of several tokens are stored as concatenated prefixes, and last tokens."""

    single_tokens: np.ndarray  # int64: words of one token
    prefixes: np.ndarray  # int32: tokens of all words without the last ones, concatenated
    distances: np.ndarray  # int64, for each of `prefixes`: distance to the word's last token
    starts: np.ndarray  # int64, for each word: its start in `prefixes`
    last_tokens: np.ndarray  # int64, for each word: its last token

    @classmethod
    def of(cls, words: Sequence[np.ndarray]) -> "BadWords":
        """From words as token ids, each with at least one token."""
        several = [word for word in words if len(word) > 1]
        lengths = np.array([len(word) - 1 for word in several], np.int64)
        nothing = np.zeros(0, np.int32)
        return cls(
            np.array([word[0] for word in words if len(word) == 1], np.int64),
            np.concatenate([nothing, *(word[:-1] for word in several)]),
            np.concatenate([nothing, *(np.arange(length, 0, -1) for length in lengths)]).astype(np.int64),
            np.cumsum(lengths) - lengths,
            np.array([word[-1] for word in several], np.int64),
        )

    def banned(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens that are banned after `tokens` (at least one), int64. May contain duplicates."""
        if not len(self.last_tokens):
            return self.single_tokens
        places = len(tokens) - self.distances
        same = (places >= 0) & (tokens[np.maximum(places, 0)] == self.prefixes)
        return np.concatenate((self.single_tokens, self.last_tokens[np.logical_and.reduceat(same, self.starts)]))


def repeating_tokens(tokens: np.ndarray, size: int) -> np.ndarray:
    """The tokens that would complete a sequence of `size` tokens that occurs in `tokens` already, int64."""
    num_starts = len(tokens) - size + 1  # of sequences of this size
    if num_starts < 1:
        return np.zeros(0, np.int64)
    last = tokens[num_starts:]  # the first size - 1 tokens of the sequence that the next token completes
    starts = np.flatnonzero(tokens[:num_starts] == last[0]) if size > 1 else np.arange(num_starts)
    for offset in range(1, size - 1):
        starts = starts[tokens[starts + offset] == last[offset]]
    return tokens[starts + size - 1].astype(np.int64)


class TokenLists:
    """Token lists per row: allowed tokens, biases, bad words, end tokens, tokens that may not repeat, and tokens with
    requested logprobs.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._no_masks = Masks(np.zeros(0, np.int64), np.zeros((0, self._num_words), np.uint32))
        self._has_edits = np.zeros(num_rows, np.bool_)  # rows that may have logit edits
        self._allowed: dict[int, np.ndarray] = {}  # row -> bit mask, as in Masks
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._bad_words: dict[int, BadWords] = {}
        self._end_tokens: dict[int, np.ndarray] = {}
        self._no_repeats: dict[int, tuple[int, np.ndarray]] = {}  # row -> size, and tokens that may repeat
        self._logprob_tokens: dict[int, np.ndarray] = {}

    def set_rows(self, new_rows: NewRows) -> None:
        """Replace the lists of the new rows."""
        edits = (self._biases, self._bad_words, self._end_tokens, self._no_repeats)
        for lists in (*edits, self._allowed, self._logprob_tokens):
            for row in lists.keys() & set(new_rows.rows.tolist()):
                del lists[row]
        words: dict[int, list[np.ndarray]] = defaultdict(list)
        for row, kind, tokens, weights in new_rows.lists:
            match kind:
                case TokenListKind.ALLOWED:
                    self._allowed[row] = self._mask(tokens)
                case TokenListKind.BIAS:
                    self._biases[row] = (tokens, weights)
                case TokenListKind.BAD_WORD:
                    words[row].append(tokens)
                case TokenListKind.END:
                    self._end_tokens[row] = tokens
                case TokenListKind.NO_REPEAT:
                    self._no_repeats[row] = int(tokens[0]), tokens[1:]
                case TokenListKind.LOGPROB:
                    self._logprob_tokens[row] = tokens.astype(np.int64)
        self._bad_words |= {row: BadWords.of(some) for row, some in words.items()}
        for row in new_rows.rows.tolist():
            self._has_edits[row] = any(row in lists for lists in edits)

    def masks(self, rows: np.ndarray, positions: np.ndarray, sampling_masks: SamplingMasks) -> Masks:
        """The masks of tokens at `positions` of `rows`: allowed tokens and `sampling_masks`, or their intersection.

        Other entries of `sampling_masks` are ignored. Raises ValueError for masks of another vocabulary size.
        """
        if len(sampling_masks.rows) and sampling_masks.masks.shape[1] != self._num_words:
            raise ValueError(f"masks must have {self._num_words} words for a row, not {sampling_masks.masks.shape[1]}")
        if not (self._allowed or len(sampling_masks.rows)):
            return self._no_masks
        words = {index: self._allowed[row] for row, index in _present(self._allowed, rows)}
        if len(sampling_masks.rows):
            indices = {place: i for i, place in enumerate(zip(rows.tolist(), positions.tolist(), strict=True))}
            masked = zip(sampling_masks.rows.tolist(), sampling_masks.positions.tolist(), strict=True)
            for place, mask in zip(masked, sampling_masks.masks, strict=True):
                if (index := indices.get(place)) is not None:
                    words[index] = words[index] & mask if index in words else mask
        stacked = np.array(list(words.values()), np.uint32).reshape(-1, self._num_words)
        return Masks(np.array(list(words), np.int64), stacked)

    def logit_edits(
        self, rows: np.ndarray, positions: np.ndarray, min_lens: np.ndarray, tokens: np.ndarray
    ) -> LogitEdits:
        """Logit edits for `rows`, whose next tokens are at `positions`: biases and banned tokens.

        min_lens (len(rows),): positions below which end tokens are banned. tokens (all rows, positions): the tokens of
        the rows before the sampled position.
        """
        has_edits = self._has_edits[rows]
        if not has_edits.any():
            return _NO_EDITS
        indices: list[np.ndarray] = []
        edited: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for index in np.flatnonzero(has_edits).tolist():
            row, position = int(rows[index]), int(positions[index])
            added, weights = self._biases.get(row, (_NO_EDITS.tokens, _NO_EDITS.values))
            bans = []
            if row in self._end_tokens and position < min_lens[index]:
                bans.append(self._end_tokens[row])
            if row in self._bad_words:
                bans.append(self._bad_words[row].banned(tokens[row, :position]))
            if row in self._no_repeats:
                size, exceptions = self._no_repeats[row]
                bans.append(np.setdiff1d(repeating_tokens(tokens[row, :position], size), exceptions))
            edited += [added, *bans]
            values += [weights, *(np.full(len(banned), -np.inf, np.float32) for banned in bans)]
            indices.append(np.full(len(added) + sum(map(len, bans)), index, np.int64))
        return LogitEdits(np.concatenate(indices), np.concatenate(edited).astype(np.int64), np.concatenate(values))

    def logprob_tokens(self, rows: np.ndarray) -> Mapping[int, np.ndarray]:
        """Index into `rows` -> listed tokens whose logprobs are reported, int64. Other rows are absent."""
        return {index: self._logprob_tokens[row] for row, index in _present(self._logprob_tokens, rows)}

    def _mask(self, tokens: np.ndarray) -> np.ndarray:
        words = np.zeros(self._num_words, np.uint32)
        np.bitwise_or.at(words, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
        return words


def _present(lists: Mapping[int, object], rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """(row, index) of the entries of `rows` that have a list."""
    return ((row, index) for index, row in enumerate(rows.tolist()) if row in lists) if lists else iter(())


_INTEGERS = ("sample_indices", "top_ks", "num_logprobs", "num_prompt_logprobs", "prompt_lens", "min_lens")
_FLOATS = (
    *("temperatures", "top_ps", "min_ps"),
    *("presence_penalties", "frequency_penalties", "repetition_penalties"),
)
_NO_EDITS = LogitEdits(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))
_NO_HISTORY = History(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_))
_SMALLEST = np.finfo(np.float32).tiny


class SamplingColumns:
    """Sampling parameters as one array each, with one entry per row. Entries of unused rows are undefined."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._seeds = np.zeros(num_rows, np.uint64)
        self._integers = np.zeros((len(_INTEGERS), num_rows), np.int32)
        self._floats = np.zeros((len(_FLOATS), num_rows), np.float32)
        self._columns: dict[str, np.ndarray] = {
            "seeds": self._seeds,
            **dict(zip(_INTEGERS, self._integers, strict=True)),
            **dict(zip(_FLOATS, self._floats, strict=True)),
        }
        self._has_penalties = np.zeros(num_rows, np.bool_)
        self.token_lists = TokenLists(num_rows, vocab_size)

    def __getitem__(self, name: str) -> np.ndarray:
        """The array of a parameter, for all rows."""
        return self._columns[name]

    def set_rows(self, new_rows: NewRows) -> None:
        """Replace the parameters of the new rows."""
        for name, column in self._columns.items():
            column[new_rows.rows] = getattr(new_rows, name)
        repetition = self._columns["repetition_penalties"]
        np.maximum(repetition, _SMALLEST, out=repetition)  # a small float64 may have become 0, and is a divisor
        penalties = self._columns["presence_penalties"], self._columns["frequency_penalties"]
        self._has_penalties = (repetition != 1) | np.any(penalties, axis=0)
        self.token_lists.set_rows(new_rows)

    def metadata(
        self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray, sampling_masks: SamplingMasks
    ) -> SamplingMetadata:
        """The sampling metadata for the tokens at `positions` of `rows`. tokens: (all rows, positions), those before.

        A row with drafts has several entries. Entries of `sampling_masks` for other tokens are ignored.
        """
        column = dict(zip(_INTEGERS, self._integers.take(rows, 1), strict=True))
        column |= zip(_FLOATS, self._floats.take(rows, 1), strict=True)
        return SamplingMetadata(
            seeds=self._seeds[rows],
            sample_indices=column["sample_indices"],
            positions=positions,
            temperatures=column["temperatures"],
            top_ps=column["top_ps"],
            top_ks=column["top_ks"],
            min_ps=column["min_ps"],
            presence_penalties=column["presence_penalties"],
            frequency_penalties=column["frequency_penalties"],
            repetition_penalties=column["repetition_penalties"],
            masks=self.token_lists.masks(rows, positions, sampling_masks),
            edits=self.token_lists.logit_edits(rows, positions, column["min_lens"], tokens),
            history=_history(rows, positions, column, tokens) if self._has_penalties[rows].any() else _NO_HISTORY,
        )


def _history(rows: np.ndarray, stops: np.ndarray, column: dict[str, np.ndarray], tokens: np.ndarray) -> History:
    """The tokens before `stops` of the rows with penalties; prompt tokens only with a repetition penalty."""
    counts_prompt = column["repetition_penalties"] != 1
    counts_output = (column["presence_penalties"] != 0) | (column["frequency_penalties"] != 0)
    asking = np.flatnonzero(counts_prompt | counts_output)
    prompts = column["prompt_lens"][asking].astype(np.int64)
    starts = np.where(counts_prompt[asking], 0, prompts)
    lengths = np.maximum(stops[asking] - starts, 0)
    ends = np.cumsum(lengths)
    positions = np.arange(lengths.sum()) + np.repeat(starts - (ends - lengths), lengths)
    indices = np.repeat(asking, lengths)
    return History(indices, tokens[rows[indices], positions].astype(np.int64), positions >= np.repeat(prompts, lengths))
