"""The split rules of byte-level BPE by the names that GGUF files give them (`tokenizer.ggml.pre`).

A rule is what a model's own tokenizer.json says, so that texts split as in training; llama.cpp's names
stand for the same rules. A file with a name that is not here is refused: a text split by another rule
still encodes, only worse.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Regular expressions applied one after another; matches and what is between them become words."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False  # where the file does not say
    nfc: bool = False  # text is brought into Unicode's composed form first

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """As the `tokenizers` library has it."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_THREE_DIGITS = _WORDS % r"\p{N}{1,3}"
_ONE_DIGIT = _WORDS % r"\p{N}"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CASED = f"{_BEFORE}{_UPPER}*{_LOWER}+%s|{_BEFORE}{_UPPER}+{_LOWER}*%s"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_GPT4O = rf"{_CASED % (_CONTRACTION + '?', _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"

_RULES = (
    ("default", SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("gpt-2 phi-2 mpt olmo jais roberta-bpe gigachat", SplitRule((_GPT2,))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b", SplitRule((r"\p{N}", _GPT2))),
    ("falcon", SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("llama-bpe llama3 llama-v3 falcon3", SplitRule((_THREE_DIGITS,), ignore_merges=True, add_bos=True)),
    ("dbrx smaug-bpe chatglm-bpe", SplitRule((_THREE_DIGITS,))),
    ("qwen2", SplitRule((_ONE_DIGIT,), nfc=True)),
    ("stablelm2 megrez deepseek-r1-qwen", SplitRule((_ONE_DIGIT,))),
    ("tekken", SplitRule((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o", SplitRule((_GPT4O,))),
)
SPLITS: Mapping[str, SplitRule] = MappingProxyType({name: rule for names, rule in _RULES for name in names.split()})
