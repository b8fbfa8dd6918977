"""Sampling on this machine's CPU beside plain torch: `python -m benchmarks.sampling`.

    python -m benchmarks.sampling [--rows 32] [--vocab 152064] [--dtype float32] [--threads 2] [--json FILE]

Times are medians of runs that the two take in turns.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.result_file import write_result
from quire.kernels import reference
from quire.kernels.contract import DTYPES
from quire.kernels.cpu import _C, sampling
from quire.kernels.sampling_contract import History, LogitEdits, Masks, SamplingMetadata

SECONDS = 0.5  # per implementation and case, after a first run
FLAT, PEAKED = 1.0, 3.5  # standard deviations of logits

# name -> temperature, top_k, top_p, standard deviation of the logits
CASES = {
    "greedy": (0.0, 0, 1.0, FLAT),
    "temperature, flat": (1.0, 0, 1.0, FLAT),
    "temperature, peaked": (1.0, 0, 1.0, PEAKED),
    "top-k 50": (1.0, 50, 1.0, FLAT),
    "top-p 0.95, flat": (1.0, 0, 0.95, FLAT),
    "top-p 0.95, peaked": (1.0, 0, 0.95, PEAKED),
    "top-k 50, top-p 0.95": (1.0, 50, 0.95, PEAKED),
}


def draws(num_rows: int, temperature: float, top_k: int, top_p: float) -> SamplingMetadata:
    """Rows with equal parameters and different seeds."""

    def column(value: float, dtype: type[np.generic]) -> np.ndarray:
        return np.full(num_rows, value, dtype)

    integers, none = np.zeros(0, np.int64), column(0, np.float32)
    return SamplingMetadata(
        np.arange(num_rows, dtype=np.uint64),
        column(0, np.int32),
        np.arange(num_rows, dtype=np.int32),
        column(temperature, np.float32),
        column(top_p, np.float32),
        column(top_k, np.int32),
        none,
        none,
        none,
        column(1, np.float32),
        Masks(integers, np.zeros((0, 0), np.uint32)),
        LogitEdits(integers, integers, np.zeros(0, np.float32)),
        History(integers, integers, np.zeros(0, np.bool_)),
    )


def seconds(work: Callable[[], Tensor]) -> list[float]:
    """Seconds of each call, after a first one that is not counted."""
    work()
    times: list[float] = []
    while sum(times) < SECONDS:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times


def measure(name: str, logits: Tensor) -> dict[str, float]:
    """Milliseconds of both, and the reference's time over ours. Logits are normal with standard deviation `spread`."""
    temperature, top_k, top_p, deviation = CASES[name]
    rows = draws(len(logits), temperature, top_k, top_p)
    logits = (logits.float() * deviation).to(logits.dtype)
    ours, theirs = (
        statistics.median(seconds(lambda kernels=kernels: kernels.sample(logits, rows))) * 1e3
        for kernels in (sampling, reference)
    )
    return {"cpu_ms": ours, "reference_ms": theirs, "ratio": theirs / ours}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per case."""
    parser = argparse.ArgumentParser(prog="benchmarks.sampling", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=152064)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    _C.set_threads(args.threads)
    logits = torch.randn(args.rows, args.vocab, generator=torch.Generator().manual_seed(0)).to(DTYPES[args.dtype])
    print(f"{args.rows} x {args.vocab} {args.dtype}, {args.threads} threads, build {_C.builds()[0]}")
    results = {}
    for name in CASES:
        results[name] = one = measure(name, logits)
        print(f"{name:22} {one['cpu_ms']:9.3f} ms   reference {one['reference_ms']:9.2f} ms   {one['ratio']:7.1f} x")
    if args.json:
        write_result(args.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
