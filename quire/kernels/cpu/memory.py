"""Memory of the CPU kernels: pages from the system, and buffers that tensors come and go in.

Fresh memory costs more than most kernels: the system clears each page when it is first touched. So what kernels
compute goes into buffers that are kept, which each thread has for itself, or each set of recordings.
"""

import mmap
import threading
import weakref
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch import Tensor

_HUGE_PAGE = 2**21  # bytes
_SMALLEST = 4096  # bytes of a buffer


def pages(num_bytes: int, *, huge: bool) -> Tensor:
    """Zeros uint8 (num_bytes,) that the system has yet to provide memory for.

    huge: in pages of 2 MiB, where it has them, for what is written whole; a page that is touched is taken whole.
    """
    return torch.from_numpy(_pages(num_bytes, huge=huge))


def _pages(num_bytes: int, *, huge: bool) -> np.ndarray:
    huge = huge and num_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    size = num_bytes + _HUGE_PAGE if huge else max(num_bytes, 1)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    whole = np.frombuffer(memory, np.uint8)  # which keeps the memory
    offset = -whole.ctypes.data % _HUGE_PAGE if huge else 0
    if huge:
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE, offset, num_bytes // _HUGE_PAGE * _HUGE_PAGE)  # whole pages only
    return whole[offset : offset + num_bytes]


class Arena:
    """Buffers, each of which one tensor has at a time. keeps: none is given back, since tapes know their addresses."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._buffers: dict[int, np.ndarray] = {}  # by their addresses

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose buffer is given back when it and all its views are gone. Not initialised."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        buffer = self._take(max(num_bytes, 1))
        owner = memoryview(buffer)  # type: ignore[arg-type]  # which the new tensor and its views hold
        weakref.finalize(owner, insort, self._free, (len(buffer), buffer.ctypes.data)).atexit = False
        tensor = torch.frombuffer(owner, dtype=torch.uint8, count=max(num_bytes, 1))
        return tensor[:num_bytes].view(dtype).view(torch.Size(shape))

    def lent(self, x: Tensor) -> Tensor:
        """The same numbers in the same place, which does not keep the buffer: until the next tape runs."""
        buffer = self._buffers.get(x.data_ptr())
        if buffer is None or not x.is_contiguous():
            return x
        return torch.from_numpy(buffer[: x.nbytes]).view(x.dtype).view(x.shape)

    def shrink(self) -> None:
        """Let go of large buffers that nobody has. Small ones are not worth the pages that would be cleared again."""
        large = bisect_left(self._free, (_HUGE_PAGE, 0))
        for _, address in self._free[large:]:
            del self._buffers[address]
        del self._free[large:]

    def _take(self, num_bytes: int) -> np.ndarray:
        """The smallest free buffer that is large enough, unless it is more than twice that."""
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length())
        place = bisect_left(self._free, (size, 0))
        if place < len(self._free) and self._free[place][0] <= 2 * size:
            found, address = self._free.pop(place)
            if found >= size:
                return self._buffers[address]
            insort(self._free, (found, address))  # a tensor that ended in another thread moved the places meanwhile
        if not self._keeps:
            self._give_back(size)
        buffer = _pages(size, huge=True)
        self._buffers[buffer.ctypes.data] = buffer
        return buffer

    def _give_back(self, size: int) -> None:
        """Let go of free buffers below a size that is needed anew: steps have grown, and they were of smaller ones."""
        while self._free and self._free[0][0] < size:
            _, address = self._free.pop(0)
            del self._buffers[address]


class _Thread(threading.local):
    """What each thread takes its memory from."""

    def __init__(self) -> None:
        self.arena = Arena(keeps=False)


_thread = _Thread()


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for what a kernel of this thread computes."""
    return _thread.arena.empty(shape, dtype)


def rest() -> None:
    """Give back what this thread keeps for kernels that will not run for a while."""
    _thread.arena.shrink()


@contextmanager
def taken_from(arena: Arena) -> Iterator[None]:
    """Let `empty` take from `arena` meanwhile."""
    before, _thread.arena = _thread.arena, arena
    try:
        yield
    finally:
        _thread.arena = before
