"""Time from the start of `quire serve` until it is ready, and until the first token of an answer.

    python -m benchmarks.startup [--shape 0.5b] [--models FOLDER] [--warm] [--repeat 5] [--json FILE] [-- OPTION ...]

Without --shape the embedded model is served, else a checkpoint with random weights in --models. OPTIONs are those of
`quire serve`. The first start is not counted: after it the files are in the page cache. --warm: a start is followed by
one with a weight cache, which an uncounted start has filled. Names of its times begin with "warm".
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track

from benchmarks.cpu.checkpoints import SHAPES, checkpoint
from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result

LINES = ("policy", "kernels", "weights", "costs", "tpot")  # start-up lines whose times are printed
COMMAND = (sys.executable, "-c", "from quire.command import main; main()", "serve", "--port", "0")


def measure(options: Sequence[str]) -> dict[str, float]:
    """Seconds from the start of a new process until its lines, until it is ready, and until the first token."""
    with answered(options) as server:
        return server.seconds


class Server(NamedTuple):
    """A server that has sent its first answer. lines: those of its start. seconds: see `measure`."""

    pid: int
    lines: list[str]
    seconds: dict[str, float]


@contextmanager
def answered(options: Sequence[str]) -> Iterator[Server]:
    """A new `quire serve` that has sent a first answer, until the end of the block. Raises RuntimeError if it ends."""
    start, seconds, lines = time.perf_counter(), dict[str, float](), list[str]()
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            url = _wait_until_ready(process, lines, seconds, start)
            seconds["ready"] = time.perf_counter() - start
            body = json.dumps({"prompt": [5, 6, 7, 8], "max_tokens": 4, "ignore_eos": True, "stream": True}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request) as stream:
                next(line for line in stream if b'"text"' in line)
                seconds["first token"] = time.perf_counter() - start
                stream.read()
            yield Server(process.pid, lines, seconds)
        finally:
            process.terminate()


def _wait_until_ready(
    process: "subprocess.Popen[str]", lines: list[str], seconds: dict[str, float], start: float
) -> str:
    """Record the lines, and the times of LINES. Returns the server's URL."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found[0]
        if (word := line.partition(" ")[0]) in LINES:
            seconds[word] = time.perf_counter() - start
    raise RuntimeError("quire serve has ended; run it in a terminal to see why")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, help="default: the embedded model")
    parser.add_argument("--models", type=Path, help="folder of the checkpoint; default: a temporary one")
    parser.add_argument("--warm", action="store_true", help="measure starts with a filled weight cache, too")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("options", nargs="*", help="of quire serve, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = [str(checkpoint(args.shape, args.models or Path(folder)))] if args.shape else []
        options = [*model, *args.options]
        cached = [*options, "--weight-cache", f"{folder}/weights"]
        runs = []
        for _ in track(range(1 + args.repeat), "starts"):
            run = measure(options)
            if args.warm:
                run |= {f"warm {name}": seconds for name, seconds in measure(cached).items()}
            runs.append(run)
        del runs[0]
    summary: dict[str, Any] = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        summary[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        print(f"{name:<17} median {statistics.median(values):.2f} s, {min(values):.2f} to {max(values):.2f} s")
    if args.json:
        setting = {"shape": args.shape or "as in the options", "repeat": args.repeat, "options": args.options}
        report = {"machine": describe(), "setting": setting, "seconds": summary}
        write_result(args.json, report)


if __name__ == "__main__":
    main()
