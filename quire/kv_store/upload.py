"""From the host to the compute device."""

import numpy as np
import torch
from torch import Tensor


def uploaded(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, without waiting for what that is doing. On a CPU it stays the array's memory."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def upload_into(target: Tensor, array: np.ndarray) -> None:
    """The array to a tensor of its shape, which stays where it is, without waiting for what the device is doing."""
    host = torch.from_numpy(array)
    target.copy_(host if target.device.type == "cpu" else host.pin_memory(), non_blocking=True)
