"""Runs in a steady state: how long they are, what of them counts, and whether they hold a rate within an SLO.

A run begins with a warm-up that does not count: it lasts as long as the longest request, so that the batch has its
usual mixture, and as most pauses of sessions, so that the prefix cache has what their next turns reuse. Where prompts
share prefixes, the requests that fill the KV blocks once come before it, at the same rate. With a warm cache an engine
can keep a rate for minutes to which it would never return after a burst: fewer hits mean longer queues, and these take
the blocks of the cache. So a rate has to be reached with a cold one.
The window that counts is LONGEST_REQUESTS times as long as the longest request. Sessions of several turns go on as if
they had begun long ago (`workloads.stationary`).

A run holds a rate if the SLO is kept and the backlog, the number of open requests, has no trend:

- Each limit must be kept by the SLO's share of the requests with 80 % confidence: the mean of the shares of NUM_BATCHES
  equal parts of the window, minus Student's t times its standard error, is at least that share (batch means; Law,
  "Simulation Modeling and Analysis", chapter 9).
- The slope of the backlog over the same parts is tested by least squares. A growth by more than MOST_GROWTH of the
  arrivals that is significant at 1 % is a trend. A backlog of a busy engine wanders without a trend, so the error comes
  from the differences of successive parts where that is larger than the error from what is left of the line. The
  power is stated with each run: `Growth.detectable` is the growth that the test finds with 95 % probability.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf, sqrt

import numpy as np

from quire.planner.results import NUM_BATCHES, Metric, RequestResult, SimulationResult, Window
from quire.planner.simulated_engine import EngineSetup
from quire.planner.simulation import Simulation
from quire.planner.slo import SLO
from quire.planner.workloads import Session, has_times, num_requests, stationary, with_arrivals, with_rate

LONGEST_REQUESTS = 4  # length of the window, in longest requests
MOST_GROWTH = 0.005  # of the backlog, as a share of the arrivals
_LATE_REQUESTS = 10  # that the SLO allows in a window, at least: fewer would say little about their share
_PAUSES = 0.9  # share of the pauses that are shorter than the warm-up
_MOST_WARM_UP = 0.4  # of the run, where there are too few requests
_MOST_LATE_IN_WARM_UP = 0.6  # share of its requests; and there are at least
_FEW_IN_WARM_UP = 100
# Student's t, one-sided
_T_SHARE = 0.896  # 80 %, 7 degrees of freedom
_T_TREND = 3.143  # 99 %, 6 degrees of freedom
_T_POWER = 1.943  # 95 %, 6 degrees of freedom
_SLOPE_OF_A_WALK = 1.2  # variance of its slope by least squares, over that of its mean step


@dataclass(frozen=True, slots=True)
class RunLength:
    """How long a run at one rate has to be."""

    rate: float  # requests per second
    longest: float  # seconds of the longest request
    num_fill: int  # requests that fill the prefix cache
    warm_up: float  # seconds
    window: float  # seconds

    @property
    def num_requests(self) -> int:
        """Requests that arrive in the run."""
        return self.num_fill + ceil(self.rate * (self.warm_up + self.window))


def run_length(rate: float, longest: float, pauses: Sequence[float], share: float, num_fill: int = 0) -> RunLength:
    """The length of a run.

    longest: seconds of the longest request. pauses: seconds. share: of requests that must keep the SLO. num_fill:
    requests that fill the prefix cache.
    """
    pause = float(np.quantile(pauses, _PAUSES)) if len(pauses) else 0.0
    warm_up = max(longest, pause)
    window = max(LONGEST_REQUESTS * longest, _LATE_REQUESTS / (1 - share) / rate)
    return RunLength(rate, longest, num_fill, warm_up, window)


def pauses_of(sessions: Sequence[Session]) -> list[float]:
    """Seconds before each further turn of a session."""
    return [turn.pause for session in sessions for turn in session.turns[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTask:
    """A run, as data that another process can compute."""

    setup: EngineSetup
    sessions: Sequence[Session]
    rate: float  # requests per second
    num_fill: int  # requests that come first, and fill the prefix cache
    warm_up: float  # seconds behind them; at most _MOST_WARM_UP of the rest
    token_seconds: float  # assumed seconds per output token, for the turns of sessions
    burstiness: float | None  # of arrivals at random; None: as they are, if they have times
    seed: int
    must_keep: SLO | None  # the run is stopped when it can no longer keep this

    def window(self) -> Window:
        """What counts."""
        seconds, filled = num_requests(self.sessions) / self.rate, self.num_fill / self.rate
        start = filled + min(self.warm_up, _MOST_WARM_UP * (seconds - filled))
        return Window(start, seconds)


def run(task: RunTask) -> SimulationResult:
    """The result of a run: a function of its task."""
    sessions, window = arriving(task), task.window()
    stops_early = None
    if task.must_keep is not None:
        before = sum(session.at < window.start for session in sessions)
        stops_early = _EarlyStop(task.must_keep, window, num_requests(sessions), before)
    return Simulation(task.setup, window=window, stops_early=stops_early).run(sessions)


def arriving(task: RunTask) -> list[Session]:
    """The sessions of a run at their times: part of a process without beginning and end."""
    sessions = list(task.sessions)
    if task.burstiness is not None or not has_times(sessions):
        sessions = with_arrivals(sessions, task.rate, burstiness=task.burstiness or 1.0, seed=task.seed)
    if has_times(sessions):
        sessions = with_rate(sessions, task.rate)
    return stationary(sessions, num_requests(sessions) / task.rate, task.token_seconds)


class _EarlyStop:
    """Counts requests that exceed a limit. True when no rest of the run can make good for them."""

    def __init__(self, slo: SLO, window: Window, most: int, in_warm_up: int) -> None:
        """most: requests of the run. in_warm_up: sessions that begin before the window."""
        self._slo = slo
        self._start = window.start
        self._allowed = (1 - slo.share) * most  # at least as many as are allowed in the window
        self._allowed_before = max(_FEW_IN_WARM_UP, _MOST_LATE_IN_WARM_UP * in_warm_up)
        self._late: Counter[tuple[Metric, bool]] = Counter()  # by metric, and whether it counts

    def __call__(self, request: RequestResult) -> bool:
        counts = request.arrived >= self._start
        allowed = self._allowed if counts else self._allowed_before
        for metric in _news(request, self._slo):
            self._late[metric, counts] += 1
            if self._late[metric, counts] > allowed:
                return True
        return False


def _news(request: RequestResult, slo: SLO) -> list[Metric]:
    """The limits that a request exceeds, and that it had not exceeded when this was asked last."""
    if not request.reason:  # it has its first token
        return ["ttft"] if request.ttft > slo.limits.get("ttft", inf) else []
    is_counted = request.first_token < inf and request.ttft > slo.limits.get("ttft", inf)
    return [metric for metric in slo.limits if slo.is_late(request, metric) and not (is_counted and metric == "ttft")]


@dataclass(frozen=True, slots=True)
class Growth:
    """The trend of the backlog, as a share of the arrivals."""

    share: float  # estimated
    error: float  # standard error of it

    @property
    def is_trend(self) -> bool:
        """Whether the backlog grows, significantly and by more than MOST_GROWTH."""
        return self.share > max(MOST_GROWTH, _T_TREND * self.error)

    @property
    def detectable(self) -> float:
        """The growth that is found with a probability of 95 %."""
        return max(MOST_GROWTH + _T_POWER * self.error, (_T_TREND + _T_POWER) * self.error)


def growth_of(means: Sequence[float], seconds: float, num_arrived: int) -> Growth:
    """The trend of mean numbers of open requests in equal parts of a window of `seconds`."""
    if not num_arrived:
        return Growth(0.0, inf)
    count = len(means)
    times = (np.arange(count) - (count - 1) / 2) * seconds / count
    values = np.array(means)
    spread = float(times @ times)
    slope = float(times @ values) / spread
    rest = values - values.mean() - slope * times
    error = sqrt(float(rest @ rest) / (count - 2) / spread)
    wandering = sqrt(_SLOPE_OF_A_WALK * float(np.diff(values).var(ddof=1)) / (count - 1)) * count / seconds
    error, rate = max(error, wandering), num_arrived / seconds
    return Growth(slope / rate, error / rate)


@dataclass(frozen=True, slots=True)
class Kept:
    """The share of the requests that keep a limit."""

    share: float
    least: float  # with a confidence of 80 %


def kept(result: SimulationResult, window: Window, is_late: Callable[[RequestResult], bool]) -> Kept:
    """The share of the window's requests that are not late, from the means of its parts."""
    parts = [[0, 0] for _ in range(NUM_BATCHES)]
    per_second = NUM_BATCHES / (window.stop - window.start)
    for request in result.requests:
        part = parts[min(NUM_BATCHES - 1, int((request.arrived - window.start) * per_second))]
        part[0] += 1
        part[1] += is_late(request)
    shares = np.array([1 - late / count for count, late in parts if count])
    if not len(shares):
        return Kept(0.0, 0.0)
    share = 1 - sum(late for _, late in parts) / sum(count for count, _ in parts)
    if len(shares) < NUM_BATCHES:  # too few requests for an interval, which the plan says
        return Kept(share, share)
    error = float(shares.std(ddof=1)) / sqrt(NUM_BATCHES)
    return Kept(share, max(0.0, share - _T_SHARE * error))


@dataclass(frozen=True, slots=True, eq=False)
class SteadyRun:
    """A run and what it says about its rate."""

    task: RunTask
    result: SimulationResult
    slo: SLO
    window: Window = field(init=False)  # what counts

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", self.task.window())

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.task.rate

    @property
    def growth(self) -> Growth:
        """The trend of the backlog."""
        return growth_of(self.result.open_requests, self.window.stop - self.window.start, len(self.result.requests))

    @property
    def kept(self) -> dict[Metric, Kept]:
        """The share of the requests that keep each limit."""
        return {metric: kept(self.result, self.window, partial(self._is_late, metric)) for metric in self.slo.limits}

    def _is_late(self, metric: Metric, request: RequestResult) -> bool:
        return self.slo.is_late(request, metric)

    @property
    def longest(self) -> float:
        """Seconds of the longest request of the window; 0 without a complete one."""
        return max((one.latency for one in self.result.complete), default=0.0)

    def holds(self, *, surely: bool = True) -> bool:
        """Whether the SLO is kept without a growing backlog. surely: with a confidence of 80 %."""
        if self.result.stopped_early or not self.result.requests or self.slo.violations(self.result):
            return False
        shares = self.kept.values() if surely else ()
        return all(one.least >= self.slo.share for one in shares) and not self.growth.is_trend

    @property
    def verdict(self) -> str:
        """Whether the rate holds, in a word or two."""
        if self.result.stopped_early or self.slo.violations(self.result):
            return "missed"
        if self.growth.is_trend:
            return "queue grows"
        return "met" if self.holds() else "not surely"
