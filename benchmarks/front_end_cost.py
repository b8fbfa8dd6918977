"""CPU time of the HTTP process for a streamed token and for a short request, beside another version of quire.

    python -m benchmarks.front_end_cost --before CHECKOUT [--pairs 15] [--json FILE]

Both versions serve the embedded model, and only one of them has requests at a time. A pair is one turn of each version,
and which is first alternates. A turn has a part with streams, and a part with short requests one after the other on one
connection. --before is a checkout with its kernels built, whose code runs with this interpreter.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.commit import ROOT, commit_of
from benchmarks.cpu.machine import describe

NUM_STREAMS, STREAM_TOKENS, NUM_SHORT = 16, 256, 200
GOAL = 1.01
_FLAGS = ("--port", "0", "--memory", "512MiB", "--threads", "1", "--speculation", "off", "--max-num-seqs", "32")
_QUESTION = {"role": "user", "content": "Tell me a story about Mira and a kettle."}


class Server(NamedTuple):
    """A server that is ready. pid: of its HTTP process."""

    port: int
    pid: int

    def cpu_seconds(self) -> float:
        """CPU time of all threads of the HTTP process so far."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


class Turn(NamedTuple):
    """CPU seconds of the HTTP process."""

    streamed_token: float
    short_request: float


@contextmanager
def served(checkout: Path) -> Iterator[Server]:
    """A server with the code of a checkout."""
    command = [sys.executable, "-u", "-c", "from quire.cli import main; main()", "serve", *_FLAGS]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    with subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stdout or ())
            port = next((found[1] for line in lines if (found := re.search(r"ready: .*:(\d+)", line))), None)
            if port is None:
                raise SystemExit(f"quire serve of {checkout} has ended; run it there to see why")
            yield Server(int(port), process.pid)
        finally:
            process.terminate()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: dict[str, object]) -> bytes:
    """The body of one answer, on an open connection."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    found = await reader.readuntil(b"\r\n\r\n")
    if not found.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"{path}: {found.decode()}")
    if length := re.search(rb"content-length: (\d+)", found.lower()):
        return await reader.readexactly(int(length[1]))
    pieces = []
    while size := int(await reader.readline(), 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(pieces)


async def stream(server: Server) -> None:
    """One streamed chat."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    about = {"stream": True, "temperature": 0, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
    answer = await ask(reader, writer, "/v1/chat/completions", {"messages": [_QUESTION], **about})
    assert answer.endswith(b"data: [DONE]\n\n"), answer[-200:]
    writer.close()


async def streams(server: Server) -> None:
    """Streams side by side."""
    await asyncio.gather(*(stream(server) for _ in range(NUM_STREAMS)))


async def short_requests(server: Server) -> None:
    """Whole answers of one token, one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(NUM_SHORT):
        await ask(reader, writer, "/v1/chat/completions", {"messages": [_QUESTION], "max_tokens": 1})
    writer.close()


def turn(server: Server) -> Turn:
    """One turn of a version."""

    def seconds(load: Callable[[Server], Awaitable[None]]) -> float:
        before = server.cpu_seconds()
        asyncio.run(load(server))  # type: ignore[arg-type]  # a coroutine
        return server.cpu_seconds() - before

    return Turn(seconds(streams) / (NUM_STREAMS * STREAM_TOKENS), seconds(short_requests) / NUM_SHORT)


def main() -> None:
    """Print the ratios, and write all turns to the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    before_commit = commit_of(args.before)
    pairs: list[tuple[Turn, Turn]] = []  # of before and now
    with ExitStack() as stack:
        before, now = (stack.enter_context(served(one)) for one in (args.before.resolve(), ROOT))
        turn(before), turn(now)  # warm
        for number in track(range(args.pairs), "pairs", console=Console(stderr=True)):
            if number % 2:
                later = turn(now)
                pairs.append((turn(before), later))
            else:
                pairs.append((turn(before), turn(now)))
    ratios = {name: [getattr(new, name) / getattr(old, name) for old, new in pairs] for name in Turn._fields}
    table = Table(title=f"CPU time of the HTTP process, this version by {before_commit}; goal at most {GOAL}")
    for name in ("of", "before (us)", "ratio: median", "least", "most"):
        table.add_column(name)
    for name, values in ratios.items():
        microseconds = 1e6 * statistics.median(getattr(old, name) for old, _ in pairs)
        figures = (statistics.median(values), min(values), max(values))
        table.add_row(name, f"{microseconds:.0f}", *(f"{value:.3f}" for value in figures))
    Console().print(table)
    if args.json:
        told = {
            **{"machine": describe(), "commit": commit_of(), "before": before_commit, "goal": GOAL},
            "medians": {name: statistics.median(values) for name, values in ratios.items()},
            "pairs": [{"before": old._asdict(), "now": new._asdict()} for old, new in pairs],
        }
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
