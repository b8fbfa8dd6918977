"""The tokenizer beside transformers' own, on the same files."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from quire.engine import embedded
from quire.engine.tokenizer import Tokenizer
from quire.errors import ModelError, RequestError

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


@given(text=st.text(max_size=60))
def test_encodes_and_decodes_as_transformers_do(tokenizer, reference, text):
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == reference.decode(ids)


@given(ids=st.lists(st.integers(0, 2047), max_size=40))
def test_bytes_of_tokens_add_up_to_the_text(tokenizer, ids):
    assert b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace") == tokenizer.decode(ids)


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
def test_what_is_no_conversation_is_refused(tokenizer, messages):
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


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("pieces", [["<|im_start|>", "$A"], ["$A", "<|im_end|>"], ["<|im_start|>", "$A", "<|im_end|>"]])
def test_ends_are_added_as_transformers_add_them(folder, configured, pieces):
    core = Core.from_file(str(folder / "tokenizer.json"))
    ends = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    core.post_processor = TemplateProcessing(single=pieces, pair=["$A", "$B:1"], special_tokens=ends)
    core.save(str(folder / "tokenizer.json"))
    change_config(folder, bos_token="<|im_start|>", add_bos_token=configured, add_eos_token=configured)
    reference = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    assert len(ours.encode("a kettle")) == 1 + len(pieces)
    for special in (True, False):
        assert ours.encode("a kettle", special) == reference.encode("a kettle", add_special_tokens=special)


def test_template_file_goes_before_the_configuration(folder):
    (folder / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0].content }}")
    assert Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": "a"}]) == "<|im_end|>a"


def test_named_templates(folder):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    change_config(folder, chat_template=named)
    ours = Tokenizer.from_folder(folder)
    messages = [{"role": "user", "content": "a"}]
    assert ours.apply_chat_template(messages) == "plain"
    assert ours.apply_chat_template(messages, TOOLS) == "tools"


def test_no_template(folder):
    change_config(folder, chat_template=None)
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": "a"}])


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
        ("tokenizer_config.json", b'{"chat_template": "{% for %}"}', "chat template is broken"),
        ("chat_template.jinja", b"\xff\xfe", "UTF-8"),
    ],
)
def test_files_that_cannot_be_used(folder, name, content, says):
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=says):
        Tokenizer.from_folder(folder)
