"""Bounds that backends share, and what each of them writes of a constraint in the same way."""

import json
from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import Generic, TypeVar

import numpy as np

from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.vocabulary import Vocabulary

MAX_REGEX = 8192  # characters
MAX_FORCED = 512  # tokens that one verdict forces
MAX_MESSAGE = 300  # characters of what a library says
_MAX_VOCABULARIES = 4

T = TypeVar("T")


class ByVocabulary(Generic[T]):
    """What is made once for each vocabulary; of the last few it is kept. Other threads wait while it is made."""

    def __init__(self, make: Callable[[Vocabulary], T]) -> None:
        self._lock = Lock()
        self._made = lru_cache(maxsize=_MAX_VOCABULARIES)(make)

    def __call__(self, vocabulary: Vocabulary) -> T:
        """Of this vocabulary."""
        with self._lock:
            return self._made(vocabulary)


def checked_regex(asked: StructuredOutputsParams) -> str:
    """The pattern. Raises RequestError for one that is too long."""
    if len(asked.text) > MAX_REGEX:
        raise RequestError(f"regex must have at most {MAX_REGEX:,} characters", "regex")
    return asked.text


def options_of(asked: StructuredOutputsParams) -> str:
    """The choices as alternatives of a grammar."""
    return " | ".join(json.dumps(one, ensure_ascii=False) for one in asked.choice or ())


def packed(allowed: np.ndarray) -> np.ndarray:
    """A mask, uint32 (ceil(vocab_size / 32),), of bool (vocab_size,); it may not be written to."""
    bits = np.zeros(-(-len(allowed) // 32) * 32, bool)
    bits[: len(allowed)] = allowed
    words = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
    words.flags.writeable = False
    return words


def num_common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    differing = (place for place, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(differing, min(len(one), len(other)))
