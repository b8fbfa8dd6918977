"""Engine processes of a fleet that are killed, stopped, or crashed by a request: the others go on with its requests."""

import asyncio
import math
import os
import signal

import pytest
from engine_processes import answer, pid, running, scenario, scripted
from scripted_engine_process import POISON
from waiting import until

from quire.core.request import Request
from quire.params import SamplingParams
from quire.startup.hardware import num_cores
from quire.supervisor.health import State

pytestmark = pytest.mark.skipif(num_cores() < 2, reason="two replicas need two cores")

NUM_KINDS = 8
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}


def kind_of(number):
    """The parameters of a request, and the number of tokens after which its stop string ends each sequence."""
    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 7, "logprobs": 2},
        {"temperature": 1.0, "seed": 3, "n": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5, "logprobs": 1},
        {"temperature": 0.8},  # with the seed that the front end sets
        {"temperature": 1.0, "seed": 9, "structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
        {"temperature": 1.0, "seed": 4, "structured_outputs": {"regex": "[a-f]{300}"}, "ignore_eos": False},
        {"temperature": 1.0, "seed": 5, "prompt_logprobs": 1, "logprobs": 0},
        {"temperature": 1.0, "seed": 6, "n": 2},
    )
    return kinds[number % NUM_KINDS], 33 + number if number % NUM_KINDS == NUM_KINDS - 1 else None


def pairs(logprobs):
    """(token, logprob) of each place, without the columns for requests of the batch that ask for more."""
    rows = zip(logprobs.ids.tolist(), logprobs.values.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] > -math.inf] for row in rows]


async def heard(fleet, name, number, num_tokens):
    """All of one request: by sequence tokens, logprobs and finish reason, and the logprobs of the prompt."""
    kind, stop_after = kind_of(number)
    params = SamplingParams(**{"max_tokens": num_tokens, "ignore_eos": True, "deterministic": True, **kind})
    prompt = [10 + number, *range(20, 24 + number % 9)]
    sequences, scored = [[[], [], None] for _ in range(params.num_sequences)], []
    stream = await fleet.generate([Request(name, prompt, params)])
    try:
        while any(reason is None for *_, reason in sequences):
            for output in await anext(stream):
                if output.prompt_logprobs is not None:
                    scored += pairs(output.prompt_logprobs)
                one = sequences[output.index]
                if one[2] is not None:
                    continue
                one[0] += output.token_ids
                if output.logprobs is not None:
                    one[1] += pairs(output.logprobs)
                one[2] = output.error or output.finish_reason
                if stop_after is not None and len(one[0]) >= stop_after:
                    del one[0][stop_after:]
                    one[2] = "stop string"
                    fleet.finish(name, output.index, stop_after)
    finally:
        stream.close()
    return sequences, scored


async def all_heard(fleet, num_requests, num_tokens=200):
    fleet._num_requests = 0  # the same seeds each time
    numbers = range(num_requests)
    return await asyncio.gather(*(heard(fleet, f"r{number}", number, num_tokens) for number in numbers))


def serving(fleet):
    return [one.health.state is State.SERVING for one in fleet.statuses()]


def test_requests_of_killed_and_stopped_engines_go_on_elsewhere_as_undisturbed():
    async def work():
        async with running(replicas=2, watchdog=1.0) as fleet:
            undisturbed = await all_heard(fleet, 16)
            for replica, number in ((0, signal.SIGKILL), (1, signal.SIGSTOP)):
                due = fleet.health().stats.generation_tokens + 800
                disturbed = asyncio.ensure_future(all_heard(fleet, 16))
                await until(lambda due=due: fleet.health().stats.generation_tokens > due)
                assert fleet.statuses()[replica].num_requests
                os.kill(pid(fleet, replica), number)
                await until(lambda one=replica: not fleet.statuses()[one].num_requests)
                assert fleet.statuses()[replica].health.num_restarts == 0, "they moved before the next engine"
                assert await disturbed == undisturbed
                await until(lambda: all(serving(fleet)))
            assert [one.health.num_restarts for one in fleet.statuses()] == [1, 1]
            stats = fleet.health().stats
            assert (stats.kv_blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
            assert len(fleet.open_requests) == 0

    scenario(work())


def test_one_request_that_crashes_engines_takes_down_one_replica_only():
    async def work():
        async with running(scripted("deadly"), replicas=2) as fleet:
            asked = {f"r{i}": [10 + i, 20, 30] for i in range(50)}
            asked["r13"] = [10, POISON, 30]
            came = asyncio.gather(
                *(answer(fleet, name, prompt, max_tokens=60, temperature=0) for name, prompt in asked.items())
            )
            while not came.done():
                assert any(serving(fleet)), "two replicas are down"
                await asyncio.sleep(0.001)
            reasons = {name: one[0][2] for name, one in zip(asked, await came, strict=True)}
            assert reasons.pop("r13") == "error"
            assert set(reasons.values()) == {"length"}
            restarts = [one.health.num_restarts for one in fleet.statuses()]
            assert min(restarts) == 0
            assert 2 <= max(restarts) <= 7

    scenario(work())
