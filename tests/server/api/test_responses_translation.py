"""Translation of /v1/responses into the messages, tools and parameters of chat."""

import json

import pytest
from pydantic import ValidationError

from quire.errors import RequestError
from quire.server.api.openai.responses_schema import (
    ResponseBody,
    chat_messages,
    chat_tool_choice,
    chat_tools,
    encode_reasoning,
)


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
    assert chat_messages(items, instructions) == messages


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
    (message,) = chat_messages([item("reasoning", **fields), said("assistant", "x")], None)
    assert message["reasoning_content"] == text


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (item("computer_call"), "items of type 'computer_call' are not supported"),
        (item(role="user"), "needs content"),
        (item(content="x"), "needs role"),
        (item("function_call", name="x", arguments="{}"), "needs call_id"),
        (item("function_call_output", call_id="c1", output="x"), "no function_call with the call_id 'c1'"),
        (item("function_call_output", call_id="c1"), "needs output|no function_call"),
        (item(role="user", content=[{"type": "input_image", "image_url": "x"}]), "'input_image' is not supported"),
        (item(role="user", content=[{"type": "input_text"}]), "needs its text"),
        (item("reasoning", encrypted_content="quire:%"), "encrypted_content is not as"),
    ],
)
def test_an_item_that_cannot_be_used_is_named_by_its_place(bad, says):
    with pytest.raises(RequestError, match=rf"input\.1: .*({says})") as caught:
        chat_messages([said("user", "Hi"), bad], None)
    assert caught.value.param == "input"


def test_a_custom_tool_is_refused_with_what_to_use():
    custom = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}}
    with pytest.raises(RequestError, match=r"tools\.0: custom tools are not .* a function with one string parameter"):
        chat_tools([custom], skip_others=False)
    assert chat_tools([custom], skip_others=True) == []


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
    assert chat_tools([flat, nested], skip_others=False) == [nested, nested]
    assert chat_tools([flat, {"type": "web_search"}], skip_others=True) == [nested]
    with pytest.raises(RequestError, match=r"tools\.1: tools of type 'web_search' are not run by this server"):
        chat_tools([flat, {"type": "web_search"}], skip_others=False)
    named = {"type": "function", "function": {"name": "f"}}
    assert chat_tool_choice("auto") == "auto"
    assert chat_tool_choice(None) is None
    assert chat_tool_choice({"type": "function", "name": "f"}) == named
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    assert chat_tool_choice(allowed) == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named]},
    }
    assert chat_tool_choice({"type": "mcp"}) == {"type": "mcp"}


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
