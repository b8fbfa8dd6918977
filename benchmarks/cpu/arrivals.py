"""Latency of streams while other requests arrive: Poisson arrivals over HTTP, for `quire serve` and other servers.

Each request is sent when it is due, whatever the state of earlier ones. The rates are shares of the capacity: the rate
at which the slowest of the servers completes the requests of `w2_lengths` that arrive all at once. The servers are
loaded side by side and take turns. The client shares the cores with the server, as for every engine.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from socket import socket
from statistics import median
from tempfile import TemporaryFile
from typing import IO, Any
from urllib.error import URLError

from benchmarks.cpu.engines import BEFORE, Engine, EngineError, environment
from benchmarks.workloads import FIRST_TOKEN, SMALLEST_VOCABULARY, w2_lengths

SHARES = (0.5, 1.0)  # of the capacity
SERVERS = ("quire", BEFORE, "vllm")
_START_SECONDS = 600.0  # for a server to answer
_NUM_WARM = 8
_DATA = b"data: "
_DONE = b"[DONE]"


@dataclass
class Latencies:
    """Seconds of one run. gaps: between consecutive events of one stream. firsts: from due to the first token."""

    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_tokens: int = 0

    def figures(self) -> dict[str, float]:
        """Percentiles in seconds, and the output rate in tokens per second."""
        return {
            "p99 between tokens s": quantile(self.gaps, 0.99),
            "median between tokens s": median(self.gaps),
            "median first token s": median(self.firsts),
            "p99 first token s": quantile(self.firsts, 0.99),
            "output tok/s": self.num_tokens / self.seconds,
        }


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@dataclass(frozen=True)
class _Server:
    name: str
    port: int
    model: str  # its name in requests


@contextmanager
def _server(engine: Engine) -> Iterator[_Server]:
    """A server process, until the end of the block. Raises EngineError if it does not answer."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if engine.name == "vllm":
        command = [engine.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(engine.model)]
        command += ["--dtype", "bfloat16"]
    else:
        command = [engine.python, "-c", "from quire.cli import main; main()", "serve", str(engine.model)]
        command += ["--dtype", "bfloat16", "--memory", "4GiB", "--speculation", "off"]
    command += ["--port", str(port), "--max-model-len", str(engine.max_model_len)]
    command += ["--max-num-seqs", str(engine.max_num_seqs)]
    with (
        TemporaryFile() as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment(engine)[0],
            start_new_session=True,
        ) as process,
    ):
        try:
            yield _Server(engine.name, port, _model_name(engine.name, port, process, log))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _model_name(name: str, port: int, process: "subprocess.Popen[bytes]", log: IO[bytes]) -> str:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except (URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    log.seek(0)
    tail = b"\n".join(log.read().splitlines()[-15:]).decode(errors="replace")
    raise EngineError(
        f"the server of {name} ended, or did not answer in {_START_SECONDS:.0f} s; its last lines:\n{tail}"
    )


async def _stream(server: _Server, prompt: list[int], num_output: int, due: float, into: Latencies) -> None:
    """Send one request when it is due, and record the times of its events."""
    asked = {"model": server.model, "prompt": prompt, "max_tokens": num_output, "temperature": 0, "ignore_eos": True}
    body = json.dumps(asked | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    await asyncio.sleep(due - time.monotonic())
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head.encode() + body)
    last, status = None, await reader.readline()
    if b" 200 " not in status:
        raise EngineError(f"{server.name} answered {status!r}")
    while line := await reader.readline():
        if not line.startswith(_DATA) or _DONE in line or not re.search(rb'"text": ?"', line):
            continue
        now = time.monotonic()
        if last is None:
            into.firsts.append(now - due)
        else:
            into.gaps.append(now - last)
        last = now
    writer.close()
    if last is None:
        raise EngineError(f"{server.name} sent no token")
    into.num_tokens += num_output


def _play(server: _Server, rate: float, count: int, seed: str) -> Latencies:
    """`count` requests with Poisson arrivals of `rate` per second; infinite: all at once.

    Another seed gives other prompts, without a prefix match with earlier ones.
    """
    rng, lengths, found = Random(f"arrivals-{seed}"), w2_lengths(count), Latencies()
    rng.shuffle(lengths)
    tokens = range(FIRST_TOKEN, SMALLEST_VOCABULARY)

    async def run() -> None:
        due, jobs = time.monotonic(), []
        for num_prompt, num_output in lengths:
            due += rng.expovariate(rate) if rate < float("inf") else 0.0
            jobs.append(_stream(server, rng.choices(tokens, k=num_prompt), num_output, due, found))
        await asyncio.gather(*jobs)

    start = time.monotonic()
    asyncio.run(run())
    found.seconds = time.monotonic() - start
    return found


def arrivals(engines: Sequence[Engine], *, count: int, repeat: int, tick: Callable[[str], None]) -> dict[str, Any]:
    """Latencies of all servers at each rate, and ratios of the first server to each other one, round by round."""
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(_server(engine)) for engine in engines]
        capacity = float("inf")
        for server in servers:
            tick(f"{server.name} warm-up")
            _play(server, float("inf"), _NUM_WARM, "warm")
            done = _play(server, float("inf"), count, "capacity")
            capacity = min(capacity, count / done.seconds)
        for share in SHARES:
            runs = rounds.setdefault(f"{share:g} of capacity", {})
            for number in range(repeat):
                for server in servers[::-1] if number % 2 else servers:
                    tick(f"{server.name} at {share:g} of capacity")
                    figures = _play(server, share * capacity, count, f"{share}-{number}").figures()
                    runs.setdefault(server.name, []).append(figures)
    first, *others = [engine.name for engine in engines]
    return {
        "requests per second at capacity": capacity,
        "num_requests": count,
        "runs": rounds,
        "ratios": {
            load: {other: {what: _ratio(runs[first], runs[other], what) for what in runs[first][0]} for other in others}
            for load, runs in rounds.items()
        },
    }


def _ratio(ours: list[dict[str, float]], theirs: list[dict[str, float]], what: str) -> dict[str, Any]:
    values = [mine[what] / other[what] for mine, other in zip(ours, theirs, strict=True)]
    return {"median": median(values), "min": min(values), "max": max(values), "values": values}


def num_ticks(num_servers: int, repeat: int) -> int:
    """How often `arrivals` calls `tick`."""
    return num_servers * (1 + len(SHARES) * repeat)
