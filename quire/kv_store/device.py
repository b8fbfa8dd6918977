"""KV and state blocks on the compute device: allocated once, copied by the Moves of a step, also to the host and back.

The kernel module defines the layout of a block. The control plane decides which sequence has it. In Moves the state
blocks are the group behind the last KV group.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.config import CacheConfig
from quire.core.step import Move
from quire.kernels.contract import Kernels, Storage
from quire.kernels.state_contract import StateStorage
from quire.kv_store.host import HostPool, PlainPool, StreamedPool, Swap
from quire.kv_store.upload import to_device

_DIRECTIONS = (("device", "device"), ("device", "host"), ("host", "device"))


class EndedSwaps(NamedTuple):
    """Moves to and from the host that are done, by id, and the seconds that they took."""

    move_ids: list[int]
    seconds_out: float
    seconds_in: float


class DeviceStore:
    """The storages and host pools of all KV groups, and of the recurrent states if the model has any."""

    def __init__(
        self,
        kernels: Kernels,
        cache: CacheConfig,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._kernels = kernels
        self.storages: list[Storage] = [kernels.allocate(group, cache.block_size, device) for group in cache.groups]
        self.states: StateStorage | None = (
            None if cache.states is None else kernels.allocate_states(cache.states, device)
        )
        self._device = device
        self.has_copy_stream = device.type != "cpu"  # whether swaps run on a stream of their own, beside forward passes
        stream = torch.cuda.Stream(device) if self.has_copy_stream else None  # type: ignore[no-untyped-call]
        self._swaps: dict[int, tuple[int, bool, Swap]] = {}  # Move id -> (step id, is swap-in, its copy)
        self._host_pools: list[HostPool] = [
            PlainPool(one, one.group.num_host_blocks, clock)
            if stream is None
            else StreamedPool(one, one.group.num_host_blocks, stream)
            for one in (*self.storages, *(() if self.states is None else (self.states,)))
        ]

    def execute(self, step_id: int, moves: Sequence[Move]) -> float:
        """Start a step's Moves in order. The pairs of one Move are copied at once. `end_swaps` has those that are done.

        Returns the seconds for which swaps without a copy stream delayed the caller. Raises ValueError for a Move
        between other tiers than device and host, and from host to host.
        """
        for move in moves:
            if (move.source, move.target) not in _DIRECTIONS:
                raise ValueError(f"{move}: only moves within the device, to the host and from it are possible")
        delay = 0.0
        for move in moves:
            if move.source == move.target:
                pairs = to_device(np.array(move.pairs, np.int64).reshape(-1, 2), self._device)
                if move.group == len(self.storages) and self.states is not None:
                    self._kernels.copy_states(self.states, pairs)
                else:
                    self._kernels.copy_blocks(self.storages[move.group], pairs, move.num_tokens)
            else:
                pool, is_in = self._host_pools[move.group], move.source == "host"
                swap = pool.swap_in(move.pairs) if is_in else pool.swap_out(move.pairs)
                self._swaps[move.id] = (step_id, is_in, swap)
                delay += 0.0 if self.has_copy_stream else swap.wait()
        return delay

    def end_swaps(self, step_id: int, *, wait: bool) -> EndedSwaps:
        """The swaps of this and earlier steps that are done since the last call. wait: wait for all of them."""
        ended = [i for i, (step, _, swap) in self._swaps.items() if step <= step_id and (wait or swap.is_done())]
        seconds = [0.0, 0.0]
        for move_id in ended:
            _, is_in, swap = self._swaps.pop(move_id)
            seconds[is_in] += swap.wait()
        return EndedSwaps(ended, *seconds)

    def wait(self) -> None:
        """Wait for all swaps. `end_swaps` returns them later."""
        for *_, swap in self._swaps.values():
            swap.wait()
