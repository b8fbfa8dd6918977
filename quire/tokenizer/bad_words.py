"""Bad words as token sequences, in the ways in which a text may hold them. Knows the tokenizer, no sampling."""

from collections.abc import Sequence

from quire.errors import RequestError
from quire.tokenizer.tokenizer import Tokenizer

MAX_BAD_TOKENS = 32768  # of all words in all ways; each running sequence looks for them
_BEFORE = "\n"  # a text that tokenizers do not join with what follows


def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of each word at the beginning of a text, behind a space, and behind something else.

    They differ: a tokenizer may have a token for a word with its space, and may put a space before a whole text.
    Each sequence comes once. Raises RequestError for more than MAX_BAD_TOKENS tokens.
    """
    if not words:
        return []
    before = tokenizer.encode(_BEFORE, add_special_tokens=False)
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, f" {bare}"):
            sequences[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
        inside = tokenizer.encode(_BEFORE + bare, add_special_tokens=False)
        if inside[: len(before)] == before:
            sequences[tuple(inside[len(before) :])] = None
    if (count := sum(map(len, sequences))) > MAX_BAD_TOKENS:
        raise RequestError(f"bad_words have {count:,} tokens; give fewer, up to {MAX_BAD_TOKENS:,} tokens", "bad_words")
    return [list(sequence) for sequence in sequences if sequence]
