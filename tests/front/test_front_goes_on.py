"""AsyncEngine with engines that die in turn: nobody waits for ever, and only what is deadly fails."""

import asyncio
import contextlib
import socket
import threading

import pytest

from quire.config import CacheConfig, EngineOptions, KVGroup
from quire.core.output import Output
from quire.engine.async_engine import AsyncEngine
from quire.engine.engine import EngineStats
from quire.engine.facts import Facts
from quire.engine.generations import NewRequest
from quire.engine.process import frames
from quire.engine.process.loop import EngineLoop
from quire.errors import RequestError
from quire.params import SamplingParams

FACTS = Facts(
    model_name="pretended",
    path="",
    max_model_len=999,
    vocab_size=999,
    num_end_tokens=0,
    hidden_size=1,
    sampling_defaults={},
    options=EngineOptions(),
    cache=CacheConfig(16, (KVGroup((0,), "full", 1, 1, "float32", 9, 64),)),
)


class Death(BaseException):
    """Of an engine, as sudden as it can be on a thread."""


class PretendEngine:
    """Token i of a request is i; its prompt is [how many there are, the token whose step is deadly, or 0]."""

    predicted_seconds = 0.0
    ahead = 0  # positions that a step computes in advance
    on_launch = None

    def __init__(self, number, acts):
        self.number = number
        self.acts = acts  # (engine, step, rows) -> ids that end early now; may raise Death
        self.said, self.wanted = {}, {}
        self.newest_rows = []
        self.steps = 0

    @property
    def has_work(self):
        return bool(self.said)

    def add(self, request_id, prompt, params, *more):
        *_, known, _resumed = more
        self.said[request_id] = len(known[0].token_ids) if known else 0
        self.wanted[request_id] = prompt

    def abort(self, request_id):
        self.said.pop(request_id, None)

    def step(self):
        self.newest_rows = [(name, 2 + said + self.ahead) for name, said in self.said.items()]
        self.on_launch(None)
        early = self.acts(self.number, self.steps, list(self.said))
        outputs = []
        for name, said in list(self.said.items()):
            wanted, deadly = self.wanted[name]
            if said + 1 == deadly:
                raise Death
            over = said + 1 == wanted or name in early
            outputs.append(Output(name, 0, 100 * self.number, [said + 1], "length" if over else None))
            self.said[name] += 1
            if over:
                del self.said[name]
        self.steps += 1
        return outputs

    def stats(self):
        first = (len(self.said), 0, 0, 9, 0, self.steps, 0, 0, 0, 0, 0.0)
        return EngineStats(*first, *[0] * (len(EngineStats.nothing().__struct_fields__) - 3 - len(first)))

    def close(self):
        pass

    def look_over(self):
        pass


class Host:
    """Engines on threads, each of which may die."""

    can_restart = True
    facts = FACTS

    def __init__(self, acts):
        self.acts, self.num_launched = acts, 0

    def launch(self):
        self.num_launched += 1
        self.connection, theirs = socket.socketpair()
        loop = EngineLoop(PretendEngine(self.num_launched, self.acts), theirs)

        def run():
            with contextlib.suppress(Death):
                loop.run()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def dump_stacks(self):
        pass

    def kill(self):
        pass

    def wait(self):
        self.thread.join(10)
        return "as pretended"


def request(name, wanted, deadly=0):
    return NewRequest(name, [wanted, deadly], SamplingParams(max_tokens=100))


async def heard(stream, names):
    """Tokens of each, and how it ended."""
    tokens, ends = {name: [] for name in names}, {}
    async for outputs in stream:
        for output in outputs:
            tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                ends[output.request_id] = output.finish_reason
        if len(ends) == len(names):
            return tokens, ends


def run(scenario, acts=lambda *_: ()):
    async def main():
        host = Host(acts)
        host.launch()
        engine = AsyncEngine(host)
        await engine.start()
        try:
            return await asyncio.wait_for(scenario(host, engine), 20)
        finally:
            await engine.close()

    return asyncio.run(main())


def test_streams_go_on_over_many_deaths():
    def acts(number, step, _rows):
        if number < 9 and step == 3:
            raise Death
        return ()

    async def scenario(host, engine):
        names = ["a", "b", "c"]
        streams = [await engine.generate([request(name, 40)]) for name in names]
        for name, stream in zip(names, streams, strict=True):
            tokens, ends = await heard(stream, [name])
            assert (tokens[name], ends[name]) == (list(range(1, 41)), "length")
        assert host.num_launched == 9
        assert engine.health().num_restarts == 8

    run(scenario, acts)


def test_poison_fails_alone_with_its_id():
    async def scenario(host, engine):
        names = [f"r{i}" for i in range(20)]
        batch = [request(name, 30, deadly=11 if name == "r13" else 0) for name in names]
        tokens, ends = await heard(await engine.generate(batch), names)
        assert ends == {name: "error" if name == "r13" else "length" for name in names}
        assert tokens == {name: list(range(1, 11 if name == "r13" else 31)) for name in names}
        assert host.num_launched <= 1 + 7

    run(scenario)


def test_a_suspect_that_ends_without_coming_as_far_as_before_holds_nobody(monkeypatch):
    """Both are of one stream, which is not closed before both have ended."""

    def acts(number, step, rows):
        if number == 2:
            monkeypatch.setattr(PretendEngine, "ahead", 0)  # of those that come
        if step == {1: 10, 2: 0}.get(number):
            raise Death
        return ["a"] if number == 3 and "a" in rows else ()

    async def scenario(host, engine):
        monkeypatch.setattr(PretendEngine, "ahead", 5)
        stream = await engine.generate([request("a", 40), request("b", 40)])
        tokens, _ = await heard(stream, ["a", "b"])
        assert tokens["b"] == list(range(1, 41))
        assert host.num_launched == 3

    run(scenario, acts)


def test_nothing_is_left_of_requests_that_are_over():
    async def scenario(host, engine):
        for i in range(5):
            stream = await engine.generate([request(f"r{i}", 3)])
            await heard(stream, [f"r{i}"])
            stream.close()
        assert not (engine._resumed or engine._streams or len(engine._ledger) or engine._questions)

    run(scenario)


def test_more_than_a_message_may_be_is_refused_and_everybody_else_goes_on(monkeypatch):
    async def scenario(host, engine):
        monkeypatch.setattr(frames, "MAX_FRAME", 2000)
        first = await engine.generate([request("a", 500)])
        with pytest.raises(RequestError, match="longer than the 2,000"):
            await engine.generate([request(f"long{i}", 5) for i in range(100)])
        second = await engine.generate([request("b", 5)])
        assert (await heard(second, ["b"]))[1] == {"b": "length"}
        assert (await heard(first, ["a"]))[1] == {"a": "length"}

    run(scenario)


def test_all_that_is_open_may_be_more_than_one_message_holds(monkeypatch):
    def acts(number, step, rows):
        if number == 1 and len(rows) == 20:
            raise Death
        return ()

    async def scenario(host, engine):
        monkeypatch.setattr(frames, "MAX_FRAME", 6000)
        names = [f"r{i}" for i in range(20)]
        streams = await asyncio.gather(*(engine.generate([request(name, 400)]) for name in names))
        for name, stream in zip(names, streams, strict=True):
            assert (await heard(stream, [name]))[1] == {name: "length"}
        assert host.num_launched == 2

    run(scenario, acts)


def test_a_name_that_cannot_be_written_is_the_callers_error():
    async def scenario(host, engine):
        with pytest.raises(RequestError, match="valid Unicode"):
            await engine.generate([request("\ud800", 5)])
        with pytest.raises(RequestError, match="surrogate"):
            await engine.explain(["\ud800"])
        assert (await heard(await engine.generate([request("a", 5)]), ["a"]))[1] == {"a": "length"}

    run(scenario)
