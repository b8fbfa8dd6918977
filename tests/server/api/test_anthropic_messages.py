"""/v1/messages: exact events, tools, thinking, caching, errors, and what clients of Anthropic's API send."""

import asyncio
import json
from dataclasses import replace
from random import Random

import httpx
import pytest
from anthropic_events import events_of, message_of
from embedded_model_server import CHAT, MODEL, run_app, service_of, small_engine
from multi_tenant_server import error_of
from waiting import DEADLINE

from quire.chat.parts import Content
from quire.config import EngineOptions
from quire.core.scheduling_params import Retention
from quire.engine.inputs import kept_for
from quire.server.api.anthropic import messages as routes
from quire.server.api.anthropic.schema import MessagesBody
from quire.server.api.anthropic.translation import chat_messages
from quire.server.api.conversation import MessageDelta
from quire.server.app import make_app
from tools.demo_model.tool_use import TOOLS

SUM = [{"role": "user", "content": "Sum: 13 25 31"}]
THINKING = {"type": "enabled", "budget_tokens": 1024}


def tool(name):
    function = TOOLS[name][0]["function"]
    return {"name": name, "description": function["description"], "input_schema": function["parameters"]}


OFFERED = [tool(name) for name in ("get_price", "get_stock", "find_person")]


def use_of(name, seed=1):
    return TOOLS[name][1](Random(seed))


def asked(messages=CHAT, **fields):
    return {"model": MODEL, "messages": messages, "max_tokens": 120, "temperature": 0, **fields}


def post(http, messages=CHAT, **fields):
    answer = http.post("/v1/messages", json=asked(messages, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http, messages=CHAT, **fields):
    answer = http.post("/v1/messages", json=asked(messages, stream=True, **fields))
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


def question(name, seed=1):
    return [{"role": "user", "content": use_of(name, seed).question}]


def test_the_events_of_a_call(http):
    use = use_of("get_price")
    http.post("/flush_cache")
    events = streamed(http, question("get_price"), tools=OFFERED, speculation=None)
    names = [name for name, _ in events]
    pieces = names.count("content_block_delta")
    deltas = ["content_block_delta"] * pieces
    start, end = (
        ["message_start", "ping", "content_block_start"],
        ["content_block_stop", "message_delta", "message_stop"],
    )
    assert names == [*start, *deltas, *end]
    assert all(data["type"] == name for name, data in events)
    first, block, last = events[0][1]["message"], events[2][1], events[-2][1]
    assert (first["type"], first["role"], first["model"], first["content"]) == ("message", "assistant", MODEL, [])
    assert first["stop_reason"] is first["stop_sequence"] is None
    assert first["usage"]["output_tokens"] == 0
    assert first["usage"]["input_tokens"] == last["usage"]["input_tokens"] > 0, "nothing was cached"
    call = block["content_block"]
    assert (block["index"], call["type"], call["name"], call["input"]) == (0, "tool_use", "get_price", {})
    inputs = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert {delta["type"] for delta in inputs} == {"input_json_delta"}
    assert json.loads("".join(delta["partial_json"] for delta in inputs)) == use.arguments
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] > 5


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 3},
        {"max_tokens": 0},
        {"stop_sequences": ["Pip"]},
        {"messages": SUM, "thinking": THINKING},
        {"messages": SUM, "thinking": {**THINKING, "display": "omitted"}},
        {"messages": SUM, "thinking": {"type": "adaptive"}, "max_tokens": 20},
        {"messages": question("get_price"), "tools": OFFERED},
        {"messages": question("get_price"), "tools": OFFERED, "max_tokens": 12},
        {"temperature": 1, "tools": OFFERED, "tool_choice": {"type": "any"}, "max_tokens": 60},
    ],
)
def test_a_stream_gives_the_message_of_the_whole_response(http, fields):
    if fields.get("temperature"):
        fields = {**fields, "temperature": 0}
    whole = post(http, **fields)
    built = message_of(streamed(http, **fields))
    for message in (whole, built):
        for block in message["content"]:
            block.pop("id", None)
        message.pop("id")
        usage = message["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    assert built == whole


@pytest.mark.parametrize("name", ["get_price", "send_note", "reserve_item"])
def test_an_agent_asks_calls_a_tool_and_answers_with_its_result(http, name):
    for seed in range(2):
        use, tools = use_of(name, seed), [tool(name)]
        messages = question(name, seed)
        first = post(http, messages, tools=tools)
        assert first["stop_reason"] == "tool_use"
        (call,) = first["content"]
        assert (call["type"], call["name"], call["input"]) == ("tool_use", name, use.arguments)
        for result in (json.dumps(use.result), [{"type": "text", "text": json.dumps(use.result)}]):
            block = {"type": "tool_result", "tool_use_id": call["id"], "content": result, "is_error": False}
            history = [
                *messages,
                {"role": "assistant", "content": first["content"]},
                {"role": "user", "content": [block]},
            ]
            last = post(http, history, tools=tools)
            assert (last["content"], last["stop_reason"]) == ([{"type": "text", "text": use.answer}], "end_turn")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any"}, {"get_price", "get_stock", "find_person"}),
        ({"type": "tool", "name": "find_person"}, {"find_person"}),
    ],
)
def test_a_required_call_is_made(http, choice, names):
    found = post(http, tools=OFFERED, tool_choice={**choice, "disable_parallel_tool_use": True})
    (call,) = found["content"]
    assert call["name"] in names
    assert found["stop_reason"] in ("tool_use", "max_tokens")


def test_no_call_is_made_with_the_choice_none(http):
    found = post(http, question("get_price"), tools=OFFERED, tool_choice={"type": "none"})
    assert [block["type"] for block in found["content"]] == ["text"]
    assert found["content"] == post(http, question("get_price"))["content"], "the template gets no tools"


def test_thinking_is_a_block_with_a_signature_and_is_accepted_back(http):
    found = post(http, SUM, thinking=THINKING)
    thought, text = found["content"]
    assert (thought["type"], text) == ("thinking", {"type": "text", "text": "69"})
    assert thought["thinking"].startswith("13+25")
    assert len(thought["signature"]) > 20
    assert found["usage"]["output_tokens_details"]["thinking_tokens"] > 10
    redacted = {"type": "redacted_thinking", "data": "abc"}
    history = [*SUM, {"role": "assistant", "content": [redacted, *found["content"]]}, *CHAT]
    assert post(http, history)["content"][0]["text"].startswith("Hello")
    assert post(http, SUM, thinking={"type": "disabled"})["content"][0]["type"] == "text"
    hidden, _ = post(http, SUM, thinking={**THINKING, "display": "omitted"})["content"]
    assert (hidden["thinking"], hidden["signature"]) == ("", thought["signature"])


def test_the_budget_of_thinking_is_kept(http):
    found = post(http, SUM, thinking={"type": "enabled", "budget_tokens": 2})
    assert found["content"][0]["type"] == "thinking"
    assert len(found["content"][0]["thinking"]) < 8
    assert found["stop_reason"] == "end_turn"


def test_stop_sequence_names_the_matched_text(http):
    whole = post(http)["content"][0]["text"]
    stop = whole.split()[2]
    found = post(http, stop_sequences=["never", stop])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert found["content"][0]["text"] == whole[: whole.index(stop)]
    assert post(http, max_tokens=2)["stop_reason"] == "max_tokens"


def test_the_last_message_of_the_assistant_is_continued(http):
    whole = post(http)["content"][0]["text"]
    begun = [*CHAT, {"role": "assistant", "content": whole[:8]}]
    assert whole[:8] + post(http, begun)["content"][0]["text"] == whole


def test_output_can_have_a_schema(http):
    record = [{"role": "user", "content": "Faye took 18 white ladders on Thursday.\nJSON keys: count, name"}]
    properties = {"count": {"type": "integer"}, "name": {"enum": ["Faye", "Zoe"]}}
    schema = {"type": "object", "properties": properties, "required": ["count", "name"], "additionalProperties": False}
    asked_format = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": asked_format, "effort": "max"}}, {"output_format": asked_format}):
        (text,) = post(http, record, **fields)["content"]
        assert json.loads(text["text"]) == {"count": 18, "name": "Faye"}
    error = error_of(http.post("/v1/messages", json=asked(output_format={**asked_format, "schema": {"type": "x"}})))
    assert error["param"] == "output_config"


def test_system_is_a_text_or_blocks(http):
    plain = post(http, system="You are terse.")
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"},
        {"type": "text", "text": "You are terse.", "cache_control": {"type": "ephemeral"}},
    ]
    found = post(http, system=blocks)
    assert found["content"] == plain["content"]
    assert sum_of(found["usage"]) == sum_of(plain["usage"]) > sum_of(post(http)["usage"])


def sum_of(usage):
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage[kind] for kind in kinds)


def test_count_tokens_counts_what_usage_counts(http):
    fields = {"system": "Be brief.", "tools": OFFERED, "thinking": THINKING}
    for more in ({}, fields, {**fields, "tool_choice": {"type": "none"}}):
        body = {"model": MODEL, "messages": SUM, **more}
        (number,) = http.post("/v1/messages/count_tokens", json=body).json().values()
        assert number == sum_of(post(http, SUM, **more)["usage"])


def test_usage_reports_cache_reads_and_cache_creation(http):
    http.post("/flush_cache")
    first = post(http, SUM, cache_control={"type": "ephemeral"})["usage"]
    again = post(http, SUM, cache_control={"type": "ephemeral"})["usage"]
    plain = post(http, SUM)["usage"]
    total = first["cache_creation_input_tokens"]
    assert (first["input_tokens"], first["cache_read_input_tokens"]) == (0, 0)
    assert (again["input_tokens"], again["cache_creation_input_tokens"], again["cache_read_input_tokens"]) == (
        *(0, 1),
        total - 1,
    )
    assert (plain["input_tokens"], plain["cache_creation_input_tokens"], plain["cache_read_input_tokens"]) == (
        *(1, 0),
        total - 1,
    )


EPHEMERAL = {"type": "ephemeral"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0),
        ({"cache_control": EPHEMERAL}, 300),
        ({"system": [{"type": "text", "text": "a", "cache_control": {**EPHEMERAL, "ttl": "1h"}}]}, 3600),
        ({"tools": [{**OFFERED[0], "cache_control": EPHEMERAL}]}, 300),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}]}]},
            300,
        ),
    ],
)
def test_cache_control_has_a_time(fields, expected):
    assert MessagesBody.model_validate(asked(**fields)).cache_seconds == expected


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, Retention()),
        ({"eviction": "lfu"}, Retention()),
        ({"eviction": "priority"}, Retention(ttl=300, priority=80)),
        ({"eviction": "cost"}, Retention(ttl=300, priority=80)),
        ({"prefix_index": "hash"}, Retention()),
        ({"enable_prefix_caching": False}, Retention()),
    ],
)
def test_cache_control_is_a_priority_for_its_time(options, kept):
    assert kept_for(300, EngineOptions(**options)) == kept


def test_retention_overrides_cache_control(keyless):
    for fields, expected in (
        ({"cache_control": EPHEMERAL, "retention": {"ttl": 5, "pin": True}}, Retention(ttl=5, pin=True)),
        ({"cache_control": EPHEMERAL}, Retention()),
    ):
        answer = keyless.post(None, "/v1/messages", **asked(max_tokens=1), **fields)
        assert answer.status_code == 200, answer.text
        assert keyless.engine.scheduling_params[f"{answer.headers['x-request-id']}-0"].retention == expected


def test_a_cache_control_leaves_no_used_blocks():
    with run_app(make_app(service_of(small_engine()))) as url, httpx.Client(base_url=url, timeout=60) as http:
        post(http, cache_control=EPHEMERAL)
        usage = next(
            line for line in http.get("/metrics").text.splitlines() if line.startswith("quire:kv_cache_usage_perc")
        )
    assert float(usage.split()[-1]) == 0


def test_a_result_that_is_an_error_says_so_to_the_model():
    def results(*blocks):
        body = MessagesBody.model_validate(asked([{"role": "user", "content": list(blocks)}]))
        return [message["content"] for message in chat_messages(body)]

    result = {"type": "tool_result", "tool_use_id": "a"}
    parts = [{"type": "text", "text": "no"}, {"type": "text", "text": "file"}]
    assert results(
        {**result, "content": "no file", "is_error": True},
        {**result, "content": "no file", "is_error": False},
        {**result, "content": "ERROR 5", "is_error": True},
        {**result, "content": parts, "is_error": True},
        {**result, "is_error": True},
    ) == ["Error: no file", "no file", "ERROR 5", [{"type": "text", "text": "Error: no"}, parts[1]], "Error"]


def test_tools_that_anthropic_runs_are_left_out(http):
    tools = [{"type": "web_search_20250305", "name": "web_search"}, OFFERED[0]]
    answer = http.post("/v1/messages", json=asked(question("get_price"), tools=tools))
    assert [block["name"] for block in answer.json()["content"]] == ["get_price"]
    assert answer.headers["x-quire-ignored"] == "tools.web_search_20250305"
    alone = http.post("/v1/messages", json=asked(tools=tools[:1]))
    assert alone.is_success


def test_the_names_that_claude_code_has_built_in_stand_for_the_model(http):
    answer = http.post("/v1/messages", json=asked(model="claude-opus-4-8[1m]"))
    assert answer.json()["model"] == MODEL
    assert answer.headers["x-quire-ignored"] == "model"
    assert http.post("/v1/messages", json=asked(model="gpt-5")).status_code == 404


def block(**fields):
    return [{"role": "user", "content": [fields]}]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": block(type="image", source={})}, "messages", "type 'image'"),
        ({"messages": block(type="document", source={})}, "messages", "type 'document'"),
        ({"messages": block(type="tool_use", id="a", name="b", input={})}, "messages", "type 'tool_use'"),
        ({"messages": block(type="text")}, "messages", "needs a text"),
        ({"messages": block(type="tool_result", content="a")}, "messages", "tool_use_id"),
        (
            {"messages": block(type="tool_result", tool_use_id="a", content=[{"type": "image"}])},
            *("messages", "type 'image'"),
        ),
        ({"messages": []}, "messages", "at least one"),
        (
            {"messages": [*CHAT, {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}]},
            *("messages", "needs a last message with content"),
        ),
        (
            {
                "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tool_choice",
            "web_search_20250305",
        ),
        ({"tools": [{"name": "a"}]}, "tools", "input_schema"),
        ({"tools": OFFERED, "tool_choice": {"type": "tool"}}, "tool_choice", "name of a tool"),
        ({"tools": OFFERED, "tool_choice": {"type": "tool", "name": "get_prise"}}, "tool_choice", "get_price"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management", "clear_tool"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers", "not supported"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences", "stop string"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "greater than"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
    ],
)
def test_refusals_name_the_field(http, fields, param, message):
    answer = http.post("/v1/messages", json=asked(**fields))
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["param"] == param
    assert message in body["error"]["message"]


def test_errors_have_the_types_of_the_dialect(http, site):
    for answer, status, kind in (
        (http.post("/v1/messages", json=asked(model="gpt")), 404, "not_found_error"),
        (http.get("/v1/messages"), 405, "invalid_request_error"),
        (site.post(None, "/v1/messages", **asked()), 401, "authentication_error"),
        (http.post("/v1/messages", json=asked(timeout=1e-6)), 408, "timeout_error"),
        (http.post("/v1/messages/batches", json={}), 404, "not_found_error"),
    ):
        body = answer.json()
        assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert "/v1/batches" in http.post("/v1/messages/batches", json={}).json()["error"]["message"]


def test_a_thread_is_rejected_with_thread_unsupported_request(http):
    """Anthropic's tool runner reads the details, and goes on without a thread."""
    error = error_of(http.post("/v1/messages", json=asked(thread={"type": "create"})))
    assert (error["param"], error["code"]) == ("thread", "unsupported_parameter")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_an_error_in_a_stream_is_an_event(monkeypatch):
    built = small_engine()
    engine = built.engine

    def failing():
        raise RuntimeError("broken")

    with run_app(make_app(service_of(replace(built, engine=engine)))) as url:
        monkeypatch.setattr(engine.runner, "collect", failing)
        events = events_of(httpx.post(f"{url}/v1/messages", json=asked(stream=True), timeout=60).text)
        monkeypatch.undo()
    assert [name for name, _ in events] == ["message_start", "ping", "error"]
    assert events[-1][1]["error"]["type"] == "api_error"


def test_a_request_in_the_form_of_claude_code_is_accepted(http):
    ephemeral = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = asked(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>a</system-reminder>"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "b", "citations": None}]},
            {"role": "user", "content": [{"type": "text", "text": "Hello! Who are you?", **ephemeral}]},
        ],
        system=[{"type": "text", "text": "You are an agent.", **ephemeral}],
        tools=[{**OFFERED[0], "eager_input_streaming": True, "defer_loading": False, **ephemeral}],
        metadata={"user_id": "user_1_session_2"},
        service_tier="auto",
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        stream=True,
    )
    body.pop("temperature")
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "none"}
    answer = http.post("/v1/messages?beta=true", json=body, headers=headers)
    assert events_of(answer.text)[-1][0] == "message_stop", answer.text


class SlowReader:
    """A reader whose first output comes late, once `comes` is set."""

    new_call_id = None

    def __init__(self):
        self.comes = asyncio.Event()

    async def deltas(self, _reply):
        await self.comes.wait()
        yield [MessageDelta(0, [Content("a")], None, None)]


def test_until_the_first_output_there_are_pings(monkeypatch):
    monkeypatch.setattr(routes, "PING_SECONDS", 0.05)
    body = MessagesBody.model_validate(asked())
    reader = SlowReader()
    answer = routes.MessagesAnswer("msg-1", MODEL, body, reader)
    monkeypatch.setattr(answer, "_usage", lambda _reply: {})

    async def read():
        names = []
        async for part in answer.events(None):
            names += [name for name, _ in events_of(part.decode())]
            if names.count("ping") >= 3:
                reader.comes.set()
        return names

    found = asyncio.run(asyncio.wait_for(read(), DEADLINE))
    assert found[0] == "message_start"
    assert found[-2:] == ["content_block_start", "content_block_delta"]
