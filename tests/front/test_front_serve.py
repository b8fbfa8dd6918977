"""serve: one port has one server, and the end of a server is told to those who still listen."""

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import ClassVar

import httpx
import pytest
from front_rig import small_engine

from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.server import serve as serving

SERVE = """
from quire.config import EngineOptions
from quire.server import serve as serving
serving.GRACE_SECONDS = {grace}
serving.serve(EngineOptions(memory="512MiB"), host="127.0.0.1", port=0, model_name=None,
              report=lambda line: print(line, flush=True), progress=lambda done, total: None)
"""


@contextmanager
def server(grace):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE.format(grace=grace)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        lines = iter(process.stdout.readline, "")
        ready = next(line for line in lines if line.startswith("ready"))
        yield process, re.search(r"http://127\.0\.0\.1:\d+", ready).group()
    finally:
        process.kill()
        process.communicate()


def ended_well(process):
    assert process.wait(20) == 0
    assert process.stderr.read() == ""


def test_of_two_servers_on_one_port_the_second_says_so(monkeypatch):
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        port = first.getsockname()[1]

        def build(options, **more):
            with pytest.raises(ConnectionRefusedError):  # bound, and not listening before the model is ready
                socket.create_connection(("127.0.0.1", port), timeout=5)
            first.listen()
            return small_engine()

        def refuse(line):
            raise AssertionError(line)

        monkeypatch.setattr(serving, "build", build)
        with pytest.raises(ConfigError, match=f"port {port} .*--port"):
            serving.serve(EngineOptions(), host="127.0.0.1", port=port, model_name=None, report=refuse, progress=print)


def test_what_is_loaded_is_no_garbage(monkeypatch):
    class Server:
        def __init__(self, *_config, **_more):
            pass

        def run(self, sockets):
            self.frozen.append(gc.get_freeze_count())

        frozen: ClassVar[list[int]] = []

    monkeypatch.setattr(serving, "build", lambda options, **more: small_engine())
    monkeypatch.setattr(serving, "GracefulServer", Server)
    before = gc.get_freeze_count()
    try:
        serving.serve(EngineOptions(), host="127.0.0.1", port=0, model_name=None, report=print, progress=print)
    finally:
        gc.unfreeze()
    assert Server.frozen[0] > before + 10_000


def answered(url, head):
    """The status of what answers a request with this head; None where the connection ends without an answer."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        try:
            client.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n")
            return client.recv(12).decode() or None
        except ConnectionError:
            return None


@pytest.mark.parametrize("many", [False, True])
def test_headers_are_bounded(served, many):
    line = b"x-more: " + b"a" * 1000 + b"\r\n"
    assert answered(served.url, line * 30) == "HTTP/1.1 200"
    huge = line * 1000 if many else b"x-more: " + b"a" * 2**20 + b"\r\n"
    assert answered(served.url, huge) in ("HTTP/1.1 400", None)
    assert answered(served.url, b"") == "HTTP/1.1 200"


@pytest.mark.parametrize(("grace", "num_signals"), [(0.3, 1), (600, 2)])
def test_streams_that_outlive_the_grace_are_told(grace, num_signals):
    body = {"prompt": "One", "n": 64, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with (
        server(grace) as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        process.send_signal(signal.SIGTERM)
        if num_signals == 2:
            next(line for _, line in zip(range(1000), lines, strict=False))
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.send_signal(signal.SIGTERM)
        got = [line.removeprefix("data: ") for line in lines]
        assert json.loads(got[-2])["error"]["message"] == "the server is shutting down"
        assert got[-1] == "[DONE]"
        ended_well(process)


def test_short_answers_come_to_their_end():
    body = {"prompt": "One", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        server(30) as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        process.send_signal(signal.SIGTERM)
        got = list(lines)
        assert json.loads(got[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        ended_well(process)


def test_a_client_that_sends_no_more_does_not_hold_up_the_end():
    with server(0.1) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as stuck:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            stuck.sendall(f'{head}content-length: 1000\r\n\r\n{{"prompt"'.encode())
            httpx.get(f"{url}/live").raise_for_status()
            process.send_signal(signal.SIGTERM)
            ended_well(process)
