"""Timing side channel: whether a tenant's latencies reveal what another tenant has cached, at a real server.

In each trial the victim sends a prompt, or another one of the same length. Then the observer sends the prompt and
measures the latency. AUC is the probability that the answer to a cached prompt is faster; 0.5 means no information.
"""

import random
import time
from collections.abc import Callable, Iterator

import httpx
import numpy as np
import pytest
from multi_tenant_server import run_site

TRIALS = 2000
FIRST_TRIALS = 600  # enough if their AUC is near 0.5: one of 0.6 is in 1 of 600 cases
CONTROLS = 200
LENGTH = 96  # tokens


@pytest.fixture(scope="module")
def site():
    with run_site("victim", "observer") as site:
        yield site


def trials(count: int, asks: Callable[[str, list[int]], float], *, victim: str) -> float:
    """The AUC over `count` trials."""
    rng = random.Random(count)
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(count + 10):
        prompt = [rng.randrange(3, 2048) for _ in range(LENGTH)]
        other = [rng.randrange(3, 2048) for _ in range(LENGTH)]
        cached = bool(rng.getrandbits(1))
        asks(victim, prompt if cached else other)
        seconds = asks("observer", prompt)
        if i >= 10:  # the first ones are a warm-up
            times[cached].append(seconds)
    cached_times, other_times = (np.array(times[kind]) for kind in (True, False))
    faster = (cached_times[:, None] < other_times).mean() + (cached_times[:, None] == other_times).mean() / 2
    return float(faster)


@pytest.fixture(scope="module")
def asks(site) -> Iterator[Callable[[str, list[int]], float]]:
    clients = {
        name: httpx.Client(base_url=site.url, headers={"authorization": f"Bearer {key}"}, timeout=60)
        for name, key in site.keys.items()
    }

    def ask(who: str, prompt: list[int]) -> float:
        begin = time.perf_counter()
        answer = clients[who].post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "temperature": 0})
        seconds = time.perf_counter() - begin
        assert answer.status_code == 200
        return seconds

    yield ask
    for client in clients.values():
        client.close()


def test_an_observer_of_its_own_cache_can_tell(asks):
    assert trials(CONTROLS, asks, victim="observer") > 0.9, "else the other test could not fail"


def test_an_observer_of_another_tenant_cannot(asks):
    for count in (FIRST_TRIALS, TRIALS):
        auc = trials(count, asks, victim="victim")
        print(f"AUC {auc:.3f} over {count} trials")
        if 0.47 <= auc <= 0.53:
            return
    assert 0.45 <= auc <= 0.55
