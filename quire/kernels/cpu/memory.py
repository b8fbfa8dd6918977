"""Memory of the CPU kernels: pages from the system, and arenas that reuse buffers for tensors.

Fresh memory costs more time than most kernels, because the system clears each page when it is first touched. So the
outputs of kernels are allocated from an arena. Each thread has one, and each `CallListCapture` has one.
"""

import mmap
import threading
import weakref
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod

import numpy as np
import torch
from torch import Tensor

_HUGE_PAGE = 2**21  # bytes
_SMALLEST = 4096  # bytes of a buffer


def pages(num_bytes: int, *, huge: bool) -> Tensor:
    """Zeros uint8 (num_bytes,). The system commits a page when it is first touched.

    huge: ask for pages of 2 MiB. Only useful for memory that is written completely, as a page is committed as a whole.
    """
    return torch.from_numpy(_pages(num_bytes, huge=huge))


def _pages(num_bytes: int, *, huge: bool) -> np.ndarray:
    huge = huge and num_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    size = num_bytes + _HUGE_PAGE if huge else max(num_bytes, 1)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    whole = np.frombuffer(memory, np.uint8)  # holds a reference to the mapping
    offset = -whole.ctypes.data % _HUGE_PAGE if huge else 0
    if huge:
        with suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, offset, num_bytes // _HUGE_PAGE * _HUGE_PAGE)  # whole pages only
    return whole[offset : offset + num_bytes]


class _Lent(weakref.ref[memoryview]):
    """A buffer of an arena that a tensor owns. It does not refer to the arena, so that this can be freed before."""

    __slots__ = ("address", "all", "free", "size")
    size: int
    address: int
    free: list[tuple[int, int]]  # of the arena
    all: "dict[int, _Lent]"  # that the arena has lent


def _take_back(lent: _Lent) -> None:
    del lent.all[lent.address]
    insort(lent.free, (lent.size, lent.address))


class Arena:
    """Reusable buffers; one tensor owns a buffer at a time. never_free: captured steps use their addresses."""

    def __init__(self, *, never_free: bool) -> None:
        self._never_free = never_free
        self.free: list[tuple[int, int]] = []  # (size, address), sorted
        self._lent: dict[int, _Lent] = {}  # by address
        self.buffers: dict[int, np.ndarray] = {}  # address -> buffer

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor. Its buffer returns to the arena when the tensor and all its views are gone."""
        count = prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        size, address = self._allocate(count * dtype.itemsize)
        owner = memoryview(self.buffers[address])  # type: ignore[arg-type]  # the new tensor and its views refer to it
        lent = self._lent[address] = _Lent(owner, _take_back)
        lent.size, lent.address, lent.free, lent.all = size, address, self.free, self._lent
        return torch.frombuffer(owner, dtype=dtype, count=count).view(shape)

    def non_owning_view(self, x: Tensor) -> Tensor:
        """A tensor on the memory of x that does not own the buffer. It is valid until the next captured step runs.

        Returns x itself if it is not contiguous or does not begin a buffer of this arena.
        """
        buffer = self.buffers.get(x.data_ptr())
        if buffer is None or not x.is_contiguous():
            return x
        return torch.from_numpy(buffer[: x.nbytes]).view(x.dtype).view(x.shape)

    def free_large(self) -> None:
        """Free unused buffers of at least 2 MiB. Smaller ones stay: clearing their pages again would cost more."""
        while self.free and self.free[-1][0] >= _HUGE_PAGE:  # other threads may free tensors meanwhile
            _, address = self.free.pop()
            del self.buffers[address]

    def _allocate(self, num_bytes: int) -> tuple[int, int]:
        """Size and address of the smallest free buffer that is large enough, or of a new one.

        A buffer that is more than twice as large as needed stays free.
        """
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length())
        place = bisect_left(self.free, (size, 0))
        if place < len(self.free) and self.free[place][0] <= 2 * size:
            found = self.free.pop(place)
            if found[0] >= size:
                return found
            insort(self.free, found)  # the list changed: a tensor was freed in another thread
        if not self._never_free:
            self._free_below(size)
        buffer = _pages(size, huge=True)
        address = buffer.ctypes.data
        self.buffers[address] = buffer
        return len(buffer), address

    def _free_below(self, size: int) -> None:
        """Free unused buffers below `size`. A new size means that steps have grown, so smaller buffers are obsolete."""
        while self.free and self.free[0][0] < size:
            _, address = self.free.pop(0)
            del self.buffers[address]


class _ThreadArena(threading.local):
    """The arena of each thread."""

    def __init__(self) -> None:
        self.arena = Arena(never_free=False)


_thread = _ThreadArena()


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor for the output of a kernel, from the arena of this thread."""
    return _thread.arena.empty(shape, dtype)


def release_workspace() -> None:
    """Free unused large buffers of this thread's arena."""
    _thread.arena.free_large()


@contextmanager
def use_arena(arena: Arena) -> Iterator[None]:
    """Context in which `empty` allocates from `arena`."""
    before, _thread.arena = _thread.arena, arena
    try:
        yield
    finally:
        _thread.arena = before
