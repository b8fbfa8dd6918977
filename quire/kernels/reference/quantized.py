"""Stored types of keys and values: floats, or 8-bit numbers with scales.

With 8 bits, one head of one token is head_dim bytes, followed by the four bytes of a float32 scale:
number = byte * scale. The scale is the smallest with which the largest number fits.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from quire.kernels.contract import DTYPES

SCALE_BYTES = 4
MAX_QUANTIZED: Mapping[str, float] = MappingProxyType({"fp8_e4m3": 448.0, "int8": 127.0})  # largest 8-bit number
_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def read_bytes(dtype: str, compute_dtype: torch.dtype) -> int:
    """Bytes per number while KV is read. 8-bit numbers need two float32 and one `compute_dtype`."""
    return 2 * torch.float32.itemsize + compute_dtype.itemsize if dtype in MAX_QUANTIZED else compute_dtype.itemsize


def stored_dtype_and_size(dtype: str, head_dim: int) -> tuple[torch.dtype, int]:
    """The torch type of stored numbers, and their count per head and token."""
    return (torch.uint8, head_dim + SCALE_BYTES) if dtype in MAX_QUANTIZED else (DTYPES[dtype], head_dim)


def to_stored(x: Tensor, dtype: str) -> Tensor:
    """x (..., head_dim) in the stored type `dtype`."""
    return quantize(x, dtype) if dtype in MAX_QUANTIZED else x.to(DTYPES[dtype])


def from_stored(x: Tensor, dtype: str) -> Tensor:
    """Stored numbers as floats (..., head_dim): the inverse of `to_stored`."""
    return dequantize(x, dtype) if dtype in MAX_QUANTIZED else x


def quantize(x: Tensor, dtype: str) -> Tensor:
    """x (..., head_dim) as uint8 (..., head_dim + SCALE_BYTES)."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / MAX_QUANTIZED[dtype]
    rounded = (x / scales.where(scales != 0, 1)).clamp(-MAX_QUANTIZED[dtype], MAX_QUANTIZED[dtype])
    if dtype == "int8":
        rounded = rounded.round()  # ties to even
    return torch.cat((rounded.to(_TYPES[dtype]).view(torch.uint8), scales.view(torch.uint8)), -1)


def dequantize(x: Tensor, dtype: str) -> Tensor:
    """The inverse of `quantize`, float32 (..., head_dim). Blocks of zero bytes give zeros."""
    values, scales = x[..., :-SCALE_BYTES], x[..., -SCALE_BYTES:].contiguous()
    return values.contiguous().view(_TYPES[dtype]).float() * scales.view(torch.float32)
