"""CPU kernel tests for each build that runs here, with new memory that is full of NaN and ends at a forbidden page."""

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from pairwise import pairwise

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
memory = pytest.importorskip("quire.kernels.cpu.memory")

EVERY = _C.builds()
_LIBC = ctypes.CDLL(None)


def each_with(*threads: int) -> list[str]:
    """Parameters of a fixture: every build with each number of threads."""
    return [f"{name}-{number}" for name in EVERY for number in threads]


def with_pairs(*threads: int, **factors: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Calls a test with each row of a pairwise table of builds, numbers of threads and the given factors.

    Rows with the same value of the first factor are one case. The test gets the factors and `seed`, a row's number.
    """
    first, *_ = factors
    table = list(enumerate(pairwise(**factors, build=EVERY, threads=threads)))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**value: Any) -> None:
            for seed, row in table:
                if row[first] is not value[first]:
                    continue
                try:
                    with in_use(f"{row['build']}-{row['threads']}"):
                        test(seed=seed, **{name: row[name] for name in factors})
                except BaseException as error:
                    error.add_note(f"row {seed} of the table: {row}")
                    raise

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        run.__signature__ = Signature([Parameter(first, Parameter.KEYWORD_ONLY)])  # type: ignore[attr-defined]
        return pytest.mark.parametrize(first, factors[first], ids=str)(run)

    return decorate


@contextmanager
def in_use(parameter: str) -> Iterator[int]:
    """Use one of `each_with`; yields its number of threads.

    New memory is NaN, so that unwritten values are found. A kernel that reads or writes behind it ends the process.
    """
    name, threads = parameter.split("-")
    _C.use(name)
    _C.set_threads(int(threads))
    torch.use_deterministic_algorithms(mode=True)  # fills the memory of torch.empty
    try:
        with patch.object(memory.Arena, "empty", _poisoned), patch.object(memory, "_pages", _fenced):
            yield int(threads)
    finally:
        torch.use_deterministic_algorithms(mode=False)
        _C.use(EVERY[0])
        _C.set_threads(1)


_empty = memory.Arena.empty


def _poisoned(arena, shape, dtype):
    if arena._never_free:  # captured steps keep the addresses
        x = _empty(arena, shape, dtype)
    else:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        x = torch.from_numpy(_fenced(num_bytes)).view(dtype).view(torch.Size(shape))
    return x.fill_(torch.nan) if dtype.is_floating_point else x


def _fenced(num_bytes: int, *, huge: bool = False) -> np.ndarray:
    """Zeros uint8 (num_bytes,), like those of quire.kernels.cpu.memory. They end at a page that must not be touched."""
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    _LIBC.mprotect(ctypes.c_void_p(whole.ctypes.data + size), mmap.PAGESIZE, 0)
    return whole[size - num_bytes : size]
