"""Token ids of a text file, in windows that a model reads one by one."""

from collections.abc import Sequence
from pathlib import Path

from quire.errors import ConfigError
from quire.tokenizer.tokenizer import Tokenizer

WINDOW = 2048  # tokens of a window, if the model's context has room
MIN_TOKENS = 1024  # of a text
_CHARACTERS_PER_TOKEN = 32  # read from the text at most, so that a large file is not tokenized


def read_token_ids(text: Path, tokenizer: Tokenizer, most: int) -> list[int]:
    """The first `most` token ids of a text file, with the token with which the tokenizer begins a text.

    Raises ConfigError for a file that cannot be read or has fewer than MIN_TOKENS tokens.
    """
    try:
        with text.open(encoding="utf-8") as file:
            ids = tokenizer.encode(file.read(most * _CHARACTERS_PER_TOKEN))[:most]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text} cannot be read as UTF-8 text: {error}") from error
    if len(ids) < MIN_TOKENS:
        raise ConfigError(
            f"the text {text} has {len(ids)} tokens, but at least {MIN_TOKENS} are needed; use a longer text, like "
            "the model's prompts and answers"
        )
    return ids


def token_windows(token_ids: Sequence[int], length: int, bos_token_id: int | None) -> list[list[int]]:
    """The ids in windows of `length` tokens and a shorter one. Each begins with the begin token if the ids do."""
    first = list(token_ids[:1]) if token_ids and token_ids[0] == bos_token_id else []
    rest, step = token_ids[len(first) :], length - len(first)
    return [[*first, *rest[start : start + step]] for start in range(0, len(rest), step)]
