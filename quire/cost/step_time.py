"""Costs: what computing and copying take on this machine. Reads no clock: durations are inputs.

All that is learnt here follows from the durations of steps and copies that a journal has, and from its calibration:
a replay learns the same.
"""

from collections.abc import Sequence
from math import inf

import msgspec

SHORTEST, LONGEST = 1e-9, 1e6  # seconds of a step
_STEP_DECAY = 0.98  # weight that a step keeps when the next one is seen


class Pace:
    """seconds = fixed + per_token * num_tokens, by least squares over recent steps.

    Both coefficients are kept from falling below zero: a noisy machine must not yield a step that is
    predicted to take no time.
    """

    __slots__ = ("_n", "_nn", "_ns", "_s", "_weight", "fixed", "per_token")

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._s = self._ns = 0.0
        self.fixed = 0.0
        self.per_token = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step. A duration that no step can have had teaches nothing."""
        if not SHORTEST < seconds < LONGEST:
            return
        self._weight = self._weight * _STEP_DECAY + 1
        self._n = self._n * _STEP_DECAY + num_tokens
        self._nn = self._nn * _STEP_DECAY + num_tokens * num_tokens
        self._s = self._s * _STEP_DECAY + seconds
        self._ns = self._ns * _STEP_DECAY + num_tokens * seconds
        spread = self._nn * self._weight - self._n * self._n
        slope = (self._ns * self._weight - self._n * self._s) / spread if spread > 1e-6 * self._nn else 0.0
        fixed = (self._s - slope * self._n) / self._weight
        if slope <= 0 or fixed < 0:  # too little variety: put it all on the tokens
            slope, fixed = self._ns / self._nn, 0.0
        self.per_token, self.fixed = slope, fixed

    def tokens_within(self, seconds: float, most: int) -> int:
        """Tokens that a step may have to take about `seconds`: between 1 and `most`.

        At least half of the time is given to tokens, also where the fixed cost leaves less: a step that
        has to be paid for anyway should not be wasted on a single token.
        """
        if self.per_token <= 0:
            return most
        tokens = max(seconds - self.fixed, seconds / 2) / self.per_token
        return most if tokens >= most else max(1, int(tokens))


_PREFILL_DECAY = 0.98  # weight that a step keeps when the next one is seen
_DISTINCT = 1e-3  # of a quantity's square that has to be its own, or it cannot be told from the others
OUTLIER = 8.0  # one step counts for no more than so many times what was expected, nor for less than that part
_MIN_PREFILL_STEPS = 8  # steps, from which on anything is expected
_TOKENS, _PAIRS, _STEP = range(3)  # what takes time
_FITS = ((_TOKENS, _PAIRS, _STEP), (_TOKENS, _PAIRS), (_TOKENS, _STEP), (_TOKENS,))


class Prefill:
    """seconds = fixed + per_token * num_tokens + per_pair * num_pairs, by least squares over recent steps.

    A pair is a token and one that it attends to, itself among them: that is what makes a long context dear. No
    coefficient is negative, and where steps were too much alike to tell two of them apart, tokens carry it all.
    """

    __slots__ = ("_products", "_rows", "_solved", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self._rows = [[0.0] * 3 for _ in range(3)]  # sums of products of (tokens, pairs, 1), recent steps weigh most
        self._products = [0.0] * 3  # the same with seconds
        self._solved: tuple[float, float, float] | None = (0.0, 0.0, 0.0)

    @property
    def per_token(self) -> float:
        """Seconds that each token takes, whatever it attends to; 0 where nothing is known yet."""
        return self._coefficients()[0]

    @property
    def per_pair(self) -> float:
        """Seconds that each pair takes."""
        return self._coefficients()[1]

    @property
    def fixed(self) -> float:
        """Seconds that a step takes, whatever is in it."""
        return self._coefficients()[2]

    def observe(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """Learn from a step. A duration that no step can have had teaches nothing, and one that is far off little."""
        if num_tokens < 1 or not SHORTEST < seconds < LONGEST:
            return
        if self.num_steps >= _MIN_PREFILL_STEPS:
            expected = self.seconds(num_tokens, num_pairs)
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        features = (float(num_tokens), float(num_pairs), 1.0)
        for i, one in enumerate(features):
            self._products[i] = self._products[i] * _PREFILL_DECAY + one * seconds
            for j, other in enumerate(features):
                self._rows[i][j] = self._rows[i][j] * _PREFILL_DECAY + one * other
        self.num_steps += 1
        self._solved = None

    def seconds(self, num_tokens: int, num_pairs: float) -> float:
        """Of a step with so many tokens and pairs; 0 where nothing is known yet."""
        per_token, per_pair, fixed = self._coefficients()
        return fixed + per_token * num_tokens + per_pair * num_pairs

    def _coefficients(self) -> tuple[float, float, float]:
        if self._solved is None:
            self._solved = self._solve()
        return self._solved

    def _solve(self) -> tuple[float, float, float]:
        """The best of the fits in which nothing is negative; that by tokens alone always is one."""
        best, least = (0.0, 0.0, 0.0), inf
        for wanted in _FITS:
            used, values = _least_squares(self._rows, self._products, wanted)
            missed = -sum(value * self._products[i] for i, value in zip(used, values, strict=True))
            if min(values) >= 0 and missed < least:
                found, least = dict(zip(used, values, strict=True)), missed
                best = found[_TOKENS], found.get(_PAIRS, 0.0), found.get(_STEP, 0.0)
        return best


def num_pairs(num_tokens: int, num_before: int) -> float:
    """Of a chunk of `num_tokens` that comes behind `num_before` others."""
    return num_tokens * (num_before + (num_tokens + 1) / 2)


def _least_squares(
    rows: list[list[float]], products: list[float], used: Sequence[int]
) -> tuple[list[int], list[float]]:
    """The quantities among `used` that can be told from those before them, and the coefficient of each.

    By Cholesky decomposition of the normal equations.
    """
    kept: list[int] = []
    lower: list[list[float]] = []
    for i in used:
        row: list[float] = []
        for j, other in enumerate(kept):
            row.append((rows[i][other] - sum(row[k] * lower[j][k] for k in range(j))) / lower[j][j])
        own = rows[i][i] - sum(value * value for value in row)
        if own > _DISTINCT * rows[i][i]:
            kept.append(i)
            lower.append([*row, own**0.5])
    forward: list[float] = []
    for j, i in enumerate(kept):
        forward.append((products[i] - sum(lower[j][k] * forward[k] for k in range(j))) / lower[j][j])
    values = [0.0] * len(kept)
    for j in reversed(range(len(kept))):
        values[j] = (forward[j] - sum(lower[k][j] * values[k] for k in range(j + 1, len(kept)))) / lower[j][j]
    return kept, values


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
