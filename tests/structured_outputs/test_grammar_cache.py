"""GrammarCache: entries belong to a tenant and a salt; threads, waiting coroutines, bounds and evictions."""

import asyncio
import logging
import threading
from contextlib import contextmanager, suppress

import pytest
from waiting import until, wait_until

from quire.core.request import NO_NAMESPACE, Namespace
from quire.errors import EngineStopped, RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.grammar_cache import (
    CHARACTERS_PER_ENTRY,
    DEADLINE,
    NUM_THREADS,
    SHARES,
    CompilerOverloaded,
    GrammarCache,
)

ENTRY = CHARACTERS_PER_ENTRY + 1  # size of an entry for a pattern of one character
ALICE, BOB = Namespace("alice"), Namespace("bob")


class Backend:
    """Rejects patterns that begin with "bad", and blocks on those that begin with "slow" until `gate` is set."""

    def __init__(self):
        self.compiled = []
        self.gate = threading.Event()
        self.results = []

    def compile(self, params):
        self.compiled.append(params.text)
        if params.text.startswith("slow"):
            assert self.gate.wait(60)
        if params.text.startswith("bad"):
            raise RequestError(f"{params.text!r} is no pattern", "regex")
        if params.text.startswith("panic"):
            raise BaseException("a backend's own")
        return [params.text]  # a grammar

    def report(self, result, seconds):
        self.results.append(result)
        assert 0 <= seconds <= DEADLINE


@contextmanager
def cache_of(backend, **limits):
    cache = GrammarCache(backend.compile, report=backend.report, **limits)
    try:
        yield cache
    finally:
        backend.gate.set()
        cache.close()


def regex(text, **options):
    return StructuredOutputsParams(regex=text, **options)


def run(work, **limits):
    backend = Backend()
    with cache_of(backend, **limits) as cache:
        asyncio.run(asyncio.wait_for(work(backend, cache), 60))
    return backend


def compiled_of(*asked, **limits):
    """The patterns that are compiled for these (namespace, pattern), one after the other."""

    async def work(_backend, cache):
        for namespace, text in asked:
            await cache.compiled(namespace, regex(text))

    return run(work, **limits).compiled


async def compiled_at_last(cache, namespace, asked):
    """The grammar, also if the deadline passes on a busy machine before the compilation has begun."""
    while True:
        with suppress(RequestError):
            return await cache.compiled(namespace, asked)
        await asyncio.sleep(0)


def test_a_constraint_is_compiled_once_for_a_namespace():
    async def work(_backend, cache):
        for _ in range(3):
            assert await cache.compiled(NO_NAMESPACE, regex("good")) == ["good"]
            await cache.compiled(NO_NAMESPACE, regex("good", fast_forward=False))  # a grammar does not depend on it
            with pytest.raises(RequestError, match="is no pattern") as caught:
                await cache.compiled(NO_NAMESPACE, regex("bad"))
            assert caught.value.param == "regex"
        await cache.compiled(NO_NAMESPACE, StructuredOutputsParams(grammar="good"))
        await cache.compiled(NO_NAMESPACE, regex("good", disable_any_whitespace=True))
        await cache.compiled(NO_NAMESPACE, regex("good", unknown_keywords="refuse"))

    backend = run(work)
    assert backend.compiled == ["good", "bad", "good", "good", "good"]
    assert backend.results == ["ok", "bad", "ok", "ok", "ok"]


def test_each_tenant_and_each_salt_compiles_a_constraint_itself():
    namespaces = [ALICE, BOB, Namespace("alice", salt="x"), Namespace("bob", salt="x"), Namespace("", salt="alice")]
    assert compiled_of(*[(one, "x") for one in namespaces * 2]) == ["x"] * len(namespaces)


def test_compilation_errors_are_not_shared_between_tenants():
    async def work(_backend, cache):
        for namespace in (ALICE, BOB, ALICE):
            with pytest.raises(RequestError):
                await cache.compiled(namespace, regex("bad"))

    assert run(work).compiled == ["bad", "bad"]


def test_namespaces_that_differ_only_for_kv_share_grammars():
    other_kv = Namespace("alice", adapter="x", deterministic=True)
    assert compiled_of((ALICE, "x"), (other_kv, "x")) == ["x"]


def test_equal_compilations_at_once_are_one_within_a_namespace_only():
    async def work(backend, cache):
        asking = [asyncio.ensure_future(cache.compiled(ALICE, regex("slow, then fine"))) for _ in range(5)]
        asking += [asyncio.ensure_future(cache.compiled(BOB, regex("slow, then fine"))) for _ in range(2)]
        await until(lambda: len(backend.compiled) == 2)
        asking[0].cancel()  # the others are not affected
        backend.gate.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(one) for one in found] == [asyncio.CancelledError] + [list] * 6
        assert found[1] is found[4] and found[5] is found[6] and found[1] is not found[5]

    assert run(work).compiled == ["slow, then fine"] * 2


def test_without_keys_one_tenant_has_the_whole_capacity():
    asked = [(NO_NAMESPACE, text) for text in "abacab"]  # the least recently used one is evicted
    assert compiled_of(*asked, capacity=2 * ENTRY) == ["a", "b", "c", "b"]


def test_with_keys_a_tenant_has_a_share_that_its_salts_divide():
    salted = Namespace("alice", salt="x")
    asked = [(ALICE, "a"), (salted, "b"), (ALICE, "a"), (salted, "c"), (ALICE, "a"), (salted, "b")]
    assert compiled_of(*asked, capacity=SHARES * 2 * ENTRY) == ["a", "b", "c", "b"]


def test_long_constraints_evict_more():
    long = "z" * 2 * CHARACTERS_PER_ENTRY
    asked = [(ALICE, text) for text in ("a", "b", long, "b", "a")]
    assert compiled_of(*asked, capacity=SHARES * 4 * ENTRY) == ["a", "b", long, "a"]


def test_a_flood_of_one_tenant_evicts_nothing_of_another():
    flood = [(BOB, f"{i}") for i in range(100)]
    asked = [(ALICE, "a"), (ALICE, "b"), *flood, (ALICE, "a"), (ALICE, "b")]
    assert len(compiled_of(*asked, capacity=SHARES * 3 * ENTRY)) == 2 + len(flood)


def test_many_tenants_together_stay_within_the_capacity_and_the_largest_gives_way():
    tenants = [Namespace(f"tenant {i}") for i in range(2 * SHARES)]
    firsts = [(one, f"{i}") for one in tenants for i in range(2)]  # more than the capacity: each keeps one

    async def work(backend, cache):
        for namespace, text in firsts:
            await cache.compiled(namespace, regex(text))
        before = len(backend.compiled)
        for namespace in (tenants[0], Namespace("newcomer")):  # floods of tenants that have no more than any other
            for i in range(50):
                await cache.compiled(namespace, regex(chr(0x4E00 + i)))
        for namespace in tenants[1:]:
            await cache.compiled(namespace, regex("1"))
        assert len(backend.compiled) == before + 100, "the last grammar of another tenant was evicted"
        for namespace in tenants[1:]:
            await cache.compiled(namespace, regex("0"))
        assert len(backend.compiled) == before + 100 + len(tenants[1:]), "more than the capacity was kept"

    run(work, capacity=SHARES * 2 * ENTRY)


def test_a_compilation_that_takes_too_long_is_an_error_until_it_ends():
    async def work(backend, cache):
        for _ in range(3):
            with pytest.raises(RequestError, match=r"regex could not be compiled within 0\.1 s; make it smaller"):
                await cache.compiled(ALICE, regex("slow"))
        assert backend.compiled == ["slow"]
        await compiled_at_last(cache, ALICE, regex("good"))  # on the other thread
        backend.gate.set()
        await until(lambda: "slow" in backend.results)
        await compiled_at_last(cache, ALICE, regex("slow"))  # once the cache has the result
        assert backend.compiled == ["slow", "good"]

    assert run(work, deadline=0.1).results == ["ok", "slow"]


def test_requests_behind_stuck_compiler_threads_are_rejected_as_overloaded():
    async def work(backend, cache):
        stuck = [asyncio.ensure_future(cache.compiled(NO_NAMESPACE, regex(f"slow {i}"))) for i in range(NUM_THREADS)]
        await until(lambda: len(backend.compiled) == NUM_THREADS)
        waits = asyncio.ensure_future(cache.compiled(NO_NAMESPACE, regex("waits")))
        await asyncio.sleep(0)
        with pytest.raises(CompilerOverloaded):
            await cache.compiled(NO_NAMESPACE, regex("one more"))
        with pytest.raises(CompilerOverloaded):
            await waits
        assert all(type(one) is RequestError for one in await asyncio.gather(*stuck, return_exceptions=True))
        backend.gate.set()
        await until(lambda: len(backend.results) == NUM_THREADS)
        assert "waits" not in backend.compiled  # abandoned compilations are not begun
        await compiled_at_last(cache, NO_NAMESPACE, regex("waits"))

    assert run(work, deadline=0.1, max_unfinished=NUM_THREADS + 1).results == ["slow"] * NUM_THREADS + ["ok"]


def test_a_tenant_that_occupies_its_threads_does_not_delay_another():
    async def work(backend, cache):
        asking = [asyncio.ensure_future(cache.compiled(ALICE, regex(f"slow {i}"))) for i in range(2 * NUM_THREADS)]
        await until(lambda: len(backend.compiled) == NUM_THREADS)
        assert await cache.compiled(BOB, regex("good")) == ["good"]  # while Alice's compilations run and wait
        assert backend.results == ["ok"]
        backend.gate.set()
        await asyncio.gather(*asking)

    run(work)


def test_a_tenant_has_a_share_of_the_unfinished_compilations():
    async def work(backend, cache):
        asking = [asyncio.ensure_future(cache.compiled(ALICE, regex(f"slow {i}"))) for i in range(3)]
        await until(lambda: len(backend.compiled) == NUM_THREADS)
        with pytest.raises(CompilerOverloaded):
            await asking[2]
        waits = asyncio.ensure_future(cache.compiled(BOB, regex("good")))
        await asyncio.sleep(0)
        backend.gate.set()
        assert await waits == ["good"]
        await asyncio.gather(*asking[:2])

    run(work, max_unfinished=SHARES * 2)


def test_a_backend_that_panics_refuses_one_constraint_only(caplog):
    async def work(_backend, cache):
        with pytest.raises(RequestError, match="regex cannot be compiled"):
            await cache.compiled(ALICE, regex("panic"))
        for i in range(NUM_THREADS):
            await cache.compiled(ALICE, regex(f"good {i}"))

    assert run(work).results == ["bad", "ok", "ok"]
    assert "a constraint of kind regex could not be compiled" in caplog.text


def test_a_dropped_grammar_is_compiled_again():
    async def work(_backend, cache):
        first = await cache.compiled(ALICE, regex("x"))
        of_another = await cache.compiled(BOB, regex("x"))
        cache.drop(first)
        cache.drop(first)
        second = await cache.compiled(ALICE, regex("x"))
        assert second is not first and second is await cache.compiled(ALICE, regex("x"))
        assert await cache.compiled(BOB, regex("x")) is of_another

    assert run(work).compiled == ["x"] * 3


def test_closing_the_grammar_cache_fails_waiting_requests():
    async def work(backend, cache):
        asking = [asyncio.ensure_future(cache.compiled(ALICE, regex(f"slow {i}"))) for i in range(NUM_THREADS + 1)]
        await until(lambda: len(backend.compiled) == NUM_THREADS)
        cache.close()
        assert {type(one) for one in await asyncio.gather(*asking, return_exceptions=True)} == {EngineStopped}
        with pytest.raises(EngineStopped):
            await cache.compiled(ALICE, regex("good"))

    run(work)


def test_a_result_that_comes_after_the_end_of_the_loop_is_ignored(caplog):
    backend = Backend()
    with cache_of(backend, deadline=0.05) as cache:

        async def ask():
            with pytest.raises(RequestError):
                await cache.compiled(ALICE, regex("slow"))

        asyncio.run(ask())
        backend.gate.set()
        wait_until(lambda: backend.results)
    assert backend.results == ["slow"]
    ours = [one for one in caplog.records if one.name.startswith(("asyncio", "quire.structured_outputs"))]
    assert not [one for one in ours if one.levelno >= logging.ERROR]


def test_the_loop_goes_on_while_a_constraint_is_compiled():
    async def work(backend, cache):
        asking = asyncio.ensure_future(cache.compiled(ALICE, regex("slow")))
        await until(lambda: backend.compiled)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not asking.done()
        backend.gate.set()
        await asking

    run(work)


def test_cancelled_compilations_keep_no_text_while_they_wait_for_a_thread():
    async def work(backend, cache):
        busy = [cache.request(NO_NAMESPACE, regex(f"slow{i}")) for i in range(NUM_THREADS)]
        cancelled = [cache.request(NO_NAMESPACE, regex(f"{i}" * 9999)) for i in range(9)]
        for one in cancelled:
            cache.release(one)
        assert all(one.result.cancelled() and one.params is None for one in cancelled)
        backend.gate.set()
        for one in busy:
            assert one.result.result(60)
        assert await cache.compiled(BOB, regex("b"))

    assert run(work).compiled[-1] == "b"


def test_a_thread_that_cannot_be_started_is_started_later(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    async def work(backend, cache):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="new thread"):
                cache.request(ALICE, regex("a"))
        assert await cache.compiled(ALICE, regex("a"))

    run(work)
