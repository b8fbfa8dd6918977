"""Drain: accepted requests finish, later ones get 503, and a rolling restart loses no request."""

import asyncio
import contextlib
import itertools
import json
import queue
import signal
import socket
import threading
import time
from dataclasses import dataclass

import httpx
import pytest
from embedded_model_server import STORY, service_of, small_engine
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from waiting import wait_until

from quire.server.app import make_app
from quire.server.middleware import drain
from quire.server.middleware.drain import Drain, DrainMiddleware, GracefulServer
from quire.server.middleware.http_protocol import http_config

PIECES = 20
PAUSE = 0.02  # seconds between two pieces of a stream


@dataclass
class Instance:
    """A server on a thread, which ends as after a signal."""

    server: GracefulServer
    port: int
    thread: threading.Thread

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def signal(self):
        self.server.handle_exit(signal.SIGTERM, None)

    def ended(self):
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(app, drain, close, grace=30.0, each_tick=lambda: None):
    ready = threading.Event()
    server = GracefulServer(
        http_config(app),
        drain=drain,
        ready=ready.set,
        each_tick=each_tick,
        has_failed=lambda: False,
        close=close,
        drain_timeout=grace,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    one = Instance(server, listener.getsockname()[1], thread)
    try:
        assert ready.wait(60)
        yield one
    finally:
        one.signal()
        one.signal()
        one.ended()
        listener.close()


class Streams:
    """An app without a model. It streams slowly until it is closed, and does not end while it is held.

    num_bytes: of the bodies received so far.
    """

    def __init__(self):
        self.drain, self.closed, self.held, self.num_bytes = Drain(), False, False, 0
        self.app = Starlette()
        self.app.add_middleware(DrainMiddleware, drain=self.drain)
        self.app.add_route("/work", self._work, methods=["POST"])
        self.app.add_route("/probe", self._probe)

    async def close(self):
        self.closed = True

    async def _probe(self, _request):
        return PlainTextResponse("draining" if self.drain.begun else "ok")

    async def _work(self, request):
        num_bytes = 0
        async for piece in request.stream():
            num_bytes += len(piece)
            self.num_bytes += len(piece)

        async def pieces():
            for _ in range(PIECES):
                if self.closed:
                    yield b"!"
                    return
                yield b"."
                await asyncio.sleep(PAUSE)
            while self.held and not self.closed:
                await asyncio.sleep(PAUSE)
            if self.closed:
                yield b"!"
                return
            yield str(num_bytes).encode()

        return StreamingResponse(pieces())


@pytest.fixture
def streams():
    return Streams()


def refused(answer):
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["connection"] == "close"
    assert answer.json()["error"]["code"] == "draining"


def test_each_tick_is_called_while_requests_run(streams):
    ticks = []
    with running(
        streams.app, streams.drain, streams.close, each_tick=lambda: ticks.append(streams.drain.num_open)
    ) as one:
        streams.held = True
        with httpx.stream("POST", f"{one.url}/work", content=b"abc") as answer:
            text = answer.iter_text()
            next(text)
            wait_until(lambda: 1 in ticks)
            streams.held = False
            list(text)


def test_a_body_that_has_not_arrived_delays_no_drain(streams, monkeypatch):
    monkeypatch.setattr(drain, "CLOSE_SECONDS", 0.2)
    with (
        running(streams.app, streams.drain, streams.close, grace=600.0) as one,
        socket.create_connection(("127.0.0.1", one.port)) as half,
    ):
        half.sendall(b"POST /work HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\nabc")
        with httpx.stream("POST", f"{one.url}/work", content=b"abc") as answer:
            assert streams.drain.num_open == 1
            one.signal()
            assert answer.read().decode() == "." * PIECES + "3"
        one.ended()


def test_accepted_requests_finish_while_work_is_refused_and_probes_are_answered(streams):
    with (
        running(streams.app, streams.drain, streams.close) as one,
        httpx.stream("POST", f"{one.url}/work", content=b"abc") as answer,
        httpx.Client() as kept,
    ):
        streams.held = True  # so that the answer ends after all requests
        text = answer.iter_text()
        got = next(text)
        assert kept.get(f"{one.url}/probe").text == "ok"
        one.signal()
        probe = kept.get(f"{one.url}/probe")
        assert (probe.status_code, probe.text, probe.headers["connection"]) == (200, "draining", "close")
        refused(httpx.post(f"{one.url}/work", content=b"abc"))
        refused(httpx.post(f"{one.url}/work", content=b"x" * 2**22))  # the body is read: no connection reset
        streams.held = False
        assert got + "".join(text) == "." * PIECES + "3"
        one.ended()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{one.url}/probe")


def test_a_request_whose_body_still_comes_was_accepted(streams, monkeypatch):
    monkeypatch.setattr(drain, "_READ_SECONDS", 60.0)
    with running(streams.app, streams.drain, streams.close) as one:
        with socket.create_connection(("127.0.0.1", one.port), timeout=60) as client:
            client.sendall(b"POST /work HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\nabc")
            wait_until(lambda: streams.num_bytes == 3)
            one.signal()
            time.sleep(0.3)
            client.sendall(b"def")
            data = b""
            while piece := client.recv(1000):
                data += piece
            assert data.startswith(b"HTTP/1.1 200")
            assert b"\r\n6\r\n" in data
        one.ended()


@pytest.mark.parametrize(("grace", "num_signals"), [(0.1, 1), (600.0, 2)])
def test_streams_end_at_the_drain_timeout_and_at_a_second_signal(streams, grace, num_signals):
    streams.held = True
    with (
        running(streams.app, streams.drain, streams.close, grace) as one,
        httpx.stream("POST", f"{one.url}/work", content=b"") as answer,
    ):
        text = answer.iter_text()
        got = next(text)
        for _ in range(num_signals):
            one.signal()
        got += "".join(text)
        assert got.endswith("!")
        one.ended()


def test_a_client_that_reads_nothing_does_not_delay_the_end(streams, monkeypatch):
    monkeypatch.setattr(drain, "CLOSE_SECONDS", 0.2)

    async def flood(_request):
        async def pieces():
            while True:
                yield b"x" * 2**20
                await asyncio.sleep(0)

        return StreamingResponse(pieces())

    streams.app.add_route("/flood", flood, methods=["POST"])
    with (
        running(streams.app, streams.drain, streams.close, 0.1) as one,
        socket.create_connection(("127.0.0.1", one.port), timeout=60) as client,
    ):
        client.sendall(b"POST /flood HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        client.recv(1)
        one.signal()
        one.ended()


def test_a_client_that_stops_within_a_body_does_not_delay_the_end(streams, monkeypatch):
    monkeypatch.setattr(drain, "CLOSE_SECONDS", 0.2)
    with (
        running(streams.app, streams.drain, streams.close, 0.1) as one,
        socket.create_connection(("127.0.0.1", one.port), timeout=60) as stuck,
    ):
        stuck.sendall(b"POST /work HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nabc")
        httpx.get(f"{one.url}/probe")
        one.signal()
        one.ended()


class Proxy:
    """Forwards each request to the next instance, and to another one after a 503 or without a connection."""

    def __init__(self, ports):
        self.ports = ports
        self.passed_on = 0  # requests forwarded to a second instance
        self._turn = itertools.count()
        self._tasks = set()

    async def serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())  # the event loop has only weak references
        with contextlib.suppress(ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            request = head + await reader.readexactly(length)
            while not await self._passed(request, writer):
                self.passed_on += 1
                await asyncio.sleep(0.01)
        await closed(writer)

    async def _passed(self, request, writer):
        ports = list(self.ports)
        try:
            answer, out = await asyncio.open_connection("127.0.0.1", ports[next(self._turn) % len(ports)])
        except ConnectionRefusedError:
            return False
        try:
            out.write(request)
            first = await answer.readline()
            if b" 503 " in first:
                return False
            writer.write(first)
            while data := await answer.read(2**16):
                writer.write(data)
            return True
        finally:
            await closed(out)


async def closed(writer):
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@contextlib.contextmanager
def proxied(proxy):
    places, stop = queue.SimpleQueue(), asyncio.Event()

    async def main():
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        places.put((asyncio.get_running_loop(), server.sockets[0].getsockname()[1]))
        await stop.wait()
        server.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=10)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    loop, port = places.get(timeout=60)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)


BODY = {"prompt": STORY, "max_tokens": 48, "temperature": 0, "ignore_eos": True}


def ask(http, url, *, stream):
    """The text and its finish reason."""
    close = {"connection": "close"}  # so that the proxy knows the end of an answer
    answer = http.post(f"{url}/v1/completions", json={**BODY, "stream": stream}, headers=close)
    assert answer.status_code == 200, answer.text
    if not stream:
        (choice,) = answer.json()["choices"]
        return choice["text"], choice["finish_reason"]
    *lines, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert done == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


@contextlib.contextmanager
def engine(built=None):
    drain, service = Drain(), service_of(built or small_engine())
    with running(make_app(service, drain=drain), drain, service.close) as one:
        yield one


def test_health_says_that_it_drains():
    body = json.dumps({**BODY, "max_tokens": 400, "ignore_eos": True}).encode()
    built, probed = small_engine(), threading.Event()
    step = built.engine.step

    def slow(on_launch):
        """A step that takes long until the server has been probed."""
        probed.wait(0.05)
        return step(on_launch)

    built.engine.step = slow
    with engine(built) as one, socket.create_connection(("127.0.0.1", one.port), timeout=60) as client:
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + head + body)
        assert httpx.get(f"{one.url}/ready").status_code == 200
        one.signal()
        for path in ("/ready", "/health"):
            probe = httpx.get(one.url + path)
            assert (probe.status_code, probe.json()["status"]) == (503, "draining")
        assert httpx.get(f"{one.url}/live").status_code == 200
        refused(httpx.post(f"{one.url}/v1/completions", json=BODY))
        probed.set()
        assert client.recv(2**16).startswith(b"HTTP/1.1 200")
        one.ended()


def test_a_rolling_restart_of_two_instances_loses_no_request():
    stop, answers, failures = threading.Event(), [], []

    def client(stream):
        with httpx.Client(timeout=60) as http:
            while not stop.is_set():
                try:
                    answers.append(ask(http, url, stream=stream))
                except Exception as error:
                    failures.append(error)

    with engine() as old, engine() as other, engine() as new:
        expected = ask(httpx, old.url, stream=False)
        proxy = Proxy([old.port, other.port])
        with proxied(proxy) as url:
            clients = [threading.Thread(target=client, args=(number % 2 == 0,)) for number in range(6)]
            for thread in clients:
                thread.start()
            try:
                for ending, ports in ((old, [old.port, other.port, new.port]), (other, [other.port, new.port])):
                    before = len(answers)
                    proxy.ports = ports
                    ending.signal()
                    ending.ended()
                    wait_until(lambda before=before: len(answers) >= before + 12 or failures)
            finally:
                stop.set()
                for thread in clients:
                    thread.join(60)
    assert failures == []
    assert set(answers) == {expected}
    assert len(answers) >= 24
    assert proxy.passed_on > 0
