"""Fairness under a flood, on the embedded model in real time.

A separate process sends each request when it is due, whatever the state of earlier ones. A wait begins when the request
is due. The normal load and the flood take turns, so that both run on the same machine state.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import mean, median

from benchmarks.policies import embedded
from benchmarks.policies.embedded import Asked, Play, Played
from benchmarks.policies.fair import Load, arrivals, percentile
from tools.virtual_time import Arrival

_SHARE = 0.45  # share of the machine's rate that the loud tenant normally needs; the quiet one needs half of it
_FLOODS = (1.0, 10.0)
_LEAD = 0.2  # seconds before the first request
_PATIENCE = 2.0  # seconds after the last request


@dataclass
class Found:
    """The quiet tenant's waits under one load, in seconds."""

    waits: list[float] = field(default_factory=list)  # to the first token, or to the end of the run without one
    num_unanswered: int = 0
    parts: list[tuple[float, float, float, float]] = field(default_factory=list)  # wait, then its three parts
    steps: list[float] = field(default_factory=list)
    collections: list[float] = field(default_factory=list)
    num_waiting: int = 0

    def take(self, due: dict[str, float], played: Played, ended: float) -> None:
        """Add the results of one run. due: when each of the quiet tenant's requests was due."""
        for request_id, came in due.items():
            times = played.times.get(request_id)
            if times is None:
                self.num_unanswered += 1
                self.waits.append(ended - came)
                continue
            taken, admitted, first = times
            self.waits.append(first - came)
            self.parts.append((first - came, taken - came, admitted - taken, first - admitted))
        self.steps += played.steps
        self.collections += played.collections
        self.num_waiting = max(self.num_waiting, played.num_waiting)

    def told(self) -> dict[str, float]:
        """The figures; for the slowest 2 % also the parts of their wait."""
        slowest = sorted(self.parts)[-max(1, len(self.parts) // 50) :]
        _, to_be_taken, to_be_admitted, to_first_token = map(mean, zip(*slowest, strict=True))
        return {
            "p50_s": percentile(self.waits, 0.5),
            "p99_s": percentile(self.waits, 0.99),
            "num": len(self.waits),
            "num_unanswered": self.num_unanswered,
            "slowest_to_be_taken_s": to_be_taken,
            "slowest_to_be_admitted_s": to_be_admitted,
            "slowest_to_first_token_s": to_first_token,
            "step_p50_s": median(self.steps),
            "step_p99_s": percentile(self.steps, 0.99),
            "full_collections": len(self.collections),
            "longest_collection_s": max(self.collections, default=0.0),
            "num_waiting": self.num_waiting,
        }


@contextmanager
def _process(target: Callable[..., None], about: object) -> Iterator[Connection]:
    """A process with a pipe to it."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, about))
    process.start()
    there.close()
    yield here
    here.close()
    process.join()


def _send(connection: Connection, requests: Sequence[Arrival], vocab_size: int) -> dict[str, float]:
    """Send each request when it is due. Returns when those of the quiet tenant were due."""
    asked = [_asked(one, vocab_size) for one in requests]
    due = {}
    begin = time.monotonic() + _LEAD
    for one, request in zip(requests, asked, strict=True):
        at = begin + one.at
        time.sleep(max(0.0, at - time.monotonic()))
        connection.send(request)
        if request.tenant == "quiet":
            due[request.id] = at
    connection.send(None)
    return due


def _asked(one: Arrival, vocab_size: int) -> Asked:
    request = one.request
    prompt = [token % vocab_size for token in request.prompt]
    return Asked(request.id, request.namespace.tenant, prompt, request.max_tokens)


def _compare(play: Play, loads: Iterable[dict[str, Load]], seconds: float, rounds: int) -> list[Found]:
    """The quiet tenant's waits under each load. The loads take turns."""
    found = [(load, Found()) for load in loads]
    for seed in range(rounds):
        for load, one in found:
            requests = arrivals(load, seconds, seed)
            with _process(embedded.serve, play) as connection:
                due = _send(connection, requests, connection.recv())
                one.take(due, connection.recv(), time.monotonic())
    return [one for _, one in found]


def live(*, quick: bool = False) -> dict[str, object]:
    """The quiet tenant's 99th percentile of seconds to the first token, normally and while the other sends 10x."""
    seconds, rounds = (4.0, 1) if quick else (40.0, 3)
    shape = Load(10.0, num_prompt=160, num_output=32)
    with _process(embedded.measure, shape) as connection:
        able = connection.recv()
    quiet, loud = replace(shape, rate=_SHARE / 2 * able), replace(shape, rate=_SHARE * able)
    loads = [{"quiet": quiet, "loud": replace(loud, rate=flood * loud.rate)} for flood in _FLOODS]
    rows: dict[str, object] = {"requests a second that the machine does": able}
    ways: list[tuple[str, Play, int]] = [
        ("fcfs", Play("fcfs", "quire", "quiet", _PATIENCE), 1),
        ("fair", Play("fair", "quire", "quiet", _PATIENCE), rounds),
        ("fair, full collections when Python wants", Play("fair", "python", "quiet", _PATIENCE), 1),
    ]
    for name, play, some in ways:
        usual, flooded = (one.told() for one in _compare(play, loads, seconds, some))
        rows[f"{name}: usually"], rows[f"{name}: flooded"] = usual, flooded
        rows[f"{name}: p99 moved by"] = flooded["p99_s"] / usual["p99_s"] - 1
    return rows
