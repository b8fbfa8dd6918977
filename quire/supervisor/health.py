"""Health of an engine, with its metrics across restarts.

Callers pass the time in seconds of a monotonic clock.
"""

from typing import Literal, NamedTuple

import msgspec

from quire.engine.engine import EngineStats

State = Literal["ok", "stalled", "restarting", "stopped"]

STALL_SECONDS = 1.5  # without a message, after which an engine counts as stalled
FAILED_STEPS = 3  # in a row, reported as a problem; fewer may be caused by one request
_SLOWER = 3  # factor on the predicted time of a step before it counts as stalled
_UNKNOWN_SECONDS = 10.0  # the same for a step without a prediction


class Health(NamedTuple):
    """Health of the engine. `problem` is empty if there is none, and contains no varying numbers. Times in seconds."""

    problem: str
    state: State
    heartbeat_age: float  # since the last message
    stats: EngineStats
    predicted_step_seconds: float  # of the current step; 0 without a prediction
    num_restarts: int


class Vitals:
    """Stall detection of one engine. now: when it was connected."""

    def __init__(self, now: float) -> None:
        self.began = self.heard = self.turned = now
        self.predicted_seconds = 0.0
        self._patience = STALL_SECONDS  # time that the current turn may take
        self._step_patience = 0.0  # the part of it for the newest step

    def launched(self, predicted_seconds: float, now: float, *, waits: bool = False) -> None:
        """Record the launch of a step. waits: whether it begins only after the in-flight step before it."""
        self.heard = self.turned = now
        before = self._step_patience if waits else 0.0
        self.predicted_seconds, self._step_patience = predicted_seconds, _patience(predicted_seconds)
        self._patience = before + self._step_patience

    def idles(self, now: float) -> None:
        """Record that the engine has no step in flight."""
        self.heard = self.turned = now
        self._patience = STALL_SECONDS

    def pulse(self, turned: float, now: float) -> None:
        """Record a heartbeat. turned: when the last turn of the engine loop began."""
        self.heard, self.turned = now, max(turned, self.turned)

    def stalled(self, now: float) -> float:
        """Seconds without a message or without progress if that is too long; else 0."""
        if now - self.heard > STALL_SECONDS:
            return now - self.heard
        return now - self.turned if now - self.turned > self._patience else 0.0


def _patience(predicted_seconds: float) -> float:
    return max(STALL_SECONDS, _SLOWER * predicted_seconds) if predicted_seconds else _UNKNOWN_SECONDS


class Tally:
    """Metrics across restarts: counters are summed over engines, gauges are of the current engine."""

    def __init__(self, first: EngineStats) -> None:
        self.stats = first
        self._before: dict[str, float] = {}

    def take(self, stats: EngineStats) -> None:
        """Take the metrics of the current engine."""
        sums = {name: getattr(stats, name) + value for name, value in self._before.items()}
        self.stats = msgspec.structs.replace(stats, **sums) if sums else stats

    def died(self, num_waiting: int) -> None:
        """Keep the counters of an engine that has ended. num_waiting: open requests, which wait for the next engine."""
        self._before = {name: getattr(self.stats, name) for name in EngineStats.__struct_fields__}
        for name in EngineStats.GAUGES:
            del self._before[name]
        idle = {"num_running": 0, "kv_blocks_used": 0, "kv_blocks_cached": 0, "host_blocks_used": 0}
        self.stats = msgspec.structs.replace(self.stats, num_waiting=num_waiting, failed_in_a_row=0, **idle)
