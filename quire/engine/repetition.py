"""Detection of an output that repeats a pattern of tokens. The rule is vLLM's."""

import numpy as np

from quire.params import RepetitionDetectionParams

REPETITION_DETECTED = "repetition_detected"  # the stop reason of such an output


class RepetitionDetector:
    """Finds out whether a sequence ends with `min_count` equal patterns, one directly behind another.

    A sequence ends with `count` equal patterns of `size` tokens if each of its last (count - 1) * size tokens equals
    the token `size` places before it. So one number per size is enough: how many of the last tokens do.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        smallest = max(params.min_pattern_size, 1)
        sizes = np.arange(smallest, params.max_pattern_size + 1)
        self._smallest = smallest
        self._needed = sizes * (params.min_count - 1)  # by size
        self._equal = np.zeros_like(sizes)  # by size: how many of the last tokens equal the one `size` places before
        self._latest = np.full(params.max_pattern_size, -1)  # the latest tokens, the last one first

    def append_token(self, token: int) -> bool:
        """Add a token. Returns whether the sequence now ends with a repeated pattern."""
        self._equal = (self._equal + 1) * (self._latest[self._smallest - 1 :] == token)
        self._latest[1:] = self._latest[:-1].copy()
        self._latest[0] = token
        return bool((self._equal >= self._needed).any())
