"""Translation of /v1/responses into the messages, tools and parameters of chat."""

import json

import pytest
from pydantic import ValidationError

from quire.errors import RequestError
from quire.server.api.openai.responses_schema import (
    ResponseBody,
    chat_messages,
    encode_reasoning,
)
from quire.server.api.openai.responses_tools import ToolOrigin, read_tools

NO_TOOLS = read_tools([])


def item(type="message", **fields):
    return {"type": type, **fields}


def said(role, text):
    return item(role=role, content=[{"type": "output_text" if role == "assistant" else "input_text", "text": text}])


CALL = item("function_call", call_id="c1", name="get_price", arguments='{"item": "kite"}')
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "get_price", "arguments": '{"item": "kite"}'}}
RESULT = item("function_call_output", call_id="c1", output='{"price": 5}')
CHAT_RESULT = {"role": "tool", "tool_call_id": "c1", "name": "get_price", "content": '{"price": 5}'}
THOUGHT = item("reasoning", summary=[], content=[{"type": "reasoning_text", "text": "Hm."}])


@pytest.mark.parametrize(
    ("items", "instructions", "messages"),
    [
        ([said("user", "Hi")], None, [{"role": "user", "content": "Hi"}]),
        (
            [said("user", "Hi")],
            "Be kind",
            [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}],
        ),
        (
            [said("developer", "Be short"), said("system", "Now"), said("user", "Hi"), said("developer", "Stop")],
            "Be kind",
            [
                {"role": "system", "content": "Be kind\n\nBe short\n\nNow"},
                {"role": "user", "content": "Hi"},
                {"role": "system", "content": "Stop"},
            ],
        ),
        (
            [said("user", "Price?"), THOUGHT, said("assistant", "I look."), CALL, RESULT, said("assistant", "5")],
            None,
            [
                {"role": "user", "content": "Price?"},
                {"role": "assistant", "reasoning_content": "Hm.", "content": "I look.", "tool_calls": [CHAT_CALL]},
                CHAT_RESULT,
                {"role": "assistant", "content": "5"},
            ],
        ),
        (
            [CALL, {**CALL, "call_id": "c2"}, RESULT],
            None,
            [{"role": "assistant", "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}]}, CHAT_RESULT],
        ),
        (
            [said("assistant", "a"), said("assistant", "b"), CALL, said("assistant", "c")],
            None,
            [
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": "b", "tool_calls": [CHAT_CALL]},
                {"role": "assistant", "content": "c"},
            ],
        ),
        ([THOUGHT, said("user", "Hi")], None, [{"role": "user", "content": "Hi"}]),
        (
            [item(role="user", content=[{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])],
            None,
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
        (
            [item(role="assistant", content=[{"type": "refusal", "refusal": "No."}]), said("user", "Why?")],
            None,
            [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}],
        ),
    ],
    ids=[
        *("text", "instructions", "system messages", "a turn with a tool", "parallel calls", "messages of one role"),
        *("reasoning that was cut", "parts", "refusal"),
    ],
)
def test_items_become_messages(items, instructions, messages):
    assert chat_messages(items, instructions, NO_TOOLS) == messages


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}, {"type": "reasoning_text", "text": "b"}]}, "ab"),
        ({"content": "a"}, "a"),
        ({"content": [], "encrypted_content": encode_reasoning("é\n")}, "é\n"),
        ({"encrypted_content": encode_reasoning("é"), "summary": [{"type": "summary_text", "text": "s"}]}, "é"),
        ({"encrypted_content": "gAAAAB", "summary": [{"type": "summary_text", "text": "s"}]}, "s"),
    ],
)
def test_reasoning_comes_back_from_where_it_is(fields, text):
    (message,) = chat_messages([item("reasoning", **fields), said("assistant", "x")], None, NO_TOOLS)
    assert message["reasoning_content"] == text


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (item("computer_call"), "items of type 'computer_call' are not supported"),
        (item(role="user"), "needs content"),
        (item(content="x"), "needs role"),
        (item("function_call", name="x", arguments="{}"), "needs call_id"),
        (item("function_call_output", call_id="c1", output="x"), "no call with the call_id 'c1'"),
        (item("function_call_output", call_id="c1"), "needs output|no call"),
        (item(role="user", content=[{"type": "input_image", "image_url": "x"}]), "'input_image' is not supported"),
        (item(role="user", content=[{"type": "input_text"}]), "needs its text"),
        (item("reasoning", encrypted_content="quire:%"), "encrypted_content is not as"),
    ],
)
def test_an_item_that_cannot_be_used_is_named_by_its_place(bad, says):
    with pytest.raises(RequestError, match=rf"input\.1: .*({says})") as caught:
        chat_messages([said("user", "Hi"), bad], None, NO_TOOLS)
    assert caught.value.param == "input"


def custom(name, **fields):
    return {"type": "custom", "name": name, **fields}


def function(name, **fields):
    return {"type": "function", "name": name, "parameters": {}, **fields}


def test_a_custom_tool_is_a_function_of_one_text():
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tools = read_tools([custom("apply_patch", description="Patch files.", format=grammar), custom("shell")])
    first, second = (one["function"] for one in tools.functions)
    assert first["name"] == "apply_patch"
    assert first["description"] == 'Patch files.\n\nThe input follows this grammar (lark):\nstart: "a"'
    assert first["parameters"]["properties"] == {"input": {"type": "string"}}
    assert "description" not in second
    assert tools.origins["shell"] == ToolOrigin("shell", None, is_custom=True)
    calls = [
        item("custom_tool_call", call_id="c1", name="shell", input='ls "é"\n'),
        item("custom_tool_call_output", call_id="c1", output="b"),
    ]
    called, result = chat_messages(calls, None, tools)
    assert called["tool_calls"][0]["function"]["arguments"] == '{"input": "ls \\"é\\"\\n"}'
    assert (result["role"], result["content"]) == ("tool", "b")


def test_functions_of_a_namespace_are_offered_by_names_that_are_unique():
    spaces = [
        {"type": "namespace", "name": space, "tools": [function("run"), function(f"only_{space}")]} for space in "ab"
    ]
    tools = read_tools([function("stop"), *spaces])
    names = [one["function"]["name"] for one in tools.functions]
    assert names == ["stop", "a.run", "only_a", "b.run", "only_b"]
    assert tools.origins["b.run"] == ToolOrigin("run", "b")
    assert tools.choice({"type": "function", "name": "run", "namespace": "b"})["function"] == {"name": "b.run"}
    (message,) = chat_messages(
        [item("function_call", call_id="c1", name="run", namespace="a", arguments="{}")], None, tools
    )
    assert message["tool_calls"][0]["function"]["name"] == "a.run"


def test_tools_that_a_server_would_run_are_left_out_unless_one_is_required():
    search = {"type": "web_search"}
    tools = read_tools([search, function("f"), {"type": "image_generation"}, search])
    assert [one["function"]["name"] for one in tools.functions] == ["f"]
    assert list(tools.left_out) == ["web_search", "image_generation"]
    for choice in ("auto", "required", None, "none"):
        assert tools.choice(choice) == choice
    both = {"type": "allowed_tools", "mode": "auto", "tools": [search, {"type": "function", "name": "f"}]}
    assert len(tools.choice(both)["allowed_tools"]["tools"]) == 1
    assert tools.choice({**both, "tools": [search]}) == "none"
    for choice in ({"type": "web_search"}, {**both, "mode": "required", "tools": [search]}):
        with pytest.raises(RequestError, match="requires a tool of type web_search or image_generation, which"):
            tools.choice(choice)
    with pytest.raises(RequestError, match="requires a tool of type web_search"):
        read_tools([search]).choice("required")


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ({"type": "namespace", "tools": []}, "tools.0: a namespace needs a name and a list of tools"),
        ({"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}, "tools.0.tools.0: a namespace has tools of"),
        (custom("a", description=5), "tools.0.description must be text"),
        ({"type": "custom"}, "tools.0: a tool of type custom needs a name"),
        (
            {"type": "namespace", "name": "a", "tools": [{"type": "function"}]},
            "tools.0.tools.0: a tool of type function",
        ),
        ({"type": "fucntion", "name": "a"}, "tools.0: the type of a tool is one of .*did you mean 'function'"),
        ({"name": "a"}, "tools.0: the type of a tool is one of function, custom, namespace, not None"),
        (
            {"type": "namespace", "name": "a", "tools": [function(f"f{i}") for i in range(600)]},
            "at most 512 tools, those in",
        ),
    ],
)
def test_a_wrong_tool_is_named_by_its_place(tool, says):
    with pytest.raises(RequestError, match=says):
        read_tools([tool])


def test_tools_and_choices_have_the_form_of_chat():
    flat = {
        "type": "function",
        "name": "f",
        "description": "d",
        "parameters": {},
        "strict": True,
        "defer_loading": False,
    }
    nested = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}, "strict": True}}
    tools = read_tools([flat, nested])
    assert tools.functions == [nested, nested]
    named = {"type": "function", "function": {"name": "f"}}
    assert tools.choice("auto") == "auto"
    assert tools.choice(None) is None
    assert tools.choice({"type": "function", "name": "f"}) == named
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    assert tools.choice(allowed) == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named]},
    }
    assert tools.choice({"type": "mcp"}) == {"type": "mcp"}


def test_fields_become_sampling_parameters():
    schema = {"type": "object"}
    body = ResponseBody.model_validate(
        {
            **{"input": "x", "max_output_tokens": 7, "temperature": 0.5, "top_logprobs": 3, "seed": 1, "stop": ["a"]},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        }
    )
    params = body.sampling_params({"top_k": 9, "temperature": 2.0})
    assert (params.max_tokens, params.temperature, params.logprobs, params.seed, params.top_k) == (7, 0.5, 3, 1, 9)
    assert json.loads(params.structured_outputs.json) == schema
    plain = ResponseBody.model_validate({"input": "x"}).sampling_params({})
    assert (plain.max_tokens, plain.logprobs, plain.structured_outputs) == (None, None, None)
    logprobs = {"input": "x", "include": ["message.output_text.logprobs"]}
    assert ResponseBody.model_validate(logprobs).sampling_params({}).logprobs == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"conversation": "conv_1"},
        {"prompt": {"id": "x"}},
        {"include": ["everything"]},
        {"metadata": {"a": 1}},
        {"metadata": {str(i): "" for i in range(17)}},
        {"truncation": "sometimes"},
        {"input": 5},
        {"text": {"format": {"type": "xml"}}},
        {"reasoning": {"efort": "low"}},
    ],
)
def test_values_that_mean_nothing_are_refused(fields):
    with pytest.raises(ValidationError):
        ResponseBody.model_validate({"input": "x", **fields})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ],
)
def test_fields_that_exclude_each_other(fields, param):
    with pytest.raises(RequestError) as caught:
        ResponseBody.model_validate({"input": "x", **fields}).check()
    assert caught.value.param == param
