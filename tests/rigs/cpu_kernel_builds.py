"""Parametrization of CPU kernel tests over the builds that run here, with new memory full of NaN."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
memory = pytest.importorskip("quire.kernels.cpu.memory")

EVERY = _C.builds()


def each_with(*threads: int) -> list[str]:
    """Parameters of a fixture: every build with each number of threads."""
    return [f"{name}-{number}" for name in EVERY for number in threads]


@contextmanager
def in_use(parameter: str) -> Iterator[int]:
    """Use one of `each_with`; yields its number of threads. New memory is NaN, so that unwritten values are found."""
    name, threads = parameter.split("-")
    _C.use(name)
    _C.set_threads(int(threads))
    torch.use_deterministic_algorithms(mode=True)  # fills the memory of torch.empty
    try:
        with patch.object(memory.Arena, "empty", _poisoned):
            yield int(threads)
    finally:
        torch.use_deterministic_algorithms(mode=False)
        _C.use(EVERY[0])
        _C.set_threads(1)


_empty = memory.Arena.empty


def _poisoned(arena, shape, dtype):
    x = _empty(arena, shape, dtype)
    return x.fill_(torch.nan) if dtype.is_floating_point else x
