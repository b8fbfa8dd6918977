"""Streams while their engine is killed repeatedly. Each must end like an undisturbed one."""

import asyncio
from random import Random
from typing import NamedTuple

from benchmarks.trust.client import Answer, queries, stream
from benchmarks.trust.server import Server, served

FLAGS = (
    *("--dtype", "float32", "--memory", "512MiB", "--max-num-seqs", "64", "--max-model-len", "2048"),
    *("--speculation", "auto"),
)


class Chaos(NamedTuple):
    """Results of a run."""

    num_streams: int  # run while engines were killed
    num_kills: int
    num_failed: int
    num_different: int
    undisturbed_seconds: float  # of one round without kills
    disturbed_seconds: float  # of the longest round with kills
    num_restarts: int
    held: dict[str, object]

    @property
    def good(self) -> bool:
        """Whether clients saw nothing except pauses."""
        return not (self.num_failed or self.num_different or self.held) and self.num_restarts == self.num_kills > 0


def chaos(num_streams: int = 200, num_kills: int = 20, seed: int = 1, max_tokens: int = 160) -> Chaos:
    """Run rounds of `num_streams` at once until the engine was killed `num_kills` times."""
    with served(*FLAGS) as server:
        return asyncio.run(_chaos(server, num_streams, num_kills, seed, max_tokens))


async def _chaos(server: Server, num_streams: int, num_kills: int, seed: int, max_tokens: int) -> Chaos:
    asked = queries(num_streams, seed, max_tokens)
    undisturbed, seconds = await _round(server, asked)
    chance = Random(seed)
    answers: list[tuple[Answer, Answer]] = []
    kills, longest = 0, 0.0
    while kills < num_kills:
        running = asyncio.ensure_future(_round(server, asked))
        while not running.done():
            await asyncio.sleep(chance.uniform(0.05, max(0.2, seconds / 2)))
            if kills < num_kills and not running.done():
                kills += await asyncio.to_thread(server.kill_engine)
        disturbed, took = await running
        longest = max(longest, took)
        answers += zip(undisturbed, disturbed, strict=True)
    held = await asyncio.to_thread(server.held)  # waits until the restarted engine serves
    health = await asyncio.to_thread(server.health)
    return Chaos(
        len(answers),
        kills,
        sum(bool(one.problem) for _, one in answers) + sum(bool(one.problem) for one in undisturbed),
        sum(before.texts != after.texts for before, after in answers),
        round(seconds, 2),
        round(longest, 2),
        int(health["engine_restarts"]),  # type: ignore[call-overload]  # a number
        held,
    )


async def _round(server: Server, asked: list[dict[str, object]]) -> tuple[list[Answer], float]:
    clock = asyncio.get_running_loop().time
    start = clock()
    answers = await asyncio.gather(*(stream(server.url, query) for query in asked))
    return list(answers), clock() - start
