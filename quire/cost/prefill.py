"""How long prompts take to compute, learnt from the steps that did. Reads no clock: durations are inputs."""

from collections.abc import Sequence
from math import inf

from quire.cost.pace import LONGEST, SHORTEST

_FORGET = 0.98  # weight that a step keeps when the next one is seen
_DISTINCT = 1e-3  # of a quantity's square that has to be its own, or it cannot be told from the others
OUTLIER = 8.0  # one step counts for no more than so many times what was expected, nor for less than that part
_TRUSTED = 8  # steps, from which on anything is expected
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
        if self.num_steps >= _TRUSTED:
            expected = self.seconds(num_tokens, num_pairs)
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        features = (float(num_tokens), float(num_pairs), 1.0)
        for i, one in enumerate(features):
            self._products[i] = self._products[i] * _FORGET + one * seconds
            for j, other in enumerate(features):
                self._rows[i][j] = self._rows[i][j] * _FORGET + one * other
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
