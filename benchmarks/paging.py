"""Cost of paged attention on a CPU: beside contiguous keys and values, memory bandwidth, and for prefill.

    python -m benchmarks.paging [--threads 2] [--heads 14] [--kv-heads 2] [--head-dim 64] [--json FILE]

For decode, prints the time with scattered blocks over the time of the same kernel with blocks in order; then the share
of the memory's read bandwidth that long contexts reach; then the speed-up of one long sequence by several threads, by
which its context is split; then operations per second of prefill. Times are the best of several, taken in turns, as
other work on the machine can only slow them down.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result
from quire.core.kv_groups import KVGroup, kv_kind
from quire.kernels.contract import DTYPES, Batch, Storage
from quire.kernels.cpu import _C, paged

BLOCK_SIZE = 16
ROUNDS = 7
LEAST_SECONDS = 0.02  # per measurement


def best_of(runs: list[Callable[[], None]], rounds: int = ROUNDS) -> list[float]:
    """Seconds of each run: the best of several rounds in which the runs take turns."""
    repeats = []
    for run in runs:
        run()
        begin = time.perf_counter()
        run()
        repeats.append(max(1, int(LEAST_SECONDS / (time.perf_counter() - begin))))
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for i, (run, count) in enumerate(zip(runs, repeats, strict=True)):
            begin = time.perf_counter()
            for _ in range(count):
                run()
            best[i] = min(best[i], (time.perf_counter() - begin) / count)
    return best


class Case:
    """`batch` chunks of positions [start, stop) over blocks in random or in ascending order."""

    def __init__(
        self, options: argparse.Namespace, batch: int, start: int, stop: int, block_size: int = BLOCK_SIZE
    ) -> None:
        width = -(-stop // block_size)
        dtype = DTYPES[options.dtype]
        padded = -(-options.head_dim // 16) * 16
        group = KVGroup((0,), kv_kind(options.kv_heads, options.head_dim), options.dtype, batch * width, 1)
        parts = (block_size // 16, 16 * padded)
        data = torch.empty(1, 2, batch * width, options.kv_heads, *parts, dtype=dtype).normal_()
        self.storage = Storage(group, block_size, data)
        self.bytes = data.nbytes
        tokens = batch * (stop - start)
        self.q = torch.randn(tokens, options.heads, options.head_dim).to(dtype)
        self.out = torch.empty(tokens, options.heads * options.head_dim, dtype=dtype)
        orders = (np.random.default_rng(0).permutation(batch * width), np.arange(batch * width))
        spans = (np.full(batch, start), np.full(batch, stop))
        self.plans = [paged.plan(Batch(*spans, order.reshape(batch, width)), self.storage) for order in orders]

    def scattered(self) -> None:
        _C.attention(*paged.kernel_arguments(self.storage, 0, self.q, self.out, self.plans[0], 0.125, 0.0))

    def contiguous(self) -> None:
        _C.attention_contiguous(*paged.kernel_arguments(self.storage, 0, self.q, self.out, self.plans[1], 0.125, 0.0))


def read_everything(num_bytes: int) -> tuple[Callable[[], None], int]:
    """A product of one row with a packed float32 weight of `size` bytes, whose time is almost only memory reads."""
    n = num_bytes // 4096 // 16 * 16
    weight = torch.ones(n, 1024)
    x, out = torch.ones(1, 1024), torch.empty(1, n)
    sizes, no_adapters = (0, 1, n, 1024, 1024, n, -1, 0), (None, None, None, 0, 0)
    return (lambda: _C.linear(x, weight, None, out, *sizes, *no_adapters)), weight.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("threads", torch.get_num_threads()), ("heads", 14), ("kv-heads", 2), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--build", default=_C.builds()[0], choices=_C.builds())
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    _C.set_threads(options.threads)
    _C.use(options.build)
    print(f"{options.build}, {options.threads} threads, {options.heads}/{options.kv_heads} heads of {options.head_dim}")
    figures: dict[str, object] = {
        "machine": describe(),
        "build": options.build,
        "decode": decode(options),
        "block_sizes": block_sizes(options),
        "bandwidth": bandwidth(options),
        "split": split(options),
        "prefill": prefill(options),
    }
    if options.json:
        write_result(options.json, figures)


def decode(options: argparse.Namespace) -> list[dict[str, float]]:
    """Scattered against contiguous blocks, by batch and context."""
    rows = []
    for batch in (1, 8, 32):
        for context in (1024, 4096):
            case = Case(options, batch, context - 1, context)
            scattered, contiguous = best_of([case.scattered, case.contiguous])
            rate, ratio = case.bytes / scattered / 1e9, scattered / contiguous
            rows.append(
                {"batch": batch, "context": context, "seconds": scattered, "gb_per_second": rate, "ratio": ratio}
            )
            print(
                f"decode, batch {batch:2}, context {context}: {scattered * 1e6:7.1f} us, {rate:5.1f} GB/s, "
                f"{ratio:.3f} of contiguous"
            )
    return rows


def block_sizes(options: argparse.Namespace) -> list[dict[str, float]]:
    """Scattered against contiguous blocks, by block size: 64 sequences of 512 tokens."""
    rows = []
    for block_size in (16, 32, 64, 128):
        case = Case(options, 64, 511, 512, block_size)
        scattered, contiguous = best_of([case.scattered, case.contiguous])
        rows.append({"block_size": block_size, "seconds": scattered, "ratio": scattered / contiguous})
        print(f"decode, batch 64, context 512, blocks of {block_size:3}: {scattered / contiguous:.3f} of contiguous")
    return rows


def bandwidth(options: argparse.Namespace) -> dict[str, float]:
    """Read bandwidth of attention over long contexts, and of a product that only reads."""
    case = Case(options, 4, 2**14 - 1, 2**14)
    read, num_bytes = read_everything(2**29)
    scattered, reading = best_of([case.scattered, read])
    rate, limit = case.bytes / scattered / 1e9, num_bytes / reading / 1e9
    print(f"decode, batch  4, context 16384: {rate:.1f} GB/s, {rate / limit:.0%} of {limit:.1f} GB/s that can be read")
    return {"gb_per_second": rate, "limit_gb_per_second": limit}


def split(options: argparse.Namespace) -> list[dict[str, float]]:
    """Decode of one sequence: all threads, which split its context, against one thread."""
    rows = []
    for context in (2**14, 2**16):
        case = Case(options, 1, context - 1, context)
        (together,) = best_of([case.scattered])
        _C.set_threads(1)
        (alone,) = best_of([case.scattered])
        _C.set_threads(options.threads)
        rows.append({"context": context, "threads": options.threads, "ratio": alone / together})
        faster = f"{alone / together:.2f} times as fast as one"
        print(f"decode, batch  1, context {context}: {options.threads} threads {faster}")
    return rows


def prefill(options: argparse.Namespace) -> list[dict[str, float]]:
    """Operations per second of chunks of a prompt."""
    rows = []
    for start, stop in ((0, 2048), (3584, 4096), (16128, 16384)):
        case = Case(options, 1, start, stop)
        (seconds,) = best_of([case.scattered])
        pairs = (stop * (stop + 1) - start * (start + 1)) // 2
        rate = 4 * pairs * options.heads * options.head_dim / seconds / 1e9
        rows.append({"start": start, "stop": stop, "seconds": seconds, "gflops": rate})
        print(f"prompt, positions {start:5} to {stop:5}: {seconds * 1e3:6.2f} ms, {rate:6.0f} GFLOP/s")
    return rows


if __name__ == "__main__":
    main()
