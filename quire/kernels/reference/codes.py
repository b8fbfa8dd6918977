"""Low-bit weights in plain torch: rounding of weights and of x to codes, and their products.

Each row of x is rounded to 8 bits, with a scale for each group of Scheme.x_group_size columns. The products of codes
are exact: their sums of such a group are integers. They are multiplied by the scales of x and of the weight, and added
in float64. Products with float8 weights (the grid "e4m3") are added in float64, too, and do not round x.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.contract import FACTOR_COLUMNS, GRIDS, MXFP4, PackedWeight, QuantizedRows, Scheme

_SMALLEST = 2.0**-96  # rows with a smaller largest magnitude, and groups with a smaller scale, count as zeros
_MAX_CODE = 127  # of x
_BETTER = 0.9999  # of the least error: other sums of the same errors select the same scale
_STEPS = tuple(1 - i / 20 for i in range(8))  # tried scales of a group, relative to its extreme at code 0
_MAX_E4M3 = 448.0
_E2M1_CODES = tuple(GRIDS["e2m1"].index(unit) if unit in GRIDS["e2m1"] else 0 for unit in range(-12, 13))
_MXFP4_SHIFTS = (-4, -3, -5)  # of the exponents of halved scales: the first is that of OCP's specification
_NVFP4_TOPS = (6.0, 5.5, 5.0, 4.5, 4.0, 6.5, 7.0)  # numbers of e2m1 that the largest magnitude of a group is tried as


def quantize_rows(
    rows: Tensor, scheme: Scheme, *, positive: bool = False, largest: Tensor | None = None
) -> QuantizedRows:
    """Rows of a weight (n, columns), of any float type, rounded to codes. Offsets are 0.

    NaN and infinity give NaN scales. 8 bits with a scale for each row: the largest magnitude is 127 codes away from
    zero. e4m3: the largest magnitude is 448. Otherwise: of several scales of a group, the one with the least squared
    error. With the grid "int" a group's extreme may have code 0. With "e2m1" and groups of 32, scales are powers of two
    (OCP Microscaling Formats v1.0: MXFP4). With other groups they are e4m3 numbers times one power of two for a row
    (NVFP4), so that a row's codes depend on this row alone.

    positive: for layouts that have no negative scales; then only an extreme below zero may have code 0.
    largest: float32 (1, 1), for NVFP4 layouts with one factor for a tensor: its largest magnitude. Scales of larger
    groups are the largest e4m3 number times the factor.
    Raises ValueError for the grid "iq4_nl", and for scales with factors.
    """
    if scheme.has_factors:
        raise ValueError("weights are not rounded to scales with factors; only GGUF files have them")
    rows, (columns, zero) = rows.float(), (rows.shape[1], scheme.zero_point)
    if scheme.grid == "int" and scheme.bits == 8 and not scheme.group_size:
        rounded, scales = quantize_activations(rows, columns)
        return with_offsets(QuantizedRows((rounded + zero).to(torch.uint8), scales.to(scheme.scale_dtype)), scheme)
    size = scheme.group_size or columns
    padded = pad(rows, (0, -columns % size)).reshape(len(rows), -1, size)
    match scheme.grid:
        case "int":
            numbers, scales = _best(padded, _linear_scales(padded, scheme, positive=positive), scheme)
            codes = codes_of(numbers, scheme)
        case "e2m1":
            numbers, scales = _best(padded, _fp4_scales(padded, scheme, largest), scheme)
            codes = codes_of(numbers, scheme)
        case "e4m3":
            scales = (padded.abs().amax(-1, keepdim=True) / _MAX_E4M3).to(scheme.scale_dtype).float()
            codes = (padded * _factors(scales)).clamp(-_MAX_E4M3, _MAX_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)
            scales = torch.where(scales.isfinite(), scales, torch.nan)
        case "iq4_nl":
            raise ValueError("weights are not rounded to iq4_nl; only GGUF files have it")
    codes = codes.flatten(1)[:, :columns].to(torch.uint8)
    return with_offsets(QuantizedRows(codes, scales.squeeze(-1).to(scheme.scale_dtype)), scheme)


def _best(groups: Tensor, tried: Iterable[Tensor], scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Groups (n, num_groups, size) as numbers, and the scales (n, num_groups, 1) with the least error."""
    best = torch.full_like(groups[..., :1], torch.inf)
    numbers, scales = torch.zeros_like(groups), torch.full_like(best, torch.nan)
    for scale in tried:
        rounded = nearest_numbers(groups, scale, scheme)
        error = ((rounded * scale - groups) ** 2).sum(-1, keepdim=True)
        better = error < best * _BETTER
        best = torch.where(better, error, best)
        numbers, scales = torch.where(better, rounded, numbers), torch.where(better, scale, scales)
    return numbers, scales


def nearest_numbers(values: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """The numbers of the grid "int" or "e2m1" that are nearest to values / scales, float32. 0 for a scale of 0."""
    x, zero = values * _factors(scales), scheme.zero_point
    return _to_e2m1(x) if scheme.grid == "e2m1" else x.round().clamp(-zero, zero - 1)


def codes_of(numbers: Tensor, scheme: Scheme) -> Tensor:
    """The codes, uint8, of numbers of the grid "int" or "e2m1": the inverse of `numbers_of`."""
    if scheme.grid == "e2m1":
        return torch.tensor(_E2M1_CODES, dtype=torch.uint8, device=numbers.device)[numbers.long() + 12]
    return (numbers + scheme.zero_point).to(torch.uint8)


def _factors(scales: Tensor) -> Tensor:
    return torch.where(scales.abs() < _SMALLEST, 0, 1 / scales)


def _linear_scales(groups: Tensor, scheme: Scheme, *, positive: bool) -> Iterator[Tensor]:
    largest, smallest, zero = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True), scheme.zero_point
    extremes = torch.where(largest > -smallest, largest, smallest)
    if positive:
        extremes = -extremes.abs()
    for step in (zero / (zero - 1), *_STEPS):
        yield (extremes * (-step / zero)).to(scheme.scale_dtype).float()


def _to_e2m1(x: Tensor) -> Tensor:
    """The nearest of the doubled numbers of e2m1, ties to the even code: steps of 1 up to 4, of 2 to 8, of 4 to 12."""
    ones, twos, fours = x.round(), (x / 2).round() * 2, (x / 4).round() * 4
    low = ones.clamp(-4, 4)
    return low + (twos.clamp(-8, 8) - twos.clamp(-4, 4)) + (fours.clamp(-12, 12) - fours.clamp(-8, 8))


def _fp4_scales(groups: Tensor, scheme: Scheme, largest: Tensor | None) -> Iterator[Tensor]:
    """Halves of the scales of MXFP4 or NVFP4 to try."""
    most = groups.abs().amax(-1, keepdim=True)
    finite = torch.where(most.isfinite() & (most >= _SMALLEST), most, 1)
    if scheme.group_size == MXFP4.group_size:
        _, exponents = finite.frexp()  # finite in [2**(exponent - 1), 2**exponent)
        scales = (torch.ldexp(torch.ones_like(most), exponents + shift) for shift in _MXFP4_SHIFTS)
    else:
        factors = nvfp4_factor(most.amax(1, keepdim=True) if largest is None else largest) / 2
        exact = (most / (2 * top * factors) for top in _NVFP4_TOPS)
        scales = (one.clamp(max=_MAX_E4M3).to(torch.float8_e4m3fn).float() * factors for one in exact)
    for scale in scales:
        yield torch.where(most < _SMALLEST, 0, scale).to(scheme.scale_dtype).float()


def nvfp4_factor(largest: Tensor) -> Tensor:
    """The factor of the e4m3 scales of numbers up to `largest` in NVFP4: a power of two, or NaN."""
    _, exponents = (largest / (min(_NVFP4_TOPS) * _MAX_E4M3)).frexp()
    return torch.ldexp(torch.where(largest.isfinite(), 1.0, torch.nan), exponents)


def with_offsets(rows: QuantizedRows, scheme: Scheme) -> QuantizedRows:
    """The rows, with offsets of 0 if the scheme has offsets."""
    return rows._replace(offsets=torch.zeros_like(rows.scales)) if scheme.has_offsets else rows


def dequantize(rows: QuantizedRows, scheme: Scheme) -> Tensor:
    """The values of quantized rows, float32 (n, columns)."""
    columns = rows.codes.shape[1]
    scales, offsets = (
        0 if some is None else some.repeat_interleave(scheme.group_size or columns, 1)[:, :columns]
        for some in scales_of(rows, scheme)
    )
    return numbers_of(rows.codes, scheme) * scales + offsets


def scales_of(rows: QuantizedRows, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Scales and offsets (n, num_groups) times their factors, float32. These products are exact."""
    scales, offsets = rows.scales.float(), None if rows.offsets is None else rows.offsets.float()
    if rows.factors is None:
        return scales, offsets
    factors = rows.factors.float().repeat_interleave(FACTOR_COLUMNS // scheme.group_size, 1)[:, : scales.shape[1]]
    return scales * factors[:, :, 0], None if offsets is None else offsets * factors[:, :, 1]


def numbers_of(codes: Tensor, scheme: Scheme) -> Tensor:
    """The numbers of codes (uint8) in the scheme's grid, float32, in units of the scale."""
    match scheme.grid:
        case "int":
            return codes.float() - scheme.zero_point
        case "e4m3":
            return codes.view(torch.float8_e4m3fn).float()
    return torch.tensor(GRIDS[scheme.grid], dtype=torch.float32, device=codes.device)[codes.long()]


def quantize_activations(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """x (num_rows, columns) as codes in [-127, 127], float32, and scales float32 (num_rows, num_groups).

    x = code * scale. A group with NaN or infinity has codes 0 and the scale NaN.
    """
    num_rows, columns = x.shape
    groups = pad(x.float(), (0, -columns % group_size)).reshape(num_rows, -1, group_size)
    most = groups.abs().amax(-1, keepdim=True)
    finite = groups.isfinite().all(-1, keepdim=True)
    zero = most < _SMALLEST
    factors = torch.where(finite & ~zero, torch.full_like(most, _MAX_CODE) / most, 0)  # 127 / most would round twice
    scales = torch.where(finite, torch.where(zero, 0, most / _MAX_CODE), torch.nan)
    codes = torch.where(finite, groups * factors, 0).round()
    return codes.flatten(1)[:, :columns], scales.squeeze(-1)


def allocate(shape: Sequence[int], dtype: torch.dtype, parts: int, scheme: Scheme) -> PackedWeight:
    """A zeroed weight (rows, columns), or stack of such weights. Codes of 4 bits are packed two to a byte.

    Scales with factors are multiplied by them, and become float32.
    """
    *number, rows, columns = shape
    codes = torch.zeros((*number, rows, -(-columns * (4 if scheme.bits == 4 else 8) // 8)), dtype=torch.uint8)
    dtype_of_scales = torch.float32 if scheme.has_factors else scheme.scale_dtype
    scales = torch.zeros((*number, rows, scheme.num_groups(columns)), dtype=dtype_of_scales)
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
    scales[start:end], offsets = scales_of(quantized, scheme)
    if one.offsets is not None and offsets is not None:
        one.offsets[start:end] = offsets


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


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, addend: Tensor | None = None) -> Tensor:
    """x (num_rows, in) times a low-bit weight (out, in), plus addend and bias, rounded once to x's type."""
    rows, (scheme, _) = rows_of(weight), require_codes(weight)
    size = scheme.x_group_size
    if scheme.grid == "e4m3":
        codes, scales = x, torch.ones((len(x), -(-weight.columns // size)), device=x.device)
    else:
        codes, scales = quantize_activations(x, size)
    out = torch.zeros((len(x), weight.rows), dtype=torch.float64, device=x.device)
    for first, scale in zip(range(0, weight.columns, size), scales.double().unbind(1), strict=True):
        some, group = slice(first, first + size), first // scheme.group_size if scheme.group_size else 0
        sums = codes[:, some].double() @ numbers_of(rows.codes[:, some], scheme).double().T
        sums *= rows.scales[:, group].double()
        if rows.offsets is not None:
            sums += codes[:, some].double().sum(1, keepdim=True) * rows.offsets[:, group].double()
        out += sums * scale[:, None]
    if addend is not None:
        out += addend
    return (out if bias is None else out + bias).to(x.dtype)


def embed(ids: Tensor, weight: PackedWeight, scale: float) -> Tensor:
    """Rows of a low-bit weight, times `scale`, rounded once."""
    scheme, scales = require_codes(weight)
    offsets = None if weight.offsets is None else weight.offsets[ids]
    chosen = replace(weight, data=weight.data[ids], scales=scales[ids], offsets=offsets)
    return (dequantize(rows_of(chosen), scheme) * scale).to(weight.dtype)
