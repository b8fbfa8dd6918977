"""How long the mind takes: `plan` + `commit` for a full batch of decoding sequences, nothing else.

    python -m benchmarks.mind [--sequences 256] [--steps 2000] [--json FILE]

Prints the median and the 99th percentile of a step, and of its parts. The runner is not timed: its
results are made on the spot.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, KVGroup, SchedulerConfig
from quire.core.request import Request
from quire.core.step import StepResult
from quire.params import SamplingParams
from quire.sched.scheduler import Scheduler

PROMPT = 64
BLOCK_SIZE = 16


def measure(num_sequences: int, num_steps: int) -> dict[str, list[float]]:
    """Seconds of each part of each step, with `num_sequences` running throughout."""
    length = PROMPT + num_steps + 8
    num_blocks = num_sequences * (-(-length // BLOCK_SIZE) + 1)
    group = KVGroup((0,), "full", 1, 64, "bfloat16", num_blocks, 2 * 64 * 2 * BLOCK_SIZE)
    config = SchedulerConfig(num_sequences, max(2048, num_sequences * PROMPT), length, 1e9, 0.01, 1)
    scheduler = Scheduler(config, KVCache(CacheConfig(BLOCK_SIZE, (group,))))
    params = SamplingParams(max_tokens=num_steps + 2, seed=1)
    for i in range(num_sequences):
        # lengths differ so that blocks fill up at different steps, as they do in life
        scheduler.add(Request(id=str(i), prompt=[1] * (PROMPT - i % BLOCK_SIZE), params=params), 0.0)
    parts: dict[str, list[float]] = {"plan": [], "commit": []}
    tokens = np.arange(num_sequences, dtype=np.int32) % 100
    counts = np.ones(num_sequences, np.int32)
    for i in range(num_steps):
        start = time.perf_counter()
        step = scheduler.plan(float(i))
        planned = time.perf_counter()
        assert step is not None
        result = StepResult(step.id, 1e-3, counts[: len(step.chunks)], tokens[: len(step.chunks)])
        made = time.perf_counter()
        scheduler.commit(result, float(i))
        parts["plan"].append(planned - start)
        parts["commit"].append(time.perf_counter() - made)
    assert scheduler.num_running == num_sequences
    return {name: seconds[1:] for name, seconds in parts.items()}  # the first step is the prefill


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    parts = measure(args.sequences, args.steps)
    parts["plan+commit"] = [a + b for a, b in zip(parts["plan"], parts["commit"], strict=True)]
    figures = {
        name: {"median_ms": statistics.median(s) * 1e3, "p99_ms": statistics.quantiles(s, n=100)[98] * 1e3}
        for name, s in parts.items()
    }
    print(f"{args.sequences} running sequences, {args.steps} steps, {platform.machine()}, {platform.python_version()}")
    for name, figure in figures.items():
        print(f"  {name:<12} median {figure['median_ms']:.3f} ms   p99 {figure['p99_ms']:.3f} ms")
    if args.json:
        args.json.write_text(json.dumps({"sequences": args.sequences, "steps": args.steps, **figures}, indent=1))


if __name__ == "__main__":
    main()
