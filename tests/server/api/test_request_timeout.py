"""`timeout`: a request is aborted after its time, and the answer has the format of its route."""

import asyncio
import gc
import json
import time
import warnings
from types import SimpleNamespace

import pytest
from embedded_model_server import CHAT, STORY
from starlette.requests import Request
from waiting import wait_until

from quire.server.api_keys import KEYLESS_CALLER
from quire.server.errors import TimedOut
from quire.server.observability.request_record import RequestRecord, store_record
from quire.server.reply import respond
from quire.server.request_body import HeldBody
from quire.server.sse import TimeLimit
from quire.tenant_memory import TenantMemory

LONG = {
    "/v1/completions": {"prompt": STORY, "max_tokens": 480, "ignore_eos": True, "n": 4},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 450, "ignore_eos": True, "n": 4},
    "/generate": {"text": STORY, "sampling_params": {"max_new_tokens": 480, "ignore_eos": True, "n": 4}},
}
SHORT = {"/v1/embeddings": {"input": STORY}, "/v1/completions": {"prompt": STORY, "max_tokens": 3, "temperature": 0}}
AT_ONCE = 1e-9


def check(error):
    assert (error["code"], error["param"], error["type"]) == ("request_timeout", "timeout", "invalid_request_error")
    assert "longer than its timeout" in error["message"]


def wait_until_idle(served):
    def is_idle():
        health = served.health()
        return health["requests_running"] + health["requests_waiting"] + health["kv_blocks_used"] == 0

    wait_until(is_idle)


@pytest.mark.parametrize("path", LONG)
def test_a_whole_answer_that_takes_too_long(served, http, path):
    wait_until_idle(served)
    begun = time.monotonic()
    answer = http.post(path, json={**LONG[path], "timeout": 0.1})
    assert answer.status_code == 408
    assert answer.headers["x-should-retry"] == "false"  # otherwise OpenAI's client would retry by itself
    check(answer.json()["error"])
    assert time.monotonic() - begun > 0.1
    wait_until_idle(served)


@pytest.mark.parametrize("path", LONG)
def test_a_stream_that_takes_too_long_ends_with_an_error(served, http, path):
    seconds = 0.1
    while True:  # until it is enough for the first token on this machine
        answer = http.post(path, json={**LONG[path], "timeout": seconds, "stream": True})
        if answer.status_code != 408:
            break
        seconds *= 2
    assert answer.status_code == 200
    *events, error, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    check(json.loads(error)["error"])
    assert done == "[DONE]"
    assert all("error" not in json.loads(event) for event in events)
    wait_until_idle(served)


@pytest.mark.parametrize("path", [*LONG, *SHORT])
def test_no_time_at_all(served, http, path):
    body = {**LONG, **SHORT}[path]
    answer = http.post(path, json={**body, "timeout": AT_ONCE})
    assert answer.status_code == 408
    check(answer.json()["error"])
    wait_until_idle(served)


@pytest.mark.parametrize("path", SHORT)
@pytest.mark.parametrize("timeout", [60, 86_400, None])
def test_time_enough_changes_nothing(http, path, timeout):
    without, given = (http.post(path, json={**SHORT[path], **more}).json() for more in ({}, {"timeout": timeout}))
    drop = ("id", "created", "usage")
    assert {k: v for k, v in given.items() if k not in drop} == {k: v for k, v in without.items() if k not in drop}


def test_other_errors_pass_through_a_limit():
    async def fails(error):
        raise error

    async def run():
        for error in (TimeoutError("of something else"), ZeroDivisionError()):
            with pytest.raises(type(error)) as caught:
                await TimeLimit(60).run(fails(error))
            assert caught.value is error
        with pytest.raises(TimeoutError):
            await TimeLimit(None).run(fails(TimeoutError()))
        with pytest.raises(TimedOut):
            await TimeLimit(0.001).run(asyncio.sleep(10))

    asyncio.run(run())


def test_work_for_which_no_time_is_left_is_never_begun():
    class Forever:
        stats = closed = None

        def charge(self, spend):
            pass

        async def end(self):
            await asyncio.sleep(60)

        def release(self):
            self.closed = True

    async def run():
        limit, reply = TimeLimit(AT_ONCE), Forever()
        scope = {"type": "http", "state": {"caller": KEYLESS_CALLER, "body_bytes": HeldBody(TenantMemory())}}
        store_record(scope, RequestRecord(None, "0", scope, 0.0, 0.0))
        await asyncio.sleep(0.001)
        with pytest.raises(TimedOut):
            await respond(Request(scope), SimpleNamespace(full_response=None), reply, limit, stream=False)
        assert reply.closed

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(run())
        gc.collect()
    assert not caught, "a coroutine was never awaited"


def test_the_time_limit_ends_an_iterator_that_never_waits():
    async def numbers():
        number = 0
        while True:
            yield number
            number += 1

    async def run():
        got = []
        with pytest.raises(TimedOut):
            async for number in TimeLimit(0.02).iterate(numbers()):
                got.append(number)
        assert got == list(range(len(got))) != []
        few = [number async for number in TimeLimit(60).iterate(some(3))]
        assert few == [number async for number in TimeLimit(None).iterate(some(3))] == [0, 1, 2]

    async def some(count):
        for number in range(count):
            yield number

    asyncio.run(run())
