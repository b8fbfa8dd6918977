"""serve: one server per port, and its end is sent to open streams."""

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import httpx
import pytest
from embedded_model_server import service_of, small_engine

from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.hub import embedded
from quire.server import serve as serving
from quire.server.options import ServerOptions
from quire.supervisor.gc_policy import GCPolicy

SERVE = """
from quire.config import EngineOptions
from quire.server.options import ServerOptions
from quire.server.serve import serve
serve(EngineOptions(memory="512MiB"), ServerOptions(port=0, drain_timeout={grace}),
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
    assert process.wait(60) == 0
    assert process.stderr.read() == ""


def test_of_two_servers_on_one_port_the_second_says_so(monkeypatch):
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        port = first.getsockname()[1]

        def launched(*_options, **_more):
            with pytest.raises(ConnectionRefusedError):  # bound, but not listening before the model is ready
                socket.create_connection(("127.0.0.1", port), timeout=60)
            first.listen()
            return nullcontext(service_of(small_engine()))

        lines = []
        monkeypatch.setattr(serving, "launched", launched)
        with pytest.raises(ConfigError, match=f"port {port} .*--port"):
            serving.serve(EngineOptions(), ServerOptions(port=port), report=lines.append, progress=print)
        assert not any(line.startswith("ready") for line in lines)


@pytest.mark.parametrize("model", [None, "demo.gguf", "owner/name"])
def test_the_tokenizer_of_a_local_model_is_read_while_the_engine_starts(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.gguf").write_bytes(b"")
    path = embedded.folder() if model is None else Path("demo.gguf" if model == "demo.gguf" else "/cache/owner/name")
    opened, sought = [], threading.Event()

    def open_tokenizer(path):
        opened.append(path)
        sought.set()
        return f"the tokenizer of {path}"

    class Handle:
        def __init__(self, *_, **__):
            self.model_info = SimpleNamespace(path=str(path))

        def launch(self):
            assert sought.wait(60) is True if model != "owner/name" else opened == []

        kill = wait = launch

    monkeypatch.setattr(serving, "open_tokenizer", open_tokenizer)
    monkeypatch.setattr(serving, "EngineProcess", Handle)
    monkeypatch.setattr(serving, "Fleet", lambda *_, **__: None)
    monkeypatch.setattr(serving, "Service", lambda _info, tokenizer, *_, **__: tokenizer)
    options = EngineOptions(model=model)
    with serving.launched(options, ServerOptions(), report=print, progress=print) as tokenizer:
        assert tokenizer == f"the tokenizer of {path}"
        assert opened == [path]
        opened.clear()


def test_loaded_objects_are_frozen_and_full_gc_runs_when_the_server_is_idle(monkeypatch):
    class Server:
        def __init__(self, *_config, drain, each_tick, **_more):
            self.drain, self.each_tick = drain, each_tick

        def run(self, sockets):
            self.frozen.append(gc.get_freeze_count())
            self.thresholds.append(gc.get_threshold())
            for self.drain.num_open in (1, 0):
                self.each_tick()

        frozen: ClassVar[list[int]] = []
        thresholds: ClassVar[list[tuple[int, int, int]]] = []

    ticks = []
    monkeypatch.setattr(GCPolicy, "collect_if_due", lambda _policy, *, idle: ticks.append(idle))

    monkeypatch.setattr(serving, "launched", lambda *_, **__: nullcontext(service_of(small_engine())))
    monkeypatch.setattr(serving, "GracefulServer", Server)
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    try:
        serving.serve(EngineOptions(), ServerOptions(port=0), report=print, progress=print)
    finally:
        gc.unfreeze()
    assert Server.frozen[0] > before + 10_000
    assert ticks == [False, True]
    assert Server.thresholds[0][2] > 10**9, "no automatic full collection"
    assert gc.get_threshold() == thresholds


def answered(url, head):
    """The status of the answer to a request with these headers; None if the connection ends without an answer."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
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
    assert answered(served.url, huge) in ("HTTP/1.1 431", None)
    assert answered(served.url, b"") == "HTTP/1.1 200"


def test_a_second_signal_ends_open_streams_with_an_error_and_the_process():
    body = {"prompt": "One", "n": 64, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with (
        server(grace=600) as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        process.send_signal(signal.SIGTERM)
        next(line for _, line in zip(range(1000), lines, strict=False))
        assert httpx.get(f"{url}/ready").json() == {"status": "draining"}
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        got = [line.removeprefix("data: ") for line in lines]
        assert json.loads(got[-2])["error"]["message"] == "the server is shutting down"
        assert got[-1] == "[DONE]"
        ended_well(process)


def test_the_http_process_does_not_wait_for_torch():
    check = "import sys, quire.server.serve; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
