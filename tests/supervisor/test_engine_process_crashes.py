"""An engine process that is killed, or crashed by a request: accepted requests continue."""

import asyncio
import json
import os
import random
import signal

import pytest
from engine_processes import HOPELESS, answer, kill, pid, running, scenario, scripted, until_running, until_steps
from example_budget import examples
from scripted_engine_process import POISON
from waiting import until

from quire.core.request import Request
from quire.core.step import Pooling
from quire.errors import EngineStopped
from quire.monitor.update import Watcher
from quire.params import SamplingParams
from quire.supervisor.health import State

STARTS_FOR_EVER = ("-ISc", "import time; time.sleep(600)")


def questions(count):
    """Different prompts and parameters, by name."""
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.9},  # with the seed that the front end sets
        {"temperature": 1.0, "seed": 3, "n": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 0.8, "seed": 4, "logprobs": 2, "min_tokens": 20, "ignore_eos": False, "max_tokens": 90},
        {"temperature": 1.0, "seed": 5, "reasoning": {"begin": "", "end": "</think>", "begun": True, "budget": 40}},
    )
    return {f"r{i}": ([10 + i, *range(20, 24 + i % 9)], kinds[i % len(kinds)]) for i in range(count)}


def test_streams_go_on_however_often_the_engine_is_killed():
    asked = questions(12)

    async def work():
        async with running() as engine:

            async def all_of_them():
                names = list(asked)
                came = await asyncio.gather(*(answer(engine, name, asked[name][0], **asked[name][1]) for name in names))
                return dict(zip(names, came, strict=True))

            undisturbed = await all_of_them()
            engine._num_requests = 0  # the same seeds again
            disturbed = asyncio.ensure_future(all_of_them())
            chance = random.Random(5)
            kills, most, due = 0, examples(8), chance.randint(300, 800)
            before = engine.health().stats.generation_tokens
            while not disturbed.done():
                await asyncio.sleep(0.002)
                generated = engine.health().stats.generation_tokens - before  # independent of the machine's speed
                if generated >= due and kills < most:
                    await kill(engine)
                    kills += 1
                    due += chance.randint(300, 800)
            assert await disturbed == undisturbed
            assert kills == engine.health().num_restarts >= 2
            stats = engine.health().stats
            assert (stats.kv_blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
            assert len(engine.open_requests) == 0

    scenario(work())


def test_a_request_that_ends_the_engine_is_found_and_fails_alone():
    async def work():
        async with running(scripted("deadly")) as engine:
            asked = {f"r{i}": [10 + i, 20, 30] for i in range(20)}
            asked["r13"] = [10, POISON, 30]
            came = await asyncio.gather(
                *(answer(engine, name, prompt, max_tokens=20, temperature=0) for name, prompt in asked.items())
            )
            reasons = {name: heard[0][2] for name, heard in zip(asked, came, strict=True)}
            assert reasons.pop("r13") == "error"
            assert set(reasons.values()) == {"length"}
            assert 2 <= engine.health().num_restarts <= 7
            assert (await answer(engine, "after", [5, 6], max_tokens=5))[0][2] == "length"

    scenario(work())


def test_an_embedding_and_prompt_logprobs_are_returned_once_although_engines_are_killed():
    """The kills are within the text to embed, within the prompt, and after the first output token."""

    async def work():
        async with running(scripted("steady"), max_num_batched_tokens=64) as engine:

            async def outputs(number):
                prompt = list(range(5, 405))
                pooled = Request(f"e{number}", prompt, SamplingParams(max_tokens=0), pooling=Pooling.MEAN)
                scored = Request(f"p{number}", prompt, SamplingParams(max_tokens=3, prompt_logprobs=1, seed=1))
                vectors, rows, tokens = [], [], []
                stream = await engine.generate([pooled, scored])
                open_ones = {pooled.id, scored.id}
                while open_ones:
                    for output in await anext(stream):
                        vectors += [] if output.pooled is None else [output.pooled.tolist()]
                        rows += [] if output.prompt_logprobs is None else output.prompt_logprobs.ids.tolist()
                        tokens += output.token_ids
                        if output.finish_reason:
                            open_ones.discard(output.request_id)
                stream.close()
                return vectors, rows, tokens

            undisturbed = await outputs(0)
            assert [len(one) for one in undisturbed] == [1, 399, 3]
            engine.engine_handles[0].program = scripted("held", 5)
            await kill(engine)
            again = asyncio.ensure_future(outputs(1))
            due = engine.health().stats.num_steps + 5
            for program, num_steps in ((scripted("held", 10), 10), (scripted("held", 7), 7), (scripted("steady"), 0)):
                await until_steps(engine, due)
                engine.engine_handles[0].program = program
                await kill(engine)
                due += num_steps
            assert await again == undisturbed

    scenario(work())


def test_an_engine_that_cannot_be_started_again_fails_what_is_open():
    async def work():
        async with running(scripted("slow"), restart_timeout=3.0) as engine:
            open_one = asyncio.ensure_future(answer(engine, "a", [5, 6, 7], max_tokens=400))
            await until_running(engine)
            engine.engine_handles[0].program = HOPELESS
            os.kill(pid(engine), signal.SIGKILL)
            with pytest.raises(EngineStopped, match=r"has served for 3 s"):
                await open_one
            assert engine.health().state is State.FAILED
            assert "with exit code 3 while it started" in engine.health().start_error
            with pytest.raises(EngineStopped):
                await answer(engine, "b", [5])

    scenario(work())


def test_each_engine_after_the_first_knows_that_it_is_a_restart():
    async def work():
        async with running(scripted("slow")) as engine:
            assert engine.engine_handles[0].model_info.model_name == "first"
            going_on = asyncio.ensure_future(answer(engine, "a", [5, 6, 7]))
            for _ in range(2):
                await until_running(engine)
                await kill(engine)
                assert engine.engine_handles[0].model_info.model_name == "restarted"
            await going_on

    scenario(work())


def test_kills_during_starts_do_not_end_the_server(monkeypatch):
    """Six kills, each while an engine starts. The open request continues."""
    monkeypatch.setattr("quire.supervisor.restart_policy.MAX_DELAY", 0.01)

    async def work():
        async with running(scripted("slow")) as engine:
            expected = await answer(engine, "a", [5, 6, 7], seed=1)
            going_on = asyncio.ensure_future(answer(engine, "b", [5, 6, 7], seed=1))
            await until_running(engine)
            engine.engine_handles[0].program = STARTS_FOR_EVER
            killed = {pid(engine)}
            os.kill(pid(engine), signal.SIGKILL)
            for _ in range(6):
                await until(lambda: pid(engine) not in killed)
                killed.add(pid(engine))
                if len(killed) == 7:
                    engine.engine_handles[0].program = scripted("slow")
                os.kill(pid(engine), signal.SIGKILL)
            assert await going_on == expected
            assert (engine.health().state, engine.health().num_restarts) == (State.SERVING, 1)

    scenario(work())


def test_a_model_that_is_away_for_a_while_is_loaded_when_it_is_back(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.supervisor.restart_policy.MAX_DELAY", 0.01)
    home, away = tmp_path / "model", tmp_path / "away"
    home.mkdir()

    async def work():
        async with running(scripted("slow"), model=str(home)) as engine:
            going_on = asyncio.ensure_future(answer(engine, "a", [5, 6, 7]))
            await until_running(engine)
            home.rename(away)
            os.kill(pid(engine), signal.SIGKILL)
            await until(lambda: "there is no model" in engine.health().start_error)
            away.rename(home)
            await going_on
            assert engine.health().num_restarts == 1

    scenario(work())


def test_a_viewer_receives_the_whole_state_after_the_engine_was_killed():
    watcher = Watcher("", sees_all=True)

    async def work():
        async with running(scripted("steady")) as engine:
            firsts = [json.loads(await engine.monitor_update(7, watcher, i)) for i in range(3)]
            assert [update["full"] for update in firsts] == [True, False, False]
            os.kill(pid(engine), signal.SIGKILL)
            after = json.loads(await engine.monitor_update(7, watcher, 3))
            assert after["full"] and after["pools"] == firsts[0]["pools"]
            assert not json.loads(await engine.monitor_update(7, watcher, 4))["full"]
            assert await engine.node(watcher, 99) == b"null"
            engine.forget_viewer(7)
            assert json.loads(await engine.monitor_update(7, watcher, 5))["full"], "the engine has forgotten the viewer"

    scenario(work())
