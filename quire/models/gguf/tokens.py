"""Special tokens of a GGUF file: which there are, and which end an answer. Builds no tokenizer. No torch here."""

from collections.abc import Mapping
from types import MappingProxyType

from quire.models.gguf.metadata import Metadata

# as tokenizer_config.json calls them: what the file calls them
_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
)
_MORE_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_SENTENCEPIECE_DEFAULTS = MappingProxyType({"bos_token": 1, "eos_token": 2, "unk_token": 0})
# tokens that end a turn, which files do not always say; llama.cpp knows them by their names too
_TURN_ENDS = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"})


def special_tokens(metadata: Metadata) -> dict[str, int]:
    """By name ("eos_token"), the ids that the file states or, for SentencePiece, implies.

    Raises ModelError for an id that no token has.
    """
    size = len(metadata.texts("tokenizer.ggml.tokens"))
    implied = _SENTENCEPIECE_DEFAULTS if metadata.text("tokenizer.ggml.model", "") == "llama" else {}
    found = {name: token for name, token in implied.items() if token < size}
    return found | {name: _token(metadata, key, size) for name, key in _KEYS.items() if metadata.has(key)}


def special_token_ids(metadata: Metadata) -> dict[str, int]:
    """As a config.json has them: bos_token_id, eos_token_id, pad_token_id."""
    return {f"{name}_id": token for name, token in special_tokens(metadata).items() if name != "unk_token"}


def eos_token_ids(metadata: Metadata) -> list[int]:
    """All tokens that end an answer, in ascending order."""
    texts = metadata.texts("tokenizer.ggml.tokens")
    ends = {token for name, token in special_tokens(metadata).items() if name == "eos_token"}
    ends |= {_token(metadata, key, len(texts)) for key in _MORE_ENDS if metadata.has(key)}
    return sorted(ends | {token for token, text in enumerate(texts) if text in _TURN_ENDS})


def _token(metadata: Metadata, key: str, size: int) -> int:
    token = metadata.number(key)
    if token >= size:
        raise metadata.error(f"{key} is {token}, but there are only {size} tokens")
    return token
