"""Public prefixes: validation of their file, and options of the prefix cache in its configuration."""

import json
import re
from pathlib import Path

import pytest
from embedded_model_server import CHAT
from small_tokenizers import KINDS

from quire.config import EngineOptions
from quire.engine import shared_prefixes as module
from quire.engine.shared_prefixes import PrefixLimits, read_public_prefixes
from quire.errors import ConfigError
from quire.startup.build import prepare
from quire.tokenizer.tokenizer import Tokenizer

BOUNDS = PrefixLimits(vocab_size=512, max_model_len=64, block_size=1)
SYSTEM = [{"role": "system", "content": "You are Pip."}]


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "public.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return str(path)

    return write


def test_the_three_forms(written, tokenizer):
    path = written(["Once upon a time", {"prompt_token_ids": [5, 6, 7]}, {"messages": SYSTEM}])
    text, ids, conversation = read_public_prefixes(path, tokenizer, PrefixLimits(tokenizer.vocab_size, 512, 1))
    assert list(text) == tokenizer.encode("Once upon a time")
    assert ids == (5, 6, 7)
    assert tokenizer.decode(conversation) == tokenizer.apply_chat_template(SYSTEM, add_generation_prompt=False)
    whole = tokenizer.encode(tokenizer.apply_chat_template([*SYSTEM, *CHAT]), add_special_tokens=False)
    assert tuple(whole[: len(conversation)]) == conversation


@pytest.mark.parametrize("kind", ["llama3", "metaspace"])
def test_texts_begin_as_prompts_of_completions_do(written, kind):
    tokenizer = Tokenizer(KINDS[kind]())
    (prefix,) = read_public_prefixes(written(["the kettle"]), tokenizer, PrefixLimits(tokenizer.vocab_size, 64, 1))
    assert list(prefix) == tokenizer.encode("the kettle") != tokenizer.encode("the kettle", add_special_tokens=False)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        ({}, "must hold a list"),
        ("text", "must hold a list"),
        (["a"] * 257, "257 prefixes, more than 256"),
        (b" " * (2**24 + 1), "longer than 16777216 bytes"),
        (["a", 3], "entry 1 .*must be a string"),
        (["a", None], "entry 1 .*must be a string"),
        ([[5, 6]], "entry 0 .*must be a string"),
        ([{}], "one of prompt_token_ids or messages"),
        ([{"prompt_token_ids": [5], "messages": SYSTEM}], "one of prompt_token_ids or messages"),
        ([{"prompt_token_id": [5]}], "did you mean 'prompt_token_ids'"),
        ([{"prompt_token_ids": []}], "entry 0 .*empty"),
        ([""], "entry 0 .*empty"),
        ([{"prompt_token_ids": "5"}], "list of whole numbers"),
        ([{"prompt_token_ids": [True]}], "list of whole numbers"),
        ([{"prompt_token_ids": [-1]}], "between 0"),
        ([{"prompt_token_ids": [512]}], r"512 is out of vocabulary, which has 512 tokens \(0 to 511\)"),
        ([{"prompt_token_ids": [5] * 64}], "64 tokens"),
        ([{"messages": []}], "at least one message"),
        ([{"messages": "hello"}], "at least one message"),
        ([{"messages": [{"role": "user"}]}], "needs content"),
        (b'["\\ud800"]', "not valid Unicode"),
    ],
)
def test_a_bad_file_is_refused_with_what_and_where(written, tokenizer, content, says):
    path = written(content)
    with pytest.raises(ConfigError, match=says) as refused:
        read_public_prefixes(path, tokenizer, BOUNDS)
    assert path in str(refused.value)
    assert str(refused.value).startswith("public_prefixes: ")


def test_a_prefix_that_fills_no_block_is_refused(prepared, written):
    path = written([{"prompt_token_ids": [7] * 16}, {"prompt_token_ids": [5] * 15}])
    with pytest.raises(ConfigError, match=r"entry 1 .* 15 tokens, less than a block of 16 .*make it longer"):
        prepared(public_prefixes=path)
    assert len(prepared(public_prefixes=path, block_size=8, kernels="reference")[0].cache.public_prefixes) == 2


def test_the_example_of_the_page(prepared, written):
    page = (Path(__file__).resolve().parents[2] / "docs" / "tenants.md").read_text()
    (example,) = re.findall("```json\n(.*?)```", page, re.DOTALL)
    assert len(prepared(public_prefixes=written(example.encode()))[0].cache.public_prefixes) == 3


def test_the_largest_allowed_file_of_public_prefixes_is_read(written, tokenizer):
    longest = [{"prompt_token_ids": [511] * 63}] * module.MAX_PREFIXES
    assert read_public_prefixes(written(longest), tokenizer, BOUNDS) == ((511,) * 63,) * 256


def test_a_file_that_is_not_there(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_public_prefixes(tmp_path / "none.json", tokenizer, BOUNDS)


@pytest.fixture
def prepared():
    """The resolved configuration for some options, and the report's lines about prefixes."""

    def prepare_with(**options):
        lines = []
        small = EngineOptions(memory="256MiB", max_num_seqs=4, max_model_len=256, **options)
        made = prepare(small, report=lines.append, progress=lambda done, total: None)
        return made, [line for line in lines if line.startswith("prefixes")]

    return prepare_with


@pytest.mark.parametrize(
    ("options", "kind", "line"),
    [
        ({}, "radix", "prefixes   radix index, exact to the token"),
        ({"prefix_index": "hash"}, "hash", "prefixes   hash index, whole blocks of 16 tokens"),
        ({"prefix_index": "hash", "block_size": 32}, "hash", "prefixes   hash index, whole blocks of 32 tokens"),
        ({"enable_prefix_caching": False}, "none", "prefixes   no prefix cache: enable_prefix_caching is off"),
    ],
)
def test_the_prefix_index_is_chosen_and_reported(prepared, options, kind, line):
    made, lines = prepared(**options)
    assert (made.cache.prefix_index, made.cache.public_prefixes, lines) == (kind, (), [line])


def test_public_prefixes_reach_the_configuration(prepared, written):
    path = written([{"prompt_token_ids": [5] * 33}, {"prompt_token_ids": [7] * 16}])
    made, (line,) = prepared(public_prefixes=path)
    assert made.cache.public_prefixes == ((5,) * 33, (7,) * 16)
    assert line.endswith("; 2 public ones, 3 whole blocks of 16 tokens")
    with pytest.raises(ConfigError, match=r"entry 0 .*256"):
        prepared(public_prefixes=written([{"prompt_token_ids": [5] * 256}]))
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        prepared(public_prefixes=path, enable_prefix_caching=False)


def test_options_are_kept_as_they_were_resolved(prepared):
    made, _ = prepared(dtype="float")
    options = made.options
    assert (options.dtype, options.kv_cache_dtype, options.device) == ("float32", "float32", made.device)
    assert (options.max_model_len, options.kernels, options.memory) == (256, "cpu", "256MiB")
    assert prepare(options, report=lambda line: None, progress=lambda done, total: None).options == options
