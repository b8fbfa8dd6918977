"""Engines in processes of their own, as servers have them: with the embedded model, or scripted without a model."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import scripted_engine_process
from msgspec.structs import replace
from waiting import until

from quire.config import EngineOptions
from quire.core.request import Request
from quire.fleet.fleet import Fleet
from quire.params import SamplingParams
from quire.startup.replica_share import WHOLE, ReplicaShare
from quire.supervisor.engine_handle import EngineProcess
from quire.supervisor.health import State
from quire.supervisor.spawn import PROGRAM

OPTIONS = EngineOptions(
    speculation="off", memory="256MiB", dtype="float32", max_num_seqs=32, max_model_len=512, threads=1
)
SECRET = bytes(range(32))  # of a fleet
HOPELESS = ("-ISc", "raise SystemExit(3)")


def scripted(*kind):
    """The program of an engine without a model. kind: see `scripted_engine_process`."""
    return (scripted_engine_process.__file__, *map(str, kind))


def host_of(program=PROGRAM, share=WHOLE, **options):
    """The process of an engine, not launched. options: those of OPTIONS that are changed."""
    options = EngineOptions(**{name: getattr(OPTIONS, name) for name in OPTIONS.__slots__} | options)
    return EngineProcess(options, report=lambda line: None, progress=lambda *_: None, program=program, share=share)


@asynccontextmanager
async def running(program=PROGRAM, watchdog=0.0, restart_timeout=600.0, replicas=1, **options):
    """Context manager: engines in processes of their own. program: arguments of the Python interpreter."""
    hosts = [host_of(program, ReplicaShare(count=replicas, secret=SECRET), **options)]
    await asyncio.to_thread(hosts[0].launch)
    shares = [replace(hosts[0].share, index=index) for index in range(1, replicas)]
    hosts += [host_of(program, share, **options) for share in shares]
    await asyncio.gather(*(asyncio.to_thread(host.launch) for host in hosts[1:]))
    engine = Fleet(*hosts, watchdog=watchdog, restart_timeout=restart_timeout)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def scenario(work):
    """Run a coroutine to its end, for two minutes at most."""
    asyncio.run(asyncio.wait_for(work, 120))


def pid(engine, replica=0):
    """The process id of a replica's engine."""
    return engine.engine_handles[replica].process.pid


async def kill(engine):
    """Kill the engine, and wait until the next one serves."""
    number = engine.health().num_restarts
    os.kill(pid(engine), signal.SIGKILL)
    await until(lambda: engine.health().num_restarts > number and engine.health().state is State.SERVING)


async def until_steps(engine, number):
    """Wait until engines have committed this many steps in all."""
    await until(lambda: engine.health().stats.num_steps >= number)


async def until_running(engine):
    """Wait until a request runs."""
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
