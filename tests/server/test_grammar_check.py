"""FormChecks: constraints are checked on threads and once each; time and number of checks are limited."""

import asyncio
import threading
from contextlib import contextmanager

import pytest

from quire.errors import EngineStopped, RequestError
from quire.params import StructuredOutputsParams
from quire.server import grammar_check
from quire.server.errors import Busy
from quire.server.grammar_check import GrammarChecks


class Backend:
    """Rejects patterns that begin with "bad", and blocks on those that begin with "slow" until `gate` is set."""

    def __init__(self):
        self.checked = []
        self.gate = threading.Event()
        self.told = []

    def check(self, form):
        self.checked.append(form.text)
        if form.text.startswith("slow"):
            assert self.gate.wait(30)
        if form.text.startswith("bad"):
            raise RequestError(f"{form.text!r} is no pattern", "regex")
        if form.text.startswith("panic"):
            raise BaseException("a backend's own")

    def tell(self, result, seconds):
        self.told.append(result)
        assert 0 <= seconds <= grammar_check.MAX_SECONDS


@contextmanager
def checks_of(backend):
    checks = GrammarChecks(backend.check, backend.tell)
    try:
        yield checks
    finally:
        backend.gate.set()
        checks.close()


def regex(text, **options):
    return StructuredOutputsParams(regex=text, **options)


def run(work):
    backend = Backend()
    with checks_of(backend) as checks:
        asyncio.run(asyncio.wait_for(work(backend, checks), 30))
    return backend


async def until(true):
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to be")


def test_what_was_found_is_known_by_content():
    async def work(backend, checks):
        for _ in range(3):
            await checks.check(regex("good"))
            await checks.check(regex("good", fast_forward=False))  # fast_forward does not affect a check
            with pytest.raises(RequestError, match="is no pattern") as caught:
                await checks.check(regex("bad"))
            assert caught.value.param == "regex"
        await checks.check(StructuredOutputsParams(grammar="good"))
        await checks.check(regex("good", disable_any_whitespace=True))

    backend = run(work)
    assert backend.checked == ["good", "bad", "good", "good"]
    assert backend.told == ["ok", "bad", "ok", "ok"]


def test_no_more_is_kept_than_a_bound(monkeypatch):
    monkeypatch.setattr(grammar_check, "MAX_CACHED_RESULTS", 2)

    async def work(_backend, checks):
        for text in ("a", "b", "a", "c", "a", "b"):  # the least recently used one is evicted
            await checks.check(regex(text))

    assert run(work).checked == ["a", "b", "c", "b"]


def test_those_who_ask_for_the_same_at_once_share_a_check():
    async def work(backend, checks):
        asking = [asyncio.ensure_future(checks.check(regex("slow, then bad"))) for _ in range(5)]
        await until(lambda: backend.checked)
        asking[0].cancel()  # the others are not affected
        backend.gate.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(one) for one in found] == [asyncio.CancelledError] + [type(None)] * 4

    assert run(work).checked == ["slow, then bad"]


def test_a_check_that_takes_too_long_is_refused_and_known(monkeypatch):
    monkeypatch.setattr(grammar_check, "MAX_SECONDS", 0.1)

    async def work(backend, checks):
        for _ in range(3):
            with pytest.raises(RequestError, match=r"regex could not be checked within 0\.1 s; make it smaller"):
                await checks.check(regex("slow"))
        assert backend.checked == ["slow"]
        await checks.check(regex("good"))  # on the other thread
        backend.gate.set()
        await until(lambda: not checks._jobs)
        await checks.check(regex("slow"))  # its result is known now
        assert backend.checked == ["slow", "good"]

    assert run(work).told == ["slow", "ok"]


def test_who_waits_for_threads_that_are_stuck_is_asked_to_come_back(monkeypatch):
    monkeypatch.setattr(grammar_check, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(grammar_check, "MAX_JOBS", grammar_check.NUM_THREADS + 1)

    async def work(backend, checks):
        stuck = [asyncio.ensure_future(checks.check(regex(f"slow {i}"))) for i in range(grammar_check.NUM_THREADS)]
        await until(lambda: len(backend.checked) == grammar_check.NUM_THREADS)
        waits = asyncio.ensure_future(checks.check(regex("waits")))
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await checks.check(regex("one more"))
        with pytest.raises(Busy):
            await waits
        assert all(isinstance(one, RequestError) for one in await asyncio.gather(*stuck, return_exceptions=True))
        backend.gate.set()
        await until(lambda: not checks._jobs)  # abandoned checks are not run
        assert "waits" not in backend.checked
        await checks.check(regex("waits"))

    assert run(work).told == ["slow"] * grammar_check.NUM_THREADS + ["ok"]


def test_a_backend_that_panics_refuses_one_form_only(caplog):
    async def work(_backend, checks):
        with pytest.raises(RequestError, match="regex cannot be compiled"):
            await checks.check(regex("panic"))
        for i in range(grammar_check.NUM_THREADS):
            await checks.check(regex(f"good {i}"))

    assert run(work).told == ["bad", "ok", "ok"]
    assert "constraint of kind regex could not be checked" in caplog.text


def test_after_the_end_nobody_waits():
    async def work(backend, checks):
        asking = [asyncio.ensure_future(checks.check(regex(f"slow {i}"))) for i in range(grammar_check.NUM_THREADS + 1)]
        await until(lambda: len(backend.checked) == grammar_check.NUM_THREADS)
        checks.close()
        assert {type(one) for one in await asyncio.gather(*asking, return_exceptions=True)} == {EngineStopped}
        with pytest.raises(EngineStopped):
            await checks.check(regex("good"))

    run(work)


def test_the_loop_goes_on_while_a_form_is_checked():
    async def work(backend, checks):
        asking = asyncio.ensure_future(checks.check(regex("slow")))
        await until(lambda: backend.checked)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not asking.done()
        backend.gate.set()
        await asking

    run(work)
