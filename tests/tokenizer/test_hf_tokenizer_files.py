"""Tokenizer settings in a model folder's files, against transformers on the same folder."""

import pytest
from small_tokenizers import KINDS, SPECIAL, split_vocabulary, write_folder
from tokenizers import AddedToken, normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quire.errors import ModelError
from quire.tokenizer.tokenizer import Tokenizer

TEXT = "The kettle costs 1234 naïve  e\u0301 茶壶 <x>y <x> <|im_end|>\n z"
CLASSES = [
    ("LlamaTokenizer", "metaspace"),
    ("LlamaTokenizerFast", "metaspace"),
    ("LlamaTokenizerFast", "llama3"),
    ("GemmaTokenizer", "gemma"),
    ("GemmaTokenizerFast", "gemma"),
    ("GPT2Tokenizer", "gpt2"),
    ("GPT2TokenizerFast", "gpt2"),
    ("CodeGenTokenizer", "gpt2"),
    ("Qwen2Tokenizer", "qwen"),
    ("Qwen2TokenizerFast", "qwen"),
    ("GPTNeoXTokenizer", "neox"),
    ("GPTNeoXTokenizerFast", "neox"),
    ("PreTrainedTokenizerFast", "prepend"),
    ("PreTrainedTokenizerFast", "digits"),
    ("TokenizersBackend", "unigram"),
    (None, "llama3"),
]
PIECES = [["$A"], ["BOS", "$A"], ["$A", "EOS"], ["BOS", "$A", "EOS"]]


def ends_of(kind: str) -> dict[str, str]:
    first, second = SPECIAL[:2] if KINDS[kind]().token_to_id("<s>") is None else ("<s>", "</s>")
    return {"BOS": first, "EOS": second}


def core_of(kind: str):
    core = KINDS["gpt2" if kind == "neox" else kind]()
    if kind == "neox":
        core.normalizer = normalizers.NFC()
    return core


def assert_same(folder, *texts: str):
    ours, reference = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in (TEXT, "kettle", "", *texts):
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == reference.encode(text, add_special_tokens=special)
            assert ours.decode(ids, special) == reference.decode(ids, skip_special_tokens=special)
    assert ours.eos_token_id == reference.eos_token_id
    assert ours.bos_token_id == reference.bos_token_id
    return ours, reference


@pytest.mark.parametrize("pieces", PIECES, ids="-".join)
@pytest.mark.parametrize("configured", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize(("name", "kind"), CLASSES)
def test_ends_are_added_as_transformers_add_them(tmp_path, name, kind, configured, pieces):
    core = core_of(kind)
    ends = ends_of("gpt2" if kind == "neox" else kind)
    core.post_processor = processors.TemplateProcessing(
        single=[ends.get(piece, piece) for piece in pieces],
        pair=["$A", "$B:1"],
        special_tokens=[(text, core.token_to_id(text)) for text in ends.values()],
    )
    config = {"bos_token": ends["BOS"], "eos_token": ends["EOS"], **configured}
    write_folder(tmp_path, core, tokenizer_config=config if name is None else {**config, "tokenizer_class": name})
    ours, _ = assert_same(tmp_path)
    bare = ours.encode("kettle", add_special_tokens=False)
    added = 0 if kind == "neox" else len(pieces) - 1
    assert len(ours.encode("kettle")) == len(bare) + added


@pytest.mark.parametrize("model_type", ["llama", "mistral", "stablelm", "olmo", "gpt_neox", "qwen2", "opt", None])
@pytest.mark.parametrize("name", ["GPTNeoXTokenizerFast", "PreTrainedTokenizerFast", None])
def test_the_model_type_counts(tmp_path, name, model_type):
    core = KINDS["qwen"]() if model_type == "qwen2" else KINDS["gpt2"]() if model_type == "opt" else core_of("neox")
    core.post_processor = processors.TemplateProcessing(
        single=["$A", "<|im_end|>"], pair=["$A", "$B:1"], special_tokens=[("<|im_end|>", 1)]
    )
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    write_folder(tmp_path, core, tokenizer_config=config if name is None else {**config, "tokenizer_class": name})
    if model_type is not None:
        write_folder(tmp_path, config={"model_type": model_type})
    ours = Tokenizer.from_folder(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("the kettle") == reference.encode("the kettle")


@pytest.mark.parametrize(
    ("name", "kind"), [("LlamaTokenizer", "prepend"), ("GPT2Tokenizer", "digits"), ("Qwen2Tokenizer", "llama3")]
)
def test_the_file_counts_where_the_class_says_otherwise(tmp_path, name, kind):
    """transformers 5 rebuilds these and loses settings of the file; the model was trained with the file's."""
    write_folder(tmp_path, KINDS[kind](), tokenizer_config={"tokenizer_class": name})
    ours = Tokenizer.from_folder(tmp_path)
    by_class = AutoTokenizer.from_pretrained(tmp_path)
    by_file = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = "  12345</s>kettle e\u0301"
    assert ours.encode(text) == by_file.encode(text) != by_class.encode(text)


@pytest.mark.parametrize("ends", [{}, {"add_bos_token": True}, {"add_eos_token": True, "add_bos_token": True}])
@pytest.mark.parametrize(
    ("name", "kind", "model_type"),
    [
        ("GPT2Tokenizer", "gpt2", "opt"),
        ("GPT2Tokenizer", "gpt2", None),
        (None, "gpt2", "gpt2"),
        ("Qwen2Tokenizer", "qwen", "qwen2"),
        (None, "qwen", "qwen3"),
    ],
)
def test_vocabulary_and_merges(tmp_path, name, kind, model_type, ends):
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", **ends}
    write_folder(tmp_path, tokenizer_config=config if name is None else {**config, "tokenizer_class": name})
    if model_type is not None:
        write_folder(tmp_path, config={"model_type": model_type})
    split_vocabulary(KINDS[kind](), tmp_path)
    ours, _ = assert_same(tmp_path)
    assert len(ours.encode("")) == len(ends)
    assert ours.encode(" <|im_end|>", add_special_tokens=False)[-1] == 1


def test_vocabulary_and_merges_of_opt(tmp_path):
    """</s> is the begin token: a small version of the OPT folder."""
    token = {"content": "<|im_end|>", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    typed = {"__type": "AddedToken", **token}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": typed, "eos_token": typed}
    names = {"bos_token": token, "eos_token": token, "unk_token": token}
    split_vocabulary(KINDS["gpt2"](), tmp_path)
    write_folder(tmp_path, tokenizer_config=config, special_tokens_map=names, config={"model_type": "opt"})
    ours, _ = assert_same(tmp_path)
    assert ours.convert_ids_to_tokens(ours.encode("kettle")) == ["<|im_end|>", "kettle"]


def test_a_prefix_space(tmp_path):
    split_vocabulary(KINDS["gpt2"](), tmp_path)
    write_folder(tmp_path, tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True})
    ours, _ = assert_same(tmp_path)
    assert ours.convert_ids_to_tokens(ours.encode("kettle")) == ["Ġkettle"]


X = {"content": "<x>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": True}
DECLARED = {
    "listed": {"tokenizer_config": {"added_tokens_decoder": {"500": X}}},
    "listed, stripping": {"tokenizer_config": {"added_tokens_decoder": {"500": {**X, "rstrip": True}}}},
    "listed, a whole word": {"tokenizer_config": {"added_tokens_decoder": {"500": {**X, "single_word": True}}}},
    "listed, not special": {"tokenizer_config": {"added_tokens_decoder": {"500": {**X, "special": False}}}},
    "listed and named": {
        "tokenizer_config": {"added_tokens_decoder": {"500": {**X, "special": False}}, "pad_token": "<x>"}
    },
    "listed in two": {
        "tokenizer_config": {
            "added_tokens_decoder": {"501": X, "500": {**X, "content": "z"}, "1": {**X, "content": "y"}}
        }
    },
    "other flags than the file": {
        "tokenizer_config": {"added_tokens_decoder": {"1": {**X, "content": "<|im_end|>", "rstrip": True}}}
    },
    "named": {"tokenizer_config": {"pad_token": "<x>", "sep_token": "z"}},
    "named, with flags": {"tokenizer_config": {"pad_token": {"__type": "AddedToken", **X}}},
    "named by the model": {"tokenizer_config": {"image_token": "<x>", "add_bos_token": True}},
    "additional": {"tokenizer_config": {"additional_special_tokens": ["<x>", "z"]}},
    "additional, with flags": {"tokenizer_config": {"additional_special_tokens": [{"__type": "AddedToken", **X}]}},
    "extra": {"tokenizer_config": {"extra_special_tokens": ["<x>"]}},
    "extra, named": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<x>"}}},
    "map": {"special_tokens_map": {"pad_token": "<x>", "additional_special_tokens": ["z"]}},
    "map, with flags": {"special_tokens_map": {"pad_token": {k: v for k, v in X.items() if k != "special"}}},
    "map after configuration": {"tokenizer_config": {"eos_token": "z"}, "special_tokens_map": {"eos_token": "<x>"}},
    "no map where tokens are listed": {
        "tokenizer_config": {"eos_token": "z", "added_tokens_decoder": {}},
        "special_tokens_map": {"eos_token": "<x>"},
    },
    "older list": {"added_tokens": {"z": 501, "<x>": 500}},
    "older list of special ones": {"added_tokens": {"<x>": 500}, "special_tokens_map": {"eos_token": "<x>"}},
    "none is split": {"tokenizer_config": {"pad_token": "<x>", "split_special_tokens": True}},
}


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "prepend", "unigram"])
@pytest.mark.parametrize("files", DECLARED.values(), ids=DECLARED.keys())
def test_declared_tokens(tmp_path, kind, files):
    write_folder(tmp_path, KINDS[kind](), **files)
    ours, reference = assert_same(tmp_path, "a<x>b <x> c", "xz z<x>z yzy <|im_end|>  ", "word<x> <x>word")
    assert ours.vocab_size == len(reference)
    assert ours.special_ids == {i for i in ours.added_ids if not reference.decode([i], skip_special_tokens=True)}
    assert {name: text for name, text in ours.special_tokens.items() if text} == reference.special_tokens_map


@pytest.mark.parametrize("kind", ["gpt2", "prepend"])
def test_flags_in_tokenizer_json(tmp_path, kind):
    core = KINDS[kind]()
    core.add_tokens(
        [
            AddedToken("<x>", lstrip=True, special=True),
            AddedToken("z", single_word=True),
            AddedToken("é", normalized=True),
            AddedToken("   "),
        ]
    )
    write_folder(tmp_path, core)
    assert_same(tmp_path, "a <x> b", "z zz z", "é e\u0301", "a   b")


def test_a_vocabulary_with_holes(tmp_path):
    """Ids that the model has and the tokenizer has not, and vice versa."""
    write_folder(tmp_path, KINDS["gpt2"](), tokenizer_config={"pad_token": "<x>"}, config={"vocab_size": 640})
    ours, reference = assert_same(tmp_path)
    assert ours.vocab_size == 501
    assert ours.convert_tokens_to_ids(["<x>", "nothing"]) == [500, None]
    assert ours.decode([67, 639, 67]) == reference.decode([67, 639, 67])
    assert ours.token_text(639) == ""


def test_names_that_the_class_gives(tmp_path):
    """GPT-2's own folder names no special token."""
    split_vocabulary(KINDS["gpt2"](), tmp_path)
    write_folder(tmp_path, config={"model_type": "gpt2"}, tokenizer_config={"model_max_length": 1024})
    ours, reference = assert_same(tmp_path)
    assert ours.special_tokens == reference.special_tokens_map
    assert ours.eos_token_id == 2
    write_folder(tmp_path, tokenizer_config={"eos_token": None, "bos_token": "<|im_start|>"})
    assert "eos_token" not in Tokenizer.from_folder(tmp_path).special_tokens


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GemmaTokenizer", "GPTNeoXTokenizer"])
def test_names_that_the_vocabulary_lacks_are_not_made_up(tmp_path, name):
    write_folder(tmp_path, KINDS["gpt2"](), tokenizer_config={"tokenizer_class": name})
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.vocab_size == 500
    assert ours.bos_token_id == (2 if name == "GPTNeoXTokenizer" else None)


def test_truncation_and_padding_of_the_file_are_left_out(tmp_path):
    core = KINDS["gpt2"]()
    core.enable_truncation(4)
    core.enable_padding(length=9)
    write_folder(tmp_path, core)
    ours, _ = assert_same(tmp_path)
    assert len(ours.encode("a")) == 1
    assert len(ours.encode("The kettle costs 1234")) > 4


@pytest.mark.parametrize("present", ["tokenizer.model", "tekken.json", "tiktoken.model"])
def test_a_sentencepiece_file_alone_is_an_error_with_the_conversion_command(tmp_path, present):
    (tmp_path / present).write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(
        ModelError, match=rf"{present} alone cannot be read; convert it once: python -c .*save_pretrained"
    ):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("vocab.json", None, "missing"),
        ("merges.txt", None, "missing"),
        ("vocab.json", b"[]", "broken"),
        ("vocab.json", b"\xff", "broken"),
        ("merges.txt", b"a", "broken"),
        ("merges.txt", b"kettle tent", "broken"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": []}', "added_tokens_decoder"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"0": "a"}}', "added_tokens_decoder"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "a"}}}', "whole number"),
        ("tokenizer_config.json", b'{"eos_token": {"text": "a"}}', "special token"),
        ("tokenizer_config.json", b'{"extra_special_tokens": [3]}', "special token"),
        ("tokenizer_config.json", b'{"extra_special_tokens": 3}', "special token"),
        ("tokenizer_config.json", b'{"extra_special_tokens": {"a": 3}}', "special token"),
        ("special_tokens_map.json", b'{"eos_token": []}', "special token"),
        ("special_tokens_map.json", b"[]", "JSON object"),
        ("added_tokens.json", b'{"a": "b"}', "whole number"),
        ("config.json", b"{", "not valid JSON"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, says):
    split_vocabulary(KINDS["gpt2"](), tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=says):
        Tokenizer.from_folder(tmp_path)
