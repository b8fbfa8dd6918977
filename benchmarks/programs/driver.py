"""Runs programs on a server, with hints or without. Imports no scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from benchmarks.programs.servers import Counted, Server
from benchmarks.programs.workloads import QUESTION, Call, Program, Start, Tokens, Turn
from quire.core.output import Output
from quire.core.scheduling_params import Program as Hint
from quire.core.scheduling_params import SchedulingParams


@dataclass(slots=True)
class _Run:
    """A running program."""

    start: Start
    number: int
    turn: Turn = field(default_factory=lambda: Turn([]))
    outputs: list[Tokens] = field(default_factory=list)
    num_open: int = 0

    @property
    def program(self) -> Program:
        return self.start.program


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of all programs. Times are seconds."""

    counted: Counted
    makespan: float
    latencies: dict[str, list[float]]  # by kind

    @property
    def mean_latency(self) -> float:
        """Mean seconds of programs, without single questions."""
        return _mean(self._of_programs)

    @property
    def _of_programs(self) -> list[float]:
        return [one for kind, some in self.latencies.items() if kind != QUESTION for one in some]

    def row(self) -> dict[str, float]:
        """The figures for the table and JSON."""
        prompts, hits, computed, preemptions = self.counted
        figures = {
            "hit_rate": hits / prompts,
            "prefill_tokens": prompts - hits,
            "computed_tokens": computed,
            "preemptions": preemptions,
            "makespan": self.makespan,
            "latency": self.mean_latency,
            "latency_p95": _p95(self._of_programs),
        }
        if QUESTION in self.latencies:
            figures["question_latency"] = _mean(self.latencies[QUESTION])
        return figures


class Driver:
    """Runs programs on one server.

    hints: "plain" sends no hints. "order" sends program and branch but no retention of KV. "hints" sends all hints.
    """

    def __init__(self, server: Server, hints: str) -> None:
        self.server = server
        self.hints = hints
        self.latencies: dict[str, list[float]] = {}
        self._due: list[tuple[float, int, _Run]] = []  # (time of the next calls, number, program)
        self._calls: dict[str, tuple[_Run, int]] = {}
        self._num_calls = 0

    def run(self, starts: Sequence[Start]) -> Figures:
        """Run all programs to their end."""
        for number, start in enumerate(starts):
            run = _Run(start, number, next(start.program))
            heappush(self._due, (start.at + run.turn.pause, number, run))
        while self._due or self.server.has_work:
            while self._due and self._due[0][0] <= self.server.now:
                self._begin(heappop(self._due)[2])
            if self.server.has_work:
                for output in self.server.step():
                    self._hear(output)
            elif self._due:
                self.server.wait(self._due[0][0])
        return Figures(self.server.counted(), self.server.now, self.latencies)

    def _begin(self, run: _Run) -> None:
        """Send the calls of a program's turn."""
        calls = run.turn.calls
        run.outputs, run.num_open = [[] for _ in calls], len(calls)
        for i, call in enumerate(calls):
            self._num_calls += 1
            name = f"{run.number}-{self._num_calls}"
            self._calls[name] = run, i
            scheduling_params = SchedulingParams(program=self._hint(run, call))
            self.server.add(name, list(call.prompt), call.num_output_tokens, scheduling_params)
        if not calls:
            self._next(run)

    def _hint(self, run: _Run, call: Call) -> Hint | None:
        if self.hints == "plain" or run.start.kind == QUESTION:
            return None
        if self.hints == "order":
            return Hint(id=run.start.name, branch=call.branch, ttl=0.0)
        return Hint(id=run.start.name, branch=call.branch, expects_more=call.expects_more)

    def _next(self, run: _Run) -> None:
        """Advance a program whose calls have all finished."""
        try:
            run.turn = run.program.send(run.outputs)
        except StopIteration:
            self.latencies.setdefault(run.start.kind, []).append(self.server.now - run.start.at)
            self._end(run, None)
            return
        for branch in run.turn.ended:
            self._end(run, branch)
        heappush(self._due, (self.server.now + run.turn.pause, run.number, run))

    def _end(self, run: _Run, branch: str | None) -> None:
        if self.hints == "hints":
            self.server.end_program(run.start.name, branch)

    def _hear(self, output: Output) -> None:
        run, i = self._calls[output.request_id]
        run.outputs[i] += output.token_ids
        if output.finish_reason is not None:
            del self._calls[output.request_id]
            run.num_open -= 1
            if not run.num_open:
                self._next(run)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))] if values else 0.0
