"""`quire chat --url`: a conversation with the model of a running server."""

import io
from contextlib import closing
from itertools import repeat

import httpx
import pytest
from embedded_model_server import MODEL, run_app, service_of, small_engine
from rich.console import Console

from quire.errors import RequestError
from quire.params import SamplingParams
from quire.server.app import make_app
from quire.terminal.chat import Chat
from quire.terminal.remote import RemoteModel, ServerFailed, _PartReader


@pytest.fixture(scope="module")
def url():
    with run_app(make_app(service_of(small_engine()))) as address:
        yield address


def conversation(url, **given):
    model = RemoteModel(url, None, None, {"temperature": 0, "max_tokens": 20, **given})
    written = io.StringIO()
    console = Console(file=written, width=200)
    return model, Chat(model, SamplingParams(max_tokens=None), None, console, repeat("5").__next__), written


def test_the_answers_are_those_of_the_server(url):
    model, chat, written = conversation(url)
    with closing(model):
        assert (model.model_name, model.max_model_len) == (MODEL, 512)
        assert chat.turn("Hello! Who are you?")
        assert chat.turn("Tell me more.")
    messages = [{"role": "user", "content": "Hello! Who are you?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 20}
    first = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    shown = " ".join(written.getvalue().split())
    assert shown.startswith(" ".join(first.split()))
    assert "tokens/s" in shown


@pytest.mark.parametrize("address", ["{url}/", "{url}/v1"])
def test_the_address_may_be_that_of_the_api(url, address):
    with closing(RemoteModel(address.format(url=url), None, MODEL, {})) as model:
        assert model.model_name == MODEL


def test_an_answer_in_json(url):
    model, chat, written = conversation(url, max_tokens=200)
    with closing(model):
        chat.turn("/json")
        chat.turn("Give me a record.")
    assert "{" in written.getvalue()


def test_an_error_of_the_server_is_shown_and_the_chat_goes_on(url):
    model, chat, written = conversation(url)
    with closing(model):
        assert chat.turn("word " * 5000)
        assert "the prompt has" in written.getvalue()
        assert chat.turn("Hello")


def test_a_server_that_cannot_be_used_is_named(url):
    with pytest.raises(ServerFailed, match=r"cannot be reached .*; is the server running\?"):
        RemoteModel("http://127.0.0.1:9", None, None, {})
    with pytest.raises(ServerFailed, match=f"does not serve no-such-model; it has {MODEL}"):
        RemoteModel(url, None, "no-such-model", {})
    for wrong, key in (("http://[::1", None), (url, "é")):
        with pytest.raises(ServerFailed, match=r"no URL|ASCII"):
            RemoteModel(wrong, key, None, {})
    with pytest.raises(ServerFailed, match="/docs/v1/models: "):
        RemoteModel(f"{url}/docs", None, None, {})


def test_calls_and_errors_within_a_stream():
    reader = _PartReader()
    begin = {"index": 0, "function": {"name": "f", "arguments": ""}}
    chunks = [
        {"choices": [{"delta": {"reasoning_content": "Hm."}}], "usage": {"completion_tokens": 2}},
        {"choices": [{"delta": {"tool_calls": [begin]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]},
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}], "usage": {"completion_tokens": 9}},
    ]
    read = [reader.read(chunk) for chunk in chunks]
    assert [type(part).__name__ for parts, _ in read for part in parts] == [
        *("Reasoning", "CallBegin", "CallArguments", "CallEnd"),
    ]
    assert [number for _, number in read] == [2, 0, 0, 7]
    with pytest.raises(RequestError, match="too much"):
        reader.read({"error": {"message": "too much"}})
