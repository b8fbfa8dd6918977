"""CPU time per token of the engine process and of the front end, with a viewer of the page and without.

    python -m benchmarks.viewer_cost [--sequences 256] [--seconds 10] [--pairs 10] [--viewers 1] [--json FILE]

A server with the embedded model answers `--sequences` streams at a time. Windows with viewers on /monitor and windows
without take turns, so that both see the same load and the same machine. A ratio is that of the two windows of a pair.
Lengths of the streams are random: if all were equal, they would end together, and windows would see other phases.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result

BIN = Path(sys.executable).parent
PROMPT, LENGTHS, SETTLE_SECONDS = 64, (20, 400), 1.0
GOALS = {"engine": 1.01, "front_end": 1.05}
_TICKS = 100  # per second, of /proc


class Window(NamedTuple):
    """CPU seconds and tokens of one window, and the updates that its viewers got."""

    engine: float
    front_end: float
    tokens: int
    updates: int


def main() -> None:
    """Print a row per pair and the medians; write them to the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a window")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--viewers", type=int, default=1)
    parser.add_argument("--port", type=int, default=8917)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with served(args.port, args.sequences) as process:
        pairs = asyncio.run(measure(args, process.pid))
    rows = [
        {
            "engine": _ratio(with_viewer.engine, with_viewer, without.engine, without),
            "front_end": _ratio(with_viewer.front_end, with_viewer, without.front_end, without),
            "updates_per_second": with_viewer.updates / args.seconds,
            "tokens_per_second": [without.tokens / args.seconds, with_viewer.tokens / args.seconds],
            "engine_us_per_token": 1e6 * without.engine / without.tokens,
            "front_end_us_per_token": 1e6 * without.front_end / without.tokens,
        }
        for without, with_viewer in pairs
    ]
    medians = {name: statistics.median(row[name] for row in rows) for name in GOALS}  # type: ignore[type-var]
    for row in rows:
        print(row)
    print({"medians": medians, "goals": GOALS})
    if args.json:
        load = {"sequences": args.sequences, "viewers": args.viewers, "seconds": args.seconds}
        found = {"machine": describe(), "load": load, "medians": medians, "goals": GOALS, "pairs": rows}
        write_result(args.json, found)


@contextmanager
def served(port: int, num_sequences: int) -> Iterator[subprocess.Popen[str]]:
    """A running server; its process is that of the front end."""
    flags = ["--max-num-seqs", str(num_sequences), "--port", str(port), "--speculation", "off", "--memory", "512MiB"]
    command = [str(BIN / "quire"), "serve", *flags, "--max-num-batched-tokens", "2048"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "http://" in line:
                break
        yield process
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


async def measure(args: argparse.Namespace, front_end: int) -> list[tuple[Window, Window]]:
    """Pairs of windows without and with viewers. Which comes first changes from pair to pair."""
    engine = _child_of(front_end)
    streams = [asyncio.create_task(_generate_forever(args.port, seed)) for seed in range(args.sequences)]
    await asyncio.sleep(10 * SETTLE_SECONDS)
    pairs = []
    for i in range(args.pairs):
        windows: dict[int, Window] = {}
        for viewers in (0, args.viewers) if i % 2 else (args.viewers, 0):
            windows[viewers] = await _window(args, viewers, front_end, engine)
        pairs.append((windows[0], windows[args.viewers]))
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return pairs


async def _window(args: argparse.Namespace, num_viewers: int, front_end: int, engine: int) -> Window:
    counts = [0]
    viewers = [asyncio.create_task(_view(args.port, counts)) for _ in range(num_viewers)]
    await asyncio.sleep(SETTLE_SECONDS)  # the first update, which is whole, does not count
    before = await asyncio.to_thread(_figures, args.port, front_end, engine)
    seen = counts[0]
    await asyncio.sleep(args.seconds)
    after = await asyncio.to_thread(_figures, args.port, front_end, engine)
    updates = counts[0] - seen
    for task in viewers:
        task.cancel()
    await asyncio.gather(*viewers, return_exceptions=True)
    return Window(after[0] - before[0], after[1] - before[1], int(after[2] - before[2]), updates)


def _figures(port: int, front_end: int, engine: int) -> tuple[float, float, float]:
    """CPU seconds of engine and front end, and generated tokens, so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        metrics = answer.read().decode()
    found = re.search(r"^\S*:generation_tokens_total(?:\{\S*\})? (\S+)$", metrics, re.MULTILINE)
    assert found is not None, "the metrics have the generated tokens"
    return _cpu_seconds(engine), _cpu_seconds(front_end), float(found[1])


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _child_of(pid: int) -> int:
    """The engine process: the child with the most CPU time."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return max(map(int, children), key=_cpu_seconds)


def _ratio(used: float, window: Window, used_without: float, without: Window) -> float:
    return (used / window.tokens) / (used_without / without.tokens)


async def _generate_forever(port: int, seed: int) -> None:
    draw = random.Random(seed)
    while True:
        body = {"prompt": [67 + (seed * 7 + i) % 1000 for i in range(PROMPT)], "max_tokens": draw.randint(*LENGTHS)}
        data = json.dumps({**body, "ignore_eos": True, "stream": True, "seed": seed}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\nconnection: close\r\n"
        )
        async for _ in _exchange(port, f"{head}content-type: application/json\r\n\r\n".encode() + data):
            pass
        seed += 1000


async def _view(port: int, counts: list[int]) -> None:
    async for data in _exchange(port, b"GET /monitor HTTP/1.1\r\nhost: localhost\r\n\r\n"):
        counts[0] += data.count(b"data: {")


async def _exchange(port: int, request: bytes) -> AsyncIterator[bytes]:
    """The bytes of an answer as they come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        while data := await reader.read(2**16):
            yield data
    finally:
        writer.close()


if __name__ == "__main__":
    main()
