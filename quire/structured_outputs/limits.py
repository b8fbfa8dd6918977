"""Limits of the grammar backends, with helper functions that they share."""

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
MAX_FORCED = 512  # forced tokens of one verdict
MAX_MESSAGE = 300  # characters of a library's error message
_MAX_VOCABULARIES = 4

T = TypeVar("T")


class VocabularyCache(Generic[T]):
    """Cache of one value per vocabulary, for the latest _MAX_VOCABULARIES. Concurrent calls are serialized."""

    def __init__(self, make: Callable[[Vocabulary], T]) -> None:
        self._lock = Lock()
        self._cached = lru_cache(maxsize=_MAX_VOCABULARIES)(make)

    def __call__(self, vocabulary: Vocabulary) -> T:
        """The value for this vocabulary."""
        with self._lock:
            return self._cached(vocabulary)


def checked_regex(params: StructuredOutputsParams) -> str:
    """The pattern. Raises RequestError if it is too long."""
    if len(params.text) > MAX_REGEX:
        raise RequestError(f"regex must have at most {MAX_REGEX:,} characters", "regex")
    return params.text


def choice_alternatives(params: StructuredOutputsParams) -> str:
    """The choices as alternatives in the syntax of Lark and EBNF."""
    return " | ".join(json.dumps(one, ensure_ascii=False) for one in params.choice or ())


def pack_bitmask(allowed: np.ndarray) -> np.ndarray:
    """Packs bool (vocab_size,) into a read-only mask, uint32 (ceil(vocab_size / 32),)."""
    bits = np.zeros(-(-len(allowed) // 32) * 32, bool)
    bits[: len(allowed)] = allowed
    words = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
    words.flags.writeable = False
    return words
