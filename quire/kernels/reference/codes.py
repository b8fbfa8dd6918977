"""Low-bit weights in plain torch: rounding of weights and of x to codes, and their products.

Each row of x is rounded to 8 bits with one scale. The products of codes are exact: their sums of a group of columns are
integers. They are multiplied by the group's scale and added in float64, then multiplied by the scale of x.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.contract import PackedWeight, QuantizedRows, Scheme

_SMALLEST = 2.0**-96  # rows with a smaller largest magnitude, and groups with a smaller scale, count as zeros
_MAX_CODE = 127  # of x
_BETTER = 0.9999  # of the least error: other sums of the same errors select the same scale
_STEPS = tuple(1 - i / 20 for i in range(8))  # tried scales of a group, relative to its extreme at code 0


def quantize_rows(rows: Tensor, scheme: Scheme, *, positive: bool = False) -> QuantizedRows:
    """Rows of a weight (n, columns), of any float type, rounded to codes. Offsets are 0.

    NaN and infinity give NaN scales. 8 bits with a scale for each row: the largest magnitude is 127 codes away from
    zero. Otherwise: of several scales of a group, the one with the least squared error; its extreme may have code 0.
    positive: for layouts that have no negative scales; then only an extreme below zero may have code 0.
    """
    rows, (columns, zero) = rows.float(), (rows.shape[1], scheme.zero_point)
    if scheme.bits == 8 and not scheme.group_size:
        rounded, scales = quantize_activations(rows)
        return with_offsets(QuantizedRows((rounded + zero).to(torch.uint8), scales.to(scheme.scale_dtype)), scheme)
    size = scheme.group_size or columns
    padded = pad(rows, (0, -columns % size)).reshape(len(rows), -1, size)
    largest, smallest = padded.amax(-1, keepdim=True), padded.amin(-1, keepdim=True)
    extremes = torch.where(largest > -smallest, largest, smallest)
    if positive:
        extremes = -extremes.abs()
    best = torch.full_like(extremes, torch.inf)
    codes, scales = torch.zeros_like(padded), torch.full_like(extremes, torch.nan)
    for step in (zero / (zero - 1), *_STEPS):
        tried = (extremes * (-step / zero)).to(scheme.scale_dtype).float()
        factors = torch.where(tried.abs() < _SMALLEST, 0, 1 / tried)
        rounded = (padded * factors).round().clamp(-zero, zero - 1)
        error = ((rounded * tried - padded) ** 2).sum(-1, keepdim=True)
        better = error < best * _BETTER
        best = torch.where(better, error, best)
        codes, scales = torch.where(better, rounded, codes), torch.where(better, tried, scales)
    codes = (codes.flatten(1)[:, :columns] + zero).to(torch.uint8)
    return with_offsets(QuantizedRows(codes, scales.squeeze(-1).to(scheme.scale_dtype)), scheme)


def with_offsets(rows: QuantizedRows, scheme: Scheme) -> QuantizedRows:
    """The rows, with offsets of 0 if the scheme has offsets."""
    return rows._replace(offsets=torch.zeros_like(rows.scales)) if scheme.has_offsets else rows


def dequantize(rows: QuantizedRows, scheme: Scheme) -> Tensor:
    """The values of quantized rows, float32 (n, columns)."""
    columns = rows.codes.shape[1]
    scales, offsets = (
        0 if some is None else some.float().repeat_interleave(scheme.group_size or columns, 1)[:, :columns]
        for some in (rows.scales, rows.offsets)
    )
    return (rows.codes.float() - scheme.zero_point) * scales + offsets


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (num_rows, columns) as codes in [-127, 127], float32, and scales float32 (num_rows, 1): x = code * scale.

    A row with NaN or infinity has codes 0 and the scale NaN.
    """
    x = x.float()
    most = x.abs().amax(-1, keepdim=True)
    finite = x.isfinite().all(-1, keepdim=True)
    zero = most < _SMALLEST
    factors = torch.where(finite & ~zero, torch.full_like(most, _MAX_CODE) / most, 0)  # 127 / most would round twice
    scales = torch.where(finite, torch.where(zero, 0, most / _MAX_CODE), torch.nan)
    return torch.where(finite, x * factors, 0).round(), scales


def allocate(shape: Sequence[int], dtype: torch.dtype, parts: int, scheme: Scheme) -> PackedWeight:
    """A zeroed weight (rows, columns), or stack of such weights. Codes of 4 bits are packed two to a byte."""
    *number, rows, columns = shape
    codes = torch.zeros((*number, rows, -(-columns * scheme.bits // 8)), dtype=torch.uint8)
    scales = torch.zeros((*number, rows, scheme.num_groups(columns)), dtype=scheme.scale_dtype)
    offsets = torch.zeros_like(scales) if scheme.has_offsets else None
    return PackedWeight(codes, rows, columns, dtype, parts, scheme, scales, offsets)


def write_rows(weight: PackedWeight, rows: Tensor | QuantizedRows, start: int, index: int = 0) -> None:
    """See Kernels."""
    one = weight if weight.data.dim() == 2 else weight[index]
    scheme, scales = require_codes(one)
    quantized = quantize_rows(rows, scheme) if isinstance(rows, Tensor) else rows
    codes, end = quantized.codes, start + len(quantized.codes)
    if scheme.bits == 4:
        pairs = pad(codes, (0, codes.shape[1] % 2)).view(len(codes), -1, 2)
        codes = pairs[:, :, 0] | pairs[:, :, 1] << 4
    one.data[start:end] = codes
    scales[start:end] = quantized.scales
    if one.offsets is not None and quantized.offsets is not None:
        one.offsets[start:end] = quantized.offsets


def rows_of(weight: PackedWeight) -> QuantizedRows:
    """All rows of a weight of this module."""
    scheme, scales = require_codes(weight)
    codes = weight.data
    if scheme.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return QuantizedRows(codes[:, : weight.columns], scales, weight.offsets)


def require_codes(weight: PackedWeight) -> tuple[Scheme, Tensor]:
    """Scheme and scales of a low-bit weight. Raises TypeError for others."""
    if weight.scheme is None or weight.scales is None:
        raise TypeError("this weight was packed by another kernel module")
    return weight.scheme, weight.scales


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x (num_rows, in) times a low-bit weight (out, in), plus bias (out,), rounded once to x's type."""
    rows, (scheme, _) = rows_of(weight), require_codes(weight)
    codes, scales = quantize_activations(x)
    size = scheme.group_size or weight.columns
    out = torch.zeros((len(x), weight.rows), dtype=torch.float64, device=x.device)
    for group, first in enumerate(range(0, weight.columns, size)):
        some = slice(first, first + size)
        sums = codes[:, some].double() @ (rows.codes[:, some].double() - scheme.zero_point).T
        out += sums * rows.scales[:, group].double()
        if rows.offsets is not None:
            out += codes[:, some].double().sum(1, keepdim=True) * rows.offsets[:, group].double()
    out *= scales
    return (out if bias is None else out + bias).to(x.dtype)


def embed(ids: Tensor, weight: PackedWeight, scale: float) -> Tensor:
    """Rows of a low-bit weight, times `scale`, rounded once."""
    scheme, scales = require_codes(weight)
    offsets = None if weight.offsets is None else weight.offsets[ids]
    chosen = replace(weight, data=weight.data[ids], scales=scales[ids], offsets=offsets)
    return (dequantize(rows_of(chosen), scheme) * scale).to(weight.dtype)
