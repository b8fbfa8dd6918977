"""Blocks in host memory: a second pool, to which blocks of the device are copied and from which they come back.

A block keeps the layout that the kernel module gave it. On a CPU, where both pools are host memory, copies are made
at once. On a GPU they run beside the forward passes, on a stream of their own: forward passes wait until what leaves is
gathered, so that its blocks can be written again, and nobody reads what comes back before its step is collected.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.kernels.contract import Storage
from quire.kv_store.upload import uploaded

STAGED_BYTES = 2**27  # of device memory: blocks that are gathered at once, or came from the host and go to their places

Pairs = Sequence[tuple[int, int]]
Ending = Callable[[], float]  # waits until blocks are where they were to go, and says how many seconds that took


class HostPool(Protocol):
    """The host pool of one group."""

    def put(self, pairs: Pairs) -> Ending:
        """Copy blocks of the device to host blocks, (source, target) each, as they are now."""

    def get(self, pairs: Pairs) -> Ending:
        """Copy host blocks to the device, (source, target) each: nobody may read or write those before the end."""


def host_blocks(storage: Storage, num_blocks: int, *, pinned: bool) -> Tensor:
    """Memory for blocks (num_blocks, ...) of a storage; where it is not pinned, taken when first written."""
    shape = (num_blocks, *storage.by_block.shape[1:])
    dtype = storage.data.dtype
    if pinned or not num_blocks:
        return torch.empty(shape, dtype=dtype, pin_memory=pinned and num_blocks > 0)
    # numpy takes zeroed pages from the system, which touches none of them
    return torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class PlainPool:
    """Beside a device whose memory is the host's."""

    def __init__(self, storage: Storage, num_blocks: int, clock: Callable[[], float]) -> None:
        self._device = storage.by_block
        self._host = host_blocks(storage, num_blocks, pinned=False)
        self._clock = clock

    def put(self, pairs: Pairs) -> Ending:
        """See HostPool."""
        return self._copy(self._device, self._host, pairs)

    def get(self, pairs: Pairs) -> Ending:
        """See HostPool."""
        return self._copy(self._host, self._device, pairs)

    def _copy(self, source: Tensor, target: Tensor, pairs: Pairs) -> Ending:
        began = self._clock()
        for one, other in pairs:
            target[other].copy_(source[one])
        took = self._clock() - began
        return lambda: took


class StreamedPool:
    """Beside a GPU: pinned memory, and a stream for copies."""

    def __init__(self, storage: Storage, num_blocks: int, stream: torch.cuda.Stream) -> None:
        self._storage = storage
        self._host = host_blocks(storage, num_blocks, pinned=True)
        self._stream = stream

    def put(self, pairs: Pairs) -> Ending:
        """See HostPool."""
        sources, targets = _sorted(pairs, by=1)
        device = self._storage.data.device
        usual = torch.cuda.current_stream(device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            began = gathered = _now()
            for some in self._pieces(len(sources)):  # one after another, in the same memory
                staged = self._storage.by_block.index_select(0, uploaded(sources[some], device))
                gathered = _now()
                for i, first, length in _runs(targets[some]):
                    self._host[first : first + length].copy_(staged[i : i + length], non_blocking=True)
            ended = _now()
        usual.wait_event(gathered)  # then blocks may be written again
        return _ending(began, ended)

    def get(self, pairs: Pairs) -> Ending:
        """See HostPool."""
        sources, targets = _sorted(pairs, by=0)
        data, axis = self._storage.data, self._storage.block_axis
        self._stream.wait_stream(torch.cuda.current_stream(data.device))  # which may still write what was there before
        with torch.cuda.stream(self._stream):
            began = _now()
            for some in self._pieces(len(sources)):
                staged = torch.empty((len(sources[some]), *self._host.shape[1:]), dtype=data.dtype, device=data.device)
                for i, first, length in _runs(sources[some]):
                    staged[i : i + length].copy_(self._host[first : first + length], non_blocking=True)
                data.index_copy_(axis, uploaded(targets[some], data.device), staged.movedim(0, axis))
            ended = _now()
        return _ending(began, ended)

    def _pieces(self, number: int) -> list[slice]:
        """Of so many blocks: as many at once as STAGED_BYTES hold, and at least one."""
        each = max(1, STAGED_BYTES // max(self._host[:1].nbytes, 1))
        return [slice(first, first + each) for first in range(0, number, each)]


def _ending(began: torch.cuda.Event, ended: torch.cuda.Event) -> Ending:
    def end() -> float:
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000

    return end


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _sorted(pairs: Pairs, *, by: int) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets, int64, in the order of one of them: neighbours in host memory travel together."""
    columns = np.array(pairs, np.int64).reshape(-1, 2)
    columns = np.ascontiguousarray(columns[np.argsort(columns[:, by], kind="stable")].T)
    return columns[0], columns[1]


def _runs(blocks: np.ndarray) -> list[tuple[int, int, int]]:
    """(index of the first, the first, length) of runs of rising consecutive numbers."""
    begins = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
    lengths = np.diff(begins, append=len(blocks))
    return list(zip(begins.tolist(), blocks[begins].tolist(), lengths.tolist(), strict=True))
