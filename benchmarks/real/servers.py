"""Servers with the OpenAI API in processes of their own, stopped between their turns, and a streaming client."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cpu.engines import ROOT, EngineError
from benchmarks.trust.client import Connection

_PATIENCE = 120.0  # seconds to start
QUIRE = (sys.executable, "-c", "from quire.cli import main; main()", "serve")


class Streamed(NamedTuple):
    """A streamed answer: seconds to the first text and to the end, tokens, text."""

    first: float
    seconds: float
    num_tokens: int
    text: str


class Server:
    """A running server."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        self._process = process
        self.url = url

    def pause(self) -> None:
        """Stop its processes: an idle server may poll, which would slow the others."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let its processes go on."""
        os.killpg(self._process.pid, signal.SIGCONT)


@contextmanager
def serving(command: Sequence[str]) -> Iterator[Server]:
    """Start a server; PORT in the command is a free port. Raises EngineError if it ends or takes too long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [word.replace("PORT", port) for word in command]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, stdout=output, stderr=output, env=variables, start_new_session=True, stdin=subprocess.DEVNULL
            )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _ready(process, url):
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise EngineError(f"{' '.join(words)} does not serve; its last lines:\n{tail}")
            yield Server(process, url)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ready(process: "subprocess.Popen[bytes]", url: str) -> bool:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    return False


async def stream(url: str, path: str, body: dict[str, Any]) -> Streamed:
    """Send a request and read its answer. Tokens are the server's count, or else pieces. Raises EngineError."""
    began, first, pieces, counted = time.perf_counter(), 0.0, [], 0
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    connection = await Connection.post(url, path, json.dumps(asked).encode())
    status = await connection.status()
    if status != 200:
        raise EngineError(f"{url}{path} answers {status}: {(await connection.reader.read()).decode()[:500]}")
    async for line in connection.reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        counted = (event.get("usage") or {}).get("completion_tokens", counted)
        for choice in event.get("choices", ()):
            if piece := choice.get("text") or (choice.get("delta") or {}).get("content"):
                first = first or time.perf_counter() - began
                pieces.append(piece)
    connection.writer.close()
    return Streamed(first, time.perf_counter() - began, counted or len(pieces), "".join(pieces))


def stream_all(url: str, path: str, bodies: Sequence[dict[str, Any]]) -> tuple[float, list[Streamed]]:
    """Seconds and answers of requests that are sent at once."""

    async def run() -> list[Streamed]:
        return list(await asyncio.gather(*(stream(url, path, body) for body in bodies)))

    began = time.perf_counter()
    answers = asyncio.run(run())
    return time.perf_counter() - began, answers
