"""The lists of tokens that rows brought along when they opened, ready to be used in every step.

Rows without lists take no time. What rows with lists take does not depend on the vocabulary, but for
masks, which are a bit per token.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from quire.core.step import Late, ListKind, Opens
from quire.kernels.contract import Edits, Masks
from quire.sampling.bad_words import BadWords


class TokenLists:
    """Per row: allowed tokens, biases, bad words, end tokens, tokens to be reported."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._editing = np.zeros(num_rows, np.bool_)  # rows that `edits` has to look at
        self._allowed: dict[int, np.ndarray] = {}  # row -> words, as in Masks
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._bad_words: dict[int, BadWords] = {}
        self._ends: dict[int, np.ndarray] = {}
        self._reported: dict[int, np.ndarray] = {}

    def open(self, opens: Opens) -> None:
        """Forget what the opened rows had, and take in what they bring."""
        for lists in (self._allowed, self._biases, self._bad_words, self._ends, self._reported):
            for row in lists.keys() & set(opens.rows.tolist()):
                del lists[row]
        words: dict[int, list[np.ndarray]] = defaultdict(list)
        for row, kind, tokens, weights in opens.lists:
            match kind:
                case ListKind.ALLOWED:
                    self._allowed[row] = self._mask(tokens)
                case ListKind.BIAS:
                    self._biases[row] = (tokens, weights)
                case ListKind.BAD_WORD:
                    words[row].append(tokens)
                case ListKind.END:
                    self._ends[row] = tokens
                case ListKind.LOGPROB:
                    self._reported[row] = tokens.astype(np.int64)
        self._bad_words |= {row: BadWords.of(some) for row, some in words.items()}
        for row in opens.rows.tolist():
            self._editing[row] = row in self._biases or row in self._bad_words or row in self._ends

    def masks(self, rows: np.ndarray, late: Late) -> Masks:
        """For logits of `rows`: their allowed tokens and their grammars' masks; where there are both, what both allow.

        Late masks of other rows are left out. Raises ValueError for late masks that do not fit the vocabulary.
        """
        if len(late.rows) and late.masks.shape[1] != self._num_words:
            raise ValueError(f"masks must have {self._num_words} words for a row, not {late.masks.shape[1]}")
        indices = self._indices(rows)
        words = {index: self._allowed[row] for row, index in _present(self._allowed, indices)}
        for row, mask in zip(late.rows.tolist(), late.masks, strict=True):
            index = int(indices[row])
            if index >= 0:
                words[index] = words[index] & mask if index in words else mask
        stacked = np.array(list(words.values()), np.uint32).reshape(-1, self._num_words)
        return Masks(np.array(list(words), np.int64), stacked)

    def edits(self, rows: np.ndarray, positions: np.ndarray, min_lens: np.ndarray, tokens: np.ndarray) -> Edits:
        """For logits of `rows`, whose tokens will stand at `positions`: biases and bans.

        min_lens: positions below which end tokens are banned, as long as `rows`. tokens (all rows, positions):
        what stands in the rows, up to the position sampled.
        """
        indices = [np.zeros(0, np.int64)]
        edited = [np.zeros(0, np.int64)]
        values = [np.zeros(0, np.float32)]
        for index in np.flatnonzero(self._editing[rows]).tolist():
            row, position = int(rows[index]), int(positions[index])
            added, weights = self._biases.get(row, (edited[0], values[0]))
            bans = []
            if row in self._ends and position < min_lens[index]:
                bans.append(self._ends[row])
            if row in self._bad_words:
                bans.append(self._bad_words[row].banned(tokens[row, :position]))
            edited += [added, *bans]
            values += [weights, *(np.full(len(banned), -np.inf, np.float32) for banned in bans)]
            indices.append(np.full(len(added) + sum(map(len, bans)), index, np.int64))
        return Edits(np.concatenate(indices), np.concatenate(edited).astype(np.int64), np.concatenate(values))

    def reported(self, rows: np.ndarray) -> Mapping[int, np.ndarray]:
        """Index into `rows` -> tokens to be reported beside the sampled one, int64; only those with some."""
        return {index: self._reported[row] for row, index in _present(self._reported, self._indices(rows))}

    def _indices(self, rows: np.ndarray) -> np.ndarray:
        """Row -> where it is in `rows`, or -1."""
        indices = np.full(len(self._editing), -1, np.int64)
        indices[rows] = np.arange(len(rows))
        return indices

    def _mask(self, tokens: np.ndarray) -> np.ndarray:
        words = np.zeros(self._num_words, np.uint32)
        np.bitwise_or.at(words, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
        return words


def _present(lists: Mapping[int, object], indices: np.ndarray) -> Iterator[tuple[int, int]]:
    """(row, index) of the rows that have a list and an index."""
    return ((row, int(indices[row])) for row in lists if indices[row] >= 0)
