"""Stored types of keys and values: floats, 8-bit numbers with a scale, or int4: rotated heads in codes of 5 bits.

With 8 bits, one head of one token is head_dim bytes, followed by the four bytes of a float32 scale:
number = byte * scale. The scale is the smallest with which the largest number fits.

In int4 a head is padded by zeros to a multiple of 32 and rotated (see `hadamard`). A rotation spreads the few large
numbers of a key over the whole head, so that one scale suits all of it. Scores stay the same if queries are rotated,
too. The codes are those of 32 steps: rotated number = (code - 16) * scale, or (code - 15) * scale if the number that is
largest in magnitude is positive. This number has the code 0 or 31. The scale is the smallest with which no number is
off by more than half a step. First come the lower four bits of all codes. Of each 32 numbers they are 16 bytes: the
lower halves are those of numbers 0 to 15, the upper halves those of numbers 16 to 31. Then come the upper bits, four
bytes of each 32 numbers: bit j of byte i is that of number 4 * j + i. A float32 is the last: the scale, with a minus
sign if the zero is 15.
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
INT4_UNIT = 32  # numbers of a head: it is padded to a multiple
_INT4_BYTES = 20  # of 32 numbers
_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def read_bytes(dtype: str, compute_dtype: torch.dtype) -> int:
    """Bytes per number while KV is read. Quantized numbers need two float32 and one `compute_dtype`."""
    return 2 * torch.float32.itemsize + compute_dtype.itemsize if dtype in QUANTIZED else compute_dtype.itemsize


def stored_dtype_and_size(dtype: str, head_dim: int) -> tuple[torch.dtype, int]:
    """The torch type of stored numbers, and their count per head and token."""
    if dtype == "int4":
        return torch.uint8, -(-head_dim // INT4_UNIT) * _INT4_BYTES + SCALE_BYTES
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


def hadamard(x: Tensor) -> Tensor:
    """x (..., size) times an orthogonal matrix that is its own inverse; size is a multiple of 32.

    A head is cut into pieces of powers of two, the longest first. A piece of n numbers is multiplied with the Hadamard
    matrix of n rows over sqrt(n). The order of the sums is part of the specification, as it decides their last bits.
    """
    pieces, start, size = [], 0, x.shape[-1]
    while start < size:
        length = 1 << (size - start).bit_length() - 1
        piece, width = x[..., start : start + length], 1
        while width < length:
            low, high = piece.reshape(*x.shape[:-1], length // width // 2, 2, width).unbind(-2)
            piece = torch.stack((low + high, low - high), -2).flatten(-3)
            width *= 2
        pieces.append(piece * length**-0.5)
        start += length
    return torch.cat(pieces, -1)


def _quantize_to_int4(x: Tensor) -> Tensor:
    rotated = hadamard(pad(x, (0, -x.shape[-1] % INT4_UNIT)))
    low, high = rotated.amin(-1, keepdim=True), rotated.amax(-1, keepdim=True)
    finite, up = rotated.isfinite().all(-1, keepdim=True), high > -low
    scales = torch.maximum(torch.maximum(high, -low) / 16, torch.minimum(high, -low) / 15.5)
    codes = (rotated / scales.where(scales > 0, 1)).round() + torch.where(up, 15, 16)  # ties to even
    codes = torch.where(finite, codes, 0).clamp(0, 31).to(torch.uint8)
    codes = codes.view(*codes.shape[:-1], codes.shape[-1] // INT4_UNIT, INT4_UNIT)
    lower, upper = codes & 15, codes >> 4
    halves = lower[..., : INT4_UNIT // 2] | lower[..., INT4_UNIT // 2 :] << 4
    upper = (upper.view(*upper.shape[:-1], 8, 4) << _bits(x)[:, None]).sum(-2, dtype=torch.uint8)
    scales = torch.where(finite, torch.where(up, -scales, scales), torch.nan)
    return torch.cat((halves.flatten(-2), upper.flatten(-2), scales.view(torch.uint8)), -1)


def _dequantize_int4(x: Tensor) -> Tensor:
    num_units = x.shape[-1] // _INT4_BYTES
    shape, size = (*x.shape[:-1], num_units), num_units * INT4_UNIT // 2
    halves, upper = x[..., :size].reshape(*shape, 16), x[..., size:-SCALE_BYTES].reshape(*shape, 4)
    bits = (upper[..., None, :] >> _bits(x)[:, None] & 1).flatten(-2)
    codes = (torch.cat((halves & 15, halves >> 4), -1) | bits << 4).flatten(-2)
    scales = x[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    zeros = torch.where(scales.signbit(), 15, 16)
    return hadamard((codes.float() - zeros) * scales.abs())


def _bits(x: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=x.device)
