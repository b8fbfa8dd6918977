"""Invalid requests get OpenAI's error object, never a 5xx, and do not affect other requests."""

import gzip
import json
import socket
import threading

import httpx
import pytest

from quire.server.request_body import MAX_BODY

JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "a"}]


def nested(depth):
    return "[" * depth + "]" * depth


COMPLETIONS = {
    "empty": b"",
    "broken": b'{"prompt": ',
    "invalid UTF-8": b'{"prompt": "\xff"}',
    "a list": b"[]",
    "a string": b'"prompt"',
    "a number": b"3",
    "null": b"null",
    "no prompt": b"{}",
    "prompt of null": b'{"prompt": null}',
    "prompt of a number": b'{"prompt": 3}',
    "empty prompt": b'{"prompt": ""}',
    "no prompts": b'{"prompt": []}',
    "an empty list of ids": b'{"prompt": [[]]}',
    "mixed prompts": b'{"prompt": ["a", 3]}',
    "ids out of range": b'{"prompt": [999999]}',
    "negative ids": b'{"prompt": [-1]}',
    "huge ids": b'{"prompt": [1' + b"0" * 400 + b"]}",
    "boolean ids": b'{"prompt": [true]}',
    "one bad prompt": b'{"prompt": ["a", ""]}',
    "a long prompt": json.dumps({"prompt": "a " * 5000}).encode(),
    "too many prompts": json.dumps({"prompt": ["a"] * 2000}).encode(),
    "too many sequences": json.dumps({"prompt": ["a"] * 20, "n": 128}).encode(),
    "surrogates": b'{"prompt": "\\ud800"}',
    "temperature 1e400": b'{"prompt": "a", "temperature": 1e400}',
    "temperature NaN": b'{"prompt": "a", "temperature": NaN}',
    "temperature 10**400": b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}",
    "10**9999": b'{"prompt": "a", "max_tokens": 1' + b"0" * 9999 + b"}",
    "max_tokens 10**400": b'{"prompt": "a", "max_tokens": 1' + b"0" * 400 + b"}",
    "max_tokens -2": b'{"prompt": "a", "max_tokens": -2}',
    "max_tokens 1.5": b'{"prompt": "a", "max_tokens": 1.5}',
    "max_tokens of a string": b'{"prompt": "a", "max_tokens": "5"}',
    "n 0": b'{"prompt": "a", "n": 0}',
    "n 1000": b'{"prompt": "a", "n": 1000}',
    "n true": b'{"prompt": "a", "n": true}',
    "seed 10**400": b'{"prompt": "a", "seed": 1' + b"0" * 400 + b"}",
    "top_p 0": b'{"prompt": "a", "top_p": 0}',
    "top_k": b'{"prompt": "a", "top_k": -2}',
    "min_tokens": b'{"prompt": "a", "min_tokens": 9, "max_tokens": 3}',
    "empty stop": b'{"prompt": "a", "stop": ""}',
    "stops": json.dumps({"prompt": "a", "stop": ["a"] * 65}).encode(),
    "long stop": json.dumps({"prompt": "a", "stop": "a" * 5000}).encode(),
    "stop tokens": b'{"prompt": "a", "stop_token_ids": [999999]}',
    "logprobs": b'{"prompt": "a", "logprobs": 129}',
    "stream of a string": b'{"prompt": "a", "stream": "yes"}',
    "stream options": b'{"prompt": "a", "stream": true, "stream_options": {"usage": true}}',
    "stream options alone": b'{"prompt": "a", "stream_options": {"include_usage": true}}',
    "deep": ('{"prompt": ' + nested(100_000) + "}").encode(),
    "deep logit_bias": ('{"prompt": "a", "logit_bias": ' + nested(900) + "}").encode(),
    "unknown field": b'{"prompt": "a", "temprature": 1}',
    "unknown field of surrogates": b'{"prompt": "a", "\\ud800": 1}',
    "best_of": b'{"prompt": "a", "best_of": 129}',
    "echo of a string": b'{"prompt": "a", "echo": "true"}',
    "suffix": b'{"prompt": "a", "suffix": "b"}',
    "penalty": b'{"prompt": "a", "presence_penalty": 2.5}',
    "repetition": b'{"prompt": "a", "repetition_penalty": 0}',
    "bias": b'{"prompt": "a", "logit_bias": {"67": 101}}',
    "bias of a word": b'{"prompt": "a", "logit_bias": {"word": 1}}',
    "bias outside": b'{"prompt": "a", "logit_bias": {"999999": 1}}',
    "bias NaN": b'{"prompt": "a", "logit_bias": {"67": NaN}}',
    "nothing allowed": b'{"prompt": "a", "allowed_token_ids": []}',
    "allowed outside": b'{"prompt": "a", "allowed_token_ids": [999999]}',
    "empty bad word": b'{"prompt": "a", "bad_words": [""]}',
    "bad word of surrogates": b'{"prompt": "a", "bad_words": ["\\ud800"]}',
    "bad words": json.dumps({"prompt": "a", "bad_words": ["a"] * 2000}).encode(),
    "prompt_logprobs": b'{"prompt": "a", "prompt_logprobs": 129}',
    "ids without logprobs": b'{"prompt": "a", "logprob_token_ids": [67]}',
    "truncated to nothing": b'{"prompt": "a", "truncate_prompt_tokens": 0}',
}
CHATS = {
    "no messages": {},
    "empty messages": {"messages": []},
    "messages of a string": {"messages": "hello"},
    "a message of a string": {"messages": ["hello"]},
    "no role": {"messages": [{"content": "a"}]},
    "no role's name": {"messages": [{"role": "user<|im_end|>", "content": "a"}]},
    "a long role": {"messages": [{"role": "a" * 65, "content": "a"}]},
    "no content": {"messages": [{"role": "user"}]},
    "a number": {"messages": [{"role": "user", "content": 3}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "bad tool calls": {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": 3}]}]},
    "surrogates": {"messages": [{"role": "user", "content": "\ud800"}]},
    "too long": {"messages": [{"role": "user", "content": "a " * 5000}]},
    "too many": {"messages": USER * 20000},
    "top_logprobs alone": {"messages": USER, "top_logprobs": 2},
    "top_logprobs": {"messages": USER, "logprobs": True, "top_logprobs": 129},
    "tools of a string": {"messages": USER, "tools": "a"},
    "tool_choice": {"messages": USER, "tool_choice": "required"},
    "response_format": {"messages": USER, "response_format": {"type": "json_schema"}},
    "an unknown form": {"messages": USER, "response_format": {"type": "yaml"}},
    "two forms": {"messages": USER, "response_format": {"type": "json_object"}, "regex": "a"},
    "surrogates in a schema": {"messages": USER, "structured_outputs": {"json": {"const": "\ud800"}}},
    "functions": {"messages": USER, "functions": [{}]},
    "own variable": {"messages": USER, "chat_template_kwargs": {"messages": []}},
    "variables of a list": {"messages": USER, "chat_template_kwargs": []},
    "surrogates in tools": {"messages": USER, "tools": [{"\ud800": 1}]},
    "surrogates in a name": {"messages": USER, "stream_options": {"\ud800": 1}},
    "a surrogate as a role": {"messages": [{"role": "\ud800", "content": "a"}]},
    "a template from outside": {"messages": USER, "chat_template": "{{ 1 }}"},
    "both": {"messages": USER, "continue_final_message": True, "add_generation_prompt": True},
    "nothing to continue": {"messages": [{"role": "assistant", "tool_calls": []}], "continue_final_message": True},
    "a field twice": {"messages": USER, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "a"}},
    "documents of strings": {"messages": USER, "documents": ["a"]},
    "given tokens without logprobs": {"messages": USER, "logprob_token_ids": [67]},
}


def check(answer, status=400):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.fixture(scope="module", autouse=True)
def another_stream(served, http):
    """Streams that run during all tests, and must not change."""
    body = {"prompt": "One Tuesday", "max_tokens": 300, "seed": 1, "ignore_eos": True}
    expected = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    texts, stop = [], threading.Event()

    def run():
        while not stop.is_set():
            text = ""
            with httpx.stream(
                "POST", f"{served.url}/v1/completions", json={**body, "stream": True}, timeout=60
            ) as lines:
                for line in lines.iter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            texts.append(text)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    stop.set()
    thread.join(60)
    assert texts == [expected] * len(texts) != []


@pytest.mark.parametrize("body", COMPLETIONS.values(), ids=COMPLETIONS.keys())
def test_completions(http, body):
    check(http.post("/v1/completions", content=body, headers=JSON))


@pytest.mark.parametrize("body", CHATS.values(), ids=CHATS.keys())
def test_chats(http, body):
    check(http.post("/v1/chat/completions", content=json.dumps(body), headers=JSON))


@pytest.mark.parametrize("depth", [40, 400, 100_000])
@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs", "metadata"])
def test_depth(http, field, depth):
    value = f"[{nested(depth)}]" if field == "tools" else '{"a": ' + nested(depth) + "}"
    if field == "tools":
        value = '[{"a": ' + nested(depth) + "}]"
    body = f'{{"max_tokens": 1, "messages": {json.dumps(USER)}, "{field}": {value}}}'
    answer = http.post("/v1/chat/completions", content=body, headers=JSON)
    if field == "metadata" and depth == 40:  # the field has no effect
        assert answer.status_code == 200
    elif answer.status_code != 200 or field != "metadata":
        check(answer)


def test_the_message_helps(http):
    def complaint(body, path="/v1/completions"):
        return check(http.post(path, json=body))

    assert "did you mean 'temperature'" in complaint({"prompt": "a", "temprature": 1})["message"]
    assert complaint({"prompt": "a", "temprature": 1})["param"] == "temprature"
    assert "not supported yet" in complaint({"prompt": "a", "suffix": "b"})["message"]
    assert complaint({"prompt": "a", "suffix": "b"})["param"] == "suffix"
    assert complaint({"prompt": "a", "top_p": 7})["param"] == "top_p"
    long = complaint({"prompt": "a " * 5000})
    assert "max_model_len" in long["message"]
    assert (long["code"], long["param"]) == ("context_length_exceeded", "prompt")
    long = complaint({"messages": [{"role": "user", "content": "a " * 2000}]}, "/v1/chat/completions")
    assert (long["code"], long["param"]) == ("context_length_exceeded", "messages")
    for body, code, param in (
        ({"prompt": "a", "temprature": 1}, "unknown_parameter", "temprature"),
        ({}, "missing_required_parameter", "prompt"),
        ({"prompt": 3}, "invalid_type", "prompt"),
        ({"prompt": "a", "n": "1"}, "invalid_type", "n"),
        ({"prompt": "a", "suffix": "b"}, "unsupported_parameter", "suffix"),
    ):
        error = complaint(body)
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)
    nested_field = complaint({"messages": [{"role": "user", "contents": "a"}]}, "/v1/chat/completions")
    assert (nested_field["param"], nested_field["message"]) == ("messages", "a message of role 'user' needs content")


@pytest.mark.parametrize(
    "body", [gzip.compress(b'{"prompt": "a"}', mtime=0), b'{"prompt": "a"', b'{"prompt": "\xff"}', b"{'a': 1}"]
)
def test_a_body_that_is_not_json(http, body):
    message = check(http.post("/v1/completions", content=body, headers=JSON))["message"]
    assert message.startswith("the body is not valid JSON: ")
    assert "send one whole JSON object as UTF-8 text, not compressed" in message


def test_wrong_content_type(http):
    error = check(http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"}))
    assert "application/json" in error["message"]
    check(http.post("/v1/completions", content=b'{"prompt": "a"}'))
    check(http.post("/v1/completions", data={"prompt": "a"}))


def test_unknown_models_and_routes(http):
    error = check(http.post("/v1/completions", json={"prompt": "a", "model": "gpt-7"}), 404)
    assert "quire-demo" in error["message"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "model_not_found", "model")
    check(http.post("/v1/completions", content=b'{"prompt": "a", "model": "\\ud800"}', headers=JSON), 404)
    check(http.get("/v1/nothing"), 404)
    check(http.get("/v1/completions"), 405)
    check(http.get("/v1/models/gpt-7"), 404)


def test_large_bodies(http):
    body = b'{"prompt": "' + b"a" * MAX_BODY + b'"}'
    check(http.post("/v1/completions", content=body, headers=JSON), 413)

    def pieces():
        for start in range(0, len(body), 2**20):
            yield body[start : start + 2**20]

    try:
        answer = http.post("/v1/completions", content=pieces(), headers=JSON)
    except httpx.WriteError:  # the server closed the connection
        return
    check(answer, 413)


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"\x00\x01\x02\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_broken_http(served, head):
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head)
        assert connection.recv(100).split(b" ")[1] in (b"400", b"413")
    assert served.health()["status"] == "ok"


def test_health_stays_green(http):
    assert http.get("/health").json()["failed_steps"] == 0


def test_sampling_parameters_that_allow_no_token_are_rejected(http, served):
    end, *_ = served.built.engine.eos_token_ids
    body = {"prompt": "Hello", "allowed_token_ids": [end], "min_tokens": 3, "max_tokens": 5}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "token" in answer.json()["error"]["message"]
