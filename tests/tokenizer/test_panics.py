"""Parts of a tokenizer that panic in the library, whose exception is no Exception: quire raises a ModelError."""

import json

import pytest
from small_tokenizers import KINDS, write_folder

from quire.errors import ModelError
from quire.tokenizer.detokenizer import Detokenizer
from quire.tokenizer.tokenizer import Tokenizer

STRIP = {"type": "Strip", "content": "a", "start": 1, "stop": 1}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": "AwAAAAAB"}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "missing", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"SpecialToken": {"id": "missing", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {},
}


def folder_with(tmp_path, **parts):
    folder = write_folder(tmp_path / "model", KINDS["gpt2"]())
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return folder


@pytest.mark.parametrize("decoder", [STRIP, {"type": "Sequence", "decoders": [STRIP]}], ids=["alone", "in a sequence"])
def test_a_decoder_that_panics_is_named(tmp_path, decoder):
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, decoder=decoder))
    token = tokenizer.convert_tokens_to_ids("a")
    for run in (
        lambda: tokenizer.decode([token]),
        lambda: tokenizer.token_bytes(token),
        lambda: tokenizer.token_text(token),
        lambda: Detokenizer(tokenizer).append_token(token),
        lambda: Detokenizer(tokenizer, [token]),
    ):
        with pytest.raises(ModelError, match=r"the tokenizer's decoder failed: .*; correct decoder in tokenizer.json"):
            run()


def test_a_decoder_that_panics_with_an_added_token_is_named_when_the_model_is_loaded(tmp_path):
    folder = folder_with(tmp_path, decoder=STRIP)
    (folder / "added_tokens.json").write_text('{"a": 64}')
    with pytest.raises(ModelError, match="the tokenizer's decoder failed"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("parts", "text", "name"),
    [
        ({"pre_tokenizer": SPLIT}, "a" * 40 + "b", "pre_tokenizer"),
        ({"normalizer": PRECOMPILED}, "abé", "normalizer"),
        ({"post_processor": TEMPLATE}, "a", "model or post_processor"),
    ],
)
def test_a_part_that_panics_with_a_text_is_named(tmp_path, parts, text, name):
    folder = folder_with(tmp_path, **parts, added_tokens=[])
    tokenizer = Tokenizer.from_folder(folder)
    for run in (lambda: tokenizer.encode(text), lambda: tokenizer.encode_pair(text, text)):
        with pytest.raises(ModelError, match=f"the tokenizer's {name} failed"):
            run()


def test_a_normalizer_that_panics_with_an_added_token_is_named(tmp_path):
    folder = folder_with(tmp_path, normalizer=PRECOMPILED)
    (folder / "added_tokens.json").write_text('{"é": 999}')
    with pytest.raises(ModelError, match="normalizer"):
        Tokenizer.from_folder(folder)


def test_an_interrupt_passes(tmp_path, monkeypatch):
    class Interrupted:
        normalizer = None

        def encode_batch_fast(self, texts, **options):
            raise KeyboardInterrupt

    tokenizer = Tokenizer.from_folder(folder_with(tmp_path))
    monkeypatch.setattr(tokenizer, "_core", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")
