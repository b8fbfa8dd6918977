"""The vocabulary for which a backend compiles grammars."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens of one model.

    tokens: the bytes that each id adds to a text, one entry for each logit of the model; empty for special tokens and
    for ids without a token. end_ids: ids that end a sequence. special_ids: ids that are no text. encode: token
    ids of a text, without special tokens at its ends. special_texts: the texts by which templates write special ids.
    """

    tokens: Sequence[bytes]
    end_ids: tuple[int, ...]
    special_ids: frozenset[int]
    encode: Callable[[str], list[int]]
    special_texts: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of logits of the model."""
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-len(self.tokens) // 32)
