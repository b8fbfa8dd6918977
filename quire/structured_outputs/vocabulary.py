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
    def special_ids_by_text(self) -> Mapping[str, int]:
        """The special ids that end no sequence, by their texts."""
        texts = ((token, text.decode(errors="ignore")) for token, text in self.special_texts.items())
        return {text: token for token, text in texts if text and token not in self.end_ids}

    @property
    def size(self) -> int:
        """Number of logits of the model."""
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-len(self.tokens) // 32)


class SpecialTokens:
    """The special tokens that a grammar may have: their ids by text. used: those that it has."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        self._longest_first = sorted(ids, key=len, reverse=True)
        self.used: set[int] = set()

    def split(self, text: str) -> list[str | int]:
        """The text as texts and ids of special tokens, at least one."""
        parts: list[str | int] = []
        start = place = 0
        while place < len(text):
            found = next((name for name in self._longest_first if text.startswith(name, place)), None)
            if found is None:
                place += 1
                continue
            parts += [text[start:place]] if start < place else []
            parts.append(self.ids[found])
            self.used.add(self.ids[found])
            start = place = place + len(found)
        return [*parts, text[start:]] if start < len(text) or not parts else parts
