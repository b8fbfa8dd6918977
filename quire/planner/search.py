"""Search for the rate that an engine sustains within an SLO, with runs in a steady state, side by side.

Runs as long as a steady state needs find the rate roughly. Runs of LONG_REQUESTS requests, from that rate on, find the
highest rate that surely holds: an engine that is overloaded by one percent keeps an SLO for a while. The rate of the
plan is MARGIN below it, so that other requests of the same workload do not break it.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from math import ceil, inf, sqrt
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Self

from quire.planner.estimate import Demand, demand_of, kv_rows, rate_bound, step_seconds
from quire.planner.options import WorkloadOptions
from quire.planner.results import SimulationResult
from quire.planner.setup import PlannedEngine, PlannedModel
from quire.planner.simulate import for_workload
from quire.planner.simulated_engine import EngineSetup
from quire.planner.simulation import Simulation
from quire.planner.slo import SLO
from quire.planner.steady import RunLength, RunTask, SteadyRun, pauses_of, run, run_length
from quire.planner.traces import read_trace
from quire.planner.workloads import Session, first_requests, make_workload, num_requests, repeated

TOLERANCE = 0.04  # of the rate that is found roughly
RATES_AT_ONCE = 2  # that a search tries
MARGIN = 1.05
LONG_REQUESTS = 6_000  # of a long run, unless a steady state needs more
_LONG_TOLERANCE = 0.06
MOST_REQUESTS = 30_000  # of a run
NO_HITS = 0.005  # share of prompt tokens that are cached: fewer are no gain
_FIRST_REQUESTS = 800  # read at first, and simulated at once
_QUICK_REQUESTS = 600  # of a run that compares options
GAIN_TOLERANCE = 0.12  # of the rates with other options
_ROUGH_REQUESTS = 2_000  # of a run that finds the rate roughly, at most
_ALONE = 32  # requests that run one by one,
_LEAST_SHARE = 64  # at this part of the rate at which everything is completed at once
_SPARE = 1.4  # requests that are drawn, of those that the estimated rate needs
_MOST_STEPS = 12  # of the search, up or down
_START = 0.9  # of the estimated rate
_STEP = 1.08


class Runs:
    """Computes runs, `workers` at a time, each in a process of its own if there are several."""

    def __init__(self, workers: int, tell: Callable[[str], None], advance: Callable[[int, int], None]) -> None:
        """tell: called with what is simulated now. advance(done, expected): called with numbers of simulations."""
        self.num_done = 0
        self.expected = 0
        self._tell = tell
        self._advance = advance
        self._pool = None if workers == 1 else ProcessPoolExecutor(workers, mp_context=get_context("spawn"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def all_until(
        self, tasks: Sequence[RunTask], what: str, is_last: Callable[[RunTask, SimulationResult], bool]
    ) -> None:
        """Compute runs, and give the result of each to `is_last`, until it returns True."""
        self._tell(f"{what}: {' and '.join(f'{task.rate:.2f}' for task in tasks)} requests/s")
        for task, result in zip(tasks, self._results(tasks), strict=True):
            self.count()
            if is_last(task, result):
                return

    def count(self, simulations: int = 1) -> None:
        """Report further simulations as done."""
        self.num_done += simulations
        self._advance(self.num_done, max(self.expected, self.num_done + 1))

    def _results(self, tasks: Sequence[RunTask]) -> Iterator[SimulationResult]:
        pool = self._pool if len(tasks) > 1 else None
        futures: list[Future[SimulationResult]] = []
        for place, task in enumerate(tasks):
            try:
                if pool is not None and not futures:
                    futures = [pool.submit(run, one) for one in tasks]
                result = futures[place].result() if futures else run(task)
            except BrokenProcessPool:  # a process was killed, as for want of memory: one run at a time, in this process
                self._pool, pool, futures = None, None, []
                result = run(task)
            yield result


class Requests:
    """The requests of a plan: as many as a run needs, from a generated workload or a trace."""

    def __init__(self, wanted: WorkloadOptions, model: PlannedModel, seed: int) -> None:
        self.num_in_trace: int | None = None  # once the end of the trace has been read
        self._wanted = wanted
        self._model = model
        self._seed = seed
        self._made: dict[int, list[Session]] = {}  # by the longest sequence; a trace: by 0
        self._asked: dict[int, int] = {}

    @property
    def is_fixed(self) -> bool:
        """Whether the number of requests was given."""
        return self._wanted.num_requests is not None

    def take(self, least: int, max_model_len: int) -> list[Session]:
        """Sessions with `least` requests together, or with the number that was given, if it is less.

        A trace that has fewer is repeated. Raises ConfigError for a trace that cannot be read.
        """
        least = min(least, self._wanted.num_requests or MOST_REQUESTS)
        key = 0 if self._wanted.trace is not None else max_model_len
        if self._asked.get(key, 0) < least:
            self._asked[key] = min(ceil(_SPARE * least), self._wanted.num_requests or MOST_REQUESTS)
            self._made[key] = self._read(self._asked[key], max_model_len)
        return first_requests(self._made[key], least)

    def _read(self, count: int, max_model_len: int) -> list[Session]:
        wanted = self._wanted
        if wanted.trace is None:
            return make_workload(wanted.workload, count, max_model_len=max_model_len, seed=self._seed)
        sessions = read_trace(Path(wanted.trace), self._model.tokenize(), count)
        found = num_requests(sessions)
        if found < count:
            self.num_in_trace = found
        return sessions if self.is_fixed else repeated(sessions, count)


@dataclass(frozen=True, slots=True)
class Sustained:
    """The result of a search."""

    best: SteadyRun | None  # the highest rate that holds; None if none does
    above: SteadyRun | None  # the lowest rate that does not hold

    @property
    def rate(self) -> float:
        """Requests per second; 0 if no rate holds."""
        return 0.0 if self.best is None else self.best.rate


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All requests at once, without pauses."""

    result: SimulationResult
    demand: Demand


class Search:
    """Finds the sustainable rates of engines for one workload."""

    def __init__(self, wanted: WorkloadOptions, slo: SLO, requests: Requests, runs: Runs) -> None:
        self.requests = requests
        self._burstiness = wanted.burstiness
        self._slo = slo
        self._runs = runs
        self._cached_share = 0.0

    def at_once(self, engine: PlannedEngine) -> AtOnce:
        """A few requests at once. What the prefix cache has of them is assumed in estimates of further runs."""
        sessions = self.requests.take(engine.setup.num_replicas * _FIRST_REQUESTS, engine.memory.max_model_len)
        setup = without_queue_limits(for_workload(engine.setup, sessions))
        result = Simulation(setup).run([_at_once(session) for session in sessions])
        self._runs.count()
        self._cached_share = result.hit_rate
        return AtOnce(result, demand_of(sessions, setup, result.hit_rate))

    def bound(self, engine: PlannedEngine, at_once: AtOnce) -> float:
        """Requests per second that the devices can compute in steps that the SLO allows."""
        return engine.setup.num_replicas * rate_bound(engine.setup, at_once.demand, self._slo.limits.get("tpot", inf))

    def estimate(self, engine: PlannedEngine, at_once: AtOnce) -> float:
        """Requests per second at which a search begins; 0 if no request can be completed."""
        return _START * min(self.bound(engine, at_once), at_once.result.steady_rate)

    def task(
        self,
        engine: PlannedEngine,
        rate: float,
        *,
        most: int = MOST_REQUESTS,
        long: bool = False,
        stops_early: bool = True,
    ) -> RunTask:
        """A run at a rate, of at most `most` requests. long: of LONG_REQUESTS at least."""
        limit = engine.memory.max_model_len
        sessions = self.requests.take(_FIRST_REQUESTS, limit)
        for _ in range(2):  # longer lists have longer requests
            length, token_seconds = self.length(engine, rate, sessions)
            count = length.num_requests
            if long:
                count = max(count, LONG_REQUESTS)
            sessions = self.requests.take(min(length.num_fill + most, count), limit)
            if long and self.requests.num_in_trace is not None:  # repetitions say nothing new
                count = max(length.num_requests, self.requests.num_in_trace)
                sessions = first_requests(sessions, min(length.num_fill + most, count))
        return RunTask(
            setup=for_workload(engine.setup, sessions),
            sessions=sessions,
            rate=rate,
            num_fill=min(length.num_fill, num_requests(sessions) // 3),
            warm_up=length.warm_up,
            token_seconds=token_seconds,
            burstiness=self._burstiness,
            seed=engine.options.seed,
            must_keep=self._slo if stops_early else None,
        )

    def length(self, engine: PlannedEngine, rate: float, sessions: Sequence[Session]) -> tuple[RunLength, float]:
        """How long a run has to be, and the assumed seconds per output token."""
        setup = engine.setup
        demand = demand_of(sessions, setup, self._cached_share)
        rows = min(setup.scheduler.max_num_seqs, kv_rows(setup, demand.context))
        slowest = setup.profile.decode_seconds(rows, round(demand.context))
        token_seconds = min(
            step_seconds(setup, demand, rate / setup.num_replicas), slowest, self._slo.limits.get("tpot", inf)
        )
        longest = demand.longest_seconds(setup.profile, token_seconds)
        num_fill = 0
        if self._cached_share > NO_HITS:
            num_cached = setup.num_replicas * kv_rows(setup, demand.prompt + demand.output)
            num_fill = min(num_cached, MOST_REQUESTS // 3)
        return run_length(rate, longest, pauses_of(sessions), self._slo.share, num_fill), token_seconds

    def short_runs(self, engine: PlannedEngine, rates: Sequence[float], what: str) -> list[SteadyRun]:
        """Runs of few requests at several rates, to their end also where the SLO is missed."""
        tasks = [self.task(engine, rate, most=_QUICK_REQUESTS, stops_early=False) for rate in rates]
        return self._steady(tasks, what, lambda _: False)

    def hold(self, engines: Sequence[PlannedEngine], rate: float, what: str) -> list[bool]:
        """Whether a rate holds with each engine, in a quick run."""
        tasks = [self.task(engine, rate, most=_QUICK_REQUESTS) for engine in engines]
        return [one.holds(surely=False) for one in self._steady(tasks, what, lambda _: False)]

    def surely_holds(self, engine: PlannedEngine, rate: float, what: str) -> bool:
        """Whether a rate surely holds in a long run."""
        (found,) = self._steady([self.task(engine, rate, long=True)], what, lambda _: False)
        return found.holds()

    def sustainable(self, engine: PlannedEngine, start: float, what: str) -> Sustained:
        """The highest rate that surely holds in long runs, less MARGIN, searched from `start`."""
        rough = self.roughly(engine, start, what)
        if rough.best is None:
            return rough
        found = self._bracket(engine, rough.rate, what, _LONG_TOLERANCE, long=True)
        if found.best is None:
            return found
        rate, above = found.best.rate, found.above
        for _ in range(_MOST_STEPS):
            rate /= MARGIN
            (one,) = self._steady([self.task(engine, rate, long=True)], what, lambda _: False)
            if one.holds():
                return Sustained(one, above)
            above = one
        return Sustained(None, above)

    def roughly(
        self, engine: PlannedEngine, start: float, what: str, *, quick: bool = False, tolerance: float = TOLERANCE
    ) -> Sustained:
        """The highest rate that holds, within `tolerance` and without regard to chance, searched from `start`.

        quick: in runs of few requests, for comparisons of options.
        """
        if start == 0:  # no request can be completed
            return Sustained(None, self._alone(engine, 1.0, what))
        return self._bracket(engine, start, what, tolerance, most=_QUICK_REQUESTS if quick else _ROUGH_REQUESTS)

    def _bracket(
        self,
        engine: PlannedEngine,
        start: float,
        what: str,
        tolerance: float,
        *,
        most: int = MOST_REQUESTS,
        long: bool = False,
    ) -> Sustained:
        """The highest rate that holds, and the lowest that does not. long: in long runs, and surely."""
        low: SteadyRun | None = None
        high: SteadyRun | None = None
        step, checked = _STEP, False
        for _ in range(_MOST_STEPS):
            if low is None and high is not None and high.rate < start / 2 and not checked:
                checked = True
                alone = self._alone(engine, start / _LEAST_SHARE, what)
                if self._slo.violations(alone.result):
                    return Sustained(None, alone)
                low = alone
            rates = _next_rates(low, high, start, step, tolerance)
            if not rates:
                break
            tasks = [self.task(engine, rate, most=most, long=long) for rate in rates]
            for one in self._steady(tasks, what, lambda one: not one.holds(surely=long)):
                if one.holds(surely=long):
                    low = one
                else:
                    high = one
            if low is not None or high is not None:
                step = min(step**2, _LARGEST_STEP)
        return Sustained(low, high)

    def _alone(self, engine: PlannedEngine, rate: float, what: str) -> SteadyRun:
        """A run of a few requests at a rate so low that hardly two are open at once."""
        (found,) = self._steady([self.task(engine, rate, most=_ALONE, stops_early=False)], what, lambda _: False)
        return found

    def _steady(self, tasks: Sequence[RunTask], what: str, is_last: Callable[[SteadyRun], bool]) -> list[SteadyRun]:
        found: list[SteadyRun] = []

        def ends(task: RunTask, result: SimulationResult) -> bool:
            found.append(SteadyRun(task, result, self._slo))
            return is_last(found[-1])

        self._runs.all_until(tasks, what, ends)
        return found


_LARGEST_STEP = 4.0


def _next_rates(
    best: SteadyRun | None, above: SteadyRun | None, start: float, step: float, tolerance: float
) -> list[float]:
    """The rates to try next, rising: two at a time, so that two processes have work. Empty: within `tolerance`.

    best: the highest rate that holds. above: the lowest one that does not. step: a factor.
    """
    if best is None:
        if above is None:
            half = sqrt(1 + tolerance)
            return [start / half, start * half]
        return [above.rate / step**2, above.rate / step]
    low = best.rate
    if above is None:
        return [low * step, low * step**2]
    ratio = above.rate / low
    if ratio <= 1 + tolerance + 1e-9:
        return []
    if ratio <= (1 + tolerance) ** 2:
        return [low * sqrt(ratio)]
    return [low * ratio ** (1 / 3), low * ratio ** (2 / 3)]


def _at_once(session: Session) -> Session:
    return replace(session, at=0.0, turns=tuple(replace(turn, pause=0.0) for turn in session.turns))


def without_queue_limits(setup: EngineSetup) -> EngineSetup:
    """The setup with queues of any length: if everything arrives at once, that is no overload."""
    return replace(setup, scheduler=replace(setup.scheduler, max_queued_requests=None, max_queued_tokens=None))
