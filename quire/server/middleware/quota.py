"""Rate limits of an API key, as token buckets.

A bucket holds one minute's worth and starts full. Its arithmetic is exact, in integers. Prompt tokens count when a
request is accepted, output tokens as they are generated, because their number is not known before. A running request is
never aborted: the level of the bucket can become negative, which delays the next request. So a key gets its rate on
average, and in a short time at most a full bucket plus the outputs of its running requests.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic_ns

from quire.errors import QuireError

MINUTE = 60 * 10**9  # ns
BYTES_PER_TOKEN = 4  # of refused bodies, uploads and stored objects that are read, which count as tokens


class RateLimited(QuireError):
    """A request beyond the rate limit. retry_after: seconds until the same request is accepted."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Bucket:
    """A token bucket of `per_minute` units. `now` is in ns.

    The missing amount is stored in units times MINUTE; it decreases by `per_minute` each ns.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._deficit = 0
        self._updated_at = 0  # time of that amount, ns

    def wait(self, amount: int, now: int) -> int:
        """Nanoseconds until `amount` units are available, or the bucket is full, rounded up."""
        over = self._deficit_at(now) + min(amount, self.per_minute) * MINUTE - self.per_minute * MINUTE
        return max(0, -(-over // self.per_minute))

    def consume(self, amount: int, now: int) -> None:
        """Take units, available or not. A negative amount returns units."""
        self._deficit = max(0, self._deficit_at(now) + amount * MINUTE)
        self._updated_at = max(self._updated_at, now)

    def remaining(self, now: int) -> int:
        """Whole units that are available."""
        return max(0, self.per_minute - -(-self._deficit_at(now) // MINUTE))

    def until_full(self, now: int) -> int:
        """Nanoseconds until the bucket is full, rounded up."""
        return -(-self._deficit_at(now) // self.per_minute)

    def _deficit_at(self, now: int) -> int:
        return max(0, self._deficit - max(0, now - self._updated_at) * self.per_minute)


class Quota:
    """The rate limits of one key. None: no limit. clock: the time in ns."""

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
        """Whether the key has a limit."""
        return self._requests is not None or self._tokens is not None

    def count_request(self) -> None:
        """Count a request. Raises RateLimited without counting it."""
        if self._requests is not None:
            self._consume(self._requests, 1, "requests")

    @contextmanager
    def spending(self, num_tokens: int) -> Iterator[None]:
        """Count prompt tokens; an exception inside returns them. Raises RateLimited, and then uncounts the request."""
        if self._tokens is None:
            yield
            return
        with self._uncounting_request():
            self._consume(self._tokens, num_tokens, "tokens")
        try:
            yield
        except BaseException:  # the request was not accepted
            self._tokens.consume(-num_tokens, self._clock())
            raise

    def spend(self, num_tokens: int) -> None:
        """Count generated tokens, also beyond the limit."""
        if self._tokens is not None:
            self._tokens.consume(num_tokens, self._clock())

    def count_download(self) -> None:
        """Count a GET of a stored object as a request. Raises RateLimited without counting it, also without a token."""
        self.count_request()
        self.check_tokens()

    def spend_bytes(self, num_bytes: int) -> None:
        """Count the bytes of one refused body, upload or stored object, as the tokens of one minute at most."""
        if self._tokens is not None:
            self._tokens.consume(min(num_bytes // BYTES_PER_TOKEN, self._tokens.per_minute), self._clock())

    def check_tokens(self) -> None:
        """Raises RateLimited if no token is available, and then uncounts the request."""
        if self._tokens is not None:
            with self._uncounting_request():
                self._check(self._tokens, 1, "tokens")

    def headers(self) -> Mapping[str, str]:
        """OpenAI's headers, for each limit: the limit, the remaining units, and the time until the bucket is full."""
        now, headers = self._clock(), {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(bucket.remaining(now))
                headers[f"x-ratelimit-reset-{name}"] = _format_duration(bucket.until_full(now))
        return headers

    @contextmanager
    def _uncounting_request(self) -> Iterator[None]:
        """Context manager that returns what `count_request` has counted after a RateLimited."""
        try:
            yield
        except RateLimited:
            if self._requests is not None:
                self._requests.consume(-1, self._clock())
            raise

    def _consume(self, bucket: Bucket, amount: int, what: str) -> None:
        self._check(bucket, amount, what)
        bucket.consume(amount, self._clock())

    def _check(self, bucket: Bucket, amount: int, what: str) -> None:
        now = self._clock()
        wait = bucket.wait(amount, now)
        if wait > 0:
            raise RateLimited(
                f"this key may use {bucket.per_minute:,} {what} per minute, {bucket.remaining(now):,} of them now, and "
                f"this request needs {amount:,}; try again in {_format_duration(wait)}",
                wait / 10**9,
            )


UNLIMITED = Quota()


def _format_duration(ns: int) -> str:
    """A duration in OpenAI's format: 250ms, 1.5s, 6m0s. Rounded up to a millisecond."""
    milliseconds = -(-ns // 10**6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
