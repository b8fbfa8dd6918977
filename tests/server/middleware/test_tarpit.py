"""Tarpit: answers to many invalid constraints are delayed, and no other answers."""

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
from embedded_model_server import run_app
from fastapi import FastAPI
from multi_tenant_server import MANY, run_site
from starlette.datastructures import Headers
from waiting import turns

from quire.errors import EngineStopped, RequestError
from quire.server.api_keys import KEYLESS_CALLER, Caller
from quire.server.error_handlers import install_error_handlers
from quire.server.middleware import tarpit
from quire.server.middleware.queue_full import RecentRefusals
from quire.server.middleware.quota import MINUTE
from quire.server.middleware.tarpit import BYTES_PER_REJECTION, FREE_BYTES_PER_MINUTE, MAX_SECONDS, Tarpit

TWO_FORMS = {"regex": "a", "ebnf": "b"}


class Clock:
    """A clock whose seconds a test sets."""

    now = 0.0

    def __call__(self):
        return int(self.now * 10**9)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def refusals(clock):
    return Tarpit(clock)


ANN = Caller("ann", "user")


def a_request(caller=ANN, length=0):
    headers = {} if length is None else {"content-length": str(length)}
    return SimpleNamespace(state=SimpleNamespace(caller=caller), headers=Headers(headers))


def test_a_minute_s_worth_is_free_and_the_rest_comes_at_its_rate(refusals, clock):
    free = FREE_BYTES_PER_MINUTE // BYTES_PER_REJECTION
    assert [refusals.delay_seconds("ann", 0) for _ in range(free)] == [0] * free
    each = MINUTE / 10**9 / free
    assert [refusals.delay_seconds("ann", 0) for _ in range(3)] == pytest.approx([each, 2 * each, 3 * each])
    assert refusals.delay_seconds("bob", 0) == 0
    clock.now = 3 * each + 30
    assert [refusals.delay_seconds("ann", 0) for _ in range(free // 2)] == [0] * (free // 2)
    assert refusals.delay_seconds("ann", 0) == pytest.approx(each, abs=1e-6)


def test_larger_rejected_constraints_count_more_and_the_delay_is_capped(refusals):
    assert refusals.delay_seconds("ann", FREE_BYTES_PER_MINUTE - BYTES_PER_REJECTION) == 0
    assert [refusals.delay_seconds("ann", 2**24) for _ in range(5)] == [MAX_SECONDS] * 5


@pytest.mark.parametrize("param", ["response_format", "structured_outputs.regex", "sampling_params.json_schema"])
def test_rejected_constraints_delay_the_error_response(refusals, monkeypatch, param):
    assert run(refusals, monkeypatch, a_request(ANN, 2**24), param) == [MAX_SECONDS]


@pytest.mark.parametrize(
    ("caller", "param"),
    [
        (ANN, "temperature"),
        (ANN, None),
        (KEYLESS_CALLER, "response_format"),
        (Caller("root", "admin"), "response_format"),
        (None, "response_format"),
    ],
)
def test_other_errors_are_not_delayed_by_the_tarpit(refusals, monkeypatch, caller, param):
    assert run(refusals, monkeypatch, a_request(caller, 2**24), param) == []


def test_a_body_of_unknown_length_counts_as_a_large_one(refusals, monkeypatch):
    assert run(refusals, monkeypatch, a_request(length=None), "regex") == [MAX_SECONDS]


def noting(monkeypatch):
    """Replaces waiting: a list receives the seconds."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(tarpit, "sleep", sleep)
    return slept


def run(refusals, monkeypatch, request, param, times=2):
    """Seconds by which answers were delayed, of those that were."""
    slept = noting(monkeypatch)
    for _ in range(times):
        asyncio.run(refusals.delay(request, param))
    return slept


@pytest.mark.parametrize(("bound", "most"), [("MAX_WAITING", 2), ("MAX_HELD_BYTES", 2 * FREE_BYTES_PER_MINUTE)])
def test_no_more_answers_wait_than_a_bound(refusals, monkeypatch, bound, most):
    monkeypatch.setattr(tarpit, bound, most)

    async def ask():
        await refusals.delay(a_request(length=FREE_BYTES_PER_MINUTE), "regex")

    async def ask_all():
        await ask()  # without a delay
        for _ in range(2):  # clients that leave make room for others
            waiting = [asyncio.ensure_future(ask()) for _ in range(3)]
            done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await turns()
            assert (len(done), [one.done() for one in pending]) == (1, [False, False])
            for one in pending:
                one.cancel()
            assert len(await asyncio.gather(*pending, return_exceptions=True)) == 2

    asyncio.run(ask_all())


def test_while_an_answer_waits_nothing_holds_the_body():
    class Parsed:
        """A parsed body, and how many there are when an answer waits."""

    parsed, alive = weakref.WeakSet(), []

    class Watching:
        async def delay(self, _request, _param):
            alive.append(len(parsed))

    async def fail():
        parsed.add(body := Parsed())
        alive.append(len(parsed))
        raise RequestError(f"no {type(body)}", "regex")

    app = FastAPI()
    install_error_handlers(app, RecentRefusals(), Watching())
    app.add_api_route("/", fail, methods=["POST"])
    gc.disable()
    try:
        with run_app(app) as url:
            assert httpx.post(url).status_code == 400
    finally:
        gc.enable()
    assert alive == [1, 0]


def test_an_error_that_two_requests_raise_ends_both_with_an_answer():
    shared = EngineStopped("the engine has stopped")

    async def fail():
        try:
            raise shared
        finally:
            await asyncio.sleep(0.1)  # as a request that waits for its client, while the other one is answered

    app = FastAPI()
    install_error_handlers(app, RecentRefusals(), None)
    app.add_api_route("/", fail, methods=["POST"])
    with run_app(app) as url, ThreadPoolExecutor() as pool:
        answers = [pool.submit(httpx.post, url, timeout=60) for _ in range(8)]
        assert {answer.result().status_code for answer in answers} == {503}


def test_a_server_holds_back_refusals_only(monkeypatch):
    monkeypatch.setattr(tarpit, "BYTES_PER_REJECTION", FREE_BYTES_PER_MINUTE)
    slept = noting(monkeypatch)
    with run_site("ann", "root") as site:

        def ask(who, **fields):
            before = len(slept)
            answer = site.post(who, "/v1/completions", prompt="Hello", **MANY, **fields)
            return answer.status_code, slept[before:]

        assert [ask("ann", **TWO_FORMS) for _ in range(3)] == [(400, []), (400, [MAX_SECONDS]), (400, [MAX_SECONDS])]
        assert ask("ann") == (200, [])
        assert ask("ann", temperature=-1) == (400, [])
        assert [ask("root", **TWO_FORMS) for _ in range(3)] == [(400, [])] * 3
