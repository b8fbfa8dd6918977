"""A model folder's tokenizer, as its files describe it. Knows files and the classes transformers has for them.

tokenizer.json says how text is split, and whether it gets begin and end tokens; tokenizer_config.json only
adds special tokens to that, as in transformers 5. But transformers 5 builds the tokenizer anew where
tokenizer_class has a constructor of its own (LlamaTokenizer, GPT2Tokenizer, Qwen2Tokenizer, ...), and drops
what the file says on normalizing, splitting and decoding. quire keeps to the file: it is what the model was
trained with, and the two differ only where the class is a misnomer, or where the older SentencePiece form
puts a space after a special token, as Llama 2's own code does.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from quire.errors import ModelError
from quire.models.json_file import read_object
from quire.tokenizer.splits import SPLITS
from quire.tokenizer.tokenizer_special import add_declared_tokens

_CLASSES = {  # model_type -> the tokenizer class of a folder that names none
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "phi", "codegen", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt", "olmo", "olmoe", "mamba", "mamba2", "falcon_mamba"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
}
_CLASS_UNHEEDED = frozenset(  # model types for which transformers takes no notice of a folder's tokenizer class
    {"granite", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "phi3", "phimoe", "qwen2", "stablelm"}
)
_END_OF_TEXT = "<|endoftext|>"
_DEFAULTS: Mapping[str, Mapping[str, str]] = MappingProxyType(  # class -> special tokens, where the folder names none
    {
        "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT),
        "GPTNeoXTokenizer": {
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT),
            "pad_token": "<|padding|>",
        },
        "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END_OF_TEXT),
        "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "GemmaTokenizer": {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    }
)
_CONVERT = (
    "convert it once: python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{0}')"
    ".save_pretrained('{0}')\" (needs the packages transformers and sentencepiece or tiktoken)"
)


class TokenizerFiles(NamedTuple):
    """What a folder says about its tokenizer."""

    core: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # "eos_token" -> text
    config: dict[str, Any]  # tokenizer_config.json


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """The tokenizer of a folder with tokenizer.json, or with vocab.json and merges.txt.

    Raises ModelError that says which file is missing or broken, and what to do.
    """
    config = _optional(folder / "tokenizer_config.json")
    model_type = _optional(folder / "config.json").get("model_type")
    kind = str(config.get("tokenizer_class") or _CLASSES.get(str(model_type), "")).removesuffix("Fast")
    whole = (folder / "tokenizer.json").is_file()
    core = _from_file(folder / "tokenizer.json") if whole else _from_vocabulary(folder, kind, config)
    defaults = {name: text for name, text in _DEFAULTS.get(kind, {}).items() if core.token_to_id(text) is not None}
    special = add_declared_tokens(
        core,
        {**defaults, **config},
        _optional(folder / "special_tokens_map.json"),
        _optional(folder / "added_tokens.json"),
    )
    if not whole:
        _set_ends(core, special, begin=config.get("add_bos_token") is True, end=config.get("add_eos_token") is True)
    elif kind == "GPTNeoXTokenizer" and model_type not in _CLASS_UNHEEDED:
        _set_ends(core, special)  # transformers takes no ends from these files, since its version 4
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = config.get("split_special_tokens") is True
    return TokenizerFiles(core, special, config)


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _from_file(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise ModelError(f"{path} is broken ({error!s:.200}); download it again") from error


def _from_vocabulary(folder: Path, kind: str, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE from GPT-2's two files."""
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not vocab.is_file() or not merges.is_file():
        raise ModelError(_missing(folder))
    try:
        core = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # as above
        raise ModelError(f"{vocab} and {merges.name} are broken ({error!s:.200}); download them again") from error
    core.decoder = decoders.ByteLevel()
    if kind == "Qwen2Tokenizer":
        core.pre_tokenizer = SPLITS["qwen2"].pre_tokenizer()
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.get("add_prefix_space") is True)
    if kind in ("Qwen2Tokenizer", "GPTNeoXTokenizer"):
        core.normalizer = normalizers.NFC()
    return core


def _missing(folder: Path) -> str:
    path = folder / "tokenizer.json"
    for name in ("tokenizer.model", "tiktoken.model", "tekken.json", "spiece.model"):
        if (folder / name).is_file():
            return f"{path} is missing, and {name} alone cannot be read; {_CONVERT.format(folder)}"
    return f"{path} is missing; download the model's tokenizer.json, or its vocab.json and merges.txt"


def _set_ends(
    core: tokenizers.Tokenizer, special: Mapping[str, str], *, begin: bool = False, end: bool = False
) -> None:
    """Begin and end tokens for every text, instead of what the tokenizer does by itself."""
    before = [special["bos_token"]] if begin and "bos_token" in special else []
    after = [special["eos_token"]] if end and "eos_token" in special else []
    core.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=["$A", "$B:1"],  # not used: a prompt is one text
        special_tokens=[(text, core.token_to_id(text)) for text in {*before, *after}],
    )
