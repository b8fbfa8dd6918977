"""Waits: how long the queue stood still and why. One cause at a time holds for all who wait."""

from typing import Literal

WaitCause = Literal[
    "step",  # nothing but the step that was running
    "tokens",  # the step's budget of tokens and time was spent
    "rows",  # max_num_seqs sequences ran
    "memory",  # KV blocks were short
    "in_flight",  # after a preemption, until the steps in flight were over
    "failure",  # a step had failed, and its sequences were tried one by one
    "prompt",  # another sequence of the request computed the prompt
]


class Waits:
    """Seconds by cause since the start; who notes them twice knows how long they waited in between."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._cause: WaitCause = "step"
        self._since = 0.0

    @property
    def cause(self) -> WaitCause:
        """What holds now."""
        return self._cause

    def because(self, cause: WaitCause, now: float) -> None:
        """From now on the queue waits for this."""
        self._advance(now)
        self._cause = cause

    def note(self, now: float) -> dict[str, float]:
        """Seconds so far."""
        self._advance(now)
        return dict(self._seconds)

    def since(self, noted: dict[str, float], now: float) -> dict[str, float]:
        """Seconds since they were noted, by cause; causes that took no time are left out."""
        self._advance(now)
        passed = {cause: seconds - noted.get(cause, 0.0) for cause, seconds in self._seconds.items()}
        return {cause: seconds for cause, seconds in passed.items() if seconds > 0}

    def _advance(self, now: float) -> None:
        if now > self._since:
            self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + now - self._since
            self._since = now
