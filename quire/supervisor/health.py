"""Vitals: signs of life of an engine, and what they mean. Time is an argument; knows no process."""

from typing import Literal, NamedTuple

import msgspec

from quire.engine.engine import EngineStats

State = Literal["ok", "stalled", "restarting", "stopped"]

STALL_SECONDS = 1.5  # without a sign of life
FAILED_STEPS = 3  # in a row; fewer may be the fault of one request
_SLOWER = 3  # times as long as predicted is no sign of death
_UNKNOWN_SECONDS = 10.0  # that a step may take of which nothing is predicted


class Health(NamedTuple):
    """Whether the engine answers; `problem` is empty when it does, and has no figures of it. Ages in seconds."""

    problem: str
    state: State
    heartbeat_age: float  # since anything was heard of it
    stats: EngineStats
    predicted_step_seconds: float  # of the step that runs; 0 where nothing is known
    num_restarts: int


class Vitals:
    """What was heard of one engine, from `now` on."""

    def __init__(self, now: float) -> None:
        self.began = self.heard = self.turned = now
        self.predicted_seconds = 0.0
        self._patience = STALL_SECONDS  # for how long nothing may move
        self._step_patience = 0.0  # of that, for the newest step alone

    def launched(self, predicted_seconds: float, now: float, *, waits: bool = False) -> None:
        """A step begins. waits: when the one before it has ended."""
        self.heard = self.turned = now
        before = self._step_patience if waits else 0.0
        self.predicted_seconds, self._step_patience = predicted_seconds, _patience(predicted_seconds)
        self._patience = before + self._step_patience

    def idles(self, now: float) -> None:
        """It has nothing to do."""
        self.heard = self.turned = now
        self._patience = STALL_SECONDS

    def pulse(self, turned: float, now: float) -> None:
        """It lives, and its engine's last turn began at `turned`."""
        self.heard, self.turned = now, max(turned, self.turned)

    def stalled(self, now: float) -> float:
        """For how long nothing has moved, where that is longer than it may be; else 0."""
        if now - self.heard > STALL_SECONDS:
            return now - self.heard
        return now - self.turned if now - self.turned > self._patience else 0.0


def _patience(predicted_seconds: float) -> float:
    return max(STALL_SECONDS, _SLOWER * predicted_seconds) if predicted_seconds else _UNKNOWN_SECONDS


class Tally:
    """Figures of engines that came one after the other: counters go on, gauges are the last one's."""

    def __init__(self, first: EngineStats) -> None:
        self.stats = first
        self._before: dict[str, float] = {}

    def take(self, stats: EngineStats) -> None:
        """The engine that runs says this."""
        sums = {name: getattr(stats, name) + value for name, value in self._before.items()}
        self.stats = msgspec.structs.replace(stats, **sums) if sums else stats

    def died(self, num_waiting: int) -> None:
        """Another one will come; so many requests wait for it."""
        self._before = {name: getattr(self.stats, name) for name in EngineStats.__struct_fields__}
        for name in EngineStats.GAUGES:
            del self._before[name]
        idle = {"num_running": 0, "kv_blocks_used": 0, "kv_blocks_cached": 0, "host_blocks_used": 0}
        self.stats = msgspec.structs.replace(self.stats, num_waiting=num_waiting, failed_in_a_row=0, **idle)
