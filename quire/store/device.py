"""Blocks on the compute device: allocated once, moved when a step says so.

It knows nothing about layouts (the kernel module does) nor about who owns a block (the mind does).
"""

from collections.abc import Sequence

import numpy as np
import torch

from quire.config import CacheConfig
from quire.core.step import Move
from quire.kernels.contract import Kernels, Storage
from quire.store.upload import uploaded


class DeviceStore:
    """The KV storage of all groups."""

    def __init__(self, kernels: Kernels, cache: CacheConfig, device: torch.device) -> None:
        self._kernels = kernels
        self.storages: list[Storage] = [kernels.allocate(group, cache.block_size, device) for group in cache.groups]

    def execute(self, moves: Sequence[Move]) -> None:
        """Do device-to-device moves in order; the pairs of one move are copied at once.

        Raises ValueError for a move between other tiers.
        """
        for move in moves:
            if (move.source, move.target) != ("device", "device"):
                raise ValueError(f"{move}: only moves within the device are possible")
        for move in moves:
            storage = self.storages[move.group]
            pairs = uploaded(np.array(move.pairs, np.int64).reshape(-1, 2), storage.data.device)
            self._kernels.copy_blocks(storage, pairs, move.num_tokens)
