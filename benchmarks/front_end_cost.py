"""CPU time of the HTTP process for a streamed token and for a short request, beside another version of quire.

    python -m benchmarks.front_end_cost --before CHECKOUT [--pairs 15] [--instructions] [--json FILE]

Both versions serve the embedded model, and only one of them has requests at a time. A pair is one turn of each version,
and which is first alternates. A turn has a part with streams, and a part with short requests one after the other on one
connection. --before is a checkout with its kernels built, whose code runs with this interpreter.

With --instructions Valgrind counts the instructions of the HTTP process, in place of its CPU time. The counts hardly
depend on what else the machine does. The process takes about 50 times as long. The engine process is not counted.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.commit import ROOT, commit_of
from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result

NUM_STREAMS, STREAM_TOKENS, NUM_SHORT = 16, 256, 200
GOAL = 1.01
_FLAGS = ("--port", "0", "--memory", "512MiB", "--threads", "1", "--speculation", "off", "--max-num-seqs", "32")
_QUESTION = {"role": "user", "content": "Tell me a story about Mira and a kettle."}


class Server(NamedTuple):
    """A server that is ready. pid: of its HTTP process. counts: Callgrind's file; None without Valgrind."""

    port: int
    pid: int
    counts: Path | None

    def cost(self) -> float:
        """CPU time of all threads of the HTTP process in seconds, or their instructions, so far."""
        if self.counts is None:
            tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
            return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
        subprocess.run(["callgrind_control", "--dump", str(self.pid)], check=True, capture_output=True)
        parts = self.counts.parent.glob(f"{self.counts.name}.*")  # one for each dump, with what came since the last
        return float(
            sum(int(n) for part in parts for n in re.findall(r"^totals: (\d+)", part.read_text(), re.MULTILINE))
        )


class Turn(NamedTuple):
    """CPU seconds of the HTTP process, or its instructions."""

    streamed_token: float
    short_request: float


@contextmanager
def served(checkout: Path, counts: Path | None) -> Iterator[Server]:
    """A server with the code of a checkout. counts: Callgrind's file, if Valgrind shall count instructions."""
    counting = [] if counts is None else ["valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={counts}"]
    command = [*counting, sys.executable, "-u", "-c", "from quire.cli import main; main()", "serve", *_FLAGS]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    with subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stdout or ())
            port = next((found[1] for line in lines if (found := re.search(r"ready: .*:(\d+)", line))), None)
            if port is None:
                raise SystemExit(f"quire serve of {checkout} has ended; run it there to see why")
            yield Server(int(port), process.pid, counts)
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

    def cost(load: Callable[[Server], Awaitable[None]]) -> float:
        before = server.cost()
        asyncio.run(load(server))  # type: ignore[arg-type]  # a coroutine
        return server.cost() - before

    return Turn(cost(streams) / (NUM_STREAMS * STREAM_TOKENS), cost(short_requests) / NUM_SHORT)


def main() -> None:
    """Print the ratios, and write all turns to the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    before_commit = commit_of(args.before)
    pairs: list[tuple[Turn, Turn]] = []  # of before and now
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        before, now = (
            stack.enter_context(served(checkout, folder / name if args.instructions else None))
            for name, checkout in (("before", args.before.resolve()), ("now", ROOT))
        )
        turn(before), turn(now)  # warm
        for number in track(range(args.pairs), "pairs", console=Console(stderr=True)):
            if number % 2:
                later = turn(now)
                pairs.append((turn(before), later))
            else:
                pairs.append((turn(before), turn(now)))
    ratios = {name: [getattr(new, name) / getattr(old, name) for old, new in pairs] for name in Turn._fields}
    what, unit, scale = ("Instructions", "thousands", 1e-3) if args.instructions else ("CPU time", "us", 1e6)
    table = Table(title=f"{what} of the HTTP process, this version by {before_commit}; goal at most {GOAL}")
    for name in ("of", f"before ({unit})", "ratio: median", "least", "most"):
        table.add_column(name)
    for name, values in ratios.items():
        typical = scale * statistics.median(getattr(old, name) for old, _ in pairs)
        figures = (statistics.median(values), min(values), max(values))
        table.add_row(name, f"{typical:.0f}", *(f"{value:.3f}" for value in figures))
    Console().print(table)
    if args.json:
        report = {
            **{"machine": describe(), "before": before_commit, "goal": GOAL, "measure": what},
            "medians": {name: statistics.median(values) for name, values in ratios.items()},
            "pairs": [{"before": old._asdict(), "now": new._asdict()} for old, new in pairs],
        }
        write_result(args.json, report)


if __name__ == "__main__":
    main()
