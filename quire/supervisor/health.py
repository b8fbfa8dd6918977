"""Health of an engine, with its metrics across restarts.

Callers pass the time in seconds of a monotonic clock.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from quire.engine.engine import EngineStats


class State(StrEnum):
    """The state of a replica."""

    STARTING = "starting"  # the first engine is launched and has not sent a message
    SERVING = "serving"
    STALLED = "stalled"  # the engine has made no progress for too long
    RESTARTING = "restarting"  # the engine ended, and another one is being started
    FAILED = "failed"  # the engine ended, and no other is started any more
    CLOSED = "closed"  # the server shuts down


STALL_SECONDS = 1.5  # without a message, after which an engine counts as stalled
FAILED_STEPS = 3  # in a row, reported as a problem; fewer may be caused by one request
_STALL_FACTOR = 3  # factor on the predicted time of a step before it counts as stalled
_UNKNOWN_SECONDS = 10.0  # the same for a step without a prediction


class Health(NamedTuple):
    """Health of the engine. Times in seconds.

    problem: empty if there is none; it contains no varying numbers. stats: without an engine all gauges are 0, but
    num_waiting is the number of open requests. start_error: why the last start failed; empty once an engine serves.
    """

    problem: str
    state: State
    stats: EngineStats
    heartbeat_age: float | None  # since the last message; None without an engine
    predicted_step_seconds: float | None  # of the current step; 0 without a prediction, None without an engine
    num_restarts: int
    start_error: str


def combined(healths: Sequence[Health]) -> Health:
    """The health of several replicas: they have a problem if all have, and the state of the best one."""
    if len(healths) == 1:
        return healths[0]
    best = min(healths, key=lambda one: (bool(one.problem), _BEST_FIRST.index(one.state)))
    ages = [one.heartbeat_age for one in healths if one.heartbeat_age is not None]
    predicted = [one.predicted_step_seconds for one in healths if one.predicted_step_seconds is not None]
    return Health(
        best.problem,
        best.state,
        EngineStats.total([one.stats for one in healths]),
        max(ages, default=None),
        max(predicted, default=None),
        sum(one.num_restarts for one in healths),
        next((one.start_error for one in healths if one.start_error), ""),
    )


_BEST_FIRST = (State.SERVING, State.STALLED, State.STARTING, State.RESTARTING, State.FAILED, State.CLOSED)


class StallDetector:
    """Stall detection of one engine. now: when it was connected."""

    def __init__(self, now: float) -> None:
        self.connected_at = self.last_message_at = self.turn_began_at = now
        self.predicted_seconds = 0.0
        self._allowed_seconds = STALL_SECONDS  # time that the current turn may take
        self._step_allowed_seconds = 0.0  # the part of it for the newest step

    def record_launch(self, predicted_seconds: float, now: float, *, is_queued: bool = False) -> None:
        """Record the launch of a step. is_queued: whether it begins only after the in-flight step before it."""
        self.last_message_at = self.turn_began_at = now
        before = self._step_allowed_seconds if is_queued else 0.0
        self.predicted_seconds, self._step_allowed_seconds = predicted_seconds, _allowed_step_seconds(predicted_seconds)
        self._allowed_seconds = before + self._step_allowed_seconds

    def record_idle(self, now: float) -> None:
        """Record that the engine has no step in flight."""
        self.last_message_at = self.turn_began_at = now
        self._allowed_seconds = STALL_SECONDS

    def record_heartbeat(self, turned: float, now: float) -> None:
        """Record a heartbeat. turned: when the last turn of the engine loop began."""
        self.last_message_at, self.turn_began_at = now, max(turned, self.turn_began_at)

    def stalled_seconds(self, now: float) -> float:
        """Seconds without a message or without progress if that is too long; else 0."""
        if now - self.last_message_at > STALL_SECONDS:
            return now - self.last_message_at
        return now - self.turn_began_at if now - self.turn_began_at > self._allowed_seconds else 0.0


def _allowed_step_seconds(predicted_seconds: float) -> float:
    return max(STALL_SECONDS, _STALL_FACTOR * predicted_seconds) if predicted_seconds else _UNKNOWN_SECONDS


class CumulativeStats:
    """Metrics across restarts: counters are summed over engines, gauges are of the current engine."""

    def __init__(self, first: EngineStats) -> None:
        self.stats = first
        self._previous_totals: dict[str, float] = {}

    def update(self, stats: EngineStats) -> None:
        """Take the metrics of the current engine."""
        sums = {name: getattr(stats, name) + value for name, value in self._previous_totals.items()}
        self.stats = msgspec.structs.replace(stats, **sums) if sums else stats

    def engine_ended(self) -> None:
        """Keep the counters of an engine that has ended, and set the gauges to those of an idle engine without KV."""
        self._previous_totals = {name: getattr(self.stats, name) for name in EngineStats.__struct_fields__}
        for name in EngineStats.GAUGES:
            del self._previous_totals[name]
        self.stats = msgspec.structs.replace(EngineStats.zero(), **self._previous_totals)
