"""Sequences of tokens that a row may not complete, looked up all at once."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class BadWords(NamedTuple):
    """Words of several tokens as their beginnings, laid end to end, and their last tokens."""

    always: np.ndarray  # int64: words of one token
    begins: np.ndarray  # int32: tokens of all words but their last ones
    distances: np.ndarray  # int64, for each of `begins`: 1 is the token before the last one
    firsts: np.ndarray  # int64, for each word: where in `begins` it starts
    lasts: np.ndarray  # int64, for each word

    @classmethod
    def of(cls, words: Sequence[np.ndarray]) -> "BadWords":
        """From words of at least one token each."""
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
        """What may not come after `tokens`, of which there is at least one, int64. Some may be named more than once."""
        if not len(self.lasts):
            return self.always
        places = len(tokens) - self.distances
        same = (places >= 0) & (tokens[np.maximum(places, 0)] == self.begins)
        return np.concatenate((self.always, self.lasts[np.logical_and.reduceat(same, self.firsts)]))
