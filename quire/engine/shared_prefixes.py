"""The operator's file of public prefixes, whose KV all tenants share.

The file is a JSON list. An entry is a string (tokenized like a completion prompt), {"prompt_token_ids": [...]}, or
{"messages": [...]} (rendered with the chat template, without a generation prompt).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.engine.inputs import tokenize
from quire.errors import ConfigError, ModelError, RequestError, nearest, out_of_vocabulary
from quire.tokenizer.tokenizer import Tokenizer

MAX_PREFIXES = 256
MAX_FILE = 16 * 2**20  # bytes
_ENTRY_FIELDS = ("prompt_token_ids", "messages")


class PrefixLimits(NamedTuple):
    """Limits of the model and the cache. block_size: tokens; only whole blocks are shared."""

    vocab_size: int
    max_model_len: int
    block_size: int


def read_public_prefixes(path: str | Path, tokenizer: Tokenizer, bounds: PrefixLimits) -> tuple[tuple[int, ...], ...]:
    """The token ids of each prefix, in the order of the file. Raises ConfigError that names the invalid entry."""
    prefixes = []
    for place, entry in enumerate(_entries(path)):
        try:
            prefixes.append(_token_ids(entry, tokenizer, bounds))
        except (RequestError, ModelError) as error:
            raise ConfigError(f"public_prefixes: entry {place} of {path}: {error}") from error
    return tuple(prefixes)


def num_public_blocks(prefixes: Iterable[Sequence[int]], block_size: int) -> int:
    """Number of whole blocks that the prefixes fill. Common blocks of two prefixes count twice."""
    return sum(len(prefix) // block_size for prefix in prefixes)


def _entries(path: str | Path) -> list[object]:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"public_prefixes: {path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE:
        raise ConfigError(f"public_prefixes: {path} is longer than {MAX_FILE} bytes")
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"public_prefixes: {path} is not valid JSON: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"public_prefixes: {path} must hold a list of prefixes")
    if len(entries) > MAX_PREFIXES:
        raise ConfigError(f"public_prefixes: {path} lists {len(entries)} prefixes, more than {MAX_PREFIXES}")
    return entries


def _token_ids(entry: object, tokenizer: Tokenizer, bounds: PrefixLimits) -> tuple[int, ...]:
    """The token ids of one entry. Raises RequestError, ModelError."""
    ids = _tokenized(entry, tokenizer)
    if not ids:
        raise RequestError("it is empty; take it out")
    if max(ids) >= bounds.vocab_size:
        raise out_of_vocabulary(max(ids), bounds.vocab_size)
    if len(ids) >= bounds.max_model_len:
        raise RequestError(f"it has {len(ids)} tokens; a prompt has less than max_model_len ({bounds.max_model_len})")
    if len(ids) < bounds.block_size:
        raise RequestError(
            f"it has {len(ids)} tokens, less than a block of {bounds.block_size} (block_size), and only whole blocks "
            "are shared; make it longer, or take it out"
        )
    return tuple(ids)


def _tokenized(entry: object, tokenizer: Tokenizer) -> list[int]:
    if isinstance(entry, str):
        return tokenize(entry, tokenizer).ids
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise RequestError(f"it must be a string, or an object with one of {' or '.join(_ENTRY_FIELDS)}")
    (name,) = entry
    if name == "messages":
        text = tokenizer.apply_chat_template(entry[name], add_generation_prompt=False)
        return tokenize(text, tokenizer, add_special_tokens=False).ids
    if name != "prompt_token_ids":
        raise RequestError(f"unknown field {name!r:.100}{nearest(name, _ENTRY_FIELDS)}")
    return tokenize({"prompt_token_ids": entry[name]}, tokenizer).ids
