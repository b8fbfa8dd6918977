"""Tokenizers from GGUF files against their sources: `tokenizers` and sentencepiece."""

import io
import subprocess
import sys
from pathlib import Path

import gguf
import gguf_writer as gguf_files
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from quire.errors import ModelError, RequestError
from quire.hub import embedded
from quire.tokenizer.gguf import gguf_tokenizer
from quire.tokenizer.hf_files import SPLITS
from quire.weights.gguf.reader import Metadata, read_header

ROOT = Path(__file__).resolve().parents[2]
CORPUS = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("api.md", "models.md", "structured.md")]
CORPUS.append(
    "don't we'll I'M they'RE 1234567 3.14 Straße naïve 東京 日本語 Привет мир 😀🎉 ½ ² क्षि   \n\n\t x  \r\n !?…,;\n"
    * 20
)
BYTE_LEVEL = {"add_prefix_space": False, "use_regex": False}

# `pre` -> the pre-tokenizer in the tokenizer.json of a published model of that kind
PUBLISHED = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-bpe": pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        ), "isolated"),
        pre_tokenizers.ByteLevel(**BYTE_LEVEL),
    ]),
    "qwen2": pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        ), "isolated"),
        pre_tokenizers.ByteLevel(**BYTE_LEVEL),
    ]),
    "starcoder": pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]),
    "falcon": pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"[\p{P}$+<=>^~|`]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]),
    "gpt-4o": pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex("|".join([
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
        ])), "isolated"),
        pre_tokenizers.ByteLevel(**BYTE_LEVEL),
    ]),
}  # fmt: skip
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces   three\n\n\n\tand tabs\t\t",
    "DON'T don't I'LL we'Ve it's 'S'",
    "12345678 1 22 333 4,444.55 x1y22 ½²",
    "naïve Straße e\u0301 東京タワー Привет क्षि \U0001f468\u200d\U0001f469\u200d\U0001f467 \x00\x7f",
    "def f(x): return x**2  # ok\r\n\r\n<|im_start|>user\nhi<|im_end|>!",
    "a<|im_end|> b <think> c</think>",
    "<s>text</s> <unk><0x41>▁",
]
texts = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(CORPUS[-1].split(" ")), max_size=12).map(" ".join))


def loaded(path):
    header = read_header(path)
    return gguf_tokenizer(Metadata(header.metadata, path))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """`pre` -> (a tokenizer trained with that rule, quire's from a file)."""
    made = {}

    def get(pre):
        if pre not in made:
            core = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
            core.normalizer = normalizers.NFC() if pre == "qwen2" else None
            core.pre_tokenizer, core.decoder = PUBLISHED[pre], decoders.ByteLevel()
            special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
            alphabet = pre_tokenizers.ByteLevel.alphabet()
            core.train_from_iterator(
                CORPUS, trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet,
                                            show_progress=False)
            )  # fmt: skip
            core.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
            folder = tmp_path_factory.mktemp(pre)
            core.save(str(folder / "tokenizer.json"))
            writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
            gguf_files.add_byte_level(writer, folder / "tokenizer.json", pre, {"eos_token": "<|im_end|>"})
            gguf_files.finish(writer)
            made[pre] = core, loaded(folder / "model.gguf")
        return made[pre]

    return get


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_encodes_and_decodes_like_its_source(byte_level, pre):
    source, found = byte_level(pre)

    @given(text=texts)
    def check(text):
        ids = source.encode(text).ids
        assert found.encode(text) == ids
        assert found.decode(ids) == source.decode(ids, skip_special_tokens=False)

    for text in TEXTS:
        check.hypothesis.inner_test(text)
    check()


def test_ids_that_only_fill_up_the_vocabulary_decode_to_nothing(byte_level):
    source, found = byte_level("gpt-2")
    size = source.get_vocab_size()
    assert found.decode([0, size, size + 1]) == "<|endoftext|>"
    assert found.encode(f"[PAD{size}]") == source.encode(f"[PAD{size}]").ids


def test_special_tokens_of_the_file(byte_level):
    _, found = byte_level("qwen2")
    assert found.special_tokens == {"eos_token": "<|im_end|>"}
    assert found.eos_token_id == 2
    assert found.special_ids == {0, 1, 2}
    assert found.decode(found.encode("<think>a<|im_end|>"), skip_special_tokens=True) == "<think>a"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("seed-coder", ["a", "!!", "\r\n", "don", "'t", " b", "1", "2"]),
        ("hunyuan", ["a", "!!\r\n", "don", "'t", " b", "1", "2"]),
        ("hunyuan-dense", ["#include", "<y", ">\n", "123", "4", "東京語", "é", " !!"]),
        ("glm4", ["DON", "'T", " stop", " ", "123", "4"]),
        ("minimax-m2", ["DON'T", " stop", "Here", " ", "123", "4", "//\n"]),
        ("exaone4", ["DON", "'", "T", " stop", " 1234"]),
    ],
)
def test_words_of_a_rule(pre, pieces):
    text = "".join(pieces)
    found = SPLITS[pre].pre_tokenizer().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == pieces


@pytest.mark.parametrize("pre", SPLITS)
@given(text=texts)
def test_every_split_rule_keeps_every_character(pre, text):
    splits = SPLITS[pre].pre_tokenizer().pre_tokenize_str(text)
    alphabet = decoders.ByteLevel()
    assert alphabet.decode([piece for piece, _ in splits]) == text


def write(path, change=None, **keys):
    """Write a small tokenizer. Keys have no prefix."""
    writer = gguf.GGUFWriter(path, "llama")
    base = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab", "<s>", "</s>"], "merges": ["a b"],
            "token_type": [1, 1, 1, 3, 3], "bos_token_id": 3, "eos_token_id": 4}  # fmt: skip
    for key, value in (base | keys).items():
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
        if value is not None:
            add[type(value)](key if "." in key else f"tokenizer.ggml.{key}", value)
    gguf_files.finish(writer)
    return path


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [2]),
        ({"add_bos_token": True}, [3, 2]),
        ({"add_bos_token": True, "add_eos_token": True}, [3, 2, 4]),
        ({"pre": "llama-bpe"}, [3, 2]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [2]),
        ({"pre": "llama-bpe", "bos_token_id": None}, [2]),
    ],
)
def test_begin_and_end_tokens(tmp_path, keys, expected):
    tokenizer = loaded(write(tmp_path / "model.gguf", **keys))
    assert tokenizer.encode("ab") == expected
    assert tokenizer.encode("ab", add_special_tokens=False) == [2]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model 'rwkv' is not supported; supported: gpt2, llama"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"pre": "quen2"}, r"tokenizer.ggml.pre 'quen2' is not supported \(did you mean 'qwen2'\?\); supported: def"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ["a", "b", "ab", "a", "c"]}, "has the token 'a' twice"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type must be a list of 5 numbers, not a list of 2"),
        ({"merges": ["a c"]}, "the tokenizer is damaged"),
        ({"merges": ["ab"]}, "the tokenizer is damaged"),
        ({"eos_token_id": 5}, "eos_token_id is 5, but there are only 5 tokens"),
        ({"tokenizer.chat_template": 5}, "tokenizer.chat_template must be text, not 5"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_an_unusable_gguf_tokenizer_is_an_error_with_the_reason(tmp_path, keys, message):
    with pytest.raises(ModelError, match=message):
        loaded(write(tmp_path / "model.gguf", **keys))


def test_a_template_that_does_not_compile_refuses_conversations_only(tmp_path):
    tokenizer = loaded(write(tmp_path / "model.gguf", **{"tokenizer.chat_template": "a\n{% if"}))
    assert tokenizer.encode("ab") == [2]
    with pytest.raises(RequestError, match="line 2: "):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("keys", [{}, {"model": "llama", "scores": [0.0, 0.0, -1.0, 0.0, 0.0]}], ids=["gpt2", "llama"])
@pytest.mark.parametrize("flip", [0x80, 0x02])
def test_damage_anywhere_is_refused_or_harmless(tmp_path, keys, flip):
    good = write(tmp_path / "model.gguf", **keys).read_bytes()
    for position in range(len(good)):
        (tmp_path / "model.gguf").write_bytes(good[:position] + bytes([good[position] ^ flip]) + good[position + 1 :])
        try:
            found = loaded(tmp_path / "model.gguf")
        except ModelError as error:
            assert str(tmp_path) in str(error) or "template" in str(error)
        else:
            assert isinstance(found.decode(found.encode("ab a")), str)


def test_chat_templates_by_name(tmp_path):
    tokenizer = loaded(write(tmp_path / "model.gguf", **{
        "tokenizer.chat_template": "plain {{ messages[0].content }}{{ eos_token }}",
        "tokenizer.chat_template.tool_use": "tools {{ tools | length }}",
        "tokenizer.chat_templates": ["tool_use"],
    }))  # fmt: skip
    conversation = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert tokenizer.apply_chat_template(conversation) == "plain hi</s>"
    assert tokenizer.apply_chat_template(conversation, [tool]) == "tools 1"


def test_quires_own_model_through_a_file(tmp_path, tokenizer):
    found = loaded(gguf_files.write_gguf(embedded.folder(), tmp_path / "model.gguf", pre="smollm"))
    source = AutoTokenizer.from_pretrained(embedded.folder())
    for text in (*TEXTS, *CORPUS):
        assert found.encode(text) == source.encode(text)
    assert found.special_tokens == tokenizer.special_tokens
    conversation = [{"role": "user", "content": "Hello!"}]
    assert found.apply_chat_template(conversation) == tokenizer.apply_chat_template(conversation)


@pytest.fixture(scope="module", params=["prefix", "no prefix"])
def spm(request, tmp_path_factory):
    """(a SentencePiece BPE model with byte fallback, quire's tokenizer from a file)"""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines()),
        model_writer=model,
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=request.param == "prefix",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    source = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    path = tmp_path_factory.mktemp("spm") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    gguf_files.add_sentencepiece(writer, source)
    if request.param != "prefix":
        writer.add_bool("tokenizer.ggml.add_space_prefix", val=False)
    gguf_files.finish(writer)
    return source, loaded(path)


def test_sentencepiece_encodes_and_decodes_like_its_source(spm):
    source, found = spm

    @given(text=texts.filter(lambda text: "\0" not in text and "<" not in text))
    def check(text):
        ids = source.encode(text)
        assert found.encode(text, add_special_tokens=False) == ids
        assert found.encode(text) == [source.bos_id(), *ids]
        assert found.decode(ids) == text == source.decode(ids)

    for text in TEXTS[:7]:
        if "\0" not in text:
            check.hypothesis.inner_test(text)
    for line in CORPUS[0].splitlines()[:100]:
        if "<" not in line:
            check.hypothesis.inner_test(line)
    check()


def test_sentencepiece_control_tokens_in_a_text(spm):
    source, found = spm
    ids = found.encode("<s>a</s>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (source.bos_id(), source.eos_id())
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_unicode_is_composed_only_where_the_model_was_trained_so(byte_level):
    for pre, same in (("qwen2", True), ("llama-bpe", False)):
        _, found = byte_level(pre)
        assert (found.encode("e\u0301") == found.encode("\u00e9")) is same


def test_reading_the_tokenizer_imports_no_torch(tmp_path):
    path = gguf_files.write_gguf(embedded.folder(), tmp_path / "model.gguf", pre="smollm")
    script = """
import sys
from pathlib import Path
from quire.tokenizer.load import open_tokenizer
print(open_tokenizer(Path(sys.argv[1])).encode("Mira"), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script, path], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == f"{loaded(path).encode('Mira')} False"
