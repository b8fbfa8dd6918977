"""Host pool: blocks in host memory to which blocks of the device are swapped out and from which they are swapped in.

A block keeps the layout of the kernel module. On a CPU both pools are host memory, and copies are synchronous. On a
GPU copies run beside the forward passes, on a stream of their own. Forward passes wait only until swapped-out blocks
are gathered, because then they may be overwritten. Swapped-in blocks are not read before their copy is done.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.kernels.contract import Storage
from quire.kernels.state_contract import StateStorage
from quire.kv_store.upload import to_device

STAGING_BYTES = 2**27  # most bytes of device memory for staging, in either direction

Pairs = Sequence[tuple[int, int]]
Blocks = Storage | StateStorage  # on the device


class Swap(NamedTuple):
    """A started copy. wait: waits for its end, and returns its seconds."""

    is_done: Callable[[], bool]
    wait: Callable[[], float]


class HostPool(Protocol):
    """The host pool of one KV group, or of the recurrent states."""

    def swap_out(self, pairs: Pairs) -> Swap:
        """Swap out: copy (device block, host block) pairs. Later writes to the device blocks do not affect the copy."""

    def swap_in(self, pairs: Pairs) -> Swap:
        """Swap in: copy (host block, device block) pairs. The device blocks must not be used before the end."""


def host_blocks(storage: Blocks, num_blocks: int, *, pinned: bool) -> Tensor:
    """Host memory for blocks (num_blocks, ...) of a storage. Unpinned memory is committed at the first write."""
    shape = (num_blocks, *storage.by_block.shape[1:])
    dtype = storage.data.dtype
    if pinned or not num_blocks:
        return torch.empty(shape, dtype=dtype, pin_memory=pinned and num_blocks > 0)
    # numpy gets zeroed pages from the system without touching them
    return torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class PlainPool:
    """Host pool beside a CPU device: synchronous copies."""

    def __init__(self, storage: Blocks, num_blocks: int, clock: Callable[[], float]) -> None:
        self._device = storage.by_block
        self._host = host_blocks(storage, num_blocks, pinned=False)
        self._clock = clock

    def swap_out(self, pairs: Pairs) -> Swap:
        """See HostPool."""
        return self._copy(self._device, self._host, pairs)

    def swap_in(self, pairs: Pairs) -> Swap:
        """See HostPool."""
        return self._copy(self._host, self._device, pairs)

    def _copy(self, source: Tensor, target: Tensor, pairs: Pairs) -> Swap:
        began = self._clock()
        for one, other in pairs:
            target[other].copy_(source[one])
        took = self._clock() - began
        return Swap(lambda: True, lambda: took)


class StreamedPool:
    """Host pool beside a GPU: pinned memory, with copies on a stream of their own."""

    def __init__(self, storage: Blocks, num_blocks: int, stream: torch.cuda.Stream) -> None:
        self._storage = storage
        self._host = host_blocks(storage, num_blocks, pinned=True)
        self._stream = stream

    def swap_out(self, pairs: Pairs) -> Swap:
        """See HostPool."""
        sources, targets = _sorted(pairs, by=1)
        device = self._storage.data.device
        usual = torch.cuda.current_stream(device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            began = gathered = _now()
            for some in self._staging_slices(len(sources)):  # one after another, so that they reuse the staging memory
                staged = self._storage.by_block.index_select(0, to_device(sources[some], device))
                gathered = _now()
                for i, first, length in _runs(targets[some]):
                    self._host[first : first + length].copy_(staged[i : i + length], non_blocking=True)
            ended = _now()
        usual.wait_event(gathered)  # forward passes may overwrite the blocks after this event
        return _swap(began, ended)

    def swap_in(self, pairs: Pairs) -> Swap:
        """See HostPool."""
        sources, targets = _sorted(pairs, by=0)
        data, blocks = self._storage.data, self._storage.by_block
        self._stream.wait_stream(torch.cuda.current_stream(data.device))  # which may still use these blocks
        with torch.cuda.stream(self._stream):
            began = _now()
            for some in self._staging_slices(len(sources)):
                staged = torch.empty((len(sources[some]), *self._host.shape[1:]), dtype=data.dtype, device=data.device)
                for i, first, length in _runs(sources[some]):
                    staged[i : i + length].copy_(self._host[first : first + length], non_blocking=True)
                blocks.index_copy_(0, to_device(targets[some], data.device), staged)
            ended = _now()
        return _swap(began, ended)

    def _staging_slices(self, number: int) -> list[slice]:
        """Slices of `number` blocks, each of at most STAGING_BYTES, or of one block."""
        each = max(1, STAGING_BYTES // max(self._host[:1].nbytes, 1))
        return [slice(first, first + each) for first in range(0, number, each)]


def _swap(began: torch.cuda.Event, ended: torch.cuda.Event) -> Swap:
    def wait() -> float:
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000

    return Swap(ended.query, wait)


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _sorted(pairs: Pairs, *, by: int) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets, int64, sorted by column `by`, so that neighbours in host memory are one copy."""
    columns = np.array(pairs, np.int64).reshape(-1, 2)
    columns = np.ascontiguousarray(columns[np.argsort(columns[:, by], kind="stable")].T)
    return columns[0], columns[1]


def _runs(blocks: np.ndarray) -> list[tuple[int, int, int]]:
    """(index of the first, the first, length) of each run of consecutive numbers."""
    begins = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
    lengths = np.diff(begins, append=len(blocks))
    return list(zip(begins.tolist(), blocks[begins].tolist(), lengths.tolist(), strict=True))
