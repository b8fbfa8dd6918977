"""Throughput of a pool that is too small for its demand, under a virtual clock.

    python -m benchmarks.overload [--seconds 600] [--json FILE]

Requests arrive at random, at multiples of the rate that the engine can sustain. A system without an admission watermark
admits every sequence that fits, preempts sequences as they grow, and computes prompts again and again: its throughput
falls while demand rises. The real scheduler runs over a model of a runner, in which a step takes a fixed time and a
time per token.
"""

import argparse
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.result_file import write_result
from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, PreemptionMode, PrefixIndexKind, SchedulerConfig
from quire.core.kv_groups import KVGroup, kv_kind
from quire.core.request import Request
from quire.core.step import ChunkOutput, Step, StepResult
from quire.params import SamplingParams
from quire.scheduler.scheduler import Scheduler

SECONDS_PER_STEP, SECONDS_PER_TOKEN = 0.02, 0.0002
BLOCK_SIZE = 16
BYTES_PER_SECOND = 10e9  # between device and host pool
BYTES_PER_TOKEN = 12_288
_ROWS, _STEP_TOKENS, _LENGTH = 256, 2048, 2048
_PROMPT, _OUTPUT = (64, 512), (16, 1024)  # minimum and maximum tokens; outputs are short more often than long
_WARM = 0.2  # share of the time that is not counted, until the pool is full


@dataclass(frozen=True, slots=True)
class Load:
    """Results of a run with one arrival rate."""

    requests_per_second: float
    tokens_per_second: float  # output tokens
    steps: int
    preemptions: int
    recomputed_tokens: int  # tokens that were computed before
    waiting: int  # at the end


class Modelled:
    """A runner that computes nothing and returns a modelled duration."""

    def run(self, step: Step) -> StepResult:
        """The step's result, with token 1 for each sampled token."""
        counts = (step.chunks.outputs == ChunkOutput.SAMPLE).astype(np.int32)
        seconds = SECONDS_PER_STEP + SECONDS_PER_TOKEN * step.num_tokens
        copied, swaps_done = [0, 0], []
        for move in step.moves:
            if "host" in (move.source, move.target):
                swaps_done.append(move.id)
                copied[move.source == "host"] += len(move.pairs) * BLOCK_SIZE * BYTES_PER_TOKEN
        swaps = (copied[0] / BYTES_PER_SECOND, copied[1] / BYTES_PER_SECOND)
        tokens = np.ones(int(counts.sum()), np.int32)
        return StepResult(step.id, seconds, counts, tokens, done_moves=swaps_done, swap_seconds=swaps)


def lengths(rng: Random) -> tuple[int, int]:
    """Random lengths of a prompt and of its output, in tokens."""
    output = min(_OUTPUT[1], max(_OUTPUT[0], int(rng.lognormvariate(5.0, 0.8))))
    return rng.randint(*_PROMPT), output


def under(
    rate: float,
    seconds: float,
    *,
    num_blocks: int = 1200,
    prefix_index: PrefixIndexKind = "radix",
    preemption: PreemptionMode = "recompute",
    num_host_blocks: int = 0,
    seed: int = 0,
) -> Load:
    """Results with `rate` arriving requests per second."""
    size = BLOCK_SIZE * BYTES_PER_TOKEN
    group = KVGroup((0,), kv_kind(1, 64), "bfloat16", num_blocks, size, num_host_blocks=num_host_blocks)
    config = SchedulerConfig(_ROWS, _STEP_TOKENS, _LENGTH, 0.5, 0.01, 1, preemption=preemption)
    scheduler = Scheduler(config, KVCache(CacheConfig(BLOCK_SIZE, (group,), prefix_index)))
    runner, rng = Modelled(), Random(seed)
    arrivals = deque[float]()
    now, at, num, num_steps, counted, computed = 0.0, rng.expovariate(rate), 0, 0, 0, 0
    needed = 0  # computed output tokens; the last token of each output is not computed
    while now < seconds:
        while at <= now:
            prompt, output = lengths(rng)
            tokens = [rng.randrange(3, 30_000) for _ in range(prompt)]
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, seed=0)
            scheduler.add(Request(id=str(num), prompt=tokens, params=params), at)
            arrivals.append(at)
            num, at = num + 1, at + rng.expovariate(rate)
        step = scheduler.plan(now)
        if step is None:
            now = at
            continue
        result = runner.run(step)
        now += result.seconds + sum(result.swap_seconds)
        outputs = scheduler.commit(result, now)
        num_steps += 1
        computed += step.num_tokens
        needed += sum(len(one.token_ids) - (one.finish_reason is not None) for one in outputs)
        if now >= _WARM * seconds:
            counted += sum(len(one.token_ids) for one in outputs)
    admitted = scheduler.request_stats.num_query_tokens - scheduler.request_stats.num_hit_tokens
    return Load(
        rate,
        counted / ((1 - _WARM) * seconds),
        num_steps,
        scheduler.request_stats.num_preemptions,
        max(0, computed - needed - admitted),
        scheduler.num_waiting,
    )


def capacity(seconds: float, **options: object) -> Load:
    """The run with the most tokens per second whose queue does not grow, by bisection of the rate."""
    low, high = 0.0, 40.0
    best = under(1.0, seconds, **options)  # type: ignore[arg-type]
    for _ in range(7):
        rate = (low + high) / 2
        load = under(rate, seconds, **options)  # type: ignore[arg-type]
        if load.waiting > 0.05 * rate * seconds:
            high = rate
        else:
            low, best = rate, load if load.tokens_per_second > best.tokens_per_second else best
    return best


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the virtual clock")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name, options in {
        "recompute": {},
        "recompute, no prefix cache": {"prefix_index": "none"},
        "swap": {"preemption": "swap", "num_host_blocks": 1200},
    }.items():
        at_capacity = capacity(args.seconds / 4, **options)
        rate = at_capacity.requests_per_second
        for factor in (1, 1.5, 3):
            load = under(factor * rate, args.seconds, **options)  # type: ignore[arg-type]
            if factor == 1:
                base = load
            rows.append({"preemption": name, "demand": factor, **asdict(load)})
            print(
                f"{name:28} {factor:4}x {load.tokens_per_second:7.0f} tokens/s "
                f"({load.tokens_per_second / base.tokens_per_second:.3f} of capacity) "
                f"{load.preemptions:6} preemptions, {load.recomputed_tokens:8} tokens recomputed",
                flush=True,
            )
    if args.json:
        write_result(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
