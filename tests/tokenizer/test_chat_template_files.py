"""Where chat templates are in a folder, and which one is used: as in transformers."""

import pytest
from small_tokenizers import KINDS, write_folder
from transformers import AutoTokenizer

from quire.errors import ModelError, RequestError
from quire.tokenizer.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "a"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
CONFIGS = {
    "none": None,
    "one": "one",
    "named": NAMED,
    "named, no tools": NAMED[:1],
    "named, no default": NAMED[1:],
    "with rag": [*NAMED, {"name": "rag", "template": "rag"}],
}
FILES = {
    "no files": {},
    "file": {"chat_template.jinja": "file"},
    "files": {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "file for tools"},
    "other files": {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "file for rag"},
}


def made(folder, config, files):
    write_folder(folder, KINDS["gpt2"](), tokenizer_config={} if config is None else {"chat_template": config})
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_same_template_as_transformers(tmp_path, config, files):
    folder = made(tmp_path, config, files)
    ours, reference = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for tools in (None, TOOLS):
        try:
            expected = reference.apply_chat_template(MESSAGES, tools, tokenize=False)
        except ValueError:
            with pytest.raises(RequestError):
                ours.apply_chat_template(MESSAGES, tools)
        else:
            assert ours.apply_chat_template(MESSAGES, tools) == expected


def test_a_template_by_its_name(tmp_path):
    ours = Tokenizer.from_folder(made(tmp_path, CONFIGS["with rag"], {}))
    assert ours.apply_chat_template(MESSAGES, chat_template="rag") == "rag"
    assert ours.apply_chat_template(MESSAGES, TOOLS, chat_template="default") == "plain"
    with pytest.raises(RequestError, match=r"did you mean 'rag'\?\); it has: default, rag, tool_use"):
        ours.apply_chat_template(MESSAGES, chat_template="raag")


@pytest.mark.parametrize("source", ["{{ 1 }}", 3, ["rag"]])
def test_callers_bring_no_templates_of_their_own(tmp_path, source):
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_folder(made(tmp_path, "one", {})).apply_chat_template(MESSAGES, chat_template=source)


def test_files_without_a_default_are_added_to_the_configuration(tmp_path):
    """transformers would have no default here."""
    ours = Tokenizer.from_folder(made(tmp_path, NAMED, {"additional_chat_templates/tool_use.jinja": "file for tools"}))
    assert ours.apply_chat_template(MESSAGES) == "plain"
    assert ours.apply_chat_template(MESSAGES, TOOLS) == "file for tools"


@pytest.mark.parametrize("config", [None, "one"])
def test_the_older_file_comes_last(tmp_path, config):
    folder = made(tmp_path, config, {})
    write_folder(folder, chat_template={"chat_template": "older"})
    assert Tokenizer.from_folder(folder).apply_chat_template(MESSAGES) == (config or "older")


def test_no_template(tmp_path):
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_folder(made(tmp_path, None, {})).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("chat_template.jinja", b"\xff\xfe", "UTF-8"),
        ("chat_template.json", b"[]", "JSON object"),
        ("chat_template.json", b'{"chat_template": 3}', "chat_template.json"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', "tokenizer_config.json"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": ["a"], "template": "b"}]}', "tokenizer_config.json"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "tokenizer_config.json"),
        ("tokenizer_config.json", b'{"chat_template": {"default": 3}}', "tokenizer_config.json"),
    ],
)
def test_templates_that_are_none(tmp_path, name, content, says):
    folder = made(tmp_path, None, {})
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=says):
        Tokenizer.from_folder(folder)


BROKEN = {  # what is in the folder, and the line that the error names
    "chat_template.jinja": "a\n{% frobnicate %}",
    "chat_template.json": '{"chat_template": "a\\n{{ 3 | from_json }}"}',
    "tokenizer_config.json": '{"chat_template": "a\\n{% for %}"}',
    "additional_chat_templates/default.jinja": "a\n{% if %}",
}


@pytest.mark.parametrize(("name", "content"), BROKEN.items(), ids=BROKEN.keys())
def test_a_template_that_does_not_compile_refuses_conversations_only(tmp_path, name, content):
    folder = made(tmp_path, None, {name: content})
    ours = Tokenizer.from_folder(folder)
    assert ours.decode(ours.encode("one two")) == "one two"
    assert ours.has_chat_template
    assert list(ours.template_errors) == ["default"]
    with pytest.raises(
        RequestError, match=r"chat template is invalid: line 2: .*; correct chat_template\.jinja"
    ) as caught:
        ours.apply_chat_template(MESSAGES)
    assert caught.value.param == "chat_template"


def test_a_named_template_that_does_not_compile_does_not_concern_the_others(tmp_path):
    broken = [
        *NAMED[:1],
        {"name": "tool_use", "template": "{% if %}"},
        {"name": "rag", "template": "{{ 3 | nothing }}"},
    ]
    ours = Tokenizer.from_folder(made(tmp_path, broken, {}))
    assert ours.apply_chat_template(MESSAGES) == "plain"
    for options in ({"tools": TOOLS}, {"chat_template": "rag"}):
        with pytest.raises(RequestError, match=r"line 1: .*correct the template '(tool_use|rag)'"):
            ours.apply_chat_template(MESSAGES, **options)


def test_a_template_without_a_tokenizer_configuration(tmp_path):
    folder = made(tmp_path, None, {"chat_template.jinja": "{{ messages[0].content }}"})
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    assert Tokenizer.from_folder(folder).apply_chat_template(MESSAGES) == "a"


@pytest.mark.parametrize(
    "options",
    [
        {"documents": 3},
        {"documents": ["a"]},
        {"documents": [{"text": object()}]},
        {"tools": {"type": "function"}},
        {"tools": ["a"]},
        {"continue_final_message": 3},
        {"continue_final_message": {}},
        {"continue_final_message": "role of"},
    ],
)
def test_arguments_that_are_none(tmp_path, options):
    with pytest.raises(RequestError):
        Tokenizer.from_folder(made(tmp_path, "one", {})).apply_chat_template(MESSAGES, **options)


def test_any_name_may_be_a_variable(tmp_path):
    ours = Tokenizer.from_folder(made(tmp_path, "{{ name }}{{ variables }}{{ conversation }}", {}))
    assert ours.apply_chat_template(MESSAGES, name=1, variables=2, conversation=3, self=4) == "123"
