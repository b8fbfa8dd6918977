"""Quota: how much one key may ask for in a minute. Knows numbers and time, which is an argument; no HTTP.

A token bucket holds one minute's worth and starts full. Whole numbers only, so that it is exact. The prompt's tokens
are counted at once; those of the output as they come, as nobody knows before how many there will be. A running request
is never cut off: the bucket may owe some, which delays the next one. So a key gets its rate in the long run,
and in a short one a full bucket and what its running requests still bring.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic_ns

from quire.errors import QuireError

MINUTE = 60 * 10**9  # ns


class RateLimited(QuireError):
    """A key has asked for too much lately. retry_after: seconds until the same request is let in."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Bucket:
    """A token bucket of `per_minute` units. What it lacks is counted in units times MINUTE, of which `per_minute`
    come back in each ns.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._lack = 0
        self._at = 0  # ns, when it lacked that

    def wait(self, amount: int, now: int) -> int:
        """Nanoseconds until `amount` units are there, rounded up; of more than it ever holds: until it is full."""
        over = self._lacks(now) + min(amount, self.per_minute) * MINUTE - self.per_minute * MINUTE
        return max(0, -(-over // self.per_minute))

    def take(self, amount: int, now: int) -> None:
        """Whether they are there or not. A negative amount is given back."""
        self._lack = max(0, self._lacks(now) + amount * MINUTE)
        self._at = max(self._at, now)

    def remaining(self, now: int) -> int:
        """Whole units that are there."""
        return max(0, self.per_minute - -(-self._lacks(now) // MINUTE))

    def until_full(self, now: int) -> int:
        """Nanoseconds, rounded up."""
        return -(-self._lacks(now) // self.per_minute)

    def _lacks(self, now: int) -> int:
        return max(0, self._lack - max(0, now - self._at) * self.per_minute)


class Quota:
    """What one key may still do. None: no limit. clock: the time in ns."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._requests = None if requests_per_minute is None else Bucket(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else Bucket(tokens_per_minute)
        self._clock = clock

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return self._requests is not None or self._tokens is not None

    def count_request(self) -> None:
        """One more. Raises RateLimited; then it does not count."""
        if self._requests is not None:
            self._take(self._requests, 1, "requests")

    @contextmanager
    def spending(self, num_tokens: int) -> Iterator[None]:
        """Count a prompt's tokens; what fails inside gives them back. Raises RateLimited; then nothing counts."""
        if self._tokens is None:
            yield
            return
        try:
            self._take(self._tokens, num_tokens, "tokens")
        except RateLimited:
            if self._requests is not None:  # counted before it was read
                self._requests.take(-1, self._clock())
            raise
        try:
            yield
        except BaseException:  # the request was not accepted
            self._tokens.take(-num_tokens, self._clock())
            raise

    def spend(self, num_tokens: int) -> None:
        """Count tokens of an output, which are there already."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._clock())

    def headers(self) -> Mapping[str, str]:
        """OpenAI's headers: the limits, what is left, and the time until all of it is there again."""
        now, told = self._clock(), {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                told[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                told[f"x-ratelimit-remaining-{name}"] = str(bucket.remaining(now))
                told[f"x-ratelimit-reset-{name}"] = _span(bucket.until_full(now))
        return told

    def _take(self, bucket: Bucket, amount: int, what: str) -> None:
        now = self._clock()
        wait = bucket.wait(amount, now)
        if wait > 0:
            raise RateLimited(
                f"this key may use {bucket.per_minute:,} {what} per minute, {bucket.remaining(now):,} of them now, and "
                f"this request needs {amount:,}; try again in {_span(wait)}",
                wait / 10**9,
            )
        bucket.take(amount, now)


UNLIMITED = Quota()


def _span(ns: int) -> str:
    """As OpenAI writes it: 250ms, 1.5s, 6m0s. Rounded up to a millisecond."""
    milliseconds = -(-ns // 10**6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
