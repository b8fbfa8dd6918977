"""/v1/responses through OpenAI's client, with the embedded model."""

import asyncio
import json
from random import Random
from types import SimpleNamespace
from typing import Literal

import openai
import pytest
from embedded_model_server import CHAT, MODEL
from pydantic import BaseModel
from waiting import wait_until

from quire.chat.parts import Content
from quire.errors import EngineStopped
from quire.server import store as store_module
from quire.server.api.conversation import MessageDelta
from quire.server.api.openai import stored_responses
from quire.server.api.openai.responses_generation import Generation
from quire.server.api.openai.responses_output import ResponseWriter
from quire.server.sse import TimeLimit
from quire.server.store import Store
from tools.demo_model.tool_use import TOOLS

HELLO = CHAT[0]["content"]
SUM = {"input": "Sum: 13 25 31", "reasoning": {"effort": "medium"}}
LONG = {"max_output_tokens": 400, "extra_body": {"ignore_eos": True}}  # seconds of generation


def respond(client, **fields):
    return client.responses.create(**{"model": MODEL, "temperature": 0, "max_output_tokens": 120, **fields})


def tool(name, **fields):
    return {"type": "function", **TOOLS[name][0]["function"], **fields}


def question(name, seed):
    return TOOLS[name][1](Random(seed))


def test_a_response_is_what_chat_answers(client):
    answer = respond(client, input=HELLO, metadata={"a": "b"})
    chat = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_completion_tokens=120)
    assert answer.output_text == chat.choices[0].message.content
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (answer.status, answer.object, answer.metadata, answer.model) == ("completed", "response", {"a": "b"}, MODEL)
    assert answer.id.startswith("resp_")
    assert client.get(f"/requests/{answer.id}/explain", cast_to=object)["id"] == answer.id
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    again = respond(client, input=[{"role": "user", "content": [{"type": "input_text", "text": HELLO}]}])
    assert again.output_text == answer.output_text
    details = again.usage.input_tokens_details
    assert details.cached_tokens == usage.input_tokens - 1
    assert details.cached_tokens + details.cache_write_tokens == usage.input_tokens


def test_instructions_are_a_message_of_the_system(client):
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": "You are Ada."}, *CHAT], temperature=0
    )
    answer = respond(client, input=HELLO, instructions="You are Ada.")
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.instructions == "You are Ada."


def test_a_stream_gives_the_same_response(client):
    for fields in ({"input": HELLO}, SUM, {"input": question("send_note", 1).question, "tools": [tool("send_note")]}):
        whole = respond(client, **fields)
        with client.responses.stream(model=MODEL, temperature=0, max_output_tokens=120, **fields) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].type == "response.created"
        assert events[-1].type == "response.completed"
        assert [item.type for item in final.output] == [item.type for item in whole.output]
        assert final.output_text == whole.output_text
        for before, after in zip(whole.output, final.output, strict=True):
            if before.type == "function_call":
                assert (before.name, before.arguments) == (after.name, after.arguments)
        assert final.usage.output_tokens == whole.usage.output_tokens
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text


def test_events_of_a_stream_are_named_and_nothing_follows_the_last(http):
    body = {"input": HELLO, "stream": True, "temperature": 0, "stream_options": {"include_obfuscation": True}}
    text = http.post("/v1/responses", json=body).text
    events = [part.split("\n") for part in text.strip().split("\n\n")]
    for name, data in events:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert events[-1][0] == "event: response.completed"
    padded = [part for part in text.split("\n\n") if "obfuscation" in part]
    assert padded
    assert {len(part.encode() + b"\n\n") % 256 for part in padded} == {0}


@pytest.mark.parametrize("name", ["get_price", "reserve_item", "find_person"])
def test_an_agent_calls_a_tool_and_answers_with_its_result(client, name):
    use = question(name, 1)
    fields = {"tools": [tool(name)], "parallel_tool_calls": False}
    first = respond(client, input=use.question, **fields)
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", name, use.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(use.result)}
    stored = respond(client, input=[result], previous_response_id=first.id, **fields)
    items = [{"role": "user", "content": use.question}, *(item.model_dump() for item in first.output), result]
    stateless = respond(client, input=items, store=False, **fields)
    referenced = [items[0], {"type": "item_reference", "id": call.id}, result]
    by_reference = respond(client, input=referenced, **fields)
    answers = [one.output_text for one in (stored, stateless, by_reference)]
    assert answers == [use.answer] * 3
    assert len({one.usage.input_tokens for one in (stored, stateless, by_reference)}) == 1


def test_a_client_as_codex_sends_all_its_fields(http):
    body = {
        **{"model": MODEL, "instructions": "You are Pip.", "stream": True, "store": False, "tool_choice": "auto"},
        **{"parallel_tool_calls": False, "prompt_cache_key": "x", "client_metadata": {"a": "b"}, "temperature": 0},
        **{"reasoning": {"effort": "none", "summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        **{"text": {"verbosity": "low"}, "max_output_tokens": 8},
        "tools": [
            tool("get_price", strict=False),
            {"type": "namespace", "name": "multi_agent_v1", "tools": [tool("get_stock")]},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
            {"type": "web_search", "external_web_access": False},
        ],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": HELLO}]},
        ],
    }
    answer = http.post("/v1/responses", json=body)
    assert answer.headers["x-quire-ignored"] == "prompt_cache_key, client_metadata, tools.web_search"
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert events[-1]["response"]["output"]


@pytest.mark.parametrize("kind", ["namespace", "custom"])
def test_the_tools_of_codex_are_called_and_answered_in_two_turns(http, kind):
    """The input of a custom tool is text, and a function in a namespace is named with it."""
    inner = tool("get_price")
    one = {"type": "custom", "name": "write"} if kind == "custom" else {"type": kind, "name": "shop", "tools": [inner]}
    name = one["name"] if kind == "custom" else inner["name"]
    choice = (
        {"type": "custom", "name": name}
        if kind == "custom"
        else {"type": "function", "name": name, "namespace": "shop"}
    )
    body = {"model": MODEL, "input": HELLO, "tools": [one], "tool_choice": choice, "max_output_tokens": 300}
    first = http.post("/v1/responses", json=body).json()
    (call,) = [item for item in first["output"] if item["type"].endswith("call")]
    assert (call["name"], call["status"]) == (name, "completed")
    if kind == "custom":
        assert isinstance(call["input"], str)
    else:
        assert call["namespace"] == "shop"
        assert isinstance(json.loads(call["arguments"]), dict)
    result = {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "5"}
    for again in (
        {"input": [result], "previous_response_id": first["id"]},
        {"input": [{"role": "user", "content": HELLO}, *first["output"], result]},
    ):
        second = http.post("/v1/responses", json={**body, **again, "tool_choice": "auto", "max_output_tokens": 4})
        assert second.is_success, second.text


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_price", "get_stock"}),
        ({"type": "function", "name": "get_stock"}, {"get_stock"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_price"}]},
            {"get_price"},
        ),
    ],
)
def test_a_required_call_is_made(client, choice, names):
    answer = respond(client, input=HELLO, tools=[tool("get_price"), tool("get_stock")], tool_choice=choice)
    called = [item for item in answer.output if item.type == "function_call" and item.status == "completed"]
    assert called
    assert all(call.name in names and set(json.loads(call.arguments)) == {"item"} for call in called)


def test_a_format_is_that_of_the_text_and_not_of_calls(client):
    schema = {"type": "object", "properties": {"price": {"type": "integer", "maximum": 99}}, "required": ["price"]}
    text = {"format": {"type": "json_schema", "name": "price", "schema": schema}}
    fields = {"tools": [tool("get_price")], "text": text}
    use = question("get_price", 1)
    forced = respond(client, input=HELLO, tool_choice={"type": "function", "name": "get_price"}, **fields)
    assert {item.type for item in forced.output} == {"function_call"}
    first = respond(client, input=use.question, **fields)
    (call,) = first.output
    assert (call.type, json.loads(call.arguments)) == ("function_call", use.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(use.result)}
    last = respond(client, input=[result], previous_response_id=first.id, **fields)
    assert json.loads(last.output_text) == use.result


def test_strict_tools_and_formats_are_parsed_by_the_client(client):
    class Price(BaseModel):
        item: Literal["kite", "lamp"]
        is_cheap: bool

    answer = client.responses.parse(model=MODEL, input=HELLO, text_format=Price, temperature=0)
    assert isinstance(answer.output_parsed, Price)
    use = question("add_numbers", 2)
    strict = tool("add_numbers", strict=True)
    strict["parameters"] = {**strict["parameters"], "additionalProperties": False}
    choice = {"type": "function", "name": "add_numbers"}
    called = client.responses.parse(model=MODEL, input=use.question, tools=[strict], tool_choice=choice, temperature=0)
    assert called.output[0].parsed_arguments.keys() == use.arguments.keys()
    some = respond(client, input=HELLO, text={"format": {"type": "json_object"}})
    assert some.status == "incomplete" or json.loads(some.output_text) is not None


def test_server_fields_of_a_tool_are_not_passed_to_the_chat_template(client):
    counts = {
        respond(client, input=HELLO, tools=[tool("get_price", **fields)], max_output_tokens=1).usage.input_tokens
        for fields in ({}, {"strict": False}, {"strict": None}, {"defer_loading": False})
    }
    assert len(counts) == 1


def test_reasoning_is_an_item(client):
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": SUM["input"]}],
        temperature=0,
        extra_body={"enable_thinking": True},
    )
    thought = chat.choices[0].message.reasoning
    answer = respond(client, **SUM)
    reasoning, message = answer.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", thought, [])
    assert (message.type, answer.output_text) == ("message", chat.choices[0].message.content)
    details = chat.usage.completion_tokens_details
    assert answer.usage.output_tokens_details.reasoning_tokens == details.reasoning_tokens > 0
    summarized = respond(client, **{**SUM, "reasoning": {"effort": "low", "summary": "auto"}})
    assert [part.text for part in summarized.output[0].summary] == [thought]
    encoded = respond(client, **SUM, include=["reasoning.encrypted_content"], store=False).output[0]
    assert encoded.encrypted_content
    assert respond(client, **{**SUM, "reasoning": {"effort": "none"}}).output[0].type == "message"


def test_an_output_that_is_cut_is_incomplete(client):
    answer = respond(client, input=HELLO, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.usage.output_tokens == 3
    events = list(respond(client, input=HELLO, max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == answer.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_chat(client, stream):
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_completion_tokens=8, logprobs=True, top_logprobs=2
    )
    expected = [(entry.token, len(entry.top_logprobs)) for entry in chat.choices[0].logprobs.content]
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 8}
    answer = respond(client, input=HELLO, stream=stream, **fields)
    events = list(answer) if stream else []
    response = events[-1].response if stream else answer
    logprobs = response.output[0].content[0].logprobs
    assert [(entry.token, len(entry.top_logprobs)) for entry in logprobs] == expected
    if stream:
        sent = [
            entry.token for event in events if event.type == "response.output_text.delta" for entry in event.logprobs
        ]
        assert sent == [token for token, _ in expected][: len(sent)]
        assert len(sent) >= len(expected) - 1, "all but the end token's"


def test_a_conversation_goes_on_and_instructions_do_not(client):
    first = respond(client, input=HELLO, instructions="You are Ada.")
    second = respond(client, input="Thanks", previous_response_id=first.id)
    messages = [*CHAT, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "Thanks"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_completion_tokens=120)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)
    third = respond(client, input="And?", previous_response_id=second.id, max_output_tokens=2)
    assert third.usage.input_tokens > second.usage.input_tokens, "a response keeps what it continues"


def test_stored_responses_are_retrieved_listed_and_deleted(client):
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    answer = respond(client, input=items, max_output_tokens=3)
    assert client.responses.retrieve(answer.id) == answer
    listed = client.responses.input_items.list(answer.id, order="asc", limit=2)
    texts = [item.content[0].text for item in listed]
    assert texts == ["a", "b", "c"], "over two pages"
    newest = client.responses.input_items.list(answer.id, limit=1)
    assert newest.data[0].content[0].text == "c"
    assert newest.has_more
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(answer.id, after="msg_x")
    client.responses.delete(answer.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            call(answer.id)
        assert caught.value.code == "not_found"


def test_many_references_read_the_stored_items_once(client, monkeypatch):
    items = [{"role": "user", "content": f"{i}"} for i in range(40)]
    stored = respond(client, input=items, max_output_tokens=1)
    ids = [item.id for item in client.responses.input_items.list(stored.id, limit=100, order="asc")]
    get, loaded = Store.get, []

    async def counted(store, *args):
        loaded.append(args)
        return await get(store, *args)

    monkeypatch.setattr(Store, "get", counted)
    again = respond(client, input=[{"type": "item_reference", "id": id} for id in ids], max_output_tokens=1)
    assert again.usage.input_tokens == stored.usage.input_tokens
    assert len(loaded) == 1


def test_a_conversation_is_bounded_with_what_it_refers_to(client, monkeypatch):
    stored = respond(client, input=HELLO, max_output_tokens=1)
    reference = {"type": "item_reference", "id": stored.output[0].id}
    with pytest.raises(openai.BadRequestError, match="twice; refer to it once"):
        respond(client, input=[reference, {"role": "user", "content": "x"}, reference])
    monkeypatch.setattr(stored_responses, "MAX_BODY", 300)
    for fields in ({"input": "x", "previous_response_id": stored.id}, {"input": "x" * 300}):
        with pytest.raises(openai.BadRequestError, match="begin another one"):
            respond(client, truncation="auto", **fields)


def test_a_response_with_store_false_is_not_found(client):
    answer = respond(client, input=HELLO, store=False, max_output_tokens=2)
    assert answer.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError) as caught:
        respond(client, input="x", previous_response_id=answer.id)
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError) as caught:
        respond(client, input=[{"type": "item_reference", "id": answer.output[0].id}])
    assert caught.value.param == "input"


def test_a_response_in_the_background(client):
    answer = respond(client, input=HELLO, background=True)
    assert (answer.status, answer.background, answer.output) == ("queued", True, [])
    wait_until(lambda: client.responses.retrieve(answer.id).status == "completed")
    done = client.responses.retrieve(answer.id)
    assert done.output_text == respond(client, input=HELLO).output_text
    last = list(respond(client, input=HELLO, background=True, stream=True))[-1].response
    assert respond(client, input="Thanks", previous_response_id=last.id, max_output_tokens=1).id, "at once"
    assert client.responses.cancel(answer.id).status == "completed"
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        client.responses.retrieve(answer.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="created with background"):
        client.responses.cancel(respond(client, input=HELLO, max_output_tokens=2).id)


def test_a_stream_in_the_background_can_be_left_and_read_again(client):
    stream = respond(client, input=HELLO, background=True, stream=True, **LONG)
    first = [next(stream) for _ in range(4)]
    stream.close()
    assert [event.type for event in first[:3]] == ["response.created", "response.queued", "response.in_progress"]
    id = first[0].response.id
    assert client.responses.retrieve(id).status == "in_progress"
    live = list(client.responses.retrieve(id, stream=True, starting_after=2))
    assert live[0] == first[3]
    assert live[-1].type == "response.incomplete"
    assert [event.sequence_number for event in live] == list(range(3, 3 + len(live)))
    wait_until(lambda: client.responses.retrieve(id).status == "incomplete")
    assert list(client.responses.retrieve(id, stream=True, starting_after=2)) == live, "from the store"
    assert list(client.responses.retrieve(id, stream=True))[:4] == first


def test_a_response_in_the_background_is_cancelled(client, http):
    def running():
        return http.get("/health").json()["requests_running"]

    answer = respond(client, input=HELLO, background=True, **LONG)
    wait_until(lambda: client.responses.retrieve(answer.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="still generated"):
        respond(client, input="x", previous_response_id=answer.id)
    assert client.responses.input_items.list(answer.id).data[0].content[0].text == HELLO
    cancelled = client.responses.cancel(answer.id)
    assert cancelled.status == client.responses.retrieve(answer.id).status == "cancelled"
    other = respond(client, input=HELLO, background=True, **LONG)
    client.responses.delete(other.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(other.id)
    wait_until(lambda: not running())


def test_a_conversation_that_is_too_long_is_truncated_on_request(client):
    items = []
    for i in range(40):
        items += [
            {"role": "user", "content": f"Question {i}: how much is the lamp, the kite and the tent?"},
            {"role": "assistant", "content": "The lamp costs 3 coins a day."},
        ]
    items = [{"role": "system", "content": "Be kind."}, *items, {"role": "user", "content": HELLO}]
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, input=items)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    answer = respond(client, input=items, truncation="auto", max_output_tokens=4)
    assert 400 < answer.usage.input_tokens < 512
    listed = list(client.responses.input_items.list(answer.id, order="asc"))
    assert len(listed) == len(items), "the conversation itself keeps all items"


def test_stored_responses_are_bounded(client, http, monkeypatch):
    first = respond(client, input="a", max_output_tokens=1)
    limits = {**store_module.LIMITS, "response": store_module.Limit(2, 2**20)}
    monkeypatch.setattr(store_module, "LIMITS", limits)
    last = [respond(client, input="a", max_output_tokens=1) for _ in range(2)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert all(client.responses.retrieve(one.id) for one in last)
    monkeypatch.setattr(store_module, "LIMITS", {**limits, "response": store_module.Limit(2, 10)})
    full = respond(client, input="a", max_output_tokens=1)
    assert full.model_extra["store"] is False, "the answer says so"
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, input="a", background=True)
    assert caught.value.code == "store_full"
    monkeypatch.setattr(store_module, "LIMITS", {**limits, "response": store_module.Limit(2, 1600)})
    grown = list(respond(client, input="a", background=True, stream=True))[-1].response
    assert grown.status == "completed"
    wait_until(lambda: http.get(f"/v1/responses/{grown.id}").status_code == 404)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("get_price")], "tool_choice": {"type": "function", "name": "get_prise"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": 5}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"max_output_tokens": -5}, "max_output_tokens"),
        ({"top_logprobs": 10**6}, "top_logprobs"),
        ({"background": True, "store": False}, "background"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "hiccup"}}}}, "text.format"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "tools"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_response_fields_are_rejected_by_name(client, fields, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, stream=stream, **{"input": HELLO, **fields})
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "\ud800"},
        {"instructions": "\ud800"},
        {"metadata": {"a": "\ud800"}},
        {"previous_response_id": "\ud800"},
        {"input": [{"type": "item_reference", "id": "msg_\ud800"}]},
        {"input": [{"role": "user", "content": "x", "extra": "\ud800"}]},
        {"tools": [{"type": "function", "name": "x", "description": "\ud800"}]},
        {"tools": [tool("get_price", note="\ud800")], "tool_choice": "none"},
        {"stop": "\ud800"},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_text_that_is_no_unicode_is_refused(keyless, fields, stream):
    answer = keyless.post(None, "/v1/responses", stream=stream, max_output_tokens=1, **{"input": "x", **fields})
    assert answer.status_code in (400, 404), answer.text


def test_tenants_do_not_see_each_others_responses(site):
    made = site.post("ann", "/v1/responses", input=HELLO, max_output_tokens=2).json()
    running = site.post(
        "ann", "/v1/responses", input=HELLO, max_output_tokens=400, ignore_eos=True, background=True
    ).json()
    for id in (made["id"], running["id"]):
        for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            answer = site.ask("bob", method, f"/v1/responses/{id}{path}")
            unknown = site.ask("bob", method, f"/v1/responses/resp_{'0' * 32}{path}")
            assert answer.status_code == unknown.status_code == 404
            assert answer.text.replace(id, "") == unknown.text.replace(f"resp_{'0' * 32}", "")
        continued = site.post("bob", "/v1/responses", input="x", previous_response_id=id)
        assert continued.status_code == 404
    reference = [{"type": "item_reference", "id": made["output"][0]["id"]}]
    assert site.post("bob", "/v1/responses", input=reference).status_code == 404
    assert site.ask("ann", "GET", f"/v1/responses/{made['id']}").json() == made
    assert site.ask("root", "GET", f"/v1/responses/{made['id']}").status_code == 404, "nor does an admin"
    assert site.ask("ann", "DELETE", f"/v1/responses/{running['id']}").status_code == 200


def test_pages_of_other_sites_change_nothing(http):
    made = http.post("/v1/responses", json={"input": HELLO, "max_output_tokens": 1}).json()
    for method, path in (("POST", f"/v1/responses/{made['id']}/cancel"), ("DELETE", f"/v1/responses/{made['id']}")):
        refused = http.request(method, path, headers={"sec-fetch-site": "cross-site"})
        assert refused.json()["error"]["code"] == "cross_site_request"


class FailingReader:
    """A reader whose engine ends after the first step."""

    async def deltas(self, reply):
        yield []
        raise EngineStopped("the engine has ended")


class DeadEndReader:
    """A reader of an output that begins, and that its constraint allows no end of."""

    async def deltas(self, reply):
        yield [MessageDelta(0, [Content("{")], SimpleNamespace(logprobs=None, stop_reason="a dead end"), "error")]


@pytest.mark.parametrize(
    ("reader", "code", "message"),
    [(FailingReader(), "server_error", "the engine has ended"), (DeadEndReader(), "invalid_prompt", "a dead end")],
)
def test_an_error_within_a_stream_is_its_last_event(reader, code, message):
    async def main():
        fields = {"id": f"resp_{'0' * 32}", "status": "in_progress", "error": None}
        writer = ResponseWriter(fields, 0, None, {}, with_summary=False, with_encoded=False, logprobs=None)
        generation = Generation(
            *("ann", writer, (reader, None), TimeLimit(None)),
            **{"object": None, "pool": None, "with_padding": False, "with_cache": True},
        )
        data = b"".join([one async for one in generation.stream({})])
        return [json.loads(part.split(b"data: ")[1]) for part in data.strip().split(b"\n\n")]

    events = asyncio.run(main())
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", code)
    assert response["error"]["message"] == message
