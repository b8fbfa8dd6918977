"""The tokenizer against transformers', on the same files."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import KINDS, write_folder
from transformers import AutoTokenizer

from quire.errors import ModelError, RequestError
from quire.hub import embedded
from quire.tokenizer.tokenizer import Tokenizer

CONVERSATIONS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi \U0001f600"}],
    [
        {"role": "user", "content": "Reserve the tent."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "reserve", "arguments": {"item": "tent"}}}],
        },
        {"role": "tool", "content": "done"},
        {"role": "user", "content": "Thanks"},
    ],
]
TOOLS = [
    {"type": "function", "function": {"name": "reserve", "description": "é <b>", "parameters": {"type": "object"}}}
]
ODD = [
    "e\u0301",
    "👩\u200d👩\u200d👧",
    "\ufeff",
    "\ufffd",
    "\0",
    "茶壶",
    "ﬁ",
    "</s>",
    "<|im_end|>",
    " [TOOL] ",
    "  ",
    "\r\n",
    "kettle",
]
TEXTS = st.lists(st.sampled_from(ODD) | st.sampled_from("ab 1\n") | st.characters(exclude_categories=["Cs"])).map(
    "".join
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Each kind of tokenizer, loaded by quire and by transformers from the same folder."""
    folders = {kind: write_folder(tmp_path_factory.mktemp(kind), build()) for kind, build in KINDS.items()}
    return {kind: (Tokenizer.from_folder(path), AutoTokenizer.from_pretrained(path)) for kind, path in folders.items()}


@pytest.fixture(scope="module")
def reference():
    return AutoTokenizer.from_pretrained(embedded.folder())


@pytest.fixture
def folder(tmp_path):
    shutil.copy(embedded.folder() / "tokenizer.json", tmp_path)
    shutil.copy(embedded.folder() / "tokenizer_config.json", tmp_path)
    return tmp_path


def change_config(folder, **changes):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, special=st.booleans())
def test_encodes_and_decodes_as_transformers_do(pairs, kind, text, special):
    ours, reference = pairs[kind]
    ids = ours.encode(text, special)
    assert ids == reference.encode(text, add_special_tokens=special)
    assert ours.decode(ids, special) == reference.decode(ids, skip_special_tokens=special)
    assert ours.convert_ids_to_tokens(ids) == reference.convert_ids_to_tokens(ids)


def test_kinds_differ(pairs):
    """Otherwise the test above compares little."""
    split = {tuple(ours.convert_ids_to_tokens(ours.encode("12 345</s>kettle e\u0301"))) for ours, _ in pairs.values()}
    assert len(split) == len(KINDS)


def test_special_tokens(tokenizer, reference):
    assert tokenizer.eos_token_id == reference.eos_token_id == 2
    assert tokenizer.bos_token_id is None
    assert tokenizer.special_ids == set(reference.all_special_ids) | {1}
    assert tokenizer.decode([67, 2], skip_special_tokens=True) == "a"
    assert tokenizer.decode([67, 2]) == "a<|im_end|>"


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_chat_template_as_transformers(tokenizer, reference, conversation, tools):
    expected = reference.apply_chat_template(conversation, tools, add_generation_prompt=True, tokenize=False)
    assert tokenizer.apply_chat_template(conversation, tools) == expected


def test_template_variables_reach_the_template(tokenizer):
    message = [{"role": "user", "content": "2+2"}]
    assert "/think" in tokenizer.apply_chat_template(message, enable_thinking=True)
    assert "/think" not in tokenizer.apply_chat_template(message, enable_thinking=False)


def test_text_parts_and_argument_strings_are_made_plain(tokenizer):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert tokenizer.apply_chat_template(parts) == tokenizer.apply_chat_template([{"role": "user", "content": "a\nb"}])
    spaced = [CONVERSATIONS[2][0], json.loads(json.dumps(CONVERSATIONS[2][1]))]
    spaced[1]["tool_calls"][0]["function"]["arguments"] = '{"item":   "tent"}'
    assert tokenizer.apply_chat_template(spaced) == tokenizer.apply_chat_template(CONVERSATIONS[2][:2])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"content": "a"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": "a", "extra": object()}],
        [{"role": "assistant", "content": None, "tool_calls": [3]}],
        [{"role": "assistant", "content": None, "tool_calls": [{"function": 3}]}],
    ],
)
def test_an_invalid_conversation_is_rejected(tokenizer, messages):
    with pytest.raises(RequestError):
        tokenizer.apply_chat_template(messages)


def test_deeply_nested_values_are_refused(tokenizer):
    value = 0
    for _ in range(100):
        value = [value]
    with pytest.raises(RequestError, match="nested"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], switch=value)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", 3, None])
def test_text_that_is_none(tokenizer, text):
    with pytest.raises(RequestError):
        tokenizer.encode(text)


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"]])
def test_ids_that_are_none(tokenizer, ids):
    with pytest.raises(RequestError):
        tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, "missing"),
        ("tokenizer.json", b"{}", "broken"),
        ("tokenizer.json", b"\xff", "broken"),
        ("tokenizer_config.json", b"{", "not valid JSON"),
        ("tokenizer_config.json", b"\xff", "not valid JSON"),
        ("tokenizer_config.json", b"[]", "JSON object"),
        ("tokenizer_config.json", b'{"eos_token": 3}', "special token"),
        ("tokenizer_config.json", b'{"chat_template": [3]}', "chat_template"),
        ("chat_template.jinja", b"\xff\xfe", "UTF-8"),
    ],
)
def test_files_that_cannot_be_used(folder, name, content, says):
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=says):
        Tokenizer.from_folder(folder)
