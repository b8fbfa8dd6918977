"""The cost model: seconds of steps and of block copies on this machine. Reads no clock; durations are inputs.

It learns from durations that the journal records, of steps, of copies and of the calibration. So a replay learns the
same.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

import msgspec

MIN_SECONDS, MAX_SECONDS = 1e-9, 1e6  # seconds of a step
_STEP_DECAY = 0.98  # weight of a step when the next one is observed


class StepTime:
    """seconds = fixed + per_token * num_tokens, fitted to recent steps by least squares.

    Neither coefficient is negative, so that noise never leads to a predicted time of 0 or less.
    """

    __slots__ = ("_n", "_nn", "_ns", "_s", "_weight", "fixed", "per_token")

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._s = self._ns = 0.0
        self.fixed = 0.0
        self.per_token = 0.0

    def observe(self, num_tokens: int, seconds: float, weight: float = 1.0) -> None:
        """Learn from a step. A duration outside (MIN_SECONDS, MAX_SECONDS) is ignored."""
        if not MIN_SECONDS < seconds < MAX_SECONDS:
            return
        self._weight = self._weight * _STEP_DECAY + weight
        self._n = self._n * _STEP_DECAY + weight * num_tokens
        self._nn = self._nn * _STEP_DECAY + weight * num_tokens * num_tokens
        self._s = self._s * _STEP_DECAY + weight * seconds
        self._ns = self._ns * _STEP_DECAY + weight * num_tokens * seconds
        spread = self._nn * self._weight - self._n * self._n
        slope = (self._ns * self._weight - self._n * self._s) / spread if spread > 1e-6 * self._nn else 0.0
        fixed = (self._s - slope * self._n) / self._weight
        if slope <= 0 or fixed < 0:  # the steps are too similar for two coefficients: fit per_token alone
            slope, fixed = self._ns / self._nn, 0.0
        self.per_token, self.fixed = slope, fixed

    def tokens_within(self, seconds: float, max_tokens: int) -> int:
        """The number of tokens, from 1 to `max_tokens`, with which a step takes about `seconds`.

        At least half of the time goes to tokens, even if the fixed cost leaves less, so that a step does not pay the
        fixed cost for a single token.
        """
        if self.per_token <= 0:
            return max_tokens
        tokens = max(seconds - self.fixed, seconds / 2) / self.per_token
        return max_tokens if tokens >= max_tokens else max(1, int(tokens))


_SHORT = 64  # tokens of a step with prompts that takes about as long as one of drafts
_CURVE_DECAY = 0.9  # weight of a step when the next one of its class is observed
_STEPS_PER_FIT = 8  # the curve is computed again after so many steps, and for a new class at once
_CURVE_AGING = 0.95  # weight of a class when a step of another class is observed


class StepCurve:
    """Seconds of short steps and of steps without prompts, by the number of tokens: piecewise linear, rising.

    A straight line would not do. While the weights are read from memory, a further token costs almost nothing. And
    kernels compute tokens in groups, so that the first token of a group costs more than the others.
    """

    __slots__ = ("_classes", "_fitted", "_num_steps", "_points")

    def __init__(self) -> None:
        self._classes: dict[int, tuple[float, float, float, int]] = {}  # decayed: steps, tokens, seconds; last step
        self._num_steps = 0
        self._points: list[tuple[float, float]] | None = None  # (tokens, seconds), rising; None: to be computed
        self._fitted: set[int] = set()  # the classes in `_points`

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step. An outlier is clamped."""
        of = _curve_class(num_tokens)
        known = self._classes.get(of, (0.0, 0.0, 0.0, 0))
        if known[0] > 1:
            mean = known[2] / known[0]
            seconds = min(max(seconds, mean / OUTLIER), mean * OUTLIER)
        steps, tokens, total = self._aged(*known)
        keep = _CURVE_DECAY
        self._num_steps += 1
        self._classes[of] = steps * keep + 1, tokens * keep + num_tokens, total * keep + seconds, self._num_steps
        if of not in self._fitted or self._num_steps % _STEPS_PER_FIT == 0:
            self._points = None

    def seconds(self, num_tokens: int) -> float:
        """Predicted seconds of a step; 0 before any step.

        A step with fewer tokens than any so far may take less time for each, but that is found out only if it is tried.
        So it is predicted in proportion.
        """
        if self._points is None:
            self._points = _rising([self._aged(*one) for one in self._classes.values()])
            self._fitted = set(self._classes)
        points = self._points
        if not points:
            return 0.0
        if len(points) == 1 or num_tokens <= points[0][0]:
            return points[0][1] * num_tokens / points[0][0]
        place = min(max(1, bisect_right(points, (num_tokens, 0.0))), len(points) - 1)
        (left, low), (right, high) = points[place - 1], points[place]
        return low + (high - low) * (num_tokens - left) / (right - left)

    def _aged(self, steps: float, tokens: float, seconds: float, last: int) -> tuple[float, float, float]:
        """The sums of a class with less weight the longer ago its last step was: the machine may be faster now."""
        weight = max(_CURVE_AGING ** (self._num_steps - last), 1e-9)
        return steps * weight, tokens * weight, seconds * weight


def _curve_class(num_tokens: int) -> int:
    """The most tokens of a step's class. Kernels take up to 8 tokens, or multiples of that, at once."""
    if num_tokens <= 16:
        return num_tokens
    group = 8 if num_tokens <= _SHORT else 64
    return -(-num_tokens // group) * group


def _rising(classes: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """(mean tokens, mean seconds) of classes, sorted. Neighbours are joined until the seconds rise, against noise."""
    joined: list[tuple[float, float, float]] = []
    for one in sorted(classes, key=lambda some: some[1] / some[0]):
        joined.append(one)
        while len(joined) > 1 and joined[-2][2] * joined[-1][0] >= joined[-1][2] * joined[-2][0]:
            last, other = joined.pop(), joined.pop()
            joined.append((last[0] + other[0], last[1] + other[1], last[2] + other[2]))
    return [(tokens / steps, seconds / steps) for steps, tokens, seconds in joined]


_PREFILL_DECAY = 0.98  # weight of a step when the next one is observed
_MIN_INDEPENDENT_SHARE = (
    1e-3  # least share of a term's square that is independent of the other terms; below it the term is left out
)
OUTLIER = 8.0  # a step counts as at most this many times the prediction, and at least 1/8 of it
_MIN_PREFILL_STEPS = 8  # steps after which outliers are clamped
_TOKENS, _PAIRS, _STEP = range(3)  # the terms
_TERM_SETS = ((_TOKENS, _PAIRS, _STEP), (_TOKENS, _PAIRS), (_TOKENS, _STEP), (_TOKENS,))


class PrefillTime:
    """seconds = fixed + per_token * num_tokens + per_pair * num_pairs, fitted to recent steps by least squares.

    A pair is a token and a token that it attends to, itself included: its cost grows with the context. No coefficient
    is negative. A term that the steps cannot separate from the others is left out.
    """

    __slots__ = ("_normal_matrix", "_normal_vector", "_solved", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self._normal_matrix = [
            [0.0] * 3 for _ in range(3)
        ]  # normal equations: decayed sums of products of (tokens, pairs, 1)
        self._normal_vector = [0.0] * 3  # decayed sums of (tokens, pairs, 1) x seconds
        self._solved: tuple[float, float, float] | None = (0.0, 0.0, 0.0)

    @property
    def per_token(self) -> float:
        """Seconds per token, without its pairs; 0 before any step."""
        return self._coefficients()[0]

    @property
    def per_pair(self) -> float:
        """Seconds per pair."""
        return self._coefficients()[1]

    @property
    def fixed(self) -> float:
        """Seconds per step, whatever it computes."""
        return self._coefficients()[2]

    def observe(self, num_tokens: int, num_pairs: float, seconds: float, weight: float = 1.0) -> None:
        """Learn from a step. A duration outside (MIN_SECONDS, MAX_SECONDS) is ignored, and an outlier is clamped."""
        if num_tokens < 1 or not MIN_SECONDS < seconds < MAX_SECONDS:
            return
        if self.num_steps >= _MIN_PREFILL_STEPS:
            expected = self.seconds(num_tokens, num_pairs)
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        features = (float(num_tokens), float(num_pairs), 1.0)
        for i, one in enumerate(features):
            self._normal_vector[i] = self._normal_vector[i] * _PREFILL_DECAY + weight * one * seconds
            for j, other in enumerate(features):
                self._normal_matrix[i][j] = self._normal_matrix[i][j] * _PREFILL_DECAY + weight * one * other
        self.num_steps += 1
        self._solved = None

    def seconds(self, num_tokens: int, num_pairs: float) -> float:
        """Predicted seconds of a step with these tokens and pairs; 0 before any step."""
        per_token, per_pair, fixed = self._coefficients()
        return fixed + per_token * num_tokens + per_pair * num_pairs

    def _coefficients(self) -> tuple[float, float, float]:
        if self._solved is None:
            self._solved = self._solve()
        return self._solved

    def _solve(self) -> tuple[float, float, float]:
        """The best fit without a negative coefficient. The fit of tokens alone never has one."""
        best, least = (0.0, 0.0, 0.0), inf
        for wanted in _TERM_SETS:
            used, values = _least_squares(self._normal_matrix, self._normal_vector, wanted)
            missed = -sum(value * self._normal_vector[i] for i, value in zip(used, values, strict=True))
            if min(values) >= 0 and missed < least:
                found, least = dict(zip(used, values, strict=True)), missed
                best = found[_TOKENS], found.get(_PAIRS, 0.0), found.get(_STEP, 0.0)
                if len(used) == len(_TERM_SETS[0]):  # no fit with fewer terms misses less
                    break
        return best


_MOST_ALIKE = 32  # steps with one token in each row behind which the fit is noise


class RowTime:
    """Seconds of each sequence of a step beside those of its tokens: a recurrent state is read and written.

    seconds = fixed + per_token * num_tokens + per_row * num_rows, fitted to recent short steps as by `PrefillTime`.
    Steps with one token in each row cannot separate rows from tokens, nor steps of one row the row from the step. So an
    estimate stays while there are no others.
    """

    __slots__ = ("_fit", "_num_alike", "per_row")

    def __init__(self) -> None:
        self._fit = PrefillTime()
        self._num_alike = 0  # last steps with one token in each row
        self.per_row = 0.0

    def observe(self, num_tokens: int, num_rows: int, seconds: float, weight: float = 1.0) -> None:
        """Learn from a step."""
        self._fit.observe(num_tokens, num_rows, seconds, weight)
        self._num_alike = self._num_alike + 1 if num_tokens == num_rows else 0
        if self._num_alike <= _MOST_ALIKE and min(self._fit.fixed, self._fit.per_pair) > 0:
            self.per_row = self._fit.per_pair

    def without_rows(self, num_rows: int, seconds: float) -> float:
        """The seconds of a step that do not come from its rows: at least 1/8 of them, whatever the error of the fit."""
        return max(seconds - self.per_row * num_rows, seconds / OUTLIER)


def num_pairs(num_tokens: int, num_before: int) -> float:
    """Pairs of a chunk of `num_tokens` tokens behind `num_before` others."""
    return num_tokens * (num_before + (num_tokens + 1) / 2)


def _least_squares(
    rows: list[list[float]], products: list[float], used: Sequence[int]
) -> tuple[list[int], list[float]]:
    """The terms of `used` that are independent of those before them, and the coefficient of each.

    Cholesky decomposition of the normal equations.
    """
    kept: list[int] = []
    lower: list[list[float]] = []
    for i in used:
        row: list[float] = []
        for j, other in enumerate(kept):
            row.append((rows[i][other] - sum(row[k] * lower[j][k] for k in range(j))) / lower[j][j])
        own = rows[i][i] - sum(value * value for value in row)
        if own > _MIN_INDEPENDENT_SHARE * rows[i][i]:
            kept.append(i)
            lower.append([*row, own**0.5])
    forward: list[float] = []
    for j, i in enumerate(kept):
        forward.append((products[i] - sum(lower[j][k] * forward[k] for k in range(j))) / lower[j][j])
    values = [0.0] * len(kept)
    for j in reversed(range(len(kept))):
        values[j] = (forward[j] - sum(lower[k][j] * values[k] for k in range(j + 1, len(kept)))) / lower[j][j]
    return kept, values


_MIN_DECODE_WEIGHT = 3  # total weight of decode steps from which on outliers are clamped
_DECAY = 0.9  # weight of a copy or a decode step when the next one is observed
_CALIBRATION_TOKENS = 8  # a calibration step weighs as much in a fit as a real step with this many tokens


class PrefillSample(msgspec.Struct, frozen=True):
    """A measured step that computed one chunk of a prompt."""

    num_tokens: int
    num_before: int  # prompt tokens before the chunk
    seconds: float


class DecodeSample(msgspec.Struct, frozen=True):
    """A measured step that computed one token of each of `num_rows` sequences."""

    num_rows: int
    seconds: float


class CopySample(msgspec.Struct, frozen=True):
    """Measured copies of blocks to the host and back."""

    num_bytes: int  # in each direction
    seconds_out: float
    seconds_in: float


class Calibration(msgspec.Struct, frozen=True):
    """Measurements from before the first request."""

    prefill: list[PrefillSample] = []
    decode: list[DecodeSample] = []
    copies: list[CopySample] = []


class CostFigures(msgspec.Struct, frozen=True, tag=True):
    """The current estimates; 0 before any measurement, and None for copies."""

    prompt_seconds_per_token: float
    prompt_seconds_per_pair: float  # a token and a token that it attends to
    prompt_seconds_per_step: float
    step_seconds: float  # mean of recent decode steps
    seconds_per_byte_out: float | None  # to the host
    seconds_per_byte_in: float | None


class CostModel:
    """The cost model. It learns from steps and copies, and from a calibration before them."""

    def __init__(self, *, has_states: bool = False) -> None:
        """has_states: whether sequences have recurrent states, so that rows of a step take time beside its tokens."""
        self._has_states = has_states
        self.step_time = StepTime()
        self.prefill = PrefillTime()
        self.step_curve = StepCurve()  # without the time of rows
        self.row_time = RowTime()  # 0 without states
        self._decode_weight = self._decode_seconds = 0.0  # of decode steps: decayed count and sum of seconds
        self.shortest_decode_seconds = inf  # of all decode steps so far
        self._copied = [(0.0, 0.0), (0.0, 0.0)]  # to the host, and from it: decayed sums of bytes and of seconds

    # Observations

    def calibrate(self, calibration: Calibration) -> None:
        """Learn from all measurements of a calibration.

        The fits minimize absolute errors, so a long chunk would outweigh hundreds of short prompts. If the machine was
        busy during the calibration, real steps could not correct it. So all of its steps count as short ones.
        """
        if self._has_states:  # before the curve, which has no time of rows
            for chunk in calibration.prefill:
                if chunk.num_tokens <= _SHORT:
                    self.row_time.observe(chunk.num_tokens, 1, chunk.seconds)
            for step in calibration.decode:
                self.row_time.observe(step.num_rows, step.num_rows, step.seconds)
        for chunk in calibration.prefill:
            pairs = num_pairs(chunk.num_tokens, chunk.num_before)
            weight = (_CALIBRATION_TOKENS / chunk.num_tokens) ** 2
            self.observe_step(chunk.num_tokens, chunk.seconds, pairs, weight)
        for step in calibration.decode:
            self.observe_step(step.num_rows, step.seconds, num_rows=step.num_rows)
        for copy in calibration.copies:
            self.observe_copies(copy.num_bytes, copy.seconds_out, copy.num_bytes, copy.seconds_in)

    def observe_step(
        self, num_tokens: int, seconds: float, pairs: float = 0, weight: float = 1.0, *, num_rows: int = 1
    ) -> None:
        """Learn from a step.

        pairs: its number of pairs; 0 for a step that only decodes. weight: in the fits. num_rows: its chunks, each of
        which reads and writes a recurrent state if the model has them.
        """
        if num_tokens < 1 or not MIN_SECONDS < seconds < MAX_SECONDS:
            return
        self.step_time.observe(num_tokens, seconds, weight)
        if not pairs or num_tokens <= _SHORT:
            own = seconds
            if self._has_states:
                self.row_time.observe(num_tokens, num_rows, seconds, weight)
                own = self.row_time.without_rows(num_rows, seconds)
            self.step_curve.observe(num_tokens, own)
        if pairs > 0:
            self.prefill.observe(num_tokens, pairs, seconds, weight)
        else:
            if self._decode_weight >= _MIN_DECODE_WEIGHT:  # a pause of the machine must not count as the speed of steps
                seconds = min(max(seconds, self.decode_step_seconds / OUTLIER), self.decode_step_seconds * OUTLIER)
            self.shortest_decode_seconds = min(self.shortest_decode_seconds, seconds)
            self._decode_weight = self._decode_weight * _DECAY + 1
            self._decode_seconds = self._decode_seconds * _DECAY + seconds

    def observe_copies(self, bytes_out: int, seconds_out: float, bytes_in: int, seconds_in: float) -> None:
        """Learn from a step's copies to the host, and from it. One without bytes or valid seconds is ignored."""
        for i, (num_bytes, seconds) in enumerate(((bytes_out, seconds_out), (bytes_in, seconds_in))):
            if num_bytes > 0 and MIN_SECONDS < seconds < MAX_SECONDS:
                old_bytes, old_seconds = self._copied[i]
                self._copied[i] = (old_bytes * _DECAY + num_bytes, old_seconds * _DECAY + seconds)

    # Estimates

    @property
    def decode_step_seconds(self) -> float:
        """Mean seconds of recent decode steps; 0 before any."""
        return self._decode_seconds / self._decode_weight if self._decode_weight else 0.0

    def recompute_seconds(self, num_tokens: int, num_cached: int = 0) -> float:
        """Seconds to compute `num_tokens` tokens behind `num_cached` others, in steps that run anyway.

        So it leaves out the fixed cost of a step. 0 before any step.
        """
        if not self.prefill.num_steps:
            return self.step_time.per_token * num_tokens
        pairs = num_pairs(num_tokens, num_cached)
        return self.prefill.per_token * num_tokens + self.prefill.per_pair * pairs

    def copy_seconds(self, num_bytes: int) -> tuple[float, float]:
        """Seconds to copy `num_bytes` to the host, and from it; infinite before any copy in that direction."""
        out, back = (num_bytes * seconds / size if size else inf for size, seconds in self._copied)
        return out, back

    def first_token_seconds(self, num_waiting_tokens: int, num_prompt_tokens: int) -> float:
        """Seconds until the first token of a prompt behind `num_waiting_tokens` tokens of other prompts.

        This is a lower bound: no other request arrives, running sequences take no time, and the other prompts have
        short contexts. A deadline before it cannot be met. 0 before any step.
        """
        waiting = (self.prefill.per_token if self.prefill.num_steps else self.step_time.per_token) * num_waiting_tokens
        return self.prefill.fixed + waiting + self.recompute_seconds(num_prompt_tokens)

    def predicted_step_seconds(self, num_tokens: int, pairs: float = 0) -> float:
        """Predicted seconds of a step, with arguments as in `observe_step`; 0 before any step."""
        if num_tokens < 1:
            return 0.0
        if pairs > 0 and self.prefill.num_steps:
            return self.prefill.seconds(num_tokens, pairs)
        return self.step_time.fixed + self.step_time.per_token * num_tokens

    def output_seconds(self, num_tokens: int) -> float:
        """Seconds to generate `num_tokens` tokens after the first, one per step; 0 before any decode step."""
        return self.decode_step_seconds * num_tokens

    def figures(self) -> CostFigures:
        """The current estimates."""
        prefill = self.prefill
        out, back = (seconds if seconds < inf else None for seconds in self.copy_seconds(1))
        return CostFigures(prefill.per_token, prefill.per_pair, prefill.fixed, self.decode_step_seconds, out, back)

    def __str__(self) -> str:
        """The estimates as text."""
        if not self.prefill.num_steps:
            return "not measured yet"
        parts = [
            f"prompts {1e6 * self.prefill.per_token:.3g} us a token",
            f"{1e9 * self.prefill.per_pair:.3g} us more for each thousand before it",
            f"{1e3 * self.prefill.fixed:.3g} ms a step",
        ]
        if self._decode_weight:
            parts.append(f"generating {1e3 * self.decode_step_seconds:.3g} ms a step")
        out, back = self.copy_seconds(10**9)
        if max(out, back) < inf:
            parts.append(f"copies {1 / out:.3g} GB/s to the host, {1 / back:.3g} GB/s from it")
        return ", ".join(parts)
