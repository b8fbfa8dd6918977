"""How long a step takes, learnt from the steps that ran. Reads no clock: durations are inputs."""

SHORTEST, LONGEST = 1e-9, 1e6  # seconds of a step
_FORGET = 0.98  # weight that a step keeps when the next one is seen


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
        self._weight = self._weight * _FORGET + 1
        self._n = self._n * _FORGET + num_tokens
        self._nn = self._nn * _FORGET + num_tokens * num_tokens
        self._s = self._s * _FORGET + seconds
        self._ns = self._ns * _FORGET + num_tokens * seconds
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
