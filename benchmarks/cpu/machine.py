"""The machine that was measured on: what it is, and how fast it reads memory and multiplies."""

import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from quire.startup.hardware import cpu_description

_READ_BYTES = 2**30  # more than any cache holds
_MATRIX = 2048
_TIMES = 5  # the best counts: nothing makes a machine faster than it is


def describe() -> dict[str, Any]:
    """In words and figures. To be asked while nothing else runs."""
    return {
        "cpu": cpu_description(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "read_gb_per_second": read_rate() / 1e9,
        "bf16_matmul_gflops": matmul_rate() / 1e9,
    }


def read_rate(num_bytes: int = _READ_BYTES) -> float:
    """Bytes a second of a matrix times a vector, with all threads: each number is read once and used once."""
    matrix, vector = torch.ones(num_bytes // 4 // _MATRIX, _MATRIX), torch.ones(_MATRIX)
    return num_bytes / _best_seconds(lambda: matrix @ vector)


def matmul_rate(size: int = _MATRIX) -> float:
    """Operations a second of a bf16 product of square matrices, an addition and a multiplication being two."""
    left, right = torch.randn(2, size, size).to(torch.bfloat16)
    out = torch.empty_like(left)  # fresh memory for each would count, too
    return 2 * size**3 / _best_seconds(lambda: torch.mm(left, right, out=out))


def _best_seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TIMES + 1):  # the first warms up, and could only be slower
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
