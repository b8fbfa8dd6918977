"""Hostile load of one tenant beside another tenant's stream, through `quire serve` with API keys.

    python -m benchmarks.hostile [--seconds 8] [--only large unread ...] [--json FILE]

Each phase plays one kind of load from a process of its own: bodies at the bounds, half-sent bodies, clients that never
read, idle connections up to the limit of file descriptors, expensive schemas, long prompts, large files that are
deleted, short requests that stand for long ones. Beside it a quiet tenant reads one chat stream after the other, and
/live is probed every 20 ms. The table has the longest waits, and the growth of the HTTP process. The exit code is 1 if
a figure misses its floor.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.hostile.load import PHASES
from benchmarks.hostile.quiet import Quiet, Waits
from benchmarks.result_file import write_result
from quire.config import EngineOptions
from quire.server.api_keys import add_key, new_key

STEP_SECONDS = EngineOptions().step_seconds  # that one step of the server may take
_DESCRIPTORS = 1024  # of the server, soft and hard: the default of most systems
_FLAGS = ("--port", "0", "--memory", "512MiB", "--max-num-seqs", "32", "--max-model-len", "2048", "--threads", "1")
_AFTER_SECONDS = 0.5  # for which the quiet tenant goes on when the connections of the load end
_SETTLE_SECONDS = 1.0  # between two phases
_GROWING = ("conversations", "replays", "logprobs", "deletes")  # phases whose small requests stand for much
_LONGER = 2  # times as long: these store something large first


class Site(NamedTuple):
    """A server that is ready. pid: of the process that speaks HTTP."""

    port: int
    pid: int
    keys: dict[str, str]


@dataclass
class Figures:
    """Results of one phase. Seconds and MiB; None where nothing was measured."""

    longest_gap: float | None
    longest_first: float | None  # from a request of the quiet tenant to its first token
    longest_live: float | None
    longest_schema: float | None
    grown: float  # MiB: the most resident memory during the phase beyond that before it
    num_events: int
    statuses: dict[str, int] = field(default_factory=dict)  # of the hostile requests
    problems: dict[str, int] = field(default_factory=dict)  # of the quiet tenant
    longest_stored: float | None = None  # of a list in the store


class Bound(NamedTuple):
    """A figure's goal and floor."""

    goal: float
    floor: float


def bounds(phase: str) -> dict[str, Bound]:
    """The bounds of a phase's figures."""
    if phase in _GROWING:
        names = ["longest_gap", "longest_live", "longest_first"]
        if phase == "logprobs":
            names.remove("longest_first")  # the load has all rows of the engine, and steps with many logprobs
        waits = dict.fromkeys(names, Bound(0.1, 0.3))
        stored = {"longest_stored": Bound(0.1, 0.3)} if phase == "deletes" else {}
        return {**waits, **stored, "grown": Bound(100, 200)}
    busy = STEP_SECONDS if phase == "prompts" else 0.0
    found = {"longest_gap": Bound(busy + 0.25, busy + (0.5 if busy else 1.0)), "longest_live": Bound(0.1, 0.5)}
    if phase == "schemas":
        found["longest_schema"] = Bound(0.2, 1.0)
    if phase == "unread":
        found["grown"] = Bound(30, 100)
    return found


@contextmanager
def site() -> Iterator[Site]:
    """A new `quire serve` process with a key for each of the tenants quiet and loud."""
    with TemporaryDirectory() as folder:
        path, keys = Path(folder) / "keys.json", {}
        for tenant in ("quiet", "loud"):
            keys[tenant], entry = new_key(tenant, "user")
            add_key(path, entry)
        limited = ["prlimit", f"--nofile={_DESCRIPTORS}:{_DESCRIPTORS}"]
        command = [sys.executable, "-u", "-c", "from quire.cli import main; main()", "serve", *_FLAGS]
        with subprocess.Popen(
            [*limited, *command, "--api-key-file", str(path), "--store-path", str(Path(folder) / "store")],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                lines = iter(process.stdout or ())
                port = next(found[1] for line in lines if (found := re.search(r"ready: .*http://[\d.]+:(\d+)", line)))
                yield Site(int(port), process.pid, keys)
            finally:
                process.kill()


def resident(pid: int) -> float:
    """Resident memory of a process in MiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0]) / 1024


async def play(site: Site, phase: str, seconds: float) -> Figures:
    """Play one phase."""
    waits, before = Waits(), resident(site.pid)
    command = (sys.executable, "-m", "benchmarks.hostile.load", phase, str(site.port), site.keys["loud"], str(seconds))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as load:
        assert load.stdin is not None and load.stdout is not None
        load.stdout.readline()
        quiet = Quiet(site.port, site.keys["quiet"], waits)
        works = [quiet.streams(), quiet.probes()]
        works += [quiet.schemas()] if phase in ("schemas", "nothing") else []
        works += [quiet.stored()] if phase in ("deletes", "nothing") else []
        running, most = [asyncio.ensure_future(work) for work in works], before
        load.stdin.write("\n")
        load.stdin.flush()
        try:
            end = asyncio.get_running_loop().time() + seconds + _AFTER_SECONDS
            while asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.1)
                most = max(most, resident(site.pid))
            statuses = json.loads(load.stdout.readline())
        finally:
            load.kill()
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    await asyncio.sleep(_SETTLE_SECONDS)
    return Figures(
        *(_most(each) for each in (waits.gaps, waits.first, waits.live, waits.schema)),
        grown=round(most - before, 1),
        num_events=len(waits.gaps),
        statuses=dict(sorted(statuses.items())),
        problems=dict(waits.problems),
        longest_stored=_most(waits.stored),
    )


def _most(values: list[float]) -> float | None:
    return round(max(values), 3) if values else None


def table(results: dict[str, Figures]) -> Table:
    """The figures. One beyond its goal has a `!`, one beyond its floor `!!`."""
    made = Table(title="longest waits of a quiet tenant beside each load (s), growth of the HTTP process (MiB)")
    columns = ("longest_gap", "longest_live", "longest_first", "longest_schema", "longest_stored", "grown")
    titles = ("load", "gap", "/live", "first token", "new schema", "stored", "grown", "answers to the load", "problems")
    for name in titles:
        made.add_column(name, overflow="fold")
    for phase, figures in results.items():
        cells = [_cell(getattr(figures, name), bounds(phase).get(name)) for name in columns]
        answers = ", ".join(f"{status}: {number}" for status, number in figures.statuses.items())
        problems = ", ".join(f"{what}: {number}" for what, number in figures.problems.items())
        made.add_row(phase, *cells, answers, problems)
    return made


def _cell(value: float | None, bound: Bound | None) -> str:
    if value is None:
        return "-"
    missed = 0 if bound is None else (value > bound.goal) + (value > bound.floor)
    return f"{value:g} {'!' * missed}".rstrip()


def is_good(phase: str, figures: Figures) -> bool:
    """Whether a phase's figures reach their floors, the quiet tenant had no problem, and the load was answered."""
    measured = {name: getattr(figures, name) for name in bounds(phase)}
    has_load = bool(figures.statuses) or phase not in _GROWING
    return (
        has_load
        and not figures.problems
        and all(value is not None and value <= bounds(phase)[name].floor for name, value in measured.items())
    )


# what the figures rest on: the README's are stale if this changes
CODE = (
    *("quire/server/middleware", "quire/server/request_body.py", "quire/server/thread_pool.py"),
    *("quire/tenant_memory.py", "quire/tenant_queue.py"),
)


def main() -> None:
    """Play the phases and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each phase")
    parser.add_argument("--only", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Figures] = {}
    with site() as server, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(args.only))
        for phase in args.only:
            progress.update(task, description=phase)
            seconds = args.seconds * (_LONGER if phase in _GROWING else 1)
            results[phase] = asyncio.run(play(server, phase, seconds))
            progress.advance(task)
    Console().print(table(results))
    if args.json:
        result = {
            "seconds": args.seconds,
            "phases": {phase: asdict(figures) for phase, figures in results.items()},
        }
        write_result(args.json, result, CODE)
    sys.exit(not all(is_good(phase, figures) for phase, figures in results.items()))


if __name__ == "__main__":
    main()
