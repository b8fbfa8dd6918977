"""The tokenizer of a GGUF file: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

The file has tokens, merges or scores, and the name of a split rule. The rest of what a tokenizer.json defines follows
llama.cpp's conventions.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Core

from quire.errors import QuireError, nearest
from quire.tokenizer.hf_files import SPLITS
from quire.tokenizer.panics import is_panic
from quire.tokenizer.tokenizer import Tokenizer
from quire.weights.gguf.reader import Metadata, read_header
from quire.weights.gguf.special_tokens import special_tokens

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # llama.cpp's token types
_MAX_PIECE = 1024  # characters of a SentencePiece token; longer ones get no merges
_MAX_PIECES = 1 << 24  # characters of all tokens; the largest vocabularies have two million
_SPACE = "▁"


def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a .gguf file. Raises ModelError."""
    header = read_header(path)
    return gguf_tokenizer(Metadata(header.metadata, header.path))


def gguf_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer of a file, with its special tokens and chat templates.

    Raises ModelError for an unsupported kind of tokenizer or split rule, and for missing or contradictory metadata.
    """
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise metadata.error(f"tokenizer.ggml.model {kind!r:.80} is not supported; supported: {', '.join(_KINDS)}")
    tokens = _tokens(metadata)
    types = metadata.numbers("tokenizer.ggml.token_type", int, len(tokens)) or [_NORMAL] * len(tokens)
    special = special_tokens(metadata)
    try:
        core = _KINDS[kind](metadata, tokens, types)
        _add_special(core, tokens, types)
        _add_bos_eos(core, metadata, tokens, special)
    except QuireError:
        raise
    except BaseException as error:  # the library raises no specific exception, and a panic is no Exception
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise metadata.error(f"the tokenizer is damaged ({error!s:.200}); get another file") from error
    texts = {name: tokens[token] for name, token in special.items()}
    return Tokenizer(core, special_tokens=texts, chat_template=_templates(metadata))


def _tokens(metadata: Metadata) -> list[str]:
    """All tokens by id. An empty token gets llama.cpp's name for it. Raises ModelError."""
    texts = metadata.texts("tokenizer.ggml.tokens")
    if not texts:
        raise metadata.error("tokenizer.ggml.tokens is missing; the file has no tokenizer, get another one")
    tokens = [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]
    seen: set[str] = set()
    for text in tokens:
        if text in seen:
            raise metadata.error(f"the tokenizer has the token {text!r:.80} twice; get another file")
        seen.add(text)
    return tokens


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Text -> id, without padding tokens, which fill the embedding and are not in the original tokenizer."""
    pairs = enumerate(tokens)
    return {text: token for token, text in pairs if types[token] != _UNUSED or text != f"[PAD{token}]"}


def _byte_level(metadata: Metadata, tokens: list[str], types: list[int]) -> Core:
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        hint = nearest(name, SPLITS)
        raise metadata.error(f"tokenizer.ggml.pre {name!r:.80} is not supported{hint}; supported: {', '.join(SPLITS)}")
    rule = SPLITS[name]
    merges = [_merge(text) for text in metadata.texts("tokenizer.ggml.merges")]
    core = Core(models.BPE(_vocabulary(tokens, types), merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = rule.pre_tokenizer()
    core.decoder = decoders.ByteLevel()
    return core


def _merge(text: str) -> tuple[str, str]:
    """The two parts of a merge, which a space separates. The first character is never the separator."""
    cut = text.index(" ", 1)
    return text[:cut], text[cut + 1 :]


def _sentencepiece(metadata: Metadata, tokens: list[str], types: list[int]) -> Core:
    scores = metadata.numbers("tokenizer.ggml.scores", float, len(tokens))
    if not scores:
        raise metadata.error("tokenizer.ggml.scores is missing; get another file")
    unknown = special_tokens(metadata).get("unk_token")
    core = Core(
        models.BPE(
            _vocabulary(tokens, types),
            _merges_by_score(metadata, tokens, types, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", default=True)
    begin = [normalizers.Prepend(_SPACE)] if prefix else []
    core.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    core.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return core


def _merges_by_score(
    metadata: Metadata, tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """All pairs of tokens that form a token, highest score first, the order in which SentencePiece merges."""
    pieces = {text: scores[i] for i, text in enumerate(tokens) if types[i] in (_NORMAL, _USER_DEFINED, _UNUSED)}
    if sum(map(len, pieces)) > _MAX_PIECES:
        raise metadata.error(f"the tokenizer's tokens have more than {_MAX_PIECES} characters")
    ranked = sorted((text for text in pieces if len(text) <= _MAX_PIECE), key=lambda text: -pieces[text])
    return [
        (text[:cut], text[cut:])
        for text in ranked
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]


def _add_special(core: Core, tokens: list[str], types: list[int]) -> None:
    """Add the tokens that are matched before a text is split. Control and unknown tokens are special."""
    control = [text for text, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    plain = [text for text, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])


def _add_bos_eos(core: Core, metadata: Metadata, tokens: list[str], special: Mapping[str, int]) -> None:
    """Set the post-processor that adds begin and end tokens to each text, if there are any."""
    is_sentencepiece = metadata.text("tokenizer.ggml.model") == "llama"
    rule = SPLITS.get(metadata.text("tokenizer.ggml.pre", "default"))
    begins = is_sentencepiece or (rule is not None and rule.add_bos)
    begin, end = (
        [tokens[special[name]]] if name in special and metadata.flag(key, default=default) else []
        for name, key, default in (
            ("bos_token", "tokenizer.ggml.add_bos_token", begins),
            ("eos_token", "tokenizer.ggml.add_eos_token", False),
        )
    )
    if begin or end:
        core.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            pair=["$A", "$B:1"],  # not used: a prompt is one text
            special_tokens=[(text, core.token_to_id(text)) for text in {*begin, *end}],
        )


def _templates(metadata: Metadata) -> dict[str, str]:
    """The chat templates by name. The file lists the names of all but the default one."""
    named = {name: f"tokenizer.chat_template.{name}" for name in metadata.texts("tokenizer.chat_templates")}
    keys = {"default": "tokenizer.chat_template", **named}
    return {name: metadata.text(key) for name, key in keys.items() if metadata.has(key)}


_KINDS: Mapping[str, Callable[[Metadata, list[str], list[int]], Core]] = MappingProxyType(
    {"gpt2": _byte_level, "llama": _sentencepiece}
)
