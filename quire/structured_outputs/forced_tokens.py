"""Tokens of forced text, as far as no later text can change them."""

from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from quire.core.common_prefix import common_prefix_len
from quire.structured_outputs.vocabulary import Vocabulary

_ANCHOR = "\x02"  # put before a text that is not the start of the output; no token joins it with the text
_MAX_STRADDLING = 8  # positions at which a token may begin that reaches beyond the text; each costs a tokenization


def forced_tokens(data: bytes, vocabulary: Vocabulary, *, closed: bool = False) -> list[int]:
    """The tokens that a tokenizer writes for these bytes within a text, whatever text follows them.

    closed: no text follows. The bytes of the tokens are a prefix of `data`. The result is empty if no token is
    certain, or if `data` begins within a character. The text before `data` is ignored: a token begins where `data`
    begins.

    Later text can change tokens only from a position at which the rest of `data` is the beginning of a longer token.
    In that case the tokens before the position are those of `data` up to it. So the common prefix of the tokens of
    `data` and of its parts up to each such position is certain.
    """
    text = _whole_characters(data)
    whole = text.encode()
    if not data.startswith(whole):
        return []
    found = encode_within(text, vocabulary)
    if closed and whole == data:
        return found
    places = [place for place in _straddling(data, vocabulary) if place < len(whole)]
    for place in places[:_MAX_STRADDLING]:
        part = encode_within(_whole_characters(whole[:place]), vocabulary)
        found = found[: common_prefix_len(found, part)]
    return found


def encode_within(text: str, vocabulary: Vocabulary, special: Mapping[int, bytes] = MappingProxyType({})) -> list[int]:
    """Tokens of a text inside of a longer one; empty if the tokenizer writes no tokens with exactly its bytes.

    special: texts of special tokens that the text may have.
    """
    data = text.encode()
    tokens = vocabulary.encode(text)
    if _bytes_of(tokens, vocabulary, special) == data:
        return tokens
    tokens = vocabulary.encode(_ANCHOR + text)  # the tokenizer changes the beginning of a text
    for start in range(len(tokens)):
        if _bytes_of(tokens[start:], vocabulary, special) == data:
            return tokens[start:]
    return []


def _bytes_of(tokens: list[int], vocabulary: Vocabulary, special: Mapping[int, bytes]) -> bytes | None:
    """The bytes of tokens; None if a token is no text and not `special`, or has no logit."""
    parts = []
    for token in tokens:
        if token >= vocabulary.size:
            return None
        text = special.get(token, b"") if token in vocabulary.special_ids else vocabulary.tokens[token]
        if not text:
            return None
        parts.append(text)
    return b"".join(parts)


def _whole_characters(data: bytes) -> str:
    """The text of these bytes without incomplete characters."""
    return data.decode("utf-8", errors="ignore")


def _straddling(data: bytes, vocabulary: Vocabulary) -> list[int]:
    """Positions at which the rest of `data` is the beginning of a longer token."""
    tokens, longest = _sorted_tokens(vocabulary)
    places = []
    for place in range(max(0, len(data) - longest + 1), len(data)):
        rest = data[place:]
        behind = bisect_right(tokens, rest)
        if behind < len(tokens) and tokens[behind].startswith(rest):
            places.append(place)
    return places


@lru_cache(maxsize=4)
def _sorted_tokens(vocabulary: Vocabulary) -> tuple[list[bytes], int]:
    """The texts of a vocabulary, sorted, and the length of the longest in bytes."""
    texts = sorted({text for token, text in enumerate(vocabulary.tokens) if token not in vocabulary.special_ids})
    return texts, max(map(len, texts), default=0)
