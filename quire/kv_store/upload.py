"""Asynchronous copies from the host to the compute device."""

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on the device. Does not wait for the copy. On a CPU it shares the array's memory."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def copy_to_device(target: Tensor, array: np.ndarray) -> None:
    """Copy the array into a tensor of the same shape, which keeps its address. Does not wait for the copy."""
    host = torch.from_numpy(array)
    target.copy_(host if target.device.type == "cpu" else host.pin_memory(), non_blocking=True)
