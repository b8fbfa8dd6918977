"""Engine processes that stall, refuse to start or end, and what the front end notices of that."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import misbehaving_engine_process
import pytest
from engine_processes import HOPELESS, answer, host_of, pid, running, scenario, scripted, until_running
from waiting import until

from quire.errors import ConfigError, EngineStopped
from quire.supervisor.health import STALL_SECONDS, State
from quire.supervisor.replica import WATCHDOG_INTERVAL

SLOW_MODEL = (misbehaving_engine_process.__file__, "slow")


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
