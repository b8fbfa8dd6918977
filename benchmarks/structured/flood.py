"""Effect of a flood of invalid schemas, patterns and grammars on other clients' streams.

    python -m benchmarks.structured.flood [--seconds 30] [--rounds 3] [--streams 8] [--concurrency 8] [--json FILE]

`quire serve` with the embedded model answers streams. In every other period of `seconds` a second process also sends
invalid constraints, all different, as fast as they are rejected. The streams may get no error and their p99 latencies
may rise by 20 % at most; the flood may get only 400, 413 and 429. Otherwise the exit code is 1. Needs an idle machine.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import NamedTuple

from benchmarks.result_file import write_result
from benchmarks.trust.client import Connection, queries
from benchmarks.trust.server import served

MAX_CHANGE = 0.2  # of a p99, as a share
REFUSED = ("400", "413", "429")
_TOKENS = 32
_EVERY = 0.5  # least seconds between the starts of two requests of a stream
MARK = "@@@@@@@@"  # replaced by a number in each body

Form = dict[str, object]


class Times(NamedTuple):
    """Latencies of the normal traffic in seconds."""

    p50: float
    p99: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times":
        """Percentiles of a list of seconds."""
        cuts = quantiles(seconds, n=100, method="inclusive")
        return cls(cuts[49], cuts[98], len(seconds))


@dataclass(slots=True)
class Traffic:
    """Latencies and errors of the normal streams."""

    requests: list[float] = field(default_factory=list)  # seconds from start to end
    first: list[float] = field(default_factory=list)  # to the first event
    between: list[float] = field(default_factory=list)  # from event to event
    errors: Counter[str] = field(default_factory=Counter)

    def times(self) -> dict[str, Times]:
        """Percentiles of each latency."""
        parts = {"request": self.requests, "first_token": self.first, "inter_token": self.between}
        return {name: Times.of(seconds) for name, seconds in parts.items()}


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a run."""

    quiet: dict[str, Times]
    flooded: dict[str, Times]
    p99_change: dict[str, float]  # as a share
    errors: dict[str, int]  # of the normal traffic
    answers: dict[str, int]  # to the flood, by kind and status

    @property
    def good(self) -> bool:
        """Whether the streams had no errors and no slowdown, and the whole flood was rejected."""
        refused = all(one.rpartition(" ")[2] in REFUSED for one in self.answers)
        return not self.errors and refused and max(self.p99_change.values()) <= MAX_CHANGE


def bad_forms() -> dict[str, Form]:
    """Body fields with invalid constraints, by name. Each contains the mark."""
    deep: object = {"type": "string", "pattern": f"({MARK}"}
    for i in range(28):
        deep = {"type": "object", "properties": {f"{MARK}{i}": deep}, "required": [f"{MARK}{i}"]}
    deeper: object = deep
    for _ in range(400):
        deeper = {"items": deeper}
    enum = [f"{MARK}-{i}" for i in range(6000)]
    rules = "\n".join(f'r{i}: "{MARK}" r{i + 1} | r{i} "{i}"' for i in range(2000))
    refs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(500)}
    every = {"allOf": [{"anyOf": [{"required": [f"{MARK}{i}{j}"]} for j in range(3)]} for i in range(12)]}
    return {
        "deep": _schema(deep),
        "deeper": _schema(deeper),
        "enum": _schema({"enum": enum, "pattern": "("}),
        "enum of 2 MB": _schema({"enum": enum * 24}),
        "references in a circle": _schema({"$ref": "#/$defs/d0", "$defs": {**refs, "d500": {"$ref": "#/$defs/d0"}}}),
        "all of any": _schema({**every, "$comment": MARK, "propertyNames": {"pattern": "["}}),
        "exponential pattern": {"structured_outputs": {"regex": f"(([a-z]+)*)*{MARK}((x+x+)+y){{1,900}}(?=z)"}},
        "pattern of many steps": {
            "structured_outputs": {"regex": f"{MARK}(((a{{1,999}}b){{1,999}}c){{1,999}}d){{1,999}})"}
        },
        "grammar": {"structured_outputs": {"grammar": f"start: r0\n{rules}"}},
        "choice": {"structured_outputs": {"choice": [f"{MARK}{i}" for i in range(5000)]}},
    }


def _schema(schema: object) -> Form:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def flood(url: str, seconds: float, concurrency: int, begin: Callable[[], None] = lambda: None) -> Counter[str]:
    """Send invalid constraints for `seconds`. Returns counts by kind and status. begin: called when ready to send."""
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    bodies = [(name, json.dumps({**chat, **form}).encode()) for name, form in bad_forms().items()]
    numbers = count(time.time_ns() % 10**8)
    answers: Counter[str] = Counter()

    def fresh() -> Iterator[tuple[str, bytes]]:
        while True:
            for name, body in bodies:
                yield name, body.replace(MARK.encode(), b"%08d" % (next(numbers) % 10**8))

    async def send(bodies: Iterator[tuple[str, bytes]], until: float) -> None:
        clock = asyncio.get_running_loop().time
        while clock() < until:
            name, body = next(bodies)
            answers[f"{name}: {await _status(url, body)}"] += 1

    async def run() -> None:
        until, each = asyncio.get_running_loop().time() + seconds, fresh()
        await asyncio.gather(*(send(each, until) for _ in range(concurrency)))

    begin()
    asyncio.run(run())
    return answers


async def _status(url: str, body: bytes) -> str:
    try:
        connection = await Connection.post(url, "/v1/chat/completions", body)
        try:
            status = str(await connection.status())
            await connection.reader.read()
            return status
        finally:
            connection.leave()
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        return type(error).__name__


async def normal(url: str, seconds: float, streams: int, traffic: Traffic, seed: int) -> None:
    """Run streams for `seconds`, each with one request after another."""
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    asked = [{**one, "n": 1, "ignore_eos": True} for one in queries(64, seed, _TOKENS)]

    async def work(chance: Random) -> None:
        await asyncio.sleep(chance.uniform(0, _EVERY))
        while (start := clock()) < end:
            await _stream(url, chance.choice(asked), traffic, clock)
            await asyncio.sleep(max(0.0, start + _EVERY * chance.uniform(0.8, 1.2) - clock()))

    await asyncio.gather(*(work(Random(f"{seed} {i}")) for i in range(streams)))


async def _stream(url: str, query: dict[str, object], traffic: Traffic, clock: Callable[[], float]) -> None:
    start = last = clock()
    num_events, done = 0, False
    try:
        connection = await Connection.post(url, "/v1/completions", json.dumps(query).encode())
        try:
            if (status := await connection.status()) != 200:
                traffic.errors[str(status)] += 1
                return
            while line := await connection.reader.readline():
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b'data: {"error"'):
                    traffic.errors["in a stream"] += 1
                elif line.startswith(b"data: "):
                    now = clock()
                    (traffic.between if num_events else traffic.first).append(now - last)
                    last, num_events = now, num_events + 1
        finally:
            connection.leave()
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        traffic.errors[type(error).__name__] += 1
        return
    if done:
        traffic.requests.append(clock() - start)
    else:
        traffic.errors["broken off"] += 1


def measure(url: str, *, seconds: float, rounds: int, streams: int, concurrency: int) -> Report:
    """Alternate periods without and with the flood, after a short warm-up."""
    quiet, flooded, answers = Traffic(), Traffic(), Counter[str]()
    asyncio.run(normal(url, min(3.0, seconds), streams, Traffic(), seed=0))
    for i in range(rounds):
        for traffic in (quiet, flooded) if i % 2 == 0 else (flooded, quiet):
            attack = _attack(url, seconds, concurrency) if traffic is flooded else None
            asyncio.run(normal(url, seconds, streams, traffic, seed=i + 1))
            if attack is not None:
                answers.update(json.loads(attack.communicate()[0]))
            time.sleep(1)  # for the last answers of the flood
    before, after = quiet.times(), flooded.times()
    change = {name: after[name].p99 / before[name].p99 - 1 for name in before}
    return Report(before, after, change, dict(quiet.errors + flooded.errors), dict(answers))


def _attack(url: str, seconds: float, concurrency: int) -> "subprocess.Popen[bytes]":
    """Start the flood in a process of its own, outside of the measured one, and wait until it is ready."""
    command = [sys.executable, "-m", "benchmarks.structured.flood", "--attack", url]
    command += ["--seconds", str(seconds), "--concurrency", str(concurrency)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    process.stdin.write(b"\n")
    process.stdin.flush()
    return process


def _wait_for_a_line() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each period")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=8, help="of the flood")
    parser.add_argument("--attack", metavar="URL", help="only flood this server")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.attack:
        print(json.dumps(flood(args.attack, args.seconds, args.concurrency, begin=_wait_for_a_line)))
        return
    options = {"rounds": args.rounds, "streams": args.streams, "concurrency": args.concurrency}
    with served() as server:
        report = measure(server.url, seconds=args.seconds, **options)
    result = {**asdict(report), "good": report.good}
    for name in ("quiet", "flooded"):
        result[name] = {key: times._asdict() for key, times in getattr(report, name).items()}
    print(json.dumps(result, indent=2))
    if args.json:
        write_result(args.json, result)
    sys.exit(not report.good)


if __name__ == "__main__":
    main()
