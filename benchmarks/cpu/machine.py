"""Facts about this machine: hardware, memory read rate and matrix product rate."""

import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from quire.kernels.cpu.memory import pages
from quire.startup.hardware import cpu_description

_READ_BYTES = 2**30  # larger than any cache
_MATRIX = 2048
_SMALLEST_MATRIX = 256
_LONG_ENOUGH = 0.03  # seconds of a product: far longer than its start
_TIMES = 5  # runs; the fastest counts, because other work can only slow a run down


def describe() -> dict[str, Any]:
    """The machine in words and figures. Run it while the machine is idle."""
    return {
        "cpu": cpu_description(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "read_gb_per_second": read_rate() / 1e9,
        "bf16_matmul_gflops": matmul_rate() / 1e9,
    }


def read_rate(num_bytes: int = _READ_BYTES) -> float:
    """Bytes per second that the machine reads now."""
    return reader(num_bytes, _TIMES)()


def reader(num_bytes: int, times: int) -> Callable[[], float]:
    """Measures the bytes per second of a sum on all threads, which reads each number once: the best of `times` passes.

    Pages have 2 MiB, as those of weights.
    """
    numbers = pages(num_bytes, huge=True).view(torch.float32).fill_(1)
    return lambda: num_bytes / _best_seconds(numbers.sum, times)


def matmul_rate(largest: int = _MATRIX) -> float:
    """Operations per second of a bf16 product of square matrices. Multiplication and addition are two operations.

    The matrices are of the size `largest`, or smaller if a product takes _LONG_ENOUGH: without bf16 instructions the
    largest takes half a minute.
    """
    size = min(_SMALLEST_MATRIX, largest)
    while True:
        left, right = torch.randn(2, size, size).to(torch.bfloat16)
        out = torch.empty_like(left)  # allocated once: allocation would count as well
        seconds = _best_seconds(partial(torch.mm, left, right, out=out))
        if size >= largest or seconds > _LONG_ENOUGH:
            return 2 * size**3 / seconds
        size = min(2 * size, largest)


def _best_seconds(run: Callable[[], object], times: int = _TIMES) -> float:
    seconds = []
    for _ in range(times + 1):  # the first run is a warm-up and can only be slower
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
