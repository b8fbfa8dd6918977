"""Costs: what computing and copying take on this machine. Reads no clock: durations are inputs.

All that is learnt here follows from the durations of steps and copies that a journal has, and from its calibration:
a replay learns the same.
"""

from math import inf

import msgspec

from quire.cost.pace import LONGEST, SHORTEST, Pace
from quire.cost.prefill import OUTLIER, Prefill, num_pairs

_TRUSTED = 3  # weight of steps, from which on another one is expected to be alike
_FORGET = 0.9  # weight that a copy, or a step that generates, keeps when the next one is seen


class PrefillSample(msgspec.Struct, frozen=True):
    """A step that computed one chunk of a prompt."""

    num_tokens: int
    num_before: int  # tokens of the prompt whose KV was there
    seconds: float


class DecodeSample(msgspec.Struct, frozen=True):
    """A step that computed one token of each of some sequences."""

    num_rows: int
    seconds: float


class CopySample(msgspec.Struct, frozen=True):
    """Blocks that were copied to the host and back."""

    num_bytes: int  # each way
    seconds_out: float
    seconds_in: float


class Calibration(msgspec.Struct, frozen=True):
    """What was measured before the first request."""

    prefill: list[PrefillSample] = []
    decode: list[DecodeSample] = []
    copies: list[CopySample] = []


class CostFigures(msgspec.Struct, frozen=True):
    """What is known; 0 where nothing is, and None of copies."""

    prompt_seconds_per_token: float
    prompt_seconds_per_pair: float  # of a token and one that it attends to
    prompt_seconds_per_step: float
    step_seconds: float  # of one that only generates, as they were lately
    seconds_per_byte_out: float | None  # to the host
    seconds_per_byte_in: float | None


class Costs:
    """Learnt from the steps and copies that ran, and from a calibration before them."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.prefill = Prefill()
        self._steps = self._step_seconds = 0.0  # that only generated: weight and sum, the latest weigh most
        self._copied = [(0.0, 0.0), (0.0, 0.0)]  # bytes and seconds, to the host and from it, the latest weigh most

    # What is learnt from

    def calibrate(self, calibration: Calibration) -> None:
        """Learn from what was measured."""
        for chunk in calibration.prefill:
            self.observe_step(chunk.num_tokens, chunk.seconds, num_pairs(chunk.num_tokens, chunk.num_before))
        for step in calibration.decode:
            self.observe_step(step.num_rows, step.seconds)
        for copy in calibration.copies:
            self.observe_copies(copy.num_bytes, copy.seconds_out, copy.num_bytes, copy.seconds_in)

    def observe_step(self, num_tokens: int, seconds: float, pairs: float = 0) -> None:
        """Learn from a step. pairs: of tokens and those they attend to, where it computed prompts; 0 where it only
        generated.
        """
        if num_tokens < 1 or not SHORTEST < seconds < LONGEST:
            return
        self.pace.observe(num_tokens, seconds)
        if pairs > 0:
            self.prefill.observe(num_tokens, pairs, seconds)
        else:
            if self._steps >= _TRUSTED:  # a pause of the machine is no property of it
                seconds = min(max(seconds, self.step_seconds / OUTLIER), self.step_seconds * OUTLIER)
            self._steps = self._steps * _FORGET + 1
            self._step_seconds = self._step_seconds * _FORGET + seconds

    def observe_copies(self, bytes_out: int, seconds_out: float, bytes_in: int, seconds_in: float) -> None:
        """Learn from a step's copies to the host, and from it."""
        for i, (num_bytes, seconds) in enumerate(((bytes_out, seconds_out), (bytes_in, seconds_in))):
            if num_bytes > 0 and SHORTEST < seconds < LONGEST:
                old_bytes, old_seconds = self._copied[i]
                self._copied[i] = (old_bytes * _FORGET + num_bytes, old_seconds * _FORGET + seconds)

    # What is known

    @property
    def step_seconds(self) -> float:
        """That a step takes which only generates, as steps were lately; 0 where nothing is known yet."""
        return self._step_seconds / self._steps if self._steps else 0.0

    def recompute_seconds(self, num_tokens: int, num_cached: int = 0) -> float:
        """To compute so many tokens that come behind `num_cached` others, beside what steps take that run anyway.

        0 where nothing is known yet.
        """
        if not self.prefill.num_steps:
            return self.pace.per_token * num_tokens
        pairs = num_pairs(num_tokens, num_cached)
        return self.prefill.per_token * num_tokens + self.prefill.per_pair * pairs

    def copy_seconds(self, num_bytes: int) -> tuple[float, float]:
        """To copy so much to the host, and from it; infinite where nothing is known yet."""
        out, back = (num_bytes * seconds / size if size else inf for size, seconds in self._copied)
        return out, back

    def first_token_seconds(self, num_waiting_tokens: int, num_prompt_tokens: int) -> float:
        """From now until the first token of a prompt, if so many tokens of others are computed before it.

        Hopeful: nobody else comes, who runs takes no time, and the others have short contexts. What takes longer
        even so cannot be had. 0 where nothing is known yet.
        """
        waiting = (self.prefill.per_token if self.prefill.num_steps else self.pace.per_token) * num_waiting_tokens
        return self.prefill.fixed + waiting + self.recompute_seconds(num_prompt_tokens)

    def predicted_seconds(self, num_tokens: int, pairs: float = 0) -> float:
        """Of a step, described as to `observe_step`; 0 where nothing is known yet."""
        if num_tokens < 1:
            return 0.0
        if pairs > 0 and self.prefill.num_steps:
            return self.prefill.seconds(num_tokens, pairs)
        return self.pace.fixed + self.pace.per_token * num_tokens

    def output_seconds(self, num_tokens: int) -> float:
        """To generate so many tokens behind the first, one a step; 0 where nothing is known yet."""
        return self.step_seconds * num_tokens

    def figures(self) -> CostFigures:
        """As they stand."""
        prefill = self.prefill
        out, back = (seconds if seconds < inf else None for seconds in self.copy_seconds(1))
        return CostFigures(prefill.per_token, prefill.per_pair, prefill.fixed, self.step_seconds, out, back)

    def __str__(self) -> str:
        """For people: what is known."""
        if not self.prefill.num_steps:
            return "nothing is known yet"
        told = [
            f"prompts {1e6 * self.prefill.per_token:.3g} us a token",
            f"{1e9 * self.prefill.per_pair:.3g} us more for each thousand before it",
            f"{1e3 * self.prefill.fixed:.3g} ms a step",
        ]
        if self._steps:
            told.append(f"generating {1e3 * self.step_seconds:.3g} ms a step")
        out, back = self.copy_seconds(10**9)
        if max(out, back) < inf:
            told.append(f"copies {1 / out:.3g} GB/s to the host, {1 / back:.3g} GB/s from it")
        return ", ".join(told)
