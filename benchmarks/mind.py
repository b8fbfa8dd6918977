"""Scheduler time: `plan` + `commit` for a full batch of decoding sequences, without a model.

    python -m benchmarks.mind [--sequences 256] [--waiting 0] [--index radix] [--steps 2000] [--json FILE]

Prints the median and the 99th percentile of a step and of its parts. The runner is not timed; its results are made up.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import get_args

import numpy as np

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, KVGroup, PrefixIndexKind, SchedulerConfig
from quire.core.request import Request
from quire.core.step import StepResult
from quire.params import SamplingParams
from quire.scheduler.scheduler import Scheduler

PROMPT = 64
BLOCK_SIZE = 16


def measure(
    num_sequences: int, num_steps: int, *, num_waiting: int = 0, prefix_index: PrefixIndexKind = "radix"
) -> dict[str, list[float]]:
    """Seconds of each part of each step, with `num_sequences` running throughout and `waiting` ones in the queue."""
    length = PROMPT + num_steps + 8
    num_blocks = num_sequences * (-(-length // BLOCK_SIZE) + 1)
    group = KVGroup((0,), "full", 1, 64, "bfloat16", num_blocks, 2 * 64 * 2 * BLOCK_SIZE)
    config = SchedulerConfig(num_sequences, max(2048, num_sequences * PROMPT), length, 1e9, 0.01, 1)
    scheduler = Scheduler(config, KVCache(CacheConfig(BLOCK_SIZE, (group,), prefix_index)))
    params = SamplingParams(max_tokens=num_steps + 2, seed=1)
    for i in range(num_sequences + num_waiting):
        # Lengths differ, so that sequences fill their blocks at different steps. Tokens differ, so that no prefix is
        # shared.
        scheduler.add(Request(id=str(i), prompt=[i] * (PROMPT - i % BLOCK_SIZE), params=params), 0.0)
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
    assert (scheduler.num_running, scheduler.num_waiting) == (num_sequences, num_waiting)
    parts["plan+commit"] = [a + b for a, b in zip(parts["plan"], parts["commit"], strict=True)]
    return {name: seconds[1:] for name, seconds in parts.items()}  # the first step is the prefill


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--index", choices=get_args(PrefixIndexKind), default="radix")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    parts = measure(args.sequences, args.steps, num_waiting=args.waiting, prefix_index=args.index)
    figures = {
        name: {"median_ms": statistics.median(s) * 1e3, "p99_ms": statistics.quantiles(s, n=100)[98] * 1e3}
        for name, s in parts.items()
    }
    print(
        f"{args.sequences} running and {args.waiting} waiting sequences, index {args.index}, {args.steps} steps, "
        f"{platform.machine()}, {platform.python_version()}"
    )
    for name, figure in figures.items():
        print(f"  {name:<12} median {figure['median_ms']:.3f} ms   p99 {figure['p99_ms']:.3f} ms")
    if args.json:
        setting = {name: getattr(args, name) for name in ("sequences", "waiting", "index", "steps")}
        args.json.write_text(json.dumps({**setting, **figures}, indent=1))


if __name__ == "__main__":
    main()
