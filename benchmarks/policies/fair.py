"""Fairness: the effect of one tenant's flood on another tenant's time to first token, in virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from benchmarks.small_engines import limits, memory, poisson, simulated
from quire.planner.workloads import Session, Turn

SECONDS = 60.0
# Requests per second. The machine completes about 45: the loud tenant normally needs half, the quiet one a quarter.
QUIET, LOUD = 11.0, 22.0
NUM_PROMPT, NUM_OUTPUT = 200, 60  # mean tokens


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one tenant: requests per second, and their mean lengths in tokens."""

    rate: float
    num_prompt: int = NUM_PROMPT
    num_output: int = NUM_OUTPUT


def arrivals(loads: dict[str, Load], seconds: float, seed: int) -> list[Session]:
    """Poisson arrivals of single requests of every tenant. Those of one tenant do not depend on the others."""
    found = []
    for tenant, load in loads.items():
        rng = Random(f"{tenant}-{seed}")
        times = poisson(np.random.default_rng(rng.randrange(2**32)), load.rate, seconds)
        for at in times:
            prompt = [
                rng.randrange(32000) for _ in range(rng.randrange(load.num_prompt // 2, load.num_prompt * 3 // 2))
            ]
            num_output = rng.randrange(load.num_output // 2, load.num_output * 3 // 2)
            found.append(Session(at, (Turn((prompt,), num_output),), tenant))
    return sorted(found, key=lambda one: one.at)


def waits(
    policy: str, loads: dict[str, Load], *, seconds: float = SECONDS, seed: int = 0, **changed: object
) -> dict[str, list[float]]:
    """Seconds to the first token of each request, by tenant; infinite if there was none before the end."""
    config = limits(policy, **({"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 4096} | changed))
    result = simulated(config, memory(4096), 8e-3, 5e-5).run(arrivals(loads, seconds, seed), until=seconds * 1.5)
    found: dict[str, list[float]] = {tenant: [] for tenant in loads}
    for one in result.requests:
        found[one.tenant].append(one.ttft)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that a share `share` of the values does not exceed. Values may be infinite."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def harm(
    policy: str, *, flood: float = 10.0, seconds: float = SECONDS, seeds: Sequence[int] = (0,)
) -> dict[str, float]:
    """The quiet tenant's 99th percentile of seconds to the first token, under the normal load and under the flood."""
    found: list[list[float]] = [[], []]
    for seed in seeds:
        for pooled, rate in zip(found, (LOUD, flood * LOUD), strict=True):
            loads = {"quiet": Load(QUIET), "loud": Load(rate)}
            pooled += waits(policy, loads, seconds=seconds, seed=seed)["quiet"]
    before, after = (percentile(pooled, 0.99) for pooled in found)
    return {"usual_s": before, "flooded_s": after, "moved": after / before - 1}


def fair(*, quick: bool = False) -> dict[str, object]:
    """Both policies in virtual time: single seeds, and the requests of all seeds together."""
    rows: dict[str, object] = {}
    seconds, seeds = (5.0, [0]) if quick else (SECONDS, list(range(5)))
    for policy in ("fcfs", "fair"):
        for some in ([[seed] for seed in seeds] if policy == "fair" else []) + [seeds]:
            rows[f"{policy}, seeds {some}"] = harm(policy, seconds=seconds, seeds=some)
    return rows
