"""Tool calls and reasoning in chat, through OpenAI's client, with the embedded model."""

import json
from random import Random

import httpx
import jsonschema
import openai
import pytest
from embedded_model_server import CHAT, MODEL

from tools.demo_model.tool_use import TOOLS

OFFERED = [TOOLS[name][0] for name in ("get_price", "get_stock", "find_person")]
UNSUPPORTED = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {"pattern": "x"}}}}},
}
UNSUPPORTED_SCHEMA = {"name": "a", "schema": UNSUPPORTED["function"]["parameters"]}
THINK = {"messages": [{"role": "user", "content": "Sum: 13 25 31"}], "extra_body": {"enable_thinking": True}}


def chat(client, messages, **fields):
    defaults = {"model": MODEL, "temperature": 0, "max_completion_tokens": 120}
    return client.chat.completions.create(messages=messages, **{**defaults, **fields})


def arguments(call) -> dict:
    return json.loads(call.function.arguments)


def question(name: str, seed: int):
    return TOOLS[name][1](Random(seed))


def streamed(client, messages, **fields):
    """The message that the chunks of a stream give together, and the finish reason."""
    message = {"content": "", "reasoning": "", "calls": []}
    finish_reason = None
    for chunk in chat(client, messages, stream=True, **fields):
        (choice,) = chunk.choices
        delta = choice.delta.model_dump(exclude_none=True)
        assert finish_reason is None, "nothing follows the finish reason"
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["calls"]):
                assert call["id"]
                assert call["type"] == "function"
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
        finish_reason = choice.finish_reason
    return message, finish_reason


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_an_agent_asks_calls_a_tool_and_answers_with_its_result(client, name):
    for seed in range(3):
        use = question(name, seed)
        messages = [{"role": "user", "content": use.question}]
        tools = [TOOLS[name][0]]
        (choice,) = chat(client, messages, tools=tools).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name, arguments(call)) == ("function", name, use.arguments)
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": json.dumps(use.result)}]
        (choice,) = chat(client, messages, tools=tools).choices
        assert (choice.message.content, choice.message.tool_calls) == (use.answer, None)
        assert choice.finish_reason == "stop"


def test_a_stream_sends_the_call_as_it_is_generated(client):
    messages = [{"role": "user", "content": question("get_price", 1).question}]
    (choice,) = chat(client, messages, tools=OFFERED).choices
    message, finish_reason = streamed(client, messages, tools=OFFERED)
    expected = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls]
    assert (message["calls"], message["content"], finish_reason) == (expected, "", "tool_calls")


def test_arguments_come_in_several_pieces(client):
    messages = [{"role": "user", "content": question("send_note", 1).question}]
    stream = chat(client, messages, tools=[TOOLS["send_note"][0]], stream=True, extra_body={"speculation": False})
    pieces = [call.function.arguments for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert len([piece for piece in pieces if piece]) > 2


@pytest.mark.parametrize(
    ("tool_choice", "names"),
    [
        ("required", {"get_price", "get_stock", "find_person"}),
        ({"type": "function", "function": {"name": "find_person"}}, {"find_person"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_stock"}}],
                },
            },
            {"get_stock"},
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_required_call_is_made_and_valid_whatever_was_asked(client, tool_choice, names, temperature):
    answer = chat(client, CHAT, tools=OFFERED, tool_choice=tool_choice, temperature=temperature, seed=1)
    (choice,) = answer.choices
    assert choice.finish_reason in ("tool_calls", "length")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in OFFERED}
    assert choice.message.content is None
    for call in choice.message.tool_calls[: None if choice.finish_reason == "tool_calls" else -1]:
        assert call.function.name in names
        jsonschema.validate(arguments(call), schemas[call.function.name])


def test_without_parallel_tool_calls_an_answer_has_one_call(client):
    for seed in range(4):
        answer = chat(
            client, CHAT, tools=OFFERED, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=seed
        )
        assert len(answer.choices[0].message.tool_calls) == 1


def test_no_call_is_made_without_tools_or_with_the_choice_none(client):
    messages = [{"role": "user", "content": question("get_price", 1).question}]
    plain = chat(client, messages).choices[0].message
    none = chat(client, messages, tools=OFFERED, tool_choice="none").choices[0].message
    assert plain.tool_calls is none.tool_calls is None
    assert plain.content == none.content


def test_each_choice_has_its_calls(client):
    messages = [{"role": "user", "content": question("get_price", 1).question}]
    choices = chat(client, messages, tools=OFFERED, n=3).choices
    assert [choice.message.tool_calls[0].function.name for choice in choices] == ["get_price"] * 3
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 3


def test_strict_tools_are_parsed_by_the_client(client):
    strict = {"type": "function", "function": {**TOOLS["add_numbers"][0]["function"], "strict": True}}
    strict["function"]["parameters"] = {**strict["function"]["parameters"], "additionalProperties": False}
    use = question("add_numbers", 2)
    answer = client.chat.completions.parse(
        **{"model": MODEL, "messages": [{"role": "user", "content": use.question}], "temperature": 0},
        **{"tools": [strict], "tool_choice": "required", "parallel_tool_calls": False},
    )
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments.keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": OFFERED, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": OFFERED, "tool_choice": {"type": "function", "function": {"name": "get_prise"}}}, "tool_choice"),
        ({"tools": [*OFFERED, OFFERED[0]]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [UNSUPPORTED], "tool_choice": "required"}, "tools"),
        (
            {"tools": OFFERED, "tool_choice": "required", "extra_body": {"structured_outputs": {"regex": "a"}}},
            "tool_choice",
        ),
    ],
)
def test_invalid_tools_are_rejected_by_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, CHAT, **fields)
    assert refused.value.param == param


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_tools_with_tool_choice_none_are_bounded_as_well(http, path):
    function = {**OFFERED[0]["function"], "description": "x" * 40_000}
    conversation = {"input": "x"} if path == "/v1/responses" else {"messages": CHAT}
    tool, choice = {"type": "function", "function": function}, "none"
    if path == "/v1/messages":
        tool = {"name": "f", "description": function["description"], "input_schema": {"type": "object"}}
        choice, conversation = {"type": "none"}, {**conversation, "max_tokens": 4}
    refused = http.post(path, json={**conversation, "tools": [tool], "tool_choice": choice})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "tools", "context_length_exceeded")


def test_reasoning_is_apart_from_the_content(client):
    answer = chat(client, **THINK)
    message = answer.choices[0].message
    assert (
        message.reasoning == message.reasoning_content == "13+25: 3+5=8, 1+2+0=3, so 38\n38+31: 8+1=9, 3+3+0=6, so 69"
    )
    assert message.content == "69"
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    parts, finish_reason = streamed(client, **THINK)
    assert (parts["reasoning"], parts["content"], finish_reason) == (message.reasoning, message.content, "stop")


def test_reasoning_can_be_left_out_or_in_the_content(client):
    extra = THINK["extra_body"]
    hidden = chat(client, THINK["messages"], extra_body={**extra, "include_reasoning": False})
    assert hidden.choices[0].message.reasoning is None
    assert hidden.usage.completion_tokens_details.reasoning_tokens > 0
    whole = chat(client, THINK["messages"], extra_body={**extra, "separate_reasoning": False})
    assert whole.choices[0].message.content.startswith("<think>")


def test_the_budget_of_reasoning_is_kept(client):
    answer = chat(client, THINK["messages"], extra_body={**THINK["extra_body"], "thinking_token_budget": 6})
    details = answer.usage.completion_tokens_details
    assert details.reasoning_tokens <= 6 + 3, "and its tags"
    assert answer.choices[0].message.content


def test_structured_output_begins_behind_the_reasoning(client):
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    answer = chat(
        client,
        **THINK,
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, "strict": True}},
    )
    message = answer.choices[0].message
    assert message.reasoning
    jsonschema.validate(json.loads(message.content), schema)


def test_beside_an_answer_of_a_schema_the_model_calls_tools(client):
    """What agents with an output type send."""
    schema = {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 80}}, "required": ["answer"]}
    fields = {
        "tools": OFFERED,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    use = question("get_price", 1)
    messages = [{"role": "user", "content": use.question}]
    (choice,) = chat(client, messages, **fields).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, arguments(call)) == ("get_price", use.arguments)
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": json.dumps(use.result)}]
    for choice_of_tools in ("auto", "none"):
        (choice,) = chat(client, messages, tool_choice=choice_of_tools, **fields).choices
        assert choice.message.tool_calls or jsonschema.validate(json.loads(choice.message.content), schema) is None
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, CHAT, tools=OFFERED, response_format={"type": "json_schema", "json_schema": UNSUPPORTED_SCHEMA})
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    "format", [{"type": "json_object"}, {"type": "json_schema", "json_schema": UNSUPPORTED_SCHEMA}]
)
def test_a_format_of_the_answer_has_no_effect_beside_a_required_call(client, format):
    fields = {"tools": OFFERED, "tool_choice": "required"}
    beside, alone = (
        [call.function for call in chat(client, CHAT, **fields, **more).choices[0].message.tool_calls]
        for more in ({"response_format": format}, {})
    )
    assert beside == alone
    invalid = {"tools": [UNSUPPORTED], "tool_choice": "required", "response_format": format}
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, CHAT, **invalid)
    assert refused.value.param == "tools"


def test_usage_of_a_stream_counts_the_reasoning(client):
    *_, last = chat(client, **THINK, stream=True, stream_options={"include_usage": True})
    whole = chat(client, **THINK).usage
    assert last.usage.completion_tokens_details.reasoning_tokens == whole.completion_tokens_details.reasoning_tokens


def test_offline_chat_returns_the_message(llm):
    use = question("get_price", 3)
    (output,) = llm.chat([{"role": "user", "content": use.question}], tools=[TOOLS["get_price"][0]])
    (call,) = output.outputs[0].message.calls
    assert (call.name, json.loads(call.arguments)) == ("get_price", use.arguments)
    (output,) = llm.chat(CHAT, tools=OFFERED, tool_choice="required")
    assert output.outputs[0].message.calls


def test_logprobs_cover_all_tokens_of_a_call(http):
    body = {"messages": [{"role": "user", "content": question("get_price", 1).question}], "tools": OFFERED}
    body |= {"temperature": 0, "logprobs": True, "return_token_ids": True}
    answer: httpx.Response = http.post("/v1/chat/completions", json=body)
    (choice,) = answer.json()["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


def cut_bodies():
    """A call that a stop string cuts within its arguments, in each dialect: route, body, way to its reason."""
    asked, (tool,) = question("get_price", 1).question, OFFERED[:1]
    function = tool["function"]
    messages = [{"role": "user", "content": asked}]
    key = next(iter(function["parameters"]["properties"]))
    stop = f'"{key}": '
    own = {"name": function["name"], "description": function["description"]}
    return {
        "chat": ("/v1/chat/completions", {"messages": messages, "tools": [tool], "stop": [stop], "temperature": 0}),
        "responses": (
            "/v1/responses",
            {
                **{"input": asked, "stop": [stop], "temperature": 0},
                "tools": [{"type": "function", **own, "parameters": function["parameters"]}],
            },
        ),
        "messages": (
            "/v1/messages",
            {
                **{"model": MODEL, "messages": messages, "max_tokens": 120, "temperature": 0, "stop_sequences": [stop]},
                "tools": [{**own, "input_schema": function["parameters"]}],
            },
        ),
        "ollama": (
            "/api/chat",
            {
                **{"model": MODEL, "messages": messages, "tools": [tool], "stream": False},
                "options": {"stop": [stop], "temperature": 0, "num_predict": 120},
            },
        ),
    }


@pytest.mark.parametrize("dialect", sorted(cut_bodies()))
def test_a_stop_string_within_a_call_ends_no_finished_call(http, dialect):
    path, body = cut_bodies()[dialect]
    answer = http.post(path, json=body).json()
    match dialect:
        case "chat":
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "stop"
            assert choice["stop_reason"] == body["stop"][0]
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["arguments"] == "{"
            chunks = http.post(path, json={**body, "stream": True}).text
            assert '"finish_reason":"stop"' in chunks.replace(" ", "")
            assert "tool_calls" not in chunks.replace('"tool_calls":[', "")
        case "responses":
            (item,) = answer["output"]
            assert (item["type"], item["status"], item["arguments"]) == ("function_call", "incomplete", "{")
            assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "unfinished_call"})
            events = http.post(path, json={**body, "stream": True}).text
            assert "event: response.incomplete" in events
        case "messages":
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", body["stop_sequences"][0])
            assert [(block["type"], block["input"]) for block in answer["content"]] == [("tool_use", {})]
            assert '"stop_reason":"stop_sequence"' in http.post(path, json={**body, "stream": True}).text
        case "ollama":
            assert answer["done_reason"] == "stop"
            assert not answer["message"].get("tool_calls")


def test_a_tool_that_is_offered_and_not_called_changes_no_token(http):
    """Compared with the same prompt without a grammar."""
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 40, "return_token_ids": True}
    strict = {"type": "function", "function": {**OFFERED[0]["function"], "strict": True}}
    for tools in (OFFERED, [strict], [*OFFERED[1:], strict]):
        found = http.post("/v1/chat/completions", json={**body, "tools": tools}).json()
        plain = http.post(
            "/v1/completions",
            json={"prompt": found["prompt_token_ids"], "temperature": 0, "max_tokens": 40, "return_token_ids": True},
        ).json()
        assert found["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]


def test_a_stop_string_does_not_end_reasoning(client):
    whole = chat(client, **THINK).choices[0].message
    assert whole.reasoning
    stop = whole.reasoning[:3]
    assert stop not in whole.content
    stopped = chat(client, **THINK, stop=[stop]).choices[0]
    assert (stopped.message.reasoning, stopped.message.content) == (whole.reasoning, whole.content)
    within = {**THINK["extra_body"], "separate_reasoning": False}
    shown = chat(client, messages=THINK["messages"], extra_body=within, stop=[stop]).choices[0]
    assert shown.stop_reason == stop
