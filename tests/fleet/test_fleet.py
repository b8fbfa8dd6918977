"""Fleet with a fake engine on a thread: order, cancellation and failures."""

import asyncio
import threading
import time

import msgspec
import pytest
from fake_engines import FACTS
from held_items import held
from waiting import until

from quire.core.explanation import Explanation
from quire.core.output import EndCause, Output
from quire.core.request import Request
from quire.engine.engine import EngineStats
from quire.errors import EngineStopped, QueueFull, RequestError
from quire.fleet.fleet import Fleet
from quire.fleet.stream import Stream
from quire.params import SamplingParams
from quire.supervisor import health, protocol
from quire.supervisor.engine_handle import EngineThread
from quire.supervisor.health import FAILED_STEPS, STALL_SECONDS, State
from quire.tenant_memory import TenantMemory


class PretendEngine:
    """Gives each request one token per step. The prompt is the number of tokens. Records the threads that call it."""

    def __init__(self):
        self.left = {}
        self.explained, self.flushed, self.looked = {}, [], []
        self.aborted, self.finished, self.threads = [], [], set()
        self.steps = self.failed_in_a_row = 0
        self.fail_at = None
        self.last_step_positions = []
        self.num_counted = {}
        self.predicted_seconds = 0.001
        self.gate = threading.Event()
        self.gate.set()
        self.is_held = False  # whether a step waits for the gate

    @property
    def has_work(self):
        return bool(self.left)

    def add(self, request):
        self.threads.add(threading.get_ident())
        if not request.prompt:
            raise RequestError("empty", "prompt")
        self.left[request.id] = request.prompt[0]

    def abort(self, request_id):
        self.threads.add(threading.get_ident())
        self.aborted.append(request_id)
        self.left.pop(request_id, None)

    def finish(self, seq_id, num_tokens):
        self.finished.append((seq_id, num_tokens))

    def explain(self, request_id):
        self.threads.add(threading.get_ident())
        return self.explained.get(request_id)

    def flush_cache(self):
        self.threads.add(threading.get_ident())
        if not self.flushed:
            raise ValueError("a bug")
        return self.flushed.pop()

    def check_block_accounting(self):
        self.looked.append((threading.get_ident(), len(self.left)))
        raise ValueError("a bug")

    def close(self):
        self.closed = True

    def step(self, on_launch):
        self.threads.add(threading.get_ident())
        self.last_step_positions = [(request_id, self.steps) for request_id in self.left]
        on_launch(None)
        while not self.gate.wait(0.01):
            self.is_held = True
        self.is_held = False
        self.steps += 1
        if self.steps == self.fail_at:
            raise ValueError("a bug")
        outputs = []
        for request_id in list(self.left):
            self.left[request_id] -= 1
            done = self.left[request_id] == 0
            outputs.append(Output(request_id, 0, 0, [self.steps], end=EndCause.LENGTH if done else None))
            if done:
                del self.left[request_id]
        return outputs

    def take_key_changes(self):
        return None

    def take_service(self):
        return {}

    def stats(self):
        return msgspec.structs.replace(
            EngineStats.zero(),
            num_running=len(self.left),
            num_steps=self.steps,
            failed_in_a_row=self.failed_in_a_row,
        )


def request(name, num_tokens):
    return Request(name, [num_tokens] if num_tokens else [], SamplingParams())


def engine_of(pretend):
    host = EngineThread(pretend, FACTS)
    before = set(threading.enumerate())
    host.launch()
    (thread,) = (one for one in threading.enumerate() if one.name == "quire-engine" and one not in before)
    engine = Fleet(host)
    engine.thread = thread
    return engine


def run(scenario):
    """Run `scenario(pretend, engine)` with a started engine."""

    async def main():
        pretend = PretendEngine()
        engine = engine_of(pretend)
        await engine.start()
        try:
            await asyncio.wait_for(scenario(pretend, engine), 60)
        finally:
            pretend.gate.set()
            await engine.close()
        assert not engine.thread.is_alive()

    asyncio.run(main())


async def read(stream, request_id):
    tokens = []
    async for outputs in stream:
        for output in outputs:
            if output.request_id == request_id:
                tokens += output.token_ids
                if output.finish_reason:
                    return tokens


def test_a_stream_with_many_outputs_lets_others_take_turns():
    async def main():
        stream, turns = Stream(TenantMemory(), lambda: None), 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        for _ in range(1000):
            stream.put(Output("a", 0, 0, [1]))
        num_taken = 0
        while num_taken < 1000:
            num_taken += len(await anext(stream))
        task.cancel()
        return turns

    assert asyncio.run(main()) >= 1000 * Output("a", 0, 0, [1]).num_bytes // 2**14


def test_streams_get_all_their_tokens_in_order():
    async def scenario(pretend, engine):
        streams = [await engine.generate([request(name, n)]) for name, n in (("a", 3), ("b", 50))]
        came = await asyncio.gather(read(streams[0], "a"), read(streams[1], "b"))
        assert [len(tokens) for tokens in came] == [3, 50]
        assert all(tokens == sorted(tokens) for tokens in came)
        assert pretend.threads == {engine.thread.ident}

    run(scenario)


def test_several_requests_on_one_stream_come_all_or_not_at_all():
    async def scenario(pretend, engine):
        pretend.gate.clear()
        with pytest.raises(RequestError, match="empty"):
            await engine.generate([request("a", 5), request("b", 0), request("c", 5)])
        assert "a" in pretend.aborted
        assert not pretend.left
        pretend.gate.set()
        stream = await engine.generate([request("a", 5), request("c", 5)])
        assert len(await read(stream, "c")) == 5

    run(scenario)


def test_logits_processors_cannot_be_sent_to_the_engine_process():
    async def scenario(pretend, engine):
        asked = msgspec.structs.replace(request("a", 5), params=SamplingParams(logits_processors=lambda _, x: x))
        with pytest.raises(RequestError, match="cannot be sent to the engine process"):
            await engine.generate([request("b", 5), asked])
        assert not pretend.left

    run(scenario)


@pytest.mark.parametrize(("num_before", "spacing"), [(0, 0.25), (2, None)])
def test_a_full_queue_says_nothing_of_single_requests_if_a_part_of_the_batch_had_room(num_before, spacing):
    async def scenario(pretend, engine):
        add = pretend.add

        def full(request):
            if len(pretend.left) == num_before:
                raise QueueFull("full", 1.0, 0.25)
            add(request)

        pretend.add = full
        pretend.gate.clear()
        with pytest.raises(QueueFull) as refused:
            await engine.generate([request(f"r{i}", 5) for i in range(4)])
        assert refused.value.spacing == spacing
        pretend.gate.set()

    run(scenario)


def test_a_long_batch_is_no_stall(monkeypatch):
    monkeypatch.setattr(health, "STALL_SECONDS", 2.5)

    async def scenario(pretend, engine):
        add, seen = pretend.add, []

        def slow(request):
            add(request)
            time.sleep(0.2)  # together they take longer than a stall

        pretend.add = slow
        adding = asyncio.ensure_future(engine.generate([request(f"r{i}", 1) for i in range(15)]))
        while not adding.done():
            seen.append(engine.health().problem)
            await asyncio.sleep(0.02)
        assert set(seen) == {""}

    run(scenario)


def test_closing_a_stream_aborts_within_a_step(monkeypatch):
    decode, arrived = protocol.decode_commands, threading.Event()

    def decode_and_tell(message):
        yield from decode(message)
        arrived.set()

    async def scenario(pretend, engine):
        stream = await engine.generate([request("a", 10**9)])
        await anext(stream)
        monkeypatch.setattr(protocol, "decode_commands", decode_and_tell)
        pretend.gate.clear()
        await until(lambda: pretend.is_held)
        steps = pretend.steps
        stream.close()
        stream.close()
        await until(arrived.is_set)
        pretend.gate.set()
        await until(lambda: not pretend.left)
        assert pretend.steps <= steps + 1
        assert pretend.aborted == ["a"]

    run(scenario)


def test_a_caller_cancelled_while_it_queues_leaves_nothing():
    async def scenario(pretend, engine):
        busy = await engine.generate([request("busy", 10**9)])
        await anext(busy)
        pretend.gate.clear()
        waiting = asyncio.ensure_future(engine.generate([request("a", 10**9)]))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        pretend.gate.set()
        await until(lambda: "a" in pretend.aborted)
        busy.close()
        await until(lambda: not pretend.left)

    run(scenario)


def test_an_engine_failure_is_raised_to_all_callers_and_shown_in_health():
    async def scenario(pretend, engine):
        pretend.fail_at = 3
        stream = await engine.generate([request("a", 10**9)])
        with pytest.raises(EngineStopped, match="failed"):
            await read(stream, "a")
        assert "failed" in engine.health().problem
        with pytest.raises(EngineStopped):
            await engine.generate([request("b", 1)])

    run(scenario)


def test_an_engine_failure_is_raised_to_a_caller_that_still_submits():
    async def scenario(pretend, engine):
        pretend.fail_at = 2
        stream = await engine.generate([request("a", 10**9)])
        await anext(stream)
        pretend.gate.clear()
        await until(lambda: pretend.steps >= 1)
        queueing = asyncio.ensure_future(engine.generate([request("b", 1)]))
        pretend.gate.set()
        with pytest.raises(EngineStopped):
            await read(await queueing, "b")

    run(scenario)


def test_a_stall_is_seen(monkeypatch):
    monkeypatch.setattr(health, "STALL_SECONDS", 0.3)

    async def scenario(pretend, engine):
        await until(lambda: engine.health().problem == "")
        pretend.gate.clear()
        stream = await engine.generate([request("a", 3)])
        await until(lambda: "no progress" in engine.health().problem)
        assert engine.health().state is State.STALLED
        pretend.gate.set()
        assert len(await read(stream, "a")) == 3
        await until(lambda: engine.health().problem == "")

    run(scenario)


def test_steps_that_fail_in_a_row_are_seen_until_one_succeeds():
    async def scenario(pretend, engine):
        stream = await engine.generate([request("a", 10**9)])
        pretend.failed_in_a_row = FAILED_STEPS
        await until(lambda: f"last {FAILED_STEPS} steps failed" in engine.health().problem)
        pretend.failed_in_a_row = FAILED_STEPS - 1
        await until(lambda: engine.health().problem == "")
        stream.close()

    run(scenario)


def test_an_idle_engine_sends_heartbeats():
    async def scenario(pretend, engine):
        num_heartbeats, before = 0, 0.0
        while num_heartbeats < 3:
            age = engine.health().heartbeat_age
            assert age < STALL_SECONDS
            num_heartbeats += age < before
            before = age
            await asyncio.sleep(0.002)
        assert pretend.steps == 0

    run(scenario)


def test_the_memory_is_looked_over_in_idle_moments_only_and_whatever_that_finds():
    async def scenario(pretend, engine):
        await until(lambda: len(pretend.looked) > 1)
        assert set(pretend.looked) == {(engine.thread.ident, 0)}
        stream = await engine.generate([request("a", 10**9)])
        await anext(stream)
        before = len(pretend.looked)
        for _ in range(200):
            await anext(stream)
        assert len(pretend.looked) == before
        stream.close()
        assert engine.health().problem == ""

    run(scenario)


def test_closing_fails_open_streams_and_refuses_new_ones():
    async def main():
        engine = engine_of(pretend := PretendEngine())
        with pytest.raises(EngineStopped, match="not been started"):
            await engine.generate([request("a", 1)])
        await engine.start()
        stream = await engine.generate([request("a", 10**9)])
        await engine.close()
        await engine.close()
        assert pretend.closed
        with pytest.raises(EngineStopped, match="shutting down"):
            await read(stream, "a")
        with pytest.raises(EngineStopped, match="shutting down"):
            await engine.generate([request("b", 1)])

    asyncio.run(main())


def test_finish_reaches_the_engine_under_its_own_name():
    async def scenario(pretend, engine):
        stream = await engine.generate([request("a", 10**9)])
        tokens = (await anext(stream))[0].token_ids
        engine.finish("a", 0, len(tokens))
        await until(lambda: pretend.finished == [(0, len(tokens))])

    run(scenario)


def explanation(name):
    return Explanation(request_id=name, tenant="", arrived=0.0, num_prompt_tokens=1)


def test_explanations_of_what_is_known_come_from_the_engines_thread():
    async def scenario(pretend, engine):
        pretend.explained = {name: explanation(name) for name in ("a", "b", "d")}
        found = await engine.explain(["c", "a", "b", "c", "d"])
        assert [one.request_id for one in found] == ["a", "b", "d"]
        assert await engine.explain([]) == await engine.explain(["c"]) == []
        assert pretend.threads == {engine.thread.ident}

    run(scenario)


def test_a_failed_query_is_raised_to_its_caller_only():
    async def scenario(pretend, engine):
        stream = await engine.generate([request("a", 50)])
        with pytest.raises(RuntimeError, match="ValueError: a bug"):
            await engine.flush_cache()
        pretend.flushed = [5]
        assert await engine.flush_cache() == 5
        assert len(await read(stream, "a")) == 50
        assert engine.health().problem == ""

    run(scenario)


def test_a_question_waits_for_the_step_and_may_be_given_up():
    async def scenario(pretend, engine):
        before = held(engine)
        stream = await engine.generate([request("a", 10**9)])
        await anext(stream)
        pretend.gate.clear()
        pretend.flushed = [2, 1]
        waiting = [asyncio.ensure_future(engine.flush_cache()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        pretend.gate.set()
        assert await waiting[1] in (1, 2)
        assert waiting[0].cancelled()
        stream.close()
        await until(lambda: not pretend.left)
        assert held(engine) == before

    run(scenario)


def test_questions_fail_when_the_engine_stops():
    async def main():
        pretend = PretendEngine()
        engine = engine_of(pretend)
        with pytest.raises(EngineStopped, match="not been started"):
            await engine.explain(["a"])
        await engine.start()
        await anext(await engine.generate([request("a", 10**9)]))
        pretend.gate.clear()
        asking = asyncio.ensure_future(engine.flush_cache())
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(engine.close())
        with pytest.raises(EngineStopped, match="shutting down"):
            await asking
        pretend.gate.set()
        await closing
        with pytest.raises(EngineStopped, match="shutting down"):
            await engine.flush_cache()

    asyncio.run(main())


def test_outputs_of_one_step_cross_in_one_message():
    async def scenario(pretend, engine):
        batches = []
        replica = engine.replicas[0]
        take = replica.on_batch
        replica.on_batch = lambda batch, committed: (batches.append(len(batch.outputs)), take(batch, committed))
        pretend.gate.clear()
        stream = await engine.generate([request(f"r{i}", 4) for i in range(8)])
        pretend.gate.set()
        await read(stream, "r7")
        assert [size for size in batches if size] == [8] * 4
        assert pretend.steps == 4

    run(scenario)
