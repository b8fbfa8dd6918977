"""Quotas: token buckets against exact fractions, and answers to a key that has exceeded its quota."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.middleware import quota as module
from quire.server.middleware.quota import MINUTE, UNLIMITED, Bucket, Quota, RateLimited

SECOND = 10**9


class Exact:
    """A token bucket in exact fractions, updated at each event."""

    def __init__(self, per_minute):
        self.per_minute, self.level, self.now = per_minute, Fraction(per_minute), 0

    def move(self, now):
        if now > self.now:
            self.level = min(
                Fraction(self.per_minute), self.level + Fraction(self.per_minute * (now - self.now), MINUTE)
            )
            self.now = now

    def take(self, amount):
        self.level = min(Fraction(self.per_minute), self.level - amount)

    def holds(self, amount, later=0):
        level = min(Fraction(self.per_minute), self.level + Fraction(self.per_minute * later, MINUTE))
        return level >= min(amount, self.per_minute)


rates = st.one_of(st.integers(1, 100), st.integers(1, 10**9))
events = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 5), st.integers(0, 3 * MINUTE)),  # ns since the previous event
        st.integers(-20, 300),  # taken
        st.integers(0, 300),  # requested
    ),
    max_size=30,
)


@given(rates, events, st.integers(0, 10**15))
def test_a_bucket_is_as_its_fractions_say(per_minute, events, now):
    bucket, exact = Bucket(per_minute), Exact(per_minute)
    exact.move(now)
    for passed, taken, asked in events:
        now += passed
        exact.move(now)
        assert bucket.remaining(now) == max(0, exact.level // 1)
        wait = bucket.wait(asked, now)
        assert exact.holds(asked, wait)
        assert wait == 0 or not exact.holds(asked, wait - 1)
        full = bucket.until_full(now)
        assert exact.holds(per_minute, full)
        assert full == 0 or not exact.holds(per_minute, full - 1)
        bucket.consume(taken, now)
        exact.take(taken)


@given(rates, st.lists(st.tuples(st.integers(0, MINUTE), st.integers(1, 50)), max_size=60))
def test_a_token_bucket_grants_at_most_its_rate_and_one_full_bucket(per_minute, asked):
    bucket, now, granted = Bucket(per_minute), 0, 0
    for passed, amount in asked:
        now += passed
        if bucket.wait(amount, now) == 0:
            bucket.consume(amount, now)
            granted += amount
        most = max(amount for _, amount in asked)  # a full bucket admits this
        assert granted * MINUTE <= per_minute * (MINUTE + now) + most * MINUTE


def test_time_that_goes_back_gives_nothing():
    bucket = Bucket(60)
    bucket.consume(60, 5 * SECOND)
    assert bucket.wait(1, 0) == SECOND
    bucket.consume(1, 0)
    assert bucket.wait(1, 5 * SECOND) == 2 * SECOND


@pytest.fixture
def clock():
    class Clock:
        now = 7 * MINUTE

        def __call__(self):
            return self.now

    return Clock()


def test_requests_are_counted_and_refused_with_the_time(clock):
    quota = Quota(requests_per_minute=3, clock=clock)
    for _ in range(3):
        quota.count_request()
    for _ in range(2):  # a rejected request does not count
        with pytest.raises(RateLimited, match=r"3 requests per minute.* try again in 20s") as refused:
            quota.count_request()
        assert refused.value.retry_after == 20
    clock.now += 20 * SECOND - 1
    with pytest.raises(RateLimited):
        quota.count_request()
    clock.now += 1
    quota.count_request()


def test_tokens_of_a_failed_request_are_returned_to_the_quota(clock):
    quota = Quota(tokens_per_minute=100, clock=clock)
    with pytest.raises(ZeroDivisionError), quota.spending(90):
        raise ZeroDivisionError
    with quota.spending(100):
        pass
    with pytest.raises(RateLimited, match=r"100 tokens per minute.* needs 1;"), quota.spending(1):
        raise AssertionError("let in")


def test_output_tokens_beyond_the_quota_delay_the_next_request(clock):
    quota = Quota(tokens_per_minute=60, clock=clock)
    with quota.spending(10):
        quota.spend(110)
    with pytest.raises(RateLimited) as refused, quota.spending(1):
        raise AssertionError("let in")
    assert refused.value.retry_after == 61
    assert quota.headers()["x-ratelimit-remaining-tokens"] == "0"


def test_a_prompt_longer_than_the_bucket_waits_until_it_is_full(clock):
    quota = Quota(tokens_per_minute=60, clock=clock)
    with quota.spending(6000):
        pass
    with pytest.raises(RateLimited) as refused, quota.spending(6000):
        raise AssertionError("let in")
    assert refused.value.retry_after == 100 * 60
    clock.now += 100 * MINUTE
    with quota.spending(6000):
        pass


def test_a_request_over_the_token_limit_does_not_count_for_the_request_limit(clock):
    quota = Quota(requests_per_minute=2, tokens_per_minute=60, clock=clock)
    quota.count_request()
    with quota.spending(60):
        pass
    for _ in range(5):
        quota.count_request()
        with pytest.raises(RateLimited, match="tokens per minute") as refused, quota.spending(1):
            raise AssertionError("let in")
    clock.now += round(refused.value.retry_after * SECOND)
    quota.count_request()
    with quota.spending(1):
        pass


def test_bytes_count_as_tokens_up_to_one_full_bucket(clock):
    quota = Quota(tokens_per_minute=1200, clock=clock)
    quota.spend_bytes(4 * 200 + 3)
    assert quota.headers()["x-ratelimit-remaining-tokens"] == "1000"
    quota.spend_bytes(10**9)
    assert quota.headers()["x-ratelimit-reset-tokens"] == "1m10s"


def test_a_download_counts_as_a_request_and_needs_a_token(clock):
    quota = Quota(requests_per_minute=2, tokens_per_minute=60, clock=clock)
    quota.count_download()
    quota.spend_bytes(240)
    with pytest.raises(RateLimited, match="tokens per minute"):
        quota.count_download()
    assert quota.headers()["x-ratelimit-remaining-requests"] == "1", "a refused download does not count"
    clock.now += SECOND
    quota.count_download()
    with pytest.raises(RateLimited, match="requests per minute"):
        quota.count_download()


def test_ratelimit_headers_list_the_configured_limits(clock):
    quota = Quota(requests_per_minute=600, tokens_per_minute=1200, clock=clock)
    quota.count_request()
    quota.spend(1500)
    assert quota.headers() == {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "599",
        "x-ratelimit-reset-requests": "100ms",
        "x-ratelimit-limit-tokens": "1200",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m15s",
    }
    assert set(Quota(tokens_per_minute=1).headers()) == {
        f"x-ratelimit-{what}-tokens" for what in ("limit", "remaining", "reset")
    }
    assert UNLIMITED.headers() == {}
    assert not UNLIMITED.is_limited
    UNLIMITED.count_request()
    UNLIMITED.spend(10**12)
    with UNLIMITED.spending(10**12):
        pass


@pytest.mark.parametrize(
    ("ns", "written"),
    [
        *((0, "0ms"), (1, "1ms"), (10**6, "1ms"), (999 * 10**6, "999ms"), (SECOND, "1s"), (SECOND + 1, "1.001s")),
        *((59 * SECOND + 5 * 10**8, "59.5s"), (MINUTE, "1m0s"), (6 * MINUTE + SECOND, "6m1s"), (90 * MINUTE, "90m0s")),
    ],
)
def test_spans_are_written_as_openai_does(ns, written):
    assert module._format_duration(ns) == written
