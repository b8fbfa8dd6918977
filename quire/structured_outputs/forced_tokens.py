"""Text that has to come as the tokens that the tokenizer would write, as far as no later text can change them."""

from bisect import bisect_right
from functools import lru_cache

from quire.structured_outputs.limits import num_common
from quire.structured_outputs.vocabulary import Vocabulary

_ANCHOR = "\x02"  # stands before a text so that the text does not begin there; no token joins it with what follows
_MAX_STRADDLING = 8  # places from which a later token may reach beyond the text, each tried by a tokenisation


def forced_tokens(data: bytes, vocabulary: Vocabulary, *, closed: bool = False) -> list[int]:
    """The tokens with which a tokenizer writes these bytes within a text, whatever comes behind them.

    closed: nothing comes behind them. The tokens' bytes are a prefix of `data`; none, where it cannot be told. What
    stands before the bytes is not looked at: the tokens begin where they begin. Bytes that begin within a character
    are no text, and have none.

    What comes behind can only take over bytes from the first place on where the rest of `data` is the beginning of a
    longer token. Wherever it does, the tokens before that place are those of the text up to there. So certain is what
    the tokenisations of `data` and of its parts up to each such place have in common.
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
        found = found[: num_common(found, part)]
    return found


def encode_within(text: str, vocabulary: Vocabulary) -> list[int]:
    """Tokens of a text that has begun before; none where they do not have just its bytes."""
    data = text.encode()
    tokens = vocabulary.encode(text)
    if _bytes_of(tokens, vocabulary) == data:
        return tokens
    tokens = vocabulary.encode(_ANCHOR + text)  # a tokenizer that treats the beginning of a text differently
    for start in range(len(tokens)):
        if _bytes_of(tokens[start:], vocabulary) == data:
            return tokens[start:]
    return []


def _bytes_of(tokens: list[int], vocabulary: Vocabulary) -> bytes | None:
    """None for tokens that are no text, or that the model has no logits for."""
    for token in tokens:
        if token >= vocabulary.size or not vocabulary.tokens[token] or token in vocabulary.special_ids:
            return None
    return b"".join(vocabulary.tokens[token] for token in tokens)


def _whole_characters(data: bytes) -> str:
    """The text of these bytes, without the parts of characters at their ends."""
    return data.decode("utf-8", errors="ignore")


def _straddling(data: bytes, vocabulary: Vocabulary) -> list[int]:
    """Places from which on `data` is the beginning of a token that is longer."""
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
    """The texts of a vocabulary, sorted, and the length of the longest."""
    texts = sorted({text for token, text in enumerate(vocabulary.tokens) if token not in vocabulary.special_ids})
    return texts, max(map(len, texts), default=0)
