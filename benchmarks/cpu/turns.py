"""Alternating runs of engines, so that a ratio compares the same machine at the same time."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.cpu.engines import Answer, Engine, Running, start
from benchmarks.workloads import Workload, workload

_STARTS = 3  # cold starts of an engine that starts fast; the first one may have to read its files from disk
_FAST_START = 15.0  # seconds
_SETTLE = 2.0  # seconds between turns, because thread pools spin for a while after their last work

Make = Callable[[str, int], Workload]  # a workload from a name and a seed
Tick = Callable[[str], None]  # called at the start of a turn with its name
Figures = dict[str, float]


def make_workload(name: str, seed: int) -> Workload:
    """A workload of benchmarks.workloads."""
    return workload(name, seed=seed)


def figures(work: Workload, answer: Answer, decode_bytes: tuple[int, int] | None = None) -> Figures:
    """Figures of an answer: rates in tokens per second, and times in seconds, whose names end in " s".

    decode_bytes: of the engine. With them also the rate at which decoding reads them, at the context's mean length.
    """
    if len(work.queries) > 1:
        return {"output tok/s": work.num_output_tokens / answer.seconds, "wall s": answer.seconds}
    if work.num_output_tokens == 1:
        return {"prompt tok/s": work.num_prompt_tokens / answer.seconds}
    assert answer.ttft is not None
    rate = (work.num_output_tokens - 1) / (answer.seconds - answer.ttft)
    found = {
        "decode tok/s": rate,
        "output tok/s": work.num_output_tokens / answer.seconds,
        "first token s": answer.ttft,
    }
    if decode_bytes is not None:
        weights, kv = decode_bytes
        found["decode GB/s"] = rate * (weights + kv * (work.num_prompt_tokens + work.num_output_tokens / 2)) / 1e9
    return found


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes, and all values in order."""
    return {"median": median(values), "min": min(values), "max": max(values), "values": list(values)}


class Turns:
    """Runs workloads on engines in turns and collects the answers.

    repeat: number of rounds; every other round reverses the order of the engines. `alone` starts an engine for each
    round and stops it before the next one starts, for machines that cannot hold all of them. cold_starts: how often
    `side_by_side` starts an engine that starts fast.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        names: Sequence[str],
        *,
        repeat: int,
        make: Make = make_workload,
        cold_starts: int = _STARTS,
    ) -> None:
        self.engines = engines
        self.names = names
        self.repeat = repeat
        self.make = make
        self.cold_starts = cold_starts
        self.facts: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, dict[str, list[Answer]]] = defaultdict(lambda: defaultdict(list))

    @property
    def num_turns(self) -> int:
        """How often `tick` is called."""
        return len(self.names) * self.repeat * len(self.engines)

    def side_by_side(self, tick: Tick) -> None:
        """Run all turns with all engines loaded at once. Raises EngineError."""
        with ExitStack() as stack:
            loaded = {engine.name: stack.enter_context(start(engine)) for engine in self.engines}
            for name in self.names:
                for number in range(self.repeat):
                    for engine in self._order(number):
                        self._turn(loaded[engine.name], name, number, tick)
            for running in loaded.values():
                self._note(running)
        for engine in self.engines:
            while len(self.facts[engine.name]["cold_starts"]) < self.cold_starts and self._starts_fast(engine):
                with start(engine) as running:
                    self._note_start(running)

    def alone(self, tick: Tick) -> None:
        """Run all turns with one engine loaded at a time. Raises EngineError."""
        for number in range(self.repeat):
            for engine in self._order(number):
                with start(engine) as running:
                    for name in self.names:
                        self._turn(running, name, number, tick)
                    self._note(running)

    def report(self) -> dict[str, Any]:
        """Figures of each engine, and ratios of the first engine to each other one; above 1 the first is faster.

        A ratio compares the two turns of one round. The figure to use is the median over rounds.
        """
        return {"engines": self.facts, "workloads": {name: self._workload(name) for name in self.names}}

    def _order(self, number: int) -> Sequence[Engine]:
        return self.engines[::-1] if number % 2 else self.engines

    def _turn(self, running: Running, name: str, number: int, tick: Tick) -> None:
        tick(f"{running.engine.name} {name}")
        work = self.make(name, number + 1)
        time.sleep(_SETTLE)
        self.answers[name][running.engine.name].append(running.run(work))

    def _note(self, running: Running) -> None:
        """Record the engine's facts and cold start, and its memory after the work."""
        self._note_start(running)["memory"] = running.memory()

    def _note_start(self, running: Running) -> dict[str, Any]:
        facts = self.facts.setdefault(running.engine.name, running.facts | {"cold_starts": []})
        facts["cold_starts"].append(running.facts["cold_start_seconds"])
        facts["cold_start_seconds"] = median(facts["cold_starts"])
        return facts

    def _starts_fast(self, engine: Engine) -> bool:
        return bool(self.facts[engine.name]["cold_start_seconds"] < _FAST_START)

    def _workload(self, name: str) -> dict[str, Any]:
        work = self.make(name, 1)
        by_engine: dict[str, list[Figures]] = {
            engine.name: [figures(work, answer, engine.decode_bytes) for answer in self.answers[name][engine.name]]
            for engine in self.engines
        }
        return {
            "num_queries": len(work.queries),
            "num_prompt_tokens": work.num_prompt_tokens,
            "num_output_tokens": work.num_output_tokens,
            **compared(by_engine),
        }


def compared(by_engine: Mapping[str, list[Figures]]) -> dict[str, Any]:
    """Summaries over rounds: the figures of each engine, and the ratios of the first engine to each other one."""
    first, *others = by_engine
    return {
        "figures": {
            engine: {what: summary([round_[what] for round_ in rounds]) for what in rounds[0]}
            for engine, rounds in by_engine.items()
        },
        "ratios": {other: _ratios(by_engine[first], by_engine[other]) for other in others},
    }


def _ratios(ours: list[Figures], theirs: list[Figures]) -> dict[str, Any]:
    def ratio(what: str, mine: Figures, other: Figures) -> float:
        return other[what] / mine[what] if what.endswith(" s") else mine[what] / other[what]

    return {what: summary([ratio(what, *pair) for pair in zip(ours, theirs, strict=True)]) for what in ours[0]}
