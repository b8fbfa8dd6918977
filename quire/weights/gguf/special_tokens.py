"""Special tokens of a GGUF file: ids by name, and the tokens that end an output.

Imports no torch, because the HTTP process reads the tokenizer of a file.
"""

from collections.abc import Mapping
from types import MappingProxyType

from quire.weights.gguf.reader import Metadata

# name in tokenizer_config.json -> key of the file
_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
)
_EOS_KEYS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_SENTENCEPIECE_DEFAULTS = MappingProxyType({"bos_token": 1, "eos_token": 2, "unk_token": 0})
# tokens that end a turn; not all files list them, and llama.cpp detects them by these texts, too
_EOS_TEXTS = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"})


def special_tokens(metadata: Metadata) -> dict[str, int]:
    """Ids of special tokens by name ("eos_token"), from the file or, for SentencePiece, from its defaults.

    Raises ModelError for an id outside the vocabulary.
    """
    size = len(metadata.texts("tokenizer.ggml.tokens"))
    implied = _SENTENCEPIECE_DEFAULTS if metadata.text("tokenizer.ggml.model", "") == "llama" else {}
    found = {name: token for name, token in implied.items() if token < size}
    return found | {name: _token(metadata, key, size) for name, key in _KEYS.items() if metadata.has(key)}


def special_token_ids(metadata: Metadata) -> dict[str, int]:
    """Fields of a config.json: bos_token_id, eos_token_id, pad_token_id."""
    return {f"{name}_id": token for name, token in special_tokens(metadata).items() if name != "unk_token"}


def eos_token_ids(metadata: Metadata) -> list[int]:
    """Ids of all tokens that end an output, in ascending order."""
    texts = metadata.texts("tokenizer.ggml.tokens")
    ends = {token for name, token in special_tokens(metadata).items() if name == "eos_token"}
    ends |= {_token(metadata, key, len(texts)) for key in _EOS_KEYS if metadata.has(key)}
    return sorted(ends | {token for token, text in enumerate(texts) if text in _EOS_TEXTS})


def _token(metadata: Metadata, key: str, size: int) -> int:
    token = metadata.number(key)
    if token >= size:
        raise metadata.error(f"{key} is {token}, but there are only {size} tokens")
    return token
