"""Vocabulary: what a backend has to know of a tokenizer. Plain data and one function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens of one model.

    tokens: the bytes that each id adds to a text, one entry for each logit of the model; empty for ids that are no
    text (special tokens, holes). end_ids: that end a sequence. special_ids: that are no text. encode: ids of a text,
    without special tokens at its ends.
    """

    tokens: Sequence[bytes]
    end_ids: tuple[int, ...]
    special_ids: frozenset[int]
    encode: Callable[[str], list[int]]

    @property
    def size(self) -> int:
        """Logits of the model."""
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """Of a mask."""
        return -(-len(self.tokens) // 32)
