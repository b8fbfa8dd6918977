"""An engine process that is killed, stopped, or crashed by a request: accepted requests continue."""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import misbehaving_engine_process as front_children
import pytest

import quire
from quire.config import EngineOptions
from quire.core.request import Request
from quire.core.step import Pooling
from quire.errors import ConfigError, EngineStopped
from quire.monitor.update import Watcher
from quire.params import SamplingParams
from quire.supervisor.async_engine import AsyncEngine
from quire.supervisor.engine_handle import EngineProcess
from quire.supervisor.health import State

OPTIONS = EngineOptions(
    speculation="off", memory="256MiB", dtype="float32", max_num_seqs=32, max_model_len=512, threads=1
)
PROGRAM = str(Path(front_children.__file__))
HOPELESS = ("-c", "raise SystemExit(3)")


def host_of(kind=None, **options):
    program = {} if kind is None else {"program": (PROGRAM, kind)}
    options = {name: getattr(OPTIONS, name) for name in OPTIONS.__slots__} | options
    return EngineProcess(EngineOptions(**options), report=lambda line: None, progress=lambda *_: None, **program)


@asynccontextmanager
async def running(kind=None, watchdog=0.0, restart_timeout=600.0, **options):
    host = host_of(kind, **options)
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


async def until_up(engine):
    while engine.health().state is not State.SERVING:
        await asyncio.sleep(0.01)


async def answer(engine, name, prompt, **params):
    """All outputs of a request: by sequence the tokens, ids of logprobs and reason."""
    params = {"max_tokens": 400, "ignore_eos": True, **params}
    asked = SamplingParams(**params)
    told = [[[], [], None] for _ in range(asked.num_sequences)]
    stream = await engine.generate([Request(name, prompt, asked)])
    try:
        while any(reason is None for _, _, reason in told):
            for output in await anext(stream):
                one = told[output.index]
                one[0] += output.token_ids
                one[1] += [] if output.logprobs is None else output.logprobs.ids.tolist()
                one[2] = output.finish_reason
    finally:
        stream.close()
    return told


def questions(count):
    """Different prompts and parameters, by name."""
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.9},  # with the seed that the front end sets
        {"temperature": 1.0, "seed": 3, "n": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 0.8, "seed": 4, "logprobs": 2, "min_tokens": 20, "ignore_eos": False, "max_tokens": 90},
        {"temperature": 1.0, "seed": 5, "reasoning": {"begin": "", "end": "</think>", "begun": True, "budget": 60}},
    )
    return {f"r{i}": ([10 + i, *range(20, 24 + i % 9)], kinds[i % len(kinds)]) for i in range(count)}


def test_streams_go_on_however_often_the_engine_is_killed():
    asked = questions(24)

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
            kills, due = 0, chance.randint(500, 3000)
            before = engine.health().stats.generation_tokens
            while not disturbed.done():
                await asyncio.sleep(0.002)
                if engine.health().stats.generation_tokens - before >= due:  # independent of the machine's speed
                    os.kill(pid(engine), signal.SIGKILL)
                    kills += 1
                    await asyncio.sleep(0.1)
                    await until_up(engine)
                    due += chance.randint(500, 3000)
            assert await disturbed == undisturbed
            assert kills == engine.health().num_restarts >= 2
            stats = engine.health().stats
            assert (stats.kv_blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
            assert len(engine._open_requests) == 0

    scenario(work())


def test_a_request_that_ends_the_engine_is_found_and_fails_alone():
    async def work():
        async with running("deadly") as engine:
            asked = {f"r{i}": [10 + i, 20, 30] for i in range(50)}
            asked["r31"] = [10, front_children.POISON, 30]
            came = await asyncio.gather(
                *(answer(engine, name, prompt, max_tokens=20, temperature=0) for name, prompt in asked.items())
            )
            reasons = {name: told[0][2] for name, told in zip(asked, came, strict=True)}
            assert reasons.pop("r31") == "error"
            assert set(reasons.values()) == {"length"}
            assert engine.health().num_restarts <= 8
            assert (await answer(engine, "after", [5, 6], max_tokens=5))[0][2] == "length"

    scenario(work())


def test_an_embedding_and_prompt_logprobs_are_told_once():
    async def work():
        async with running("slow", max_num_batched_tokens=64) as engine:

            async def told(number):
                prompt = list(range(5, 405))
                pooled = Request(f"e{number}", prompt, SamplingParams(max_tokens=0), pooling=Pooling.MEAN)
                scored = Request(f"p{number}", prompt, SamplingParams(max_tokens=3, prompt_logprobs=1, seed=1))
                vectors, rows, tokens = [], [], []
                stream = await engine.generate([pooled, scored])
                open_ones = {pooled.id, scored.id}
                while open_ones:
                    for output in await anext(stream):
                        vectors += [] if output.pooled is None else [output.pooled]
                        rows += [] if output.prompt_logprobs is None else output.prompt_logprobs.ids.tolist()
                        tokens += output.token_ids
                        if output.finish_reason:
                            open_ones.discard(output.request_id)
                stream.close()
                return vectors, rows, tokens

            (vector,), *undisturbed = await told(0)
            again = asyncio.ensure_future(told(1))
            for _ in range(2):
                await asyncio.sleep(0.4)
                os.kill(pid(engine), signal.SIGKILL)
                await asyncio.sleep(0.1)
                await until_up(engine)
            (other,), *disturbed = await again
            assert disturbed == undisturbed
            assert len(disturbed[0]) == 399
            assert abs(other - vector).max() < 1e-3 * abs(vector).max()

    scenario(work())


def test_a_stopped_engine_is_red_within_two_seconds_and_is_started_anew(capfd):
    async def work():
        async with running(watchdog=2.5) as engine:
            before = await answer(engine, "a", [5, 6, 7], temperature=0)
            going_on = asyncio.ensure_future(answer(engine, "b", [5, 6, 7], temperature=0))
            await asyncio.sleep(0.1)
            os.kill(pid(engine), signal.SIGSTOP)
            stopped = time.monotonic()
            while not engine.health().problem:
                await asyncio.sleep(0.01)
            assert time.monotonic() - stopped < 2
            assert engine.health().state is State.STALLED
            assert await going_on == before
            assert engine.health().num_restarts == 1

    scenario(work())


def test_a_long_prompt_on_a_slow_model_is_no_stall():
    async def work():
        async with running("slow", max_model_len=2048, calibration=1.0, watchdog=1.0) as engine:
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


def test_a_stall_is_told_with_the_stacks_of_the_engine(capfd):
    host = host_of()
    host.launch()
    try:
        time.sleep(0.5)
        host.dump_stacks()
        time.sleep(0.5)
    finally:
        host.kill()
        assert host.wait() == "by signal SIGKILL"
        host.connection.close()
    assert "_turn" in capfd.readouterr().err


def test_what_cannot_be_built_is_told_by_type():
    with pytest.raises(ConfigError, match="max_model_len"):
        host_of(max_model_len=10**9).launch()


def test_an_end_is_told_whatever_ended_it():
    host = host_of()
    for end, told in (("exit(4)", "with exit code 4"), ("kill(9)", "by signal SIGKILL"), ("kill(40)", "by signal 40")):
        code = f"import os\nkill = lambda number: os.kill(os.getpid(), number)\n{end}"
        host.process = subprocess.Popen([sys.executable, "-c", code])
        assert host.wait() == told


def test_an_engine_that_dies_while_it_starts_is_given_up():
    host = host_of()
    host.program = HOPELESS
    with pytest.raises(EngineStopped, match="with exit code 3 while it started"):
        host.launch()


def test_an_engine_that_cannot_be_started_again_fails_what_is_open():
    async def work():
        async with running(restart_timeout=2.0) as engine:
            open_one = asyncio.ensure_future(answer(engine, "a", [5, 6, 7], max_tokens=400))
            while not engine.health().stats.generation_tokens:
                await asyncio.sleep(0.01)
            engine.engine_handle.program = HOPELESS
            os.kill(pid(engine), signal.SIGKILL)
            with pytest.raises(EngineStopped, match="has served for 2 s"):
                await open_one
            assert engine.health().state is State.FAILED
            assert "with exit code 3 while it started" in engine.health().start_error
            with pytest.raises(EngineStopped):
                await answer(engine, "b", [5])

    scenario(work())


def test_each_engine_writes_a_journal_of_its_own(tmp_path):
    journal = tmp_path / "journal"

    async def work():
        async with running(journal=str(journal)) as engine:
            going_on = asyncio.ensure_future(answer(engine, "a", [5, 6, 7]))
            while not engine.health().stats.num_running:
                await asyncio.sleep(0.001)
            os.kill(pid(engine), signal.SIGKILL)
            await going_on

    scenario(work())
    assert [one.name for one in sorted(tmp_path.iterdir())] == ["journal", "journal.1"]


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_journal_that_exists_or_cannot_be_written_does_not_stop_a_restart(tmp_path, is_writable):
    folder = tmp_path / "journals"
    folder.mkdir()

    async def work():
        async with running(journal=str(folder / "j"), restart_timeout=20.0) as engine:
            (folder / "j.1").write_bytes(b"of another server")
            going_on = asyncio.ensure_future(answer(engine, "a", [5, 6, 7]))
            while not engine.health().stats.num_running:
                await asyncio.sleep(0.001)
            if not is_writable:
                folder.rename(tmp_path / "away")
            os.kill(pid(engine), signal.SIGKILL)
            await going_on

    scenario(work())
    if is_writable:
        assert {one.name for one in folder.iterdir()} == {"j", "j.1", "j.2"}
        assert (folder / "j.1").read_bytes() == b"of another server"
    else:
        assert not folder.exists()


def test_kills_during_starts_do_not_end_the_server():
    """Six kills, each while an engine starts. The open request continues."""

    async def work():
        async with running() as engine:
            expected = await answer(engine, "a", [5, 6, 7], max_tokens=300, seed=1)
            going_on = asyncio.ensure_future(answer(engine, "b", [5, 6, 7], max_tokens=300, seed=1))
            while not engine.health().stats.num_running:
                await asyncio.sleep(0.001)
            killed = {pid(engine)}
            os.kill(pid(engine), signal.SIGKILL)
            for _ in range(6):
                while pid(engine) in killed:
                    await asyncio.sleep(0.001)
                killed.add(pid(engine))
                os.kill(pid(engine), signal.SIGKILL)
            assert await going_on == expected
            assert (engine.health().state, engine.health().num_restarts) == (State.SERVING, 1)

    scenario(work())


def test_a_model_that_is_away_for_a_while_is_loaded_when_it_is_back(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.supervisor.restart_policy.MAX_DELAY", 0.25)
    home, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(Path(quire.__file__).parent / "assets" / "demo_model", home)

    async def work():
        async with running(model=str(home)) as engine:
            home.rename(away)
            os.kill(pid(engine), signal.SIGKILL)
            going_on = asyncio.ensure_future(answer(engine, "a", [5, 6, 7]))
            while "model" not in engine.health().start_error:
                await asyncio.sleep(0.01)
            away.rename(home)
            await going_on
            assert engine.health().num_restarts == 1

    scenario(work())


def test_an_engine_ends_with_its_front_end():
    host = host_of()
    host.launch()
    host.connection.close()
    assert host.process.wait(10) == 0


def test_a_viewer_goes_on_with_the_whole_state_after_the_engine_was_killed():
    watcher = Watcher("", sees_all=True)

    async def work():
        async with running() as engine:
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
