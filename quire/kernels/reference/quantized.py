"""Keys and values as blocks hold them: as floats, or in 8 bits with scales.

In 8 bits a head of a token is head_dim bytes, and behind them the four of a float32 scale, the smallest with which
its largest number fits: number = byte * scale.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from quire.kernels.contract import DTYPES

SCALE_BYTES = 4
LARGEST: Mapping[str, float] = MappingProxyType({"fp8_e4m3": 448.0, "int8": 127.0})  # that a byte can hold
_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def read_bytes(dtype: str, computed: torch.dtype) -> int:
    """Bytes that a number takes while it is read: as float32, times its scale, and in the type of the computation."""
    return 2 * torch.float32.itemsize + computed.itemsize if dtype in LARGEST else computed.itemsize


def kept_as(dtype: str, head_dim: int) -> tuple[torch.dtype, int]:
    """The type of stored numbers, and how many of them a head of a token takes."""
    return (torch.uint8, head_dim + SCALE_BYTES) if dtype in LARGEST else (DTYPES[dtype], head_dim)


def stored(x: Tensor, dtype: str) -> Tensor:
    """Numbers (..., head_dim) in the form that blocks of `dtype` hold."""
    return quantized(x, dtype) if dtype in LARGEST else x.to(DTYPES[dtype])


def numbers(x: Tensor, dtype: str) -> Tensor:
    """The numbers (..., head_dim) that stored ones stand for, as floats."""
    return dequantized(x, dtype) if dtype in LARGEST else x


def quantized(x: Tensor, dtype: str) -> Tensor:
    """x (..., head_dim) as uint8 (..., head_dim + SCALE_BYTES)."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / LARGEST[dtype]
    rounded = (x / scales.where(scales != 0, 1)).clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == "int8":
        rounded = rounded.round()  # halves to even
    return torch.cat((rounded.to(_TYPES[dtype]).view(torch.uint8), scales.view(torch.uint8)), -1)


def dequantized(x: Tensor, dtype: str) -> Tensor:
    """The inverse, float32 (..., head_dim). Zeros are zeros."""
    values, scales = x[..., :-SCALE_BYTES], x[..., -SCALE_BYTES:].contiguous()
    return values.contiguous().view(_TYPES[dtype]).float() * scales.view(torch.float32)
