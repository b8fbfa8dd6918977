"""Reader of the tokenizer files of a Hugging Face model folder.

tokenizer.json defines how text is split and whether it gets begin and end tokens. tokenizer_config.json only adds
special tokens, as in transformers 5. But if tokenizer_class has a constructor of its own (LlamaTokenizer,
GPT2Tokenizer, Qwen2Tokenizer, ...), transformers 5 rebuilds the tokenizer and ignores the file's normalizer, splitter
and decoder. quire uses the file, because the model was trained with it. The two differ only if the class is wrong, or
if the older SentencePiece form puts a space after a special token, as Llama 2's own code does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from quire.errors import ModelError
from quire.tokenizer.panics import NoPanics
from quire.weights.json_file import read_json_object

_STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_declared_tokens(
    core: tokenizers.Tokenizer, config: Mapping[str, Any], special_map: Mapping[str, Any], added: Mapping[str, Any]
) -> dict[str, str]:
    """Add declared tokens that `core` lacks, and return the named tokens: "eos_token" -> text.

    The mappings are the contents of tokenizer_config.json, special_tokens_map.json and added_tokens.json.
    Raises ModelError for an invalid token.
    """
    listed = config.get("added_tokens_decoder")
    fields = config if listed is not None else {**config, **special_map}
    extra = fields.get("extra_special_tokens") or fields.get("additional_special_tokens") or []
    named = _named(fields)
    if isinstance(extra, Mapping):  # named tokens
        named |= {str(name): _token(value, special=True) for name, value in extra.items()}
        extra = []
    if not isinstance(extra, list):
        raise ModelError("the extra special tokens of a folder must be a list, or an object of named ones")
    special = [*named.values(), *(_token(value, special=True) for value in extra)]
    if listed is None:
        _add(core, (*_older(added, special), *special))
    else:
        _add(core, special, _listed(listed, special))
    return {name: token.content for name, token in named.items()}


def _add(core: tokenizers.Tokenizer, missing: Iterable[AddedToken], exact: Iterable[AddedToken] = ()) -> None:
    """Add the tokens of `missing` that `core` lacks, and those of `exact` that it lacks or has with other flags."""
    have = core.get_added_tokens_decoder().values()
    flags = {_flags(token) for token in have}
    new = {token.content: token for token in exact if _flags(token) not in flags}
    known = {token.content for token in have} | new.keys()
    for token in missing:
        if token.content not in known:
            new.setdefault(token.content, token)
    core.add_tokens(list(new.values()))


def _named(fields: Mapping[str, Any]) -> dict[str, AddedToken]:
    names = [name for name in _STANDARD_NAMES if fields.get(name) is not None]
    own = (name for name in fields if name.endswith("_token") and name not in _STANDARD_NAMES)
    names += [name for name in own if isinstance(fields[name], str) or _is_token(fields[name])]
    return {name: _token(fields[name], special=True) for name in names}


def _listed(listed: object, special: Iterable[AddedToken]) -> list[AddedToken]:
    """The tokens of added_tokens_decoder in tokenizer_config.json (id -> token with flags), by id."""
    contents = {token.content for token in special}
    if not isinstance(listed, Mapping) or not all(_is_token(value) for value in listed.values()):
        raise ModelError("added_tokens_decoder in tokenizer_config.json must list tokens by their ids")
    ordered = [listed[key] for key in sorted(listed, key=_id)]
    return [_token(value, special=value["content"] in contents or value.get("special") is True) for value in ordered]


def _older(added: Mapping[str, Any], special: Iterable[AddedToken]) -> list[AddedToken]:
    """The tokens of added_tokens.json (text -> id), by id."""
    contents = {token.content for token in special}
    return [AddedToken(text, special=text in contents) for text in sorted(added, key=lambda text: _id(added[text]))]


def _id(value: object) -> int:
    if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()):
        return int(value)
    raise ModelError(f"the id of an added token must be a whole number, not {value!r:.80}")


def _is_token(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("content"), str)


def _token(value: object, *, special: bool) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special)
    if isinstance(value, Mapping) and _is_token(value):
        flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
        return AddedToken(value["content"], **{**flags, "special": special})
    raise ModelError(f"a special token must be a string, or an object with its content, not {value!r:.80}")


def _flags(token: AddedToken) -> tuple[object, ...]:
    return (token.content, *(getattr(token, name) for name in _FLAGS))


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Regular expressions, applied one after another. Matches and the texts between them become words."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is not split
    add_bos: bool = False  # if the file does not set add_bos_token
    nfc: bool = False  # text is normalized to NFC first

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer of the `tokenizers` library."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_THREE_DIGITS = _WORDS % r"\p{N}{1,3}"
_ONE_DIGIT = _WORDS % r"\p{N}"

_SEED = _ONE_DIGIT.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}]+")  # symbols without the ends of lines
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CASED = f"{_BEFORE}{_UPPER}*{_LOWER}+%s|{_BEFORE}{_UPPER}+{_LOWER}*%s"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_GPT4O = rf"{_CASED % (_CONTRACTION + '?', _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"

_RULES = (
    ("default", SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("gpt-2 phi-2 mpt olmo jais roberta-bpe gigachat exaone4", SplitRule((_GPT2,))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b", SplitRule((r"\p{N}", _GPT2))),
    ("falcon", SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("llama-bpe llama3 llama-v3 falcon3 pixtral", SplitRule((_THREE_DIGITS,), ignore_merges=True, add_bos=True)),
    ("dbrx smaug-bpe chatglm-bpe", SplitRule((_THREE_DIGITS,))),
    ("glm4", SplitRule((_THREE_DIGITS,), ignore_merges=True)),
    ("qwen2", SplitRule((_ONE_DIGIT,), nfc=True)),
    ("stablelm2 megrez deepseek-r1-qwen hunyuan", SplitRule((_ONE_DIGIT,))),
    ("seed-coder", SplitRule((_SEED,))),
    ("hunyuan-dense", SplitRule((r"\p{N}{1,3}", _CJK, _DEEPSEEK))),
    ("tekken", SplitRule((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o minimax-m2", SplitRule((_GPT4O,))),
)
SPLITS: Mapping[str, SplitRule] = MappingProxyType({name: rule for names, rule in _RULES for name in names.split()})


_CLASSES = {  # model_type -> the tokenizer class if the folder names none
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "phi", "codegen", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt", "olmo", "olmoe", "mamba", "mamba2", "falcon_mamba"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
}
_CLASS_IGNORED = frozenset(  # model types for which transformers ignores the folder's tokenizer class
    {"granite", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "phi3", "phimoe", "qwen2", "stablelm"}
)
_END_OF_TEXT = "<|endoftext|>"
_DEFAULTS: Mapping[str, Mapping[str, str]] = MappingProxyType(  # class -> special tokens if the folder names none
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
    """The tokenizer of a folder."""

    core: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # "eos_token" -> text
    config: dict[str, Any]  # tokenizer_config.json


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """The tokenizer of a folder with tokenizer.json, or with vocab.json and merges.txt.

    Raises ModelError that says which file is missing or broken, and what to do.
    """
    with NoPanics("added tokens, normalizer or model"):
        return _read_tokenizer(folder)


def _read_tokenizer(folder: Path) -> TokenizerFiles:
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
        _set_bos_eos(core, special, begin=config.get("add_bos_token") is True, end=config.get("add_eos_token") is True)
    elif kind == "GPTNeoXTokenizer" and model_type not in _CLASS_IGNORED:
        _set_bos_eos(core, special)  # since version 4 transformers ignores begin and end tokens of these files
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = config.get("split_special_tokens") is True
    return TokenizerFiles(core, special, config)


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _from_file(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no specific exception
        raise ModelError(f"{path} is broken ({error!s:.200}); download it again") from error


def _from_vocabulary(folder: Path, kind: str, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE from vocab.json and merges.txt. Raises ModelError."""
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


def _set_bos_eos(
    core: tokenizers.Tokenizer, special: Mapping[str, str], *, begin: bool = False, end: bool = False
) -> None:
    """Replace the post-processor: each text gets the begin token, the end token, both or none."""
    before = [special["bos_token"]] if begin and "bos_token" in special else []
    after = [special["eos_token"]] if end and "eos_token" in special else []
    core.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=["$A", "$B:1"],  # not used: a prompt is one text
        special_tokens=[(text, core.token_to_id(text)) for text in {*before, *after}],
    )
