"""The service with the real engine: when cancelled requests are freed."""

import asyncio
import dataclasses
import time

import pytest
from embedded_model_server import service_of, small_engine
from waiting import until

from quire.core.request import Namespace
from quire.params import SamplingParams


class Watched:
    """An engine that records its metrics after each step."""

    def __init__(self, engine):
        self._engine = engine
        self.seen = []
        self.pause = 0.0  # seconds before a step

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self, on_launch):
        time.sleep(self.pause)
        outputs = self._engine.step(on_launch)
        self.seen.append(self._engine.stats())
        return outputs


def run(scenario):
    """Run `scenario(service, watched)` with a started engine."""

    async def main():
        built = small_engine()
        watched = Watched(built.engine)
        service = service_of(dataclasses.replace(built, engine=watched))
        await service.engine.start()
        try:
            await asyncio.wait_for(scenario(service, watched), 60)
        finally:
            await service.close()

    asyncio.run(main())


async def start(service, **params):
    asked = SamplingParams(max_tokens=400, ignore_eos=True, seed=3, **params)
    return await service.start("r", await service.tokenize("", ["One Tuesday Mira went"], [asked]), Namespace())


@pytest.mark.parametrize("n", [1, 3])
def test_a_closed_reply_frees_its_kv_blocks_within_50_steps(n):
    async def scenario(service, watched):
        reply = await start(service, n=n)
        deltas = reply.deltas()
        await anext(deltas)
        watched.pause = 0.02  # of each of about 400 steps, as the message takes time
        before = watched.stats().num_steps
        reply.close()
        await until(lambda: not watched.stats().kv_blocks_used)
        assert watched.stats().num_steps <= before + 50
        await deltas.aclose()

    run(scenario)


def test_the_engine_hears_of_a_stop_string_while_another_sequence_goes_on():
    async def scenario(service, watched):
        free = await start(service, n=2)
        await free.end()
        result = free.transcripts[0].result()
        free.close()
        first, second = (output.text for output in result.outputs)
        stop = next(first[i : i + 8] for i in range(20, len(first)) if first[i : i + 8] not in second)
        watched.seen.clear()
        reply = await start(service, n=2, stop=(stop,))
        await reply.end()
        result = reply.transcripts[0].result()
        reply.close()
        assert [output.finish_reason for output in result.outputs] == ["stop", "length"]
        assert {stats.num_running for stats in watched.seen} >= {1, 2}
        alone = -(-(len(result.prompt_token_ids) + 400) // 16)
        assert max(stats.kv_blocks_used for stats in watched.seen) < 1.5 * alone

    run(scenario)
