"""Copies of host arrays to the device: few, and asynchronous."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 4  # words: kernels are compiled for pointers that are multiples of 16 bytes


def stage(arrays: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, list[int]]:
    """The 32-bit words of all arrays in one host tensor, int32, and the index at which each array begins.

    torch allocates the memory, pinned for a GPU, and reuses pinned memory only after the copies from it are done.
    """
    columns = [np.ascontiguousarray(array).reshape(-1).view(np.int32) for array in arrays]
    begins = np.cumsum([0, *(-(-len(column) // _ALIGNED) * _ALIGNED for column in columns)]).tolist()
    host = torch.empty(begins.pop(), dtype=torch.int32, pin_memory=device.type != "cpu")
    words = host.numpy()
    for begin, column in zip(begins, columns, strict=True):
        words[begin : begin + len(column)] = column
    return host, begins


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Each array as a flat int32 tensor on the device. One copy transfers all of them."""
    host, begins = stage(arrays, device)
    there = host.to(device, non_blocking=True)
    sizes = [array.size * array.itemsize // 4 for array in arrays]
    return [there[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, copied asynchronously unless it is already there."""
    if tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
