"""KV blocks on the compute device: allocated once, copied by the Moves of a step, also to the host pool and back.

The kernel module defines the layout of a block. The control plane decides which sequence has it.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.config import CacheConfig
from quire.core.step import Move
from quire.kernels.contract import Kernels, Storage
from quire.kv_store.host import HostPool, PlainPool, StreamedPool, WaitForSwap
from quire.kv_store.upload import to_device

_DIRECTIONS = (("device", "device"), ("device", "host"), ("host", "device"))


class DeviceStore:
    """The KV storages and host pools of all KV groups."""

    def __init__(
        self,
        kernels: Kernels,
        cache: CacheConfig,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._kernels = kernels
        self.storages: list[Storage] = [kernels.allocate(group, cache.block_size, device) for group in cache.groups]
        self.has_copy_stream = device.type != "cpu"  # whether swaps run on a stream of their own, beside forward passes
        stream = torch.cuda.Stream(device) if self.has_copy_stream else None  # type: ignore[no-untyped-call]
        self._pending_swaps: dict[int, list[tuple[bool, WaitForSwap]]] = {}  # step id -> (is swap-in, its end)
        self._host_pools: list[HostPool] = [
            PlainPool(one, one.group.num_host_blocks, clock)
            if stream is None
            else StreamedPool(one, one.group.num_host_blocks, stream)
            for one in self.storages
        ]

    def execute(self, step_id: int, moves: Sequence[Move]) -> None:
        """Start a step's Moves in order. The pairs of one Move are copied at once. `wait_swaps` waits for swaps.

        Raises ValueError for a Move between other tiers than device and host, and from host to host.
        """
        for move in moves:
            if (move.source, move.target) not in _DIRECTIONS:
                raise ValueError(f"{move}: only moves within the device, to the host and from it are possible")
        for move in moves:
            if move.target == "host":
                self._pending_swaps.setdefault(step_id, []).append(
                    (False, self._host_pools[move.group].swap_out(move.pairs))
                )
            elif move.source == "host":
                self._pending_swaps.setdefault(step_id, []).append(
                    (True, self._host_pools[move.group].swap_in(move.pairs))
                )
            else:
                storage = self.storages[move.group]
                pairs = to_device(np.array(move.pairs, np.int64).reshape(-1, 2), storage.data.device)
                self._kernels.copy_blocks(storage, pairs, move.num_tokens)

    def wait_swaps(self, step_id: int) -> tuple[float, float]:
        """Wait for a step's swaps. Returns the seconds that swap-out and swap-in took."""
        seconds = [0.0, 0.0]
        for is_back, end in self._pending_swaps.pop(step_id, ()):
            seconds[is_back] += end()
        return seconds[0], seconds[1]

    def drain(self) -> None:
        """Wait for the swaps of failed steps, and discard their durations."""
        for step_id in list(self._pending_swaps):
            self.wait_swaps(step_id)
