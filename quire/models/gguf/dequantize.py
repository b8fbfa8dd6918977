"""Bytes of a GGUF tensor to a torch tensor. Knows types, not names."""

import numpy as np
import torch
from torch import Tensor

from quire.models.gguf.tensor_types import TensorType

_CHUNK = 1 << 16  # numbers decoded at a time, so that what is between stays in a processor's cache


def dequantize(data: np.ndarray, kind: TensorType, shape: tuple[int, ...]) -> Tensor:
    """The numbers in `data` (bytes): F16 and BF16 as they are, F32 and quantized ones as float32."""
    blocks = data.view(kind.layout)
    if kind.decode is None:
        plain = torch.from_numpy(blocks.copy())  # a copy, because the file is mapped read-only
        return (plain.view(torch.bfloat16) if kind.name == "BF16" else plain).view(shape)
    numbers = np.empty((len(blocks), kind.block_size), np.float32)
    step = _CHUNK // kind.block_size
    with np.errstate(over="ignore", invalid="ignore"):  # a scale that is no number gives numbers that are none
        for start in range(0, len(blocks), step):
            numbers[start : start + step] = kind.decode(blocks[start : start + step])
    return torch.from_numpy(numbers).view(shape)
