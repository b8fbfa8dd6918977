"""Scheduler time: `plan` + `commit` of full batches without a model, alone or beside another version of quire.

    python -m benchmarks.scheduling_time [--sequences 256] [--waiting 0] [--index radix] [--policy fcfs] [--steps 400]
                                         [--drafts N] [--json FILE] [--before CHECKOUT [--pairs 15]]

Loads: *decoding*, where all sequences run throughout, and *churn*, where about four sequences end and begin in each
step. In both, --waiting further requests wait throughout. With --drafts N also *drafting*: decoding of texts that
repeat themselves, with N drafts, all of them right, of as many sequences as may have drafts in one step. Figures are
CPU time of this process in milliseconds per step: median and 99th percentile over the steps. The runner is not timed;
its results are made up. With --before both versions run in turns, each in processes of its own, and the ratios of their
medians are printed with an interval that has the median of pairs with 95 % confidence.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import get_args

import numpy as np
from rich.progress import track

from quire.cache.kv_cache import KVCache
from quire.config import DEFAULT_POLICY, CacheConfig, Policy, PrefixIndexKind, SchedulerConfig
from quire.core.kv_groups import KVGroup, kv_kind
from quire.core.request import Request
from quire.core.step import ChunkOutput, Step, StepResult
from quire.params import SamplingParams
from quire.scheduler.scheduler import Scheduler

ROOT = Path(__file__).resolve().parents[1]
PROMPT = 64
BLOCK_SIZE = 16
SETTING = ("sequences", "waiting", "policy", "index", "steps", "drafts")  # options of the measurement
_WARM_UP = 8  # steps that are not counted
_LEAST_CHAINS = 16  # sequences with drafts in each step, if there are so many


def new_scheduler(
    num_sequences: int, length: int, prefix_index: PrefixIndexKind, policy: Policy = DEFAULT_POLICY
) -> Scheduler:
    """A scheduler with rows and blocks for `num_sequences` sequences of up to `length` tokens."""
    num_blocks = num_sequences * (-(-length // BLOCK_SIZE) + 1)
    group = KVGroup((0,), kv_kind(1, 64), "bfloat16", num_blocks, 2 * 64 * 2 * BLOCK_SIZE)
    config = SchedulerConfig(num_sequences, max(2048, num_sequences * PROMPT), length, 1e9, 0.01, 1, policy)
    return Scheduler(config, KVCache(CacheConfig(BLOCK_SIZE, (group,), prefix_index)))


def decoding(
    num_sequences: int,
    num_steps: int,
    *,
    num_waiting: int = 0,
    prefix_index: PrefixIndexKind = "radix",
    policy: Policy = DEFAULT_POLICY,
) -> dict[str, list[float]]:
    """CPU seconds of plan, commit and both in each step, with `num_sequences` running and others waiting throughout."""
    scheduler = new_scheduler(num_sequences, PROMPT + num_steps + 24, prefix_index, policy)
    params = SamplingParams(max_tokens=num_steps + 16, seed=1)
    for i in range(num_sequences + num_waiting):
        # Lengths differ, so that sequences fill their blocks at different steps. Tokens differ, so that no prefix is
        # shared.
        scheduler.add(Request(id=str(i), prompt=[i] * (PROMPT - i % BLOCK_SIZE), params=params), 0.0)
    times = [_step(scheduler, float(i)) for i in range(num_steps + _WARM_UP)][_WARM_UP:]
    if (scheduler.num_running, scheduler.num_waiting) != (num_sequences, num_waiting):
        raise AssertionError("a sequence ended; the figures would mean something else")
    return _parts(times)


def drafting(num_sequences: int, num_steps: int, num_drafts: int) -> dict[str, list[float]]:
    """CPU seconds of steps in which some of `num_sequences` sequences have `num_drafts` right drafts."""
    length = PROMPT + num_steps * (num_drafts + 1) + 64
    group = KVGroup(
        (0,), kv_kind(1, 64), "bfloat16", num_sequences * (length // BLOCK_SIZE + 2), 2 * 64 * 2 * BLOCK_SIZE
    )
    config = SchedulerConfig(num_sequences, max(4096, num_sequences * PROMPT), length, 1e9, 0.01, 1)
    drafts = {"speculation": ("suffix", "answers"), "num_speculative_tokens": num_drafts, "governs_speculation": False}
    cache = KVCache(CacheConfig(BLOCK_SIZE, (group,), "radix"))
    scheduler = Scheduler(replace(config, **drafts), cache)  # type: ignore[arg-type]  # checked by name
    params = SamplingParams(max_tokens=length - PROMPT, seed=1)
    for i in range(num_sequences):
        prompt = [_repeated(i, position) for position in range(PROMPT - i % BLOCK_SIZE)]
        scheduler.add(Request(id=str(i), prompt=prompt, params=params), 0.0)
    times = [_step(scheduler, float(i), _repeating) for i in range(num_steps + _WARM_UP)][_WARM_UP:]
    verified = scheduler.request_stats.drafts["suffix"]
    least = 0.7 * num_drafts * verified.num_chains  # some chains end at the last free slot of a block
    if verified.num_accepted < least or verified.num_chains < num_steps * min(num_sequences, _LEAST_CHAINS):
        raise AssertionError("few drafts were accepted; the figures would mean something else")
    return _parts(times)


def _repeated(row: int, position: int) -> int:
    return 10 * row + position % 7


def _repeating(step: Step) -> StepResult:
    """Tokens that repeat themselves after seven positions. The rows are those of the prompts, in order."""
    tokens = [
        _repeated(chunk.seq_id, position)
        for chunk in step.chunks
        if chunk.output is ChunkOutput.SAMPLE
        for position in range(chunk.stop - chunk.num_drafts, chunk.stop + 1)
    ]
    return StepResult(step.id, 1e-3, step.chunks.num_samples, np.array(tokens, np.int32))


def churn(
    num_sequences: int,
    num_steps: int,
    *,
    num_waiting: int = 0,
    prefix_index: PrefixIndexKind = "radix",
    policy: Policy = DEFAULT_POLICY,
) -> dict[str, list[float]]:
    """The same while about `num_sequences` / 64 sequences end and begin per step, with shared prefixes of 48 tokens."""
    scheduler, number, times = new_scheduler(num_sequences, PROMPT + 80, prefix_index, policy), 0, []
    for i in range(num_steps + 128):
        while scheduler.num_running + scheduler.num_waiting < num_sequences + num_waiting:
            prompt = [number * 7 % 40] * 48 + [100 + number] * 16
            params = SamplingParams(max_tokens=32 + number * 37 % 64, seed=1)
            scheduler.add(Request(id=str(number), prompt=prompt, params=params), float(i))
            number += 1
        times.append(_step(scheduler, float(i)))
    return _parts(times[128:])


def _result_of(step: Step) -> StepResult:
    counts = (step.chunks.outputs == ChunkOutput.SAMPLE).astype(np.int32)
    return StepResult(step.id, 1e-3, counts, np.arange(counts.sum(), dtype=np.int32) % 100)


def _step(
    scheduler: Scheduler, now: float, result_of: Callable[[Step], StepResult] = _result_of
) -> tuple[float, float]:
    """CPU seconds of one plan and of its commit."""
    begin = time.process_time()
    step = scheduler.plan(now)
    planned = time.process_time() - begin
    assert step is not None, "there is always work"
    result = result_of(step)
    begin = time.process_time()
    scheduler.commit(result, now)
    return planned, time.process_time() - begin


def _parts(times: list[tuple[float, float]]) -> dict[str, list[float]]:
    plans, commits = map(list, zip(*times, strict=True))
    return {"plan": plans, "commit": commits, "plan+commit": [sum(both) for both in times]}


def figures(
    num_sequences: int,
    num_steps: int,
    num_waiting: int,
    prefix_index: PrefixIndexKind,
    policy: Policy,
    num_drafts: int = 0,
) -> dict[str, dict[str, float]]:
    """Milliseconds by load and part."""
    gc.collect()
    gc.freeze()  # full collections are scheduled by the engine process (quire/supervisor/gc_policy.py)
    kinds = {"decoding": decoding, "churn": churn}
    loads = {
        name: load(num_sequences, num_steps, num_waiting=num_waiting, prefix_index=prefix_index, policy=policy)
        for name, load in kinds.items()
    }
    if num_drafts:
        loads["drafting"] = drafting(num_sequences, num_steps, num_drafts)
    return {
        f"{load}, {part}": {
            "median_ms": statistics.median(seconds) * 1e3,
            "p99_ms": statistics.quantiles(seconds, n=100)[98] * 1e3,
        }
        for load, parts in loads.items()
        for part, seconds in parts.items()
    }


def interval(values: list[float]) -> tuple[float, float]:
    """The order statistics between which the median lies with at least 95 % confidence (the sign test)."""
    ranked, n = sorted(values), len(values)
    outside, rank = 0.0, 0
    while rank < n // 2 and 2 * (outside + comb(n, rank) / 2**n) <= 0.05:
        outside += comb(n, rank) / 2**n
        rank += 1
    first = max(rank - 1, 0)
    return ranked[first], ranked[n - 1 - first]


def compare(before: Path, num_pairs: int, arguments: list[str]) -> dict[str, dict[str, object]]:
    """Ratios of the medians, this version's to the other's, over pairs of processes in turns."""
    ratios: dict[str, list[float]] = {}
    for i in track(range(num_pairs), "pairs"):
        found = {}
        for checkout in (ROOT, before) if i % 2 else (before, ROOT):
            command = [sys.executable, str(checkout / "benchmarks" / Path(__file__).name), "--print-json", *arguments]
            environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
            done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
            found[checkout] = json.loads(done.stdout)
        for name, figure in found[ROOT].items():
            ratios.setdefault(name, []).append(figure["median_ms"] / found[before][name]["median_ms"])
    return {
        name: {"median": statistics.median(values), "interval": interval(values), "pairs": len(values)}
        for name, values in ratios.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--policy", choices=get_args(Policy), default=DEFAULT_POLICY)
    parser.add_argument("--index", choices=get_args(PrefixIndexKind), default="radix")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--drafts", type=int, default=0, help="drafts of each sequence, for the load drafting")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another version of quire")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--print-json", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    found = figures(args.sequences, args.steps, args.waiting, args.index, args.policy, args.drafts)
    if args.print_json:
        print(json.dumps(found))
        return
    from benchmarks.result_file import write_result  # noqa: PLC0415  (another version may have no such module)
    from quire.startup.hardware import cpu_description  # noqa: PLC0415

    report: dict[str, object] = {
        "machine": f"{cpu_description()}, Python {platform.python_version()}",
        "setting": {name: getattr(args, name) for name in SETTING},
        "cpu_time": found,
    }
    print(
        f"{args.sequences} sequences, {args.waiting} waiting, {args.policy}, index {args.index}, {args.steps} steps, "
        "CPU time"
    )
    for name, figure in found.items():
        print(f"  {name:<22} median {figure['median_ms']:.3f} ms   p99 {figure['p99_ms']:.3f} ms")
    if args.before is not None:
        setting = [word for name in SETTING for word in (f"--{name}", f"{getattr(args, name)}")]
        report["ratio_to_before"] = ratios = compare(args.before.resolve(), args.pairs, setting)
        for name, ratio in ratios.items():
            print(f"  {name:<22} {ratio['median']:.3f} of the time before, {ratio['interval']}, {ratio['pairs']} pairs")
    if args.json:
        write_result(args.json, report)


if __name__ == "__main__":
    main()
