"""Small tokenizers of every kind used by language models, trained on a few sentences, and their folders."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Core

SENTENCES = [
    "The kettle stands on the shelf, and the tent hangs beside it; nobody's taken either since 1987.",
    "They'll ask: how much is 12345 + 678? I'd say 13023, but we've been wrong before!",
    "Der Kessel kostet 3,50 € — très cher, n'est-ce pas? Það er dýrt. Кто это купит? Ποιος;",
    "茶壶在架子上。帐篷挂在旁边。いくらですか。 हाँ, यह महँगा है। สวัสดี",
    "def total(items):\n    return sum(item.price for item in items)  # tabs\tand   spaces\r\n\r\n",
    "kettle kettle kettle tent tent shelf shelf 😀😀 👩‍👩‍👧 naïve naïve",
] * 4
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
ENDS = ["<unk>", "<s>", "</s>"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def gpt2() -> Core:
    """Byte-level BPE with GPT-2's rule."""
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def llama3() -> Core:
    """Byte-level BPE that looks up whole words before merges, with numbers in threes and a begin token."""
    core = _byte_level(_split(LLAMA3_SPLIT), ignore_merges=True)
    begin = processors.TemplateProcessing(
        single=["<|im_start|>", "$A"],
        pair=["$A", "$B:1"],
        special_tokens=[("<|im_start|>", core.token_to_id("<|im_start|>"))],
    )
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return core


def qwen() -> Core:
    """Byte-level BPE over composed characters, with numbers digit by digit."""
    return _byte_level(_split(QWEN_SPLIT), normalizer=normalizers.NFC())


def digits() -> Core:
    """Byte-level BPE with a rule that no transformers class has, as in StarCoder 2 and DeepSeek."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words]))


def prepend() -> Core:
    """SentencePiece BPE in the older format: a normalizer replaces the spaces."""
    core = _sentencepiece_bpe()
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return core


def metaspace() -> Core:
    """SentencePiece BPE in the newer format, as transformers 5 writes it for a LlamaTokenizer."""
    core = _sentencepiece_bpe()
    core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    return core


def gemma() -> Core:
    """SentencePiece BPE that neither adds nor drops a space before a text."""
    core = _sentencepiece_bpe()
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def unigram() -> Core:
    """Unigram with byte tokens."""
    core = Core(models.Unigram([*_bytes_scored(), *_unigram_pieces()], unk_id=0, byte_fallback=True))
    core.add_special_tokens(ENDS)
    core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="always")])
    return _with_ends(core)


def unigram_unk() -> Core:
    """Unigram without byte tokens: unknown characters are lost."""
    core = Core(models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *_unigram_pieces()], unk_id=0))
    core.add_special_tokens(ENDS)
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return _with_ends(core)


KINDS: Mapping[str, Callable[[], Core]] = {
    build.__name__: build for build in (gpt2, llama3, qwen, digits, prepend, metaspace, gemma, unigram, unigram_unk)
}


def write_folder(folder: Path, core: Core | None = None, **files: object) -> Path:
    """Write a folder with tokenizer.json and other JSON files; `tokenizer_config={...}` is tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    if core is not None:
        core.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def split_vocabulary(core: Core, folder: Path) -> None:
    """Replace tokenizer.json by GPT-2's two files. Added tokens are in the vocabulary, as in OPT's."""
    model = json.loads(core.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _split(rule: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(rule), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _byte_level(rule: pre_tokenizers.PreTokenizer, normalizer=None, *, ignore_merges: bool = False) -> Core:
    core = Core(models.BPE(ignore_merges=ignore_merges))
    core.pre_tokenizer = rule
    if normalizer is not None:
        core.normalizer = normalizer
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES, trainer)
    return core


def _sentencepiece_bpe() -> Core:
    vocab, merges = _bpe_pieces()
    core = Core(models.BPE(dict(vocab), list(merges), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.add_special_tokens(ENDS)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_ends(core)


def _with_ends(core: Core) -> Core:
    core.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], pair=["$A", "$B:1"], special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    core.add_tokens([AddedToken("[TOOL]", special=True, rstrip=True), AddedToken("<think>", normalized=False)])
    return core


@cache
def _bpe_pieces() -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, str], ...]]:
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    latin = [sentence for sentence in SENTENCES if sentence.isascii()]  # byte tokens represent other letters
    core.train_from_iterator(latin, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(core.to_str())["model"]
    learnt = sorted(model["vocab"], key=model["vocab"].get)
    pieces = [*ENDS, *_bytes(), *learnt]
    return tuple((piece, i) for i, piece in enumerate(pieces)), tuple((a, b) for a, b in model["merges"])


@cache
def _unigram_pieces() -> tuple[tuple[str, float], ...]:
    core = Core(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    latin = [sentence for sentence in SENTENCES if sentence.isascii()]
    core.train_from_iterator(latin, trainers.UnigramTrainer(vocab_size=150, show_progress=False))
    return tuple((piece, score) for piece, score in json.loads(core.to_str())["model"]["vocab"])


def _bytes() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _bytes_scored() -> list[tuple[str, float]]:
    return [(piece, 0.0) for piece in (*ENDS, *_bytes())]
