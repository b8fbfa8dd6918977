"""Responses of a server with the embedded model to more than 60 requests: status, content type and body.

Ids and times, which differ between runs, are masked. Floats, which differ between processors, are compared with a
tolerance (`same`). The texts of a stream are joined, because the number of tokens in an event depends on timing.
"""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MASKED = {"created", "request_id", "seconds", "queue_seconds", "e2e_latency"}
JOINED = {"content", "text"}  # of the events of a stream
DRAWN = re.compile(r"[0-9a-f]{8}")  # in an id: it is drawn for each answer
COUNTED = {"output_ids", "completion_tokens", "total_tokens", "token_ids"}  # what grows from event to event
_TOLERANCE = 1e-3
_USER = [{"role": "user", "content": "Who are you?"}]
_CHAT = {"messages": _USER, "temperature": 0, "max_tokens": 24}
_TEXT = {"prompt": "One Tuesday Mira went to the", "temperature": 0, "max_tokens": 12}
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
_NATIVE = {"text": "Ivy had a red kettle and", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}


def _requests() -> Iterator[tuple[str, str, Any]]:
    """Method, path and body of each request."""
    for path in ("/v1/models", "/v1/models/quire-demo", "/v1/models/none", "/live", "/ready", "/nowhere"):
        yield "GET", path, None
    yield "PUT", "/v1/models", {}
    chat, text, native = "/v1/chat/completions", "/v1/completions", "/generate"
    for extra in (
        {},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"n": 2, "temperature": 1.0, "seed": 3},
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 4},
        {"stop": ["small"]},
        {"stop": ["small"], "include_stop_str_in_output": True},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "[a-z]{3}"}},
        {"max_completion_tokens": 5},
        {"deterministic": True},
        {"logit_bias": {"70": -100}},
        {"min_tokens": 30, "max_tokens": 32},
        {
            "messages": [*_USER, {"role": "assistant", "content": "I am"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "no body", "content": "?"}]},
        {"max_tokens": 0},
        {"temperature": -1},
        {"temperature": "warm"},
        {"top_p": 2},
        {"tempreature": 1},
        {"model": "another"},
        {"n": 0},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"structured_outputs": {"regex": "(", "choice": ["a"]}},
        {"structured_outputs": {"regex": "("}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
        {"priority": 1},
        {"stream_options": {"include_usage": True}},
    ):
        yield "POST", chat, _CHAT | extra
    for extra in (
        {},
        {"stream": True},
        {"echo": True, "logprobs": 1, "max_tokens": 2},
        {"prompt": [1, 70, 300], "max_tokens": 3},
        {"prompt": ["The lamp", "Ivy had"], "max_tokens": 3},
        {"best_of": 2, "temperature": 1.0, "seed": 1, "max_tokens": 4},
        {"use_beam_search": True, "n": 2, "max_tokens": 6},
        {"suffix": "end"},
        {"prompt": [5000]},
        {"prompt": "x " * 3000},
        {"max_tokens": 100000},
        {"prompt_logprobs": 1, "max_tokens": 1},
    ):
        yield "POST", text, _TEXT | extra
    for extra in (
        {},
        {"stream": True},
        {"return_logprob": True, "top_logprobs_num": 2},
        {"sampling_params": {"max_new_tokens": 3, "regex": "[ab]+", "temperature": 0}},
        {"text": None},
        {"input_ids": [1, 70, 300], "text": None},
    ):
        yield "POST", native, _NATIVE | extra
    yield "POST", "/tokenize", {"prompt": "Ivy had a red kettle"}
    yield "POST", "/tokenize", {"messages": _USER}
    yield "POST", "/detokenize", {"tokens": [70, 300, 301]}
    yield "POST", "/detokenize", {"tokens": [5000]}
    yield "POST", "/v1/embeddings", {"input": "kettle", "encoding_format": "float"}
    yield "POST", "/v1/programs/end", {"program": "p"}
    yield "POST", "/flush_cache", {}
    yield "POST", chat, "not json"
    yield "GET", chat, None
    yield "GET", "/v1/requests/none/explain", None


@contextmanager
def _server() -> Iterator[str]:
    command = [
        str(Path(sys.executable).with_name("quire")),
        "serve",
        "--port",
        "0",
        "--dtype",
        "float32",
        "--seed",
        "0",
    ]
    # the number of tokens in an event of a stream would depend on durations of steps
    command += ["--threads", "1", "--kernels", "reference", "--speculation", "off"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise RuntimeError("the server did not start:\n" + "".join(said))
        try:
            yield found[0]
        finally:
            process.terminate()
            process.communicate(timeout=60)


def record() -> Iterator[dict[str, Any]]:
    """Each request with its response, in order. One server answers all of them."""
    with _server() as url:
        for method, path, body in _requests():
            data = None if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
            request = urllib.request.Request(url + path, data, {"content-type": "application/json"}, method=method)
            try:
                response = urllib.request.urlopen(request, timeout=60)
            except urllib.error.HTTPError as error:
                response = error
            with response:
                kind = response.headers.get("content-type", "")
                answer = _masked_text(response.read().decode(), kind)
            yield {
                "request": [method, path, _shortened(body)],
                "status": response.status,
                "type": kind,
                "answer": answer,
            }


def _shortened(body: Any) -> Any:  # noqa: ANN401  (what JSON can hold)
    text = json.dumps(body)
    return body if len(text) < 1000 else text[:100] + "..."


def _masked_text(text: str, kind: str) -> Any:  # noqa: ANN401
    if kind.startswith("application/json"):
        return _masked(json.loads(text))
    if kind.startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return _joined([event if event == "[DONE]" else _masked(json.loads(event)) for event in events])
    return text


def _joined(events: list[Any]) -> dict[str, Any]:
    """The joined text of a stream, its last event before [DONE], and the shapes of events without repetitions."""
    texts: list[str] = []
    shapes: list[Any] = []
    for event in events:
        shape = _shape(event, texts)
        if not shapes or shapes[-1] != shape:
            shapes.append(shape)
    last = [event for event in events if event != "[DONE]"][-1]
    if (
        isinstance(last, dict) and "text" in last
    ):  # SGLang's events have the whole text, and as many tokens as there are
        return {"text": texts[-1], "last": last}
    return {"text": "".join(texts), "last": last, "shapes": shapes}


def _shape(value: Any, texts: list[str]) -> Any:  # noqa: ANN401
    """`value` without texts and fields that depend on the number of tokens. Its texts are added to `texts`."""
    if isinstance(value, list):
        return [_shape(one, texts) for one in value]
    if not isinstance(value, dict):
        return value
    shape = {}
    for key, one in value.items():
        if key in JOINED and isinstance(one, str):
            texts.append(one)
            shape[key] = "some" if one else ""
        else:
            shape[key] = "counted" if key in COUNTED else _shape(one, texts)
    return shape


def same(recorded: Any, found: Any) -> bool:  # noqa: ANN401
    """Whether two answers are equal, floats within _TOLERANCE."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        return recorded.keys() == found.keys() and all(same(one, found[key]) for key, one in recorded.items())
    if isinstance(recorded, list) and isinstance(found, list):
        return len(recorded) == len(found) and all(map(same, recorded, found))
    if isinstance(recorded, float) and isinstance(found, float):
        return abs(recorded - found) < _TOLERANCE
    return type(recorded) is type(found) and bool(recorded == found)


def _is_drawn(key: str, value: Any) -> bool:  # noqa: ANN401
    return key in MASKED or (key == "id" and isinstance(value, str) and bool(DRAWN.search(value)))


def _masked(value: Any) -> Any:  # noqa: ANN401
    match value:
        case dict():
            return {key: "masked" if _is_drawn(key, one) else _masked(one) for key, one in value.items()}
        case list():
            return [_masked(one) for one in value]
        case float():
            return round(value, 5)
        case _:
            return value
