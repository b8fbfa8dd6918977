"""Requests whose outputs are not taken, or whose tenant holds too much, leave the engine and go on later."""

import asyncio
import threading

import fake_engines
import numpy as np
import pytest
from fake_engines import Death, Host, PretendEngine, heard
from msgspec import structs
from waiting import until

from quire.core.output import Output
from quire.core.request import Beams, Namespace
from quire.core.step import Logprobs, Pooling
from quire.fleet import replica_requests
from quire.fleet.open_requests import OpenRequests
from quire.fleet.stream import MAX_STREAM_BYTES, Stream, WholeAnswers
from quire.tenant_memory import LARGE, MAX_TENANT_BYTES, TenantMemory

ROWS = Logprobs(np.zeros((1024, 128), np.int32), np.zeros((1024, 128), np.float32), np.zeros(1024, np.int32))  # 1 MiB
BEAMS = Beams(width=2, num_candidates=4, length_penalty=1.0, early_stopping=False)
MANY = 3 * MAX_TENANT_BYTES // 2**20  # outputs, more than fit


def request(name, wanted, tenant="ann"):
    return structs.replace(fake_engines.request(name, wanted), namespace=Namespace(tenant=tenant))


class WideEngine(PretendEngine):
    """Each of its outputs has 1 MiB of logprobs. aborted: requests that were unfinished."""

    def __init__(self, number, acts):
        super().__init__(number, acts)
        self.aborted, self.added = [], []

    def add(self, request):
        self.added.append((request.id, len(request.known_outputs[0].token_ids) if request.known_outputs else 0))
        super().add(request)

    def abort(self, request_id):
        if request_id in self.said:
            self.aborted.append(request_id)
        super().abort(request_id)

    def explain(self, request_id):
        raise KeyError(request_id)

    def step(self, on_launch):
        return [structs.replace(output, logprobs=ROWS) for output in super().step(on_launch)]


class WideHost(Host):
    """Remembers its engines."""

    def __init__(self, acts=lambda *_: ()):
        super().__init__(acts)
        self.engines = []

    def engine_class(self, number, acts):
        self.engines.append(WideEngine(number, acts))
        return self.engines[-1]


def run(scenario, host=None):
    return fake_engines.run(scenario, host=host or WideHost())


async def kept(stream, name):
    """The tokens of a request, whose outputs are kept."""
    tokens = []
    async for outputs in stream:
        for output in outputs:
            stream.keep(output.num_bytes)
            tokens += output.token_ids
            if output.finish_reason:
                return tokens


def test_unread_outputs_are_queued_outside_of_the_engine_and_none_is_lost():
    async def scenario(host, engine):
        stream = await engine.generate([request("a", MANY)])
        other = await engine.generate([request("b", MANY, "ben")])
        assert (await heard(other, ["b"]))[0]["b"] == list(range(1, MANY + 1))
        await until(lambda: host.engines[0].aborted)
        assert MAX_STREAM_BYTES < stream.num_bytes == engine.memories.of("ann").num_held < MAX_TENANT_BYTES
        tokens, ends = await heard(stream, ["a"])
        assert tokens["a"] == list(range(1, MANY + 1))
        assert ends == {"a": "length"}
        assert "b" not in host.engines[0].aborted
        stream.close()
        assert engine.memories.of("ann").num_held == 0
        assert host.engines[0].added[-1][1] > 0, "it went on from the tokens before"

    run(scenario)


def test_whole_answers_of_a_tenant_take_turns_when_they_hold_too_much():
    async def scenario(host, engine):
        streams = [await engine.generate([request(name, MANY)], whole=True) for name in "abc"]
        first, *others = [asyncio.ensure_future(kept(one, name)) for one, name in zip(streams, "abc", strict=True)]
        assert await first == list(range(1, MANY + 1))
        await until(lambda: set(host.engines[0].aborted) == {"b", "c"})
        assert not any(one.done() for one in others)
        streams[0].close()
        quick = await engine.generate([request("d", 3)])  # what is sent on at once goes on beside them
        assert (await heard(quick, ["d"]))[0]["d"] == [1, 2, 3]
        assert not any(one.done() for one in others)
        streams[0].release()
        assert await others[0] == list(range(1, MANY + 1))
        streams[1].release()
        assert await others[1] == list(range(1, MANY + 1))
        streams[2].release()
        assert "a" not in host.engines[0].aborted
        assert engine.memories.of("ann").num_held == 0

    run(scenario)


def test_a_crash_while_a_request_waits_loses_nothing():
    def acts(number, step, names):
        if number == 1 and names == ["b"] and step > 20:
            raise Death
        return ()

    async def scenario(host, engine):
        stream = await engine.generate([request("a", MANY)])
        await until(lambda: host.engines[0].aborted)
        other = await engine.generate([request("b", MANY, "ben")])
        assert (await heard(other, ["b"]))[0]["b"] == list(range(1, MANY + 1))
        assert (await heard(stream, ["a"]))[0]["a"] == list(range(1, MANY + 1))
        assert len(host.engines) == 2

    run(scenario, WideHost(acts))


def test_outputs_of_a_step_that_runs_during_a_pause_come_once_however_many_calls_are_pending(monkeypatch):
    ends_step = threading.Event()

    def acts(_number, step, _names):
        if step == 3:
            ends_step.wait(60)
        return ()

    async def scenario(host, engine):
        stream = await engine.generate([request("a", 20)])
        tokens = []
        while len(tokens) < 3:
            tokens += [token for output in await anext(stream) for token in output.token_ids]
        monkeypatch.setattr(replica_requests, "MAX_PENDING_CALLS", 0)
        engine.replicas[0]._pause(stream)
        for _ in range(10):
            await asyncio.sleep(0)
        ends_step.set()
        tokens += (await heard(stream, ["a"]))[0]["a"]
        assert tokens == list(range(1, 21))
        assert host.engines[0].aborted == ["a"]

    run(scenario, WideHost(acts))


@pytest.mark.parametrize("whole", [False, True])
def test_a_request_that_waits_can_be_aborted(whole):
    async def scenario(host, engine):
        stream = await engine.generate([request("a", MANY)], whole=whole)
        waiting = await engine.generate([request("b", MANY)], whole=whole)
        taking = asyncio.ensure_future(kept(waiting, "b"))
        await until(lambda: host.engines[0].aborted)
        taking.cancel()
        for one in (stream, waiting):
            one.release()
        await until(lambda: not host.engines[0].said)
        assert engine.memories.of("ann").num_held == 0
        again = await engine.generate([request("b", 3)])
        assert (await heard(again, ["b"]))[0]["b"] == [1, 2, 3]

    run(scenario)


def test_requests_that_would_start_over_do_not_leave_the_engine():
    requests = OpenRequests()
    plain = request("plain", 3)
    requests.add(
        [
            plain,
            structs.replace(plain, id="beams", beams=BEAMS),
            structs.replace(plain, id="pooled", pooling=Pooling.LAST),
        ]
    )
    assert [name for name in ("plain", "beams", "pooled", "gone") if requests.can_pause(name)] == ["plain"]


def test_cached_tokens_are_those_of_the_beginning_after_a_pause():
    requests = OpenRequests()
    requests.add([request("a", 3)])
    output = Output("a", 0, 0, [1], num_cached_tokens=2)
    assert requests.record_output(output)[0].num_cached_tokens == 2
    requests.resume("a")
    assert requests.record_output(structs.replace(output, num_cached_tokens=9))[0].num_cached_tokens == 0


def test_the_stream_that_holds_too_much_memory_of_a_tenant_must_wait():
    memory, answers = TenantMemory(), WholeAnswers()

    async def main():
        sent = Stream(memory, lambda: None)
        first, second = (Stream(memory, lambda: None, answers) for _ in range(2))
        output = Output("a", 0, 0, [1], logprobs=ROWS)
        second.keep(LARGE + 1)
        seen = []
        for _ in range(MAX_TENANT_BYTES // 2**20):
            first.keep(2**20)
            seen.append((sent.must_wait, first.must_wait, second.must_wait))
        assert set(seen[:-1]) == {(False, False, False)}
        assert seen[-1] == (False, False, True)
        small = Stream(memory, lambda: None, answers)
        small.keep(LARGE)
        assert not small.must_wait
        sent.put(output)
        assert sent.must_wait
        waits = asyncio.ensure_future(second.wait())
        await asyncio.sleep(0)
        assert not waits.done()
        first.release()
        await waits
        assert not second.must_wait
        assert not sent.must_wait

    asyncio.run(main())
