"""Timing side channel: whether a tenant's latencies reveal what another tenant has cached, at a real server.

In each trial the victim sends a prompt, or another one of the same length. Then the observer sends the prompt, and
notes the latency, the CPU seconds of the server, which other programs hardly change, and the tokens that the engine
computed. Tokens are counted, so that a single trial shows a cache that is shared. AUC is the probability that the
answer to a cached prompt is faster; 0.5 means no information. It finds other differences. Without one, over n trials
of each kind, it has the standard deviation sqrt((2 n + 1) / 12) / n.
"""

import random
import time
from collections.abc import Callable, Iterator
from math import sqrt

import httpx
import numpy as np
import pytest
from multi_tenant_server import run_site

TRIALS = 200
CONTROLS = 60
WARM_UP = 10
LENGTH = 96  # tokens
# tenant and prompt -> seconds (latency, CPU time), computed tokens
Asks = Callable[[str, list[int]], tuple[tuple[float, float], int]]


@pytest.fixture(scope="module")
def site():
    with run_site("victim", "observer") as site:
        yield site


@pytest.fixture(scope="module")
def firsts() -> Iterator[int]:
    """First tokens, each once: no two prompts of the observer share KV."""
    return iter(range(3, 2048))


def trials(
    count: int, asks: Asks, firsts: Iterator[int], *, victim: str
) -> tuple[np.ndarray, float, set[int], set[int]]:
    """Runs `count` trials, half of them with a cached prompt. Returns the AUC of latency and CPU time (2,), their
    standard deviation without a difference, and the numbers of tokens that were computed for prompts that the victim
    has sent, and for others.
    """
    rng = random.Random(count)
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    computed: dict[bool, set[int]] = {True: set(), False: set()}
    kinds = [i % 2 == 0 for i in range(count)]
    rng.shuffle(kinds)
    for i, cached in enumerate([*kinds[:WARM_UP], *kinds]):
        prompt, other = ([next(firsts), *(rng.randrange(3, 2048) for _ in range(LENGTH - 1))] for _ in range(2))
        asks(victim, prompt if cached else other)
        seconds, num_tokens = asks("observer", prompt)
        if i >= WARM_UP:
            times[cached].append(seconds)
            computed[cached].add(num_tokens)
    cached_times, other_times = (np.array(times[kind]) for kind in (True, False))
    faster = (cached_times[:, None] < other_times).mean((0, 1)) + (cached_times[:, None] == other_times).mean(
        (0, 1)
    ) / 2
    deviation = sqrt((count + 1) / 12) / (count / 2)
    return faster, deviation, computed[True], computed[False]


@pytest.fixture(scope="module")
def asks(site) -> Iterator[Asks]:
    clients = {
        name: httpx.Client(base_url=site.url, headers={"authorization": f"Bearer {key}"}, timeout=60)
        for name, key in site.keys.items()
    }

    def ask(who: str, prompt: list[int]) -> tuple[tuple[float, float], int]:
        before = site.engine.stats().num_step_tokens
        begin, cpu_begin = time.perf_counter(), time.process_time()
        answer = clients[who].post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "temperature": 0})
        seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        assert answer.status_code == 200
        return seconds, site.engine.stats().num_step_tokens - before

    yield ask
    for client in clients.values():
        client.close()


def test_an_observer_of_its_own_cache_sees_what_is_cached(asks, firsts):
    auc, _, cached, other = trials(CONTROLS, asks, firsts, victim="observer")
    assert max(auc) > 0.9, "else the other test could not fail"
    assert max(cached) < min(other)


def test_an_observer_of_another_tenant_learns_nothing(asks, firsts):
    auc, deviation, cached, other = trials(TRIALS, asks, firsts, victim="victim")
    assert cached == other == {LENGTH}
    assert all(abs(auc - 0.5) < 4 * deviation), f"AUC {auc} over {TRIALS} trials"
