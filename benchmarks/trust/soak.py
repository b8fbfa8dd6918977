"""All kinds of misbehaviour at once for a chosen time. Afterwards nothing is held, and answers are unchanged."""

import asyncio
from collections import Counter
from random import Random
from typing import NamedTuple

from benchmarks.trust.chaos import FLAGS
from benchmarks.trust.client import Answer, leave_early, queries, send_too_much, stream
from benchmarks.trust.server import Server, served

_WORKERS = 12
_TOO_MUCH = 17 * 2**20  # bytes
_SECONDS_BETWEEN_KILLS = (4.0, 12.0)
_WARM = 0.4  # share of the time after which memory should stop growing


class Soak(NamedTuple):
    """Results of a run."""

    seconds: float
    asked: dict[str, int]  # requests by kind
    num_kills: int
    wrong: list[str]  # a sample of the errors
    grown: int  # growth of the front-end process in bytes after the warm-up
    held: dict[str, object]

    @property
    def good(self) -> bool:
        """Whether there were no errors and no growth."""
        return not self.wrong and not self.held and self.grown < 32 * 2**20


def soak(seconds: float = 60.0, seed: int = 1) -> Soak:
    """Run for `seconds`."""
    with served(*FLAGS) as server:
        return asyncio.run(_Soaking(server, seed).run(seconds))


class _Soaking:
    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._seed = seed
        self._asked = queries(40, seed, max_tokens=80)
        self._right: list[Answer] = []
        self._counts: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._num_kills = 0

    async def run(self, seconds: float) -> Soak:
        self._right = list(await asyncio.gather(*(stream(self._server.url, query) for query in self._asked)))
        self._wrong += [one.problem for one in self._right if one.problem]
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        working = [asyncio.ensure_future(self._work(Random(f"{self._seed} {i}"), end)) for i in range(_WORKERS)]
        working.append(asyncio.ensure_future(self._kill(Random(self._seed), end)))
        await asyncio.sleep(_WARM * seconds)
        warm = self._server.resident()
        await asyncio.gather(*working)
        await self._check("at the end", self._asked)
        held = await asyncio.to_thread(self._server.held)
        grown = self._server.resident() - warm
        return Soak(seconds, dict(self._counts), self._num_kills, self._wrong[:10], grown, held)

    async def _work(self, chance: Random, end: float) -> None:
        clock = asyncio.get_running_loop().time
        ways = {self._answer: 10, self._slow: 2, self._leave: 5, self._too_much: 1, self._nonsense: 2}
        while clock() < end:
            (way,) = chance.choices(list(ways), list(ways.values()))
            self._counts[way.__name__.strip("_")] += 1
            await way(chance)

    async def _kill(self, chance: Random, end: float) -> None:
        clock = asyncio.get_running_loop().time
        while clock() < end:
            await asyncio.sleep(min(chance.uniform(*_SECONDS_BETWEEN_KILLS), max(0.0, end - clock())))
            self._num_kills += await asyncio.to_thread(self._server.kill_engine)

    async def _answer(self, chance: Random, pause: float = 0.0) -> None:
        place = chance.randrange(len(self._asked))
        self._compare(place, await stream(self._server.url, self._asked[place], pause))

    async def _slow(self, chance: Random) -> None:
        await self._answer(chance, pause=0.05)

    async def _leave(self, chance: Random) -> None:
        await leave_early(self._server.url, {**chance.choice(self._asked), "max_tokens": 900}, chance.uniform(0, 0.5))

    async def _too_much(self, _chance: Random) -> None:
        status = await send_too_much(self._server.url, _TOO_MUCH)
        if status not in (0, 413):
            self._wrong.append(f"a body that is too large was answered with {status}")

    async def _nonsense(self, chance: Random) -> None:
        query = {**chance.choice(self._asked), chance.choice(("temperature", "max_tokens", "n", "prompt")): -7.5}
        answer = await stream(self._server.url, query)
        if answer.status != 400:
            self._wrong.append(f"nonsense was answered with {answer.status}: {answer.problem}")

    async def _check(self, when: str, asked: list[dict[str, object]]) -> None:
        for place, answer in enumerate(await asyncio.gather(*(stream(self._server.url, query) for query in asked))):
            self._compare(place, answer, when)

    def _compare(self, place: int, answer: Answer, when: str = "") -> None:
        if answer.problem:
            self._wrong.append(f"{when} query {place} failed: {answer.status} {answer.problem}")
        elif answer.texts != self._right[place].texts:
            self._wrong.append(f"{when} query {place} was answered differently")
