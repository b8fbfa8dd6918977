"""Several engine processes behind one front end: streams while engines are killed, and the cost of delivery.

    python -m benchmarks.fleet [--only chaos,crowd,delivery] [--kills 20] [--rounds 3] [--json FILE]

- chaos: 60 streams of 400 tokens on three engines of the embedded model, while engines are killed at random. Streams
  are repeated until all kills were done. A pause is the time between the last token of a stream before a kill and its
  next one: of streams that the killed engine had (moved) and of others. A gap is the time between any two tokens of
  streams that moved at least once in their round, or never.
- crowd: the same with 200 streams, beside the bound of a pause by CPU time: the tokens that are computed again and the
  start of an engine, divided by the cores.
- delivery: events per second, and CPU time of the front end for each, of eight engines without a model with 32 rows
  each, as one fleet and as eight fleets of one replica with requests in turn, alternating.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cpu.machine import describe
from benchmarks.fleet_engine import STEP_SECONDS
from benchmarks.result_file import write_result
from quire.config import EngineOptions
from quire.core.request import Request
from quire.fleet.fleet import Fleet
from quire.params import SamplingParams
from quire.startup.hardware import num_cores
from quire.supervisor.engine_handle import EngineProcess
from quire.supervisor.spawn import PROGRAM

_PARTS = ("chaos", "crowd", "delivery")
_NUM_TOKENS = 400  # of a stream
_PACED = ("-m", "benchmarks.fleet_engine")
_NUM_PACED, _ROWS, _PACED_TOKENS = 8, 32, 160  # engines of `delivery`, requests of each, tokens of a request
_CODE = ("quire/fleet", "quire/supervisor", "benchmarks/fleet.py", "benchmarks/fleet_engine.py")
_GOALS = {"moved": 1.0, "others": 0.5}  # seconds, of the p99 of gaps
_DELIVERY_GOAL = 0.97
_CONSOLE = Console(stderr=True)


def process(program: Sequence[str] = PROGRAM, **options: Any) -> EngineProcess:  # noqa: ANN401  (of EngineOptions)
    """A launched engine process."""
    one = EngineProcess(
        EngineOptions(**options), report=lambda _: None, progress=lambda *_: None, program=tuple(program)
    )
    one.launch()
    return one


@asynccontextmanager
async def serving(handles: Sequence[EngineProcess]) -> AsyncIterator[Fleet]:
    """Context manager: a fleet of engine processes."""
    fleet = Fleet(*handles)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()


def cpu_seconds(pid: int) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Stream:
    """What has come of one stream."""

    number: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of its outputs
    error: str = ""

    @property
    def request(self) -> Request:
        """Its request."""
        prompt = [10 + self.number % 50, *range(20, 30 + self.number % 9)]
        params = SamplingParams(
            temperature=1.0, seed=self.number, max_tokens=_NUM_TOKENS, ignore_eos=True, deterministic=True
        )
        return Request(f"r{self.number}", prompt, params)

    async def read(self, fleet: Fleet) -> None:
        """Read all outputs."""
        stream = await fleet.generate([self.request])
        try:
            while True:
                for output in await anext(stream):
                    self.tokens += output.token_ids
                    self.times.append(time.perf_counter())
                    if output.finish_reason is not None:
                        self.error = output.error or ""
                        return
        finally:
            stream.close()


@dataclass
class Kill:
    """A kill of an engine."""

    at: float
    moved: set[int]  # numbers of its streams
    num_again: int  # tokens that other engines compute again


@dataclass
class Chaos:
    """Streams over engines that are killed."""

    fleet: Fleet
    num_streams: int
    num_kills: int
    rng: random.Random
    kills: list[Kill] = field(default_factory=list)
    pauses: dict[str, list[float]] = field(default_factory=lambda: {"moved": [], "others": []})
    gaps: dict[str, list[float]] = field(default_factory=lambda: {"moved": [], "others": []})
    num_failed: int = 0
    num_wrong: int = 0
    num_rounds: int = 0

    async def run(self) -> None:
        """Repeat the streams until all kills were done."""
        undisturbed = await self._streams()
        while len(self.kills) < self.num_kills:
            before = len(self.kills)
            killing = asyncio.ensure_future(self._kill_some())
            disturbed = await self._streams()
            killing.cancel()
            self.num_rounds += 1
            for expected, one in zip(undisturbed, disturbed, strict=True):
                self.num_failed += bool(one.error)
                self.num_wrong += one.tokens != expected.tokens
                kills = self.kills[before:]
                kind = "moved" if any(one.number in kill.moved for kill in kills) else "others"
                self.gaps[kind] += [after - earlier for earlier, after in pairwise(one.times)]
                for kill in kills:
                    kind = "moved" if one.number in kill.moved else "others"
                    self.pauses[kind] += _pauses(one.times, kill.at)

    async def _streams(self) -> list[Stream]:
        self.current = [Stream(number) for number in range(self.num_streams)]
        await asyncio.gather(*(one.read(self.fleet) for one in self.current))
        return self.current

    async def _kill_some(self) -> None:
        while len(self.kills) < self.num_kills:
            await asyncio.sleep(self.rng.uniform(0.1, 1.0))
            serving = [i for i, one in enumerate(self.fleet.replicas) if one.takes_requests and one.ids]
            if len(serving) < 2:
                continue
            number = self.rng.choice(serving)
            moved = {int(name[1:]) for name in self.fleet.replicas[number].ids}
            again = sum(len(self.current[one].request.prompt) + len(self.current[one].tokens) for one in moved)
            self.kills.append(Kill(time.perf_counter(), moved, again))
            handle = self.fleet.engine_handles[number]
            assert isinstance(handle, EngineProcess)
            os.kill(handle.process.pid, signal.SIGKILL)


def _pauses(times: Sequence[float], at: float) -> list[float]:
    """The pause of a stream that spans a moment; [] if it had not begun or had ended."""
    return [after - before for before, after in pairwise(times) if before <= at < after]


def chaos(num_streams: int, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of streams over kills."""
    options = {"speculation": "off", "memory": "256MiB", "dtype": "float32", "threads": 1}
    options |= {"max_num_seqs": num_streams, "max_model_len": 512}

    async def run() -> dict[str, Any]:
        handles = [process(**options) for _ in range(3)]
        start = cpu_seconds(handles[0].process.pid)
        async with serving(handles) as fleet:
            token = await _prefill_seconds(fleet, handles[0])
            work = Chaos(fleet, num_streams, args.kills, random.Random(1))
            await work.run()
            deaths = fleet.health().num_restarts + sum(not one.replica.is_serving for one in fleet.replicas)
        bounds = [(kill.num_again * token + start) / num_cores() for kill in work.kills]
        found: dict[str, Any] = {"streams": num_streams, "rounds": work.num_rounds, "kills": len(work.kills)}
        found |= {"deaths": deaths, "failed": work.num_failed, "wrong": work.num_wrong}
        for kind, some in work.pauses.items():
            found |= {
                f"{kind}": len(some),
                f"{kind}_median_s": median(some),
                f"{kind}_p99_s": quantiles(some, n=100)[98],
            }
            gaps = work.gaps[kind]
            found |= {f"{kind}_largest_s": max(some), f"{kind}_gap_p99_s": quantiles(gaps, n=100)[98] if gaps else None}
            found[f"{kind}_goal_s"] = _GOALS[kind]
        found |= {"start_cpu_s": start, "prefill_cpu_ms_per_token": 1e3 * token}
        return found | {"bound_median_s": median(bounds), "bound_largest_s": max(bounds)}

    return asyncio.run(run())


async def _prefill_seconds(fleet: Fleet, handle: EngineProcess) -> float:
    """CPU time of a prompt token. All requests go to the first engine, as the fleet is idle."""
    rng, before = random.Random(2), cpu_seconds(handle.process.pid)
    for i in range(10):
        prompt = [rng.randrange(10, 1000) for _ in range(_NUM_TOKENS)]
        stream = await fleet.generate([Request(f"p{i}", prompt, SamplingParams(max_tokens=1, deterministic=True))])
        await anext(stream)
        stream.close()
    return (cpu_seconds(handle.process.pid) - before) / (10 * _NUM_TOKENS)


async def _deliver(num_fleets: int) -> tuple[float, float]:
    """Events per second, and CPU microseconds of the front end for each."""
    handles = await asyncio.gather(*(asyncio.to_thread(process, _PACED) for _ in range(_NUM_PACED)))
    each = _NUM_PACED // num_fleets
    fleets = [Fleet(*handles[i * each : (i + 1) * each]) for i in range(num_fleets)]
    await asyncio.gather(*(one.start() for one in fleets))
    params = SamplingParams(max_tokens=_PACED_TOKENS, ignore_eos=True)

    async def read(number: int) -> int:
        stream, num_events = await fleets[number % num_fleets].generate([Request(f"r{number}", [1], params)]), 0
        while True:
            for output in await anext(stream):
                num_events += 1
                if output.finish_reason is not None:
                    stream.close()
                    return num_events

    began, cpu = time.perf_counter(), time.process_time()
    num_events = sum(await asyncio.gather(*map(read, range(_NUM_PACED * _ROWS))))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    await asyncio.gather(*(one.close() for one in fleets))
    return num_events / seconds, 1e6 * cpu / num_events


def delivery(args: argparse.Namespace) -> dict[str, Any]:
    """One fleet of eight engines beside eight fleets of one."""
    found: dict[int, list[tuple[float, float]]] = {1: [], _NUM_PACED: []}
    for i in range(args.rounds):
        for number in found if i % 2 else reversed(found):
            found[number].append(asyncio.run(_deliver(number)))
    one, several = found[1], found[_NUM_PACED]
    return {
        "engines": _NUM_PACED,
        "rows": _ROWS,
        "most_events_per_s": _NUM_PACED * _ROWS / STEP_SECONDS,
        "one_fleet_events_per_s": median(rate for rate, _ in one),
        "round_robin_events_per_s": median(rate for rate, _ in several),
        "ratio": median(a / b for (a, _), (b, _) in zip(one, several, strict=True)),
        "goal": _DELIVERY_GOAL,
        "one_fleet_cpu_us_per_event": median(cpu for _, cpu in one),
        "round_robin_cpu_us_per_event": median(cpu for _, cpu in several),
    }


def _measured(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    chosen = args.only.split(",")
    if unknown := set(chosen) - set(_PARTS):
        sys.exit(f"--only has {', '.join(_PARTS)}, not {', '.join(sorted(unknown))}")
    if "chaos" in chosen:
        yield "chaos", chaos(60, args)
    if "crowd" in chosen:
        yield "crowd", chaos(200, args)
    if "delivery" in chosen:
        yield "delivery", delivery(args)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write the JSON file."""
    parser = argparse.ArgumentParser(prog="benchmarks.fleet", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(_PARTS))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3, help="of `delivery`")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(arguments)
    figures: dict[str, Any] = {"machine": describe()}
    for name, found in _measured(args):
        figures[name] = found
        table = Table("figure", "value", title=name)
        for key, value in found.items():
            table.add_row(key, f"{value:.3g}" if isinstance(value, float) else str(value))
        _CONSOLE.print(table)
    if args.json is not None:
        write_result(args.json, figures, _CODE)


if __name__ == "__main__":
    main()
