"""Health of an engine, with its metrics across restarts.

Callers pass the time in seconds of a monotonic clock.
"""

from typing import Literal, NamedTuple

import msgspec

from quire.engine.engine import EngineStats

State = Literal["ok", "stalled", "restarting", "stopped"]

STALL_SECONDS = 1.5  # without a message, after which an engine counts as stalled
FAILED_STEPS = 3  # in a row, reported as a problem; fewer may be caused by one request
_STALL_FACTOR = 3  # factor on the predicted time of a step before it counts as stalled
_UNKNOWN_SECONDS = 10.0  # the same for a step without a prediction


class Health(NamedTuple):
    """Health of the engine. `problem` is empty if there is none, and contains no varying numbers. Times in seconds."""

    problem: str
    state: State
    heartbeat_age: float  # since the last message
    stats: EngineStats
    predicted_step_seconds: float  # of the current step; 0 without a prediction
    num_restarts: int


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

    def engine_ended(self, num_waiting: int) -> None:
        """Keep the counters of an engine that has ended. num_waiting: open requests, which wait for the next engine."""
        self._previous_totals = {name: getattr(self.stats, name) for name in EngineStats.__struct_fields__}
        for name in EngineStats.GAUGES:
            del self._previous_totals[name]
        idle = {"num_running": 0, "kv_blocks_used": 0, "kv_blocks_cached": 0, "host_blocks_used": 0}
        self.stats = msgspec.structs.replace(self.stats, num_waiting=num_waiting, failed_in_a_row=0, **idle)
