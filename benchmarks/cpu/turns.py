"""Engines take turns, so that the ratios of their figures are of one machine at one time."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.cpu.engines import Answer, Engine, Running, start
from benchmarks.workloads import Workload, workload

_STARTS = 3  # of an engine that starts fast: files that nobody has read for a while make the first one slower
_FAST_START = 15.0  # seconds
_SETTLE = 2.0  # seconds between turns: thread pools spin for a while after their last work

Make = Callable[[str, int], Workload]  # from a name and a seed
Tick = Callable[[str], None]  # called when a turn begins, with what it is
Figures = dict[str, float]


def make_workload(name: str, seed: int) -> Workload:
    """As benchmarks.workloads has it."""
    return workload(name, seed=seed)


def figures(work: Workload, answer: Answer) -> Figures:
    """What is said about an answer: rates in tokens per second, and times in seconds, which end in " s"."""
    if len(work.queries) > 1:
        return {"output tok/s": work.num_output_tokens / answer.seconds, "wall s": answer.seconds}
    if work.num_output_tokens == 1:
        return {"prompt tok/s": work.num_prompt_tokens / answer.seconds}
    assert answer.ttft is not None
    return {
        "decode tok/s": (work.num_output_tokens - 1) / (answer.seconds - answer.ttft),
        "output tok/s": work.num_output_tokens / answer.seconds,
        "first token s": answer.ttft,
    }


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes, and all values in order."""
    return {"median": median(values), "min": min(values), "max": max(values), "values": list(values)}


class Turns:
    """Runs workloads on engines in turn, and keeps what came.

    repeat: rounds; the order of the engines is reversed on every other one. alone: an engine is started for each
    round and stopped before the next is, for machines that cannot hold all of them.
    """

    def __init__(
        self, engines: Sequence[Engine], names: Sequence[str], *, repeat: int, make: Make = make_workload
    ) -> None:
        self.engines = engines
        self.names = names
        self.repeat = repeat
        self.make = make
        self.facts: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, dict[str, list[Answer]]] = defaultdict(lambda: defaultdict(list))

    @property
    def num_turns(self) -> int:
        """How many times `tick` is called."""
        return len(self.names) * self.repeat * len(self.engines)

    def side_by_side(self, tick: Tick) -> None:
        """With all engines loaded at once. Raises EngineError."""
        with ExitStack() as stack:
            loaded = {engine.name: stack.enter_context(start(engine)) for engine in self.engines}
            for name in self.names:
                for number in range(self.repeat):
                    for engine in self._order(number):
                        self._turn(loaded[engine.name], name, number, tick)
            for running in loaded.values():
                self._note(running)
        for engine in self.engines:
            while len(self.facts[engine.name]["cold_starts"]) < _STARTS and self._starts_fast(engine):
                with start(engine) as running:
                    self._note_start(running)

    def alone(self, tick: Tick) -> None:
        """With one engine loaded at a time. Raises EngineError."""
        for number in range(self.repeat):
            for engine in self._order(number):
                with start(engine) as running:
                    for name in self.names:
                        self._turn(running, name, number, tick)
                    self._note(running)

    def report(self) -> dict[str, Any]:
        """Figures of each engine, and ratios of the first engine to each other one: above 1 the first is faster.

        A ratio is of the two turns of one round; the median over rounds is what counts.
        """
        return {"engines": self.facts, "workloads": {name: self._workload(name) for name in self.names}}

    def _order(self, number: int) -> Sequence[Engine]:
        return self.engines[::-1] if number % 2 else self.engines

    def _turn(self, running: Running, name: str, number: int, tick: Tick) -> None:
        tick(f"{running.engine.name} {name}")
        time.sleep(_SETTLE)
        self.answers[name][running.engine.name].append(running.run(self.make(name, number + 1)))

    def _note(self, running: Running) -> None:
        """What the engine is, the start of the median cold start, and the memory after its work."""
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
            engine.name: [figures(work, answer) for answer in self.answers[name][engine.name]]
            for engine in self.engines
        }
        first, *others = by_engine
        return {
            "num_queries": len(work.queries),
            "num_prompt_tokens": work.num_prompt_tokens,
            "num_output_tokens": work.num_output_tokens,
            "ttft_is": {engine.name: self.answers[name][engine.name][0].ttft_is for engine in self.engines},
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
