"""Fleet with engines that die one after another: no deadlock, and only deadly requests fail."""

import asyncio

import pytest
from fake_engines import Death, Host, PretendEngine, heard, request, run
from held_items import held
from scripted_engine import Rig
from waiting import until

from quire.core.request import Request
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.supervisor import protocol


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


def test_a_suspect_that_finishes_early_does_not_block_the_bisection(monkeypatch):
    """Both requests are of one stream, which closes when both have ended."""

    def acts(number, step, rows):
        if number == 2:
            monkeypatch.setattr(PretendEngine, "ahead", 0)  # for the next engines
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


def test_closed_requests_leave_no_state_in_the_engine_client():
    async def scenario(host, engine):
        before = held(engine)
        for i in range(5):
            stream = await engine.generate([request(f"r{i}", 3)])
            await heard(stream, [f"r{i}"])
            stream.close()
        assert held(engine) == before

    run(scenario)


def test_an_oversized_request_is_rejected_and_other_requests_continue(monkeypatch):
    async def scenario(host, engine):
        monkeypatch.setattr(protocol, "MAX_FRAME", 2000)
        first = await engine.generate([request("a", 500)])
        with pytest.raises(RequestError, match="longer than the 2,000"):
            await engine.generate([request(f"long{i}", 5) for i in range(100)])
        second = await engine.generate([request("b", 5)])
        assert (await heard(second, ["b"]))[1] == {"b": "length"}
        assert (await heard(first, ["a"]))[1] == {"a": "length"}

    run(scenario)


def test_open_requests_are_replayed_in_several_messages(monkeypatch):
    def acts(number, step, rows):
        if number == 1 and len(rows) == 20:
            raise Death
        return ()

    async def scenario(host, engine):
        monkeypatch.setattr(protocol, "MAX_FRAME", 6000)
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


class RealEngines(Host):
    """Engines with the scripted runner, of 16 tokens a step. The first dies when it launches a step."""

    def __init__(self, last_step, prefix_index):
        super().__init__(None)
        self.last_step, self.prefix_index = last_step, prefix_index

    def engine_class(self, number, _acts):
        sizes = {"max_num_batched_tokens": 16, "num_blocks": 128, "steps_in_flight": 2}
        engine = Rig(prefix_index=self.prefix_index, **sizes).engine
        launch = engine.runner.launch

        def launch_or_die(step):
            if number == 1 and step.id == self.last_step:
                raise Death
            launch(step)

        engine.runner.launch = launch_or_die
        return engine


@pytest.mark.parametrize("prefix_index", ["none", "radix"])
@pytest.mark.parametrize("last_step", [0, 1, 2, 3, 5, 7])
def test_prompt_tokens_are_counted_once_over_a_death(last_step, prefix_index):
    """At the death requests have no tokens, a part of their prompt, or some tokens of output."""
    prompts = [[i % 50 for i in range(length)] for length in (70, 5, 50)]

    async def scenario(host, engine):
        names = ["a", "b", "c"]
        asked = [
            Request(name, tokens, SamplingParams(max_tokens=6, temperature=0))
            for name, tokens in zip(names, prompts, strict=True)
        ]
        _, ends = await heard(await engine.generate(asked), names)
        assert ends == dict.fromkeys(names, "length")
        await until(lambda: not engine.health().stats.num_running)
        stats = engine.health().stats
        assert (host.num_launched, stats.prompt_tokens) == (2, 125)
        assert (stats.prefix_hit_tokens > 0) == (prefix_index == "radix")

    run(scenario, host=RealEngines(last_step, prefix_index))
