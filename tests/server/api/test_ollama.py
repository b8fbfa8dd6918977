"""Ollama's routes: lines of a stream, tools, thinking, options, models, embeddings, errors."""

import json
import re
from random import Random

import pytest
from embedded_model_server import CHAT, MODEL, STORY, run_app, service_of, small_engine
from multi_tenant_server import error_of

from quire.server.api.ollama.chat import chat_messages
from quire.server.api.ollama.schema import OllamaChatBody, OllamaOptions
from quire.server.app import make_app
from tools.demo_model.tool_use import TOOLS

GREEDY = {"temperature": 0, "num_predict": 100}
SUM = [{"role": "user", "content": "Sum: 13 25 31"}]
OFFERED = [TOOLS[name][0] for name in ("get_price", "get_stock", "find_person")]
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


def chat(http, messages=CHAT, path="/api/chat", **fields):
    body = {"model": MODEL, "messages": messages, "options": GREEDY, "stream": False, **fields}
    answer = http.post(path, json={name: value for name, value in body.items() if value is not None})
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines_of(http, path, **body):
    answer = http.post(path, json={"model": MODEL, "options": GREEDY, **body})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def question(name, seed=1):
    return [{"role": "user", "content": TOOLS[name][1](Random(seed)).question}]


def test_a_stream_has_lines_and_a_last_one_with_figures(http):
    *lines, last = lines_of(http, "/api/chat", messages=CHAT)
    assert lines
    for line in lines:
        assert line.keys() == {"model", "created_at", "message", "done"}
        assert (line["model"], line["message"]["role"], line["done"]) == (MODEL, "assistant", False)
        assert TIME.fullmatch(line["created_at"])
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"], last["load_duration"]) == (True, "stop", 0)
    assert 0 <= last["prompt_eval_duration"] + last["eval_duration"] <= last["total_duration"] < 60 * 10**9
    assert (last["prompt_eval_count"] > 5, last["eval_count"] > 5) == (True, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": CHAT},
        {"messages": CHAT, "options": {**GREEDY, "num_predict": 3}},
        {"messages": SUM, "think": True},
        {"messages": SUM, "think": True, "options": {**GREEDY, "num_predict": 20}},
        {"messages": question("get_price"), "tools": OFFERED},
        {"messages": CHAT, "logprobs": True, "top_logprobs": 2},
    ],
)
def test_the_lines_give_the_whole_answer(http, fields):
    whole = chat(http, **fields)
    lines = lines_of(http, "/api/chat", **fields)
    message = {"role": "assistant"}
    for field in ("content", "thinking"):
        text = "".join(line["message"].get(field, "") for line in lines)
        if text or field == "content":
            message[field] = text
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    if calls:
        message["tool_calls"] = calls
    for call in (*calls, *whole["message"].get("tool_calls", ())):
        call.pop("id")
    assert message == whole["message"]
    assert [row for line in lines for row in line.get("logprobs", ())] == whole.get("logprobs", [])
    for name in ("done", "done_reason", "eval_count", "prompt_eval_count"):
        assert lines[-1][name] == whole[name]


@pytest.mark.parametrize("name", ["get_price", "send_note"])
def test_an_agent_asks_calls_a_tool_and_answers_with_its_result(http, name):
    use, messages = TOOLS[name][1](Random(1)), question(name)
    message = chat(http, messages, tools=[TOOLS[name][0]])["message"]
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == (name, use.arguments)
    result = {"role": "tool", "tool_name": name, "content": json.dumps(use.result)}
    last = chat(http, [*messages, message, result], tools=[TOOLS[name][0]])
    assert last["message"] == {"role": "assistant", "content": use.answer}


def test_thinking_is_apart(http):
    thought = chat(http, SUM, think=True)["message"]
    assert thought["content"] == "69"
    assert thought["thinking"].startswith("13+25")
    assert "thinking" not in chat(http, SUM, think=False)["message"]
    generated = chat(http, None, "/api/generate", prompt=SUM[0]["content"], think="high")
    assert (generated["response"], generated["thinking"]) == ("69", thought["thinking"])
    history = [*SUM, thought, *CHAT]
    assert chat(http, history)["message"]["content"].startswith("Hello")


def test_generate_uses_the_template_unless_it_is_raw(http, offline):
    answer = chat(http, None, "/api/generate", prompt=CHAT[0]["content"])
    assert answer["response"] == chat(http)["message"]["content"]
    with_system = chat(http, None, "/api/generate", prompt="Hello!", system="You are terse.")
    assert with_system["prompt_eval_count"] > chat(http, None, "/api/generate", prompt="Hello!")["prompt_eval_count"]
    raw = chat(http, None, "/api/generate", prompt=STORY, raw=True, options={"temperature": 0, "num_predict": 8})
    assert raw["response"] == offline(STORY, temperature=0, max_tokens=8).outputs[0].text
    assert (raw["done_reason"], raw["eval_count"]) == ("length", 8)
    *lines, last = lines_of(http, "/api/generate", prompt=CHAT[0]["content"])
    assert "".join(line["response"] for line in lines) == answer["response"]
    assert last["response"] == ""


@pytest.mark.parametrize(("path", "field"), [("/api/chat", "messages"), ("/api/generate", "prompt")])
def test_without_a_prompt_nothing_is_generated(http, path, field):
    empty = {"messages": [], "prompt": ""}[field]
    for more, reason in (({}, "load"), ({field: empty}, "load"), ({"keep_alive": 0}, "unload")):
        answer = http.post(path, json={"model": MODEL, **more}).json()
        assert (answer["done"], answer["done_reason"]) == (True, reason)


def test_output_can_be_json(http):
    record = [{"role": "user", "content": "Faye took 18 white ladders on Thursday.\nJSON keys: count, name"}]
    properties = {"count": {"type": "integer"}, "name": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["count", "name"], "additionalProperties": False}
    for form in ("json", schema):
        found = json.loads(chat(http, record, format=form)["message"]["content"])
        assert found == {"count": 18, "name": "Faye"}
    assert chat(http, format="")["message"]["content"].startswith("Hello")


def test_options_mean_what_they_mean_elsewhere():
    given = {
        **{"num_predict": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.4, "min_p": 0.1, "seed": 5, "stop": ["a"]},
        **{"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_ctx": 8192, "mirostat": 0},
        **{"num_gpu": 1, "num_thread": 4, "use_mmap": True, "typical_p": 1.0, "tfs_z": 1.0, "repeat_last_n": 64},
    }
    body = {"model": MODEL, "messages": CHAT, "options": given}
    params = OllamaChatBody.model_validate(body).sampling_params({"temperature": 0.7})
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (9, 0.5, 3, 0.4, 0.1)
    assert (params.seed, params.stop, params.repetition_penalty) == (5, ("a",), 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    assert OllamaOptions(num_predict=-1).sampling_fields() == {"max_tokens": None}
    assert OllamaOptions(repeat_penalty=2.0, repeat_last_n=0).sampling_fields() == {"repetition_penalty": 1.0}
    assert OllamaChatBody(model=MODEL).sampling_params({"temperature": 0.7}).max_tokens is None


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/api/chat", {"model": "gpt"}, "model", "not served"),
        ("/api/chat", {"options": {"num_predic": 1}}, "options.num_predic", "did you mean 'num_predict'"),
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat", "not supported"),
        ("/api/chat", {"options": {"temperature": -1}}, "options.temperature", "temperature"),
        ("/api/chat", {"options": {"num_predict": 2**40}}, "options.num_predict", "num_predict"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "a", "images": ["aa"]}]},
            "messages.0.images",
            "images",
        ),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "tool call needs"),
        ("/api/chat", {"format": "yaml"}, "format", "must be"),
        ("/api/chat", {"format": {"type": "x"}}, "format", "unknown type"),
        ("/api/chat", {"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ("/api/chat", {"tools": [{"type": "function"}]}, "tools", "function"),
        ("/api/generate", {"suffix": "a"}, "suffix", "suffix"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template", "template"),
        ("/api/generate", {"context": [1, 2]}, "context", "context"),
        ("/api/generate", {"raw": True, "system": "a"}, "system", "raw"),
        ("/api/show", {"model": "gpt"}, "model", "not served"),
        ("/api/embed", {"dimensions": 3}, "dimensions", "dimensions"),
        ("/api/embed", {"input": [""]}, "input", "is empty"),
    ],
)
def test_refusals_name_the_field(http, path, fields, param, message):
    inputs = {"/api/chat": {"messages": CHAT}, "/api/generate": {"prompt": "a"}, "/api/embed": {"input": "a"}}
    answer = http.post(path, json={"model": MODEL, **inputs.get(path, {}), **fields})
    assert answer.status_code == (404 if fields.get("model") == "gpt" else 400)
    body = answer.json()
    assert isinstance(body["error"], str), "as Ollama's clients read it"
    assert body["param"] == param, body
    assert message in body["error"]


def test_a_model_without_reasoning_cannot_think(monkeypatch):
    service = service_of(small_engine())
    with run_app(make_app(service)) as url:
        monkeypatch.setattr(service, "chat_format", service.chat_format.__class__(None, None, "a test"))
        import httpx  # noqa: PLC0415

        answer = httpx.post(f"{url}/api/chat", json={"model": MODEL, "messages": SUM, "think": True})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "think")


def test_calls_without_ids_get_the_same_ones_each_time():
    def call(name, **more):
        return {**more, "function": {"name": name, "arguments": {"a": 1}}}

    body = OllamaChatBody.model_validate(
        {
            "model": MODEL,
            "messages": [
                {"role": "assistant", "tool_calls": [call("f"), call("g"), call("h", id="own")]},
                {"role": "tool", "tool_name": "g", "content": "1"},
                {"role": "tool", "content": "2"},
                {"role": "tool", "tool_call_id": "own", "content": "3"},
                {"role": "assistant", "tool_calls": [call("f")]},
                {"role": "tool", "tool_name": "f", "content": None},
            ],
        }
    )
    first, g, f, own, second, last = chat_messages(body.messages)
    ids = [one["id"] for one in first["tool_calls"]]
    assert ids == ["000000001", "000000002", "own"]
    assert [g["tool_call_id"], f["tool_call_id"], own["tool_call_id"]] == [ids[1], ids[0], "own"]
    assert second["tool_calls"][0]["id"] == last["tool_call_id"] == "000000004"
    assert last["content"] == ""
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


def test_the_model_is_described(http):
    (listed,) = http.get("/api/tags").json()["models"]
    (loaded,) = http.get("/api/ps").json()["models"]
    assert listed["name"] == listed["model"] == loaded["name"] == f"{MODEL}:latest"
    assert re.fullmatch(r"[0-9a-f]{64}", listed["digest"])
    assert listed["size"] > 10**6
    assert TIME.fullmatch(listed["modified_at"])
    assert (listed["details"]["family"], listed["details"]["parameter_size"]) == ("qwen3", "3.3M")
    assert (loaded["context_length"], loaded["size_vram"]) == (512, 0)
    shown = http.post("/api/show", json={"name": f"{MODEL}:latest", "verbose": True}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["qwen3.context_length"] == 512
    assert shown["model_info"]["general.parameter_count"] == 3312704
    assert "<|im_start|>" in shown["template"]
    assert re.fullmatch(r"0\.\d+\.\d+", http.get("/api/version").json()["version"])
    assert http.head("/").status_code == http.get("/").status_code == 200


def test_embeddings_are_those_of_the_other_route(http):
    plain = http.post("/v1/embeddings", json={"input": ["a", STORY]}).json()["data"]
    answer = http.post("/api/embed", json={"model": f"{MODEL}:latest", "input": ["a", STORY]}).json()
    for one, vector in zip(plain, answer["embeddings"], strict=True):
        assert vector == pytest.approx(one["embedding"], abs=1e-5)
    assert answer["prompt_eval_count"] > 2
    raw = http.post("/v1/embeddings", json={"input": "a", "normalize": False}).json()["data"][0]["embedding"]
    older = http.post("/api/embeddings", json={"model": MODEL, "prompt": "a"}).json()["embedding"]
    assert older == pytest.approx(raw, abs=1e-3)
    long = {"model": MODEL, "input": "a " * 2000}
    assert len(http.post("/api/embed", json=long).json()["embeddings"]) == 1
    error = http.post("/api/embed", json={**long, "truncate": False}).json()
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
