"""Stored types of keys and values: floats, 8-bit numbers with a scale, or 4-bit codes with a scale and an offset.

With 8 bits, one head of one token is head_dim bytes, followed by the four bytes of a float32 scale:
number = byte * scale. The scale is the smallest with which the largest number fits.

With 4 bits a head is cut into groups of 32 numbers, and the last one is padded by zeros. A group is 16 bytes: the lower
halves are the codes of its first 16 numbers, the upper halves those of the others. After all groups, each has four
bytes: a bfloat16 scale and a bfloat16 offset. number = (code - 8) * scale + offset. The codes reach from the smallest
to the largest number of the group. A group whose numbers differ by less than a 30th of their size loses precision,
because the offset has eight bits.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.contract import DTYPES

SCALE_BYTES = 4
MAX_QUANTIZED: Mapping[str, float] = MappingProxyType({"fp8_e4m3": 448.0, "int8": 127.0})  # largest 8-bit number
QUANTIZED = (*MAX_QUANTIZED, "int4")
INT4_GROUP = 32
_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def read_bytes(dtype: str, compute_dtype: torch.dtype) -> int:
    """Bytes per number while KV is read. Quantized numbers need two float32 and one `compute_dtype`."""
    return 2 * torch.float32.itemsize + compute_dtype.itemsize if dtype in QUANTIZED else compute_dtype.itemsize


def stored_dtype_and_size(dtype: str, head_dim: int) -> tuple[torch.dtype, int]:
    """The torch type of stored numbers, and their count per head and token."""
    if dtype == "int4":
        return torch.uint8, -(-head_dim // INT4_GROUP) * (INT4_GROUP // 2 + SCALE_BYTES)
    return (torch.uint8, head_dim + SCALE_BYTES) if dtype in MAX_QUANTIZED else (DTYPES[dtype], head_dim)


def to_stored(x: Tensor, dtype: str) -> Tensor:
    """x (..., head_dim) in the stored type `dtype`."""
    return quantize(x, dtype) if dtype in QUANTIZED else x.to(DTYPES[dtype])


def from_stored(x: Tensor, dtype: str, head_dim: int) -> Tensor:
    """Stored numbers as floats (..., head_dim): the inverse of `to_stored`."""
    return dequantize(x, dtype)[..., :head_dim] if dtype in QUANTIZED else x


def quantize(x: Tensor, dtype: str) -> Tensor:
    """x (..., head_dim) as uint8 (..., size of `stored_dtype_and_size`)."""
    x = x.float()
    if dtype == "int4":
        return _quantize_to_int4(x)
    scales = x.abs().amax(-1, keepdim=True) / MAX_QUANTIZED[dtype]
    rounded = (x / scales.where(scales != 0, 1)).clamp(-MAX_QUANTIZED[dtype], MAX_QUANTIZED[dtype])
    if dtype == "int8":
        rounded = rounded.round()  # ties to even
    return torch.cat((rounded.to(_TYPES[dtype]).view(torch.uint8), scales.view(torch.uint8)), -1)


def dequantize(x: Tensor, dtype: str) -> Tensor:
    """The inverse of `quantize`, float32 (..., head_dim), of int4 with the padding. Zero bytes give zeros."""
    if dtype == "int4":
        return _dequantize_int4(x)
    values, scales = x[..., :-SCALE_BYTES], x[..., -SCALE_BYTES:].contiguous()
    return values.contiguous().view(_TYPES[dtype]).float() * scales.view(torch.float32)


def _quantize_to_int4(x: Tensor) -> Tensor:
    groups = pad(x, (0, -x.shape[-1] % INT4_GROUP)).reshape(*x.shape[:-1], -1, INT4_GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    finite = groups.isfinite().all(-1, keepdim=True)
    scales = torch.where(finite, (high - low) / 15, torch.nan).bfloat16()
    offsets = torch.where(finite, low + 8 * scales.float(), torch.nan).bfloat16()
    steps = scales.float()
    codes = ((groups - offsets.float()) / steps.where(steps > 0, torch.inf)).round().clamp(-8, 7) + 8
    codes = torch.where(finite, codes, 0).to(torch.uint8)
    halves = codes[..., : INT4_GROUP // 2] | codes[..., INT4_GROUP // 2 :] << 4
    pairs = torch.cat((scales, offsets), -1).view(torch.uint8)
    return torch.cat((halves.flatten(-2), pairs.flatten(-2)), -1)


def _dequantize_int4(x: Tensor) -> Tensor:
    num_groups = x.shape[-1] // (INT4_GROUP // 2 + SCALE_BYTES)
    size = num_groups * INT4_GROUP // 2
    shape = (*x.shape[:-1], num_groups)
    pairs = x[..., size:].contiguous().view(torch.bfloat16).view(*shape, 2).float()
    halves = x[..., :size].reshape(*shape, -1)
    codes = torch.cat((halves & 15, halves >> 4), -1)
    numbers: Tensor = (codes.float() - 8) * pairs[..., :1] + pairs[..., 1:]
    return numbers.flatten(-2)
