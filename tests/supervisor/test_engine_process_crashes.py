"""An engine process that is killed, stopped, or crashed by a request: accepted requests continue."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import misbehaving_engine_process
import pytest
import scripted_engine_process
from example_budget import examples
from scripted_engine_process import POISON
from waiting import until

from quire.config import EngineOptions
from quire.core.request import Request
from quire.core.step import Pooling
from quire.errors import ConfigError, EngineStopped
from quire.monitor.update import Watcher
from quire.params import SamplingParams
from quire.supervisor.async_engine import AsyncEngine
from quire.supervisor.engine_handle import EngineProcess
from quire.supervisor.health import STALL_SECONDS, State
from quire.supervisor.spawn import PROGRAM
from quire.supervisor.supervisor import WATCHDOG_INTERVAL

OPTIONS = EngineOptions(
    speculation="off", memory="256MiB", dtype="float32", max_num_seqs=32, max_model_len=512, threads=1
)
HOPELESS = ("-ISc", "raise SystemExit(3)")
STARTS_FOR_EVER = ("-ISc", "import time; time.sleep(600)")
SLOW_MODEL = (misbehaving_engine_process.__file__, "slow")


def scripted(*kind):
    """The program of an engine without a model. kind: see `scripted_engine_process`."""
    return (scripted_engine_process.__file__, *map(str, kind))


def host_of(program=PROGRAM, **options):
    options = {name: getattr(OPTIONS, name) for name in OPTIONS.__slots__} | options
    return EngineProcess(EngineOptions(**options), report=lambda line: None, progress=lambda *_: None, program=program)


@asynccontextmanager
async def running(program=PROGRAM, watchdog=0.0, restart_timeout=600.0, **options):
    host = host_of(program, **options)
    await asyncio.to_thread(host.launch)
    engine = AsyncEngine(host, watchdog=watchdog, restart_timeout=restart_timeout)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def scenario(work):
    asyncio.run(asyncio.wait_for(work, 120))


def pid(engine):
    return engine.engine_handle.process.pid


async def kill(engine):
    """Kill the engine, and wait until the next one serves."""
    number = engine.health().num_restarts
    os.kill(pid(engine), signal.SIGKILL)
    await until(lambda: engine.health().num_restarts > number and engine.health().state is State.SERVING)


async def until_steps(engine, number):
    """Wait until engines have committed this many steps in all."""
    await until(lambda: engine.health().stats.num_steps >= number)


async def until_running(engine):
    await until(lambda: engine.health().stats.num_running)


async def answer(engine, name, prompt, **params):
    """All outputs of a request: by sequence the tokens, ids of logprobs and reason."""
    params = {"max_tokens": 120, "ignore_eos": True, **params}
    asked = SamplingParams(**params)
    heard = [[[], [], None] for _ in range(asked.num_sequences)]
    stream = await engine.generate([Request(name, prompt, asked)])
    try:
        while any(reason is None for _, _, reason in heard):
            for output in await anext(stream):
                one = heard[output.index]
                one[0] += output.token_ids
                one[1] += [] if output.logprobs is None else output.logprobs.ids.tolist()
                one[2] = output.finish_reason
    finally:
        stream.close()
    return heard


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
            assert len(engine._open_requests) == 0

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
            engine.engine_handle.program = scripted("held", 5)
            await kill(engine)
            again = asyncio.ensure_future(outputs(1))
            due = engine.health().stats.num_steps + 5
            for program, num_steps in ((scripted("held", 10), 10), (scripted("held", 7), 7), (scripted("steady"), 0)):
                await until_steps(engine, due)
                engine.engine_handle.program = program
                await kill(engine)
                due += num_steps
            assert await again == undisturbed

    scenario(work())


def test_a_stopped_engine_is_stalled_and_the_watchdog_replaces_it():
    assert STALL_SECONDS + WATCHDOG_INTERVAL < 2, "seconds until a stopped engine is unhealthy, see docs"

    async def work():
        async with running(scripted("slow"), watchdog=STALL_SECONDS) as engine:
            before = await answer(engine, "a", [5, 6, 7])
            going_on = asyncio.ensure_future(answer(engine, "b", [5, 6, 7]))
            await until_running(engine)
            os.kill(pid(engine), signal.SIGSTOP)
            await until(lambda: engine.health().problem)
            assert engine.health().state is State.STALLED
            assert await going_on == before
            assert engine.health().num_restarts == 1

    scenario(work())


def test_a_long_prompt_on_a_slow_model_is_no_stall():
    async def work():
        async with running(SLOW_MODEL, max_model_len=2048, calibration=1.0, watchdog=1.0) as engine:
            began = time.monotonic()
            answering = asyncio.ensure_future(answer(engine, "a", [5] * 2040, max_tokens=2))
            problems = set()
            while not answering.done():
                problems.add(engine.health().problem)
                await asyncio.sleep(0.02)
            assert problems == {""}
            assert time.monotonic() - began > 2.5
            assert engine.health().num_restarts == 0

    scenario(work())


def test_an_engine_writes_its_stacks_and_ends_with_its_front_end(capfd):
    host = host_of(scripted("steady"))
    host.launch()
    written = ""
    while "_turn" not in written:
        host.dump_stacks()
        time.sleep(0.05)
        written += capfd.readouterr().err
    host.connection.close()
    assert host.wait() == "with exit code 0"


def test_options_that_the_engine_refuses_raise_its_type_of_error():
    with pytest.raises(ConfigError, match="max_model_len"):
        host_of(max_model_len=10**9).launch()


def test_the_end_of_an_engine_is_described_by_exit_code_or_signal():
    host = host_of()
    for end, described in (
        ("exit(4)", "with exit code 4"),
        ("kill(9)", "by signal SIGKILL"),
        ("kill(40)", "by signal 40"),
    ):
        code = f"import os\nkill = lambda number: os.kill(os.getpid(), number)\n{end}"
        host.process = subprocess.Popen([sys.executable, "-c", code])
        assert host.wait() == described


def test_an_engine_that_dies_while_it_starts_is_given_up():
    host = host_of()
    host.program = HOPELESS
    with pytest.raises(EngineStopped, match="with exit code 3 while it started"):
        host.launch()


def test_an_engine_that_cannot_be_started_again_fails_what_is_open():
    async def work():
        async with running(scripted("slow"), restart_timeout=3.0) as engine:
            open_one = asyncio.ensure_future(answer(engine, "a", [5, 6, 7], max_tokens=400))
            await until_running(engine)
            engine.engine_handle.program = HOPELESS
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
            assert engine.engine_handle.model_info.model_name == "first"
            going_on = asyncio.ensure_future(answer(engine, "a", [5, 6, 7]))
            for _ in range(2):
                await until_running(engine)
                await kill(engine)
                assert engine.engine_handle.model_info.model_name == "restarted"
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
            engine.engine_handle.program = STARTS_FOR_EVER
            killed = {pid(engine)}
            os.kill(pid(engine), signal.SIGKILL)
            for _ in range(6):
                await until(lambda: pid(engine) not in killed)
                killed.add(pid(engine))
                if len(killed) == 7:
                    engine.engine_handle.program = scripted("slow")
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
