"""quire's bf16 matrix products beside oneDNN's with packed weights in torch, on shapes of a 0.5B model.

    python -m benchmarks.products [--rows 1,4,8,16,32,64,128,512,2048] [--threads N] [--json FILE]

Each turn goes over copies of a weight that are together larger than any cache. Times are the best of several rounds in
which the two libraries take turns. oneDNN allocates its output at every call, as in torch; quire writes into an
existing buffer.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result
from quire.kernels.contract import PackedWeight
from quire.kernels.cpu import kernels
from quire.kernels.cpu.products import pack_weight

SHAPES = {"qkv": (1152, 896), "gate and up": (9728, 896), "down": (896, 4864)}  # columns out, columns in
WEIGHT_BYTES = 2**28  # sum over the copies of one weight
ROUNDS = 5


def best(runs: list[Callable[[], object]]) -> list[float]:
    """The least seconds of each, measured in turns."""
    seconds = [float("inf")] * len(runs)
    for _ in range(ROUNDS + 1):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            seconds[i] = min(seconds[i], time.perf_counter() - start)
    return seconds


def measure(columns: int, terms: int, rows: int) -> tuple[float, float]:
    """Seconds of one product by quire and by oneDNN."""
    copies = max(2, WEIGHT_BYTES // (2 * columns * terms))
    weights = [torch.randn(columns, terms).mul_(0.02).to(torch.bfloat16) for _ in range(copies)]
    ours: list[PackedWeight] = [pack_weight(weight) for weight in weights]
    theirs = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
    x = torch.randn(rows, terms).to(torch.bfloat16)

    def by_quire() -> None:
        for weight in ours:
            kernels.linear(x, weight)

    def by_onednn() -> None:
        for weight in theirs:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    first, second = best([by_quire, by_onednn])
    return first / copies, second / copies


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="1,4,8,16,32,64,128,512,2048")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    kernels.use_threads(args.threads)
    found = []
    print(f"{'':<14}{'rows':>6}{'quire us':>10}{'oneDNN us':>11}{'ratio':>7}{'GFLOP/s':>9}{'GB/s':>7}")
    for name, (columns, terms) in SHAPES.items():
        for rows in map(int, args.rows.split(",")):
            ours, theirs = measure(columns, terms, rows)
            rate, read = 2e-9 * rows * columns * terms / ours, 2e-9 * columns * terms / ours
            times = f"{1e6 * ours:>10.0f}{1e6 * theirs:>11.0f}{theirs / ours:>7.2f}"
            print(f"{name:<14}{rows:>6}{times}{rate:>9.0f}{read:>7.1f}")
            found.append({"weight": name, "rows": rows, "quire_us": 1e6 * ours, "onednn_us": 1e6 * theirs})
    if args.json:
        write_result(args.json, {"machine": describe(), "products": found})


if __name__ == "__main__":
    main()
