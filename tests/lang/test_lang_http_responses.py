"""Server responses are used only if they are complete and conform to the API."""

import asyncio
import json
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest
from waiting import wait_until

import quire.lang as sgl
from quire.errors import ConfigError
from quire.lang.backends.http import Http
from quire.lang.event_loop import LoopThread


@sgl.function
def program(s):
    s += "a" + sgl.gen("x")


def native(reason):
    return {"text": "part", "meta_info": {"finish_reason": reason and {"type": reason, "message": "why not"}}}


def completion(reason):
    return {"choices": [{"index": 0, "text": "part", "finish_reason": reason, "stop_reason": "why not"}]}


APIS = {
    "server": (native, [], lambda: sgl.RuntimeEndpoint("http://server")),
    "openai": (completion, {"choices": []}, lambda: sgl.OpenAI(None, is_chat_model=False, base_url="http://server")),
}


def run(monkeypatch, api, answer, *, stream, end="data: [DONE]\n\n"):
    """The state of a program on a server that gives this answer to every generation."""

    def server_info(request):
        if request.method == "GET":
            return httpx2.Response(200, json={"data": [{"id": "m"}]})
        if "tokenize" in request.url.path:
            return httpx2.Response(200, json={"tokens": [], "prompt": ""})
        if not json.loads(request.content).get("stream"):
            return httpx2.Response(200, json=answer)
        return httpx2.Response(200, text=f"data: {json.dumps(answer)}\n\n{end}")

    transport = httpx2.MockTransport(server_info)
    monkeypatch.setattr(f"quire.lang.backends.{api}.Http", partial(Http, transport=transport))
    with APIS[api][2]() as backend:
        state = program.run(stream=stream, backend=backend)
        wait_until(lambda: not stream or "x" in state)
        state.sync()
        return state


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_an_answer_that_is_fine_is_taken(monkeypatch, api, stream):
    state = run(monkeypatch, api, APIS[api][0]("stop"), stream=stream)
    assert (state.error(), state.text()) == (None, "apart")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("error", "why not"),
        ("abort", "why not"),
        (None, "cut off"),
        *((fault, "cut off|does not follow its") for fault in ("form", "nothing")),
    ],
)
def test_a_malformed_http_response_is_a_generation_failure(monkeypatch, api, stream, fault, message):
    good, nothing, _ = APIS[api]
    answer = {"form": {"foo": 1}, "nothing": nothing}.get(fault) if fault in ("form", "nothing") else good(fault)
    state = run(monkeypatch, api, answer, stream=stream)
    with pytest.raises(sgl.GenerationFailed, match=message):
        raise state.error()
    with pytest.raises(sgl.GenerationFailed):
        state["x"]


@pytest.mark.parametrize("api", APIS)
def test_a_stream_that_only_stops_is_a_failure(monkeypatch, api):
    state = run(monkeypatch, api, APIS[api][0]("stop"), stream=True, end="")
    with pytest.raises(sgl.GenerationFailed, match="without"):
        raise state.error()


def test_a_file_that_is_not_there_is_named_and_no_thread_is_left():
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match=r"none\.pem"):
        sgl.RuntimeEndpoint("http://server", verify="/none.pem")
    assert set(threading.enumerate()) <= before


def test_get_server_info_of_an_endpoint_has_model_and_running_requests(endpoint):
    server_info = endpoint.get_server_info()
    assert server_info["id"] == endpoint.get_model_name() and "requests_running" in server_info


@contextmanager
def http_server(rest):
    """A server that streams one event and [DONE], and ends the body once `rest` is set: base URL and connections."""
    connections = set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            connections.add(self.client_address)
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for text in ('data: {"a": 1}\n\n', "data: [DONE]\n\n"):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text.encode()))
            self.wfile.flush()
            if rest.wait(60):
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", connections
        finally:
            rest.set()
            server.shutdown()


async def events_of(url, number):
    http = Http(url, None)
    try:
        return [[event async for event in http.events("/", {})] for _ in range(number)]
    finally:
        await http.close()


def test_streams_that_end_share_one_connection():
    ended = threading.Event()
    ended.set()
    with http_server(ended) as (url, connections):
        assert asyncio.run(events_of(url, 3)) == [[{"a": 1}]] * 3
        assert len(connections) == 1


def test_a_server_that_does_not_end_its_stream_is_left(monkeypatch):
    monkeypatch.setattr("quire.lang.backends.http._MAX_END_SECONDS", 0.05)
    with http_server(threading.Event()) as (url, connections):
        assert asyncio.run(events_of(url, 2)) == [[{"a": 1}]] * 2
        assert len(connections) == 2


def test_a_loop_that_is_closed_has_ended_generators_that_were_left():
    ended = []

    async def numbers(depth):
        try:
            if depth:
                async for number in numbers(depth - 1):
                    yield number
            while True:
                yield 1
        finally:
            await asyncio.sleep(0)
            ended.append(depth)

    async def first():
        async for number in numbers(3):
            return number

    async def nothing():
        pass

    loop = LoopThread()
    assert loop.run(first()) == 1
    loop.close(nothing)
    assert sorted(ended) == [0, 1, 2, 3]
