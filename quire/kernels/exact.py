"""Arithmetic whose result bits depend on the arguments alone, not on shape, batch or threads.

It requires that sums, products and quotients of floats are correctly rounded (IEEE 754), and that an elementwise
function of torch gives equal bits for equal numbers in whole vectors (`apply_to_whole_vectors`).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

VECTOR = 64  # numbers; a multiple of the SIMD width of elementwise loops
CHUNK_NUMBERS = 2**14  # numbers that torch gives to one thread; it splits larger tensors between threads at any index
TERMS = 256  # of one exact sum: 2**8
LEFT_BITS = 22  # fixed-point bits of the left operand of a product
RIGHT_BITS = 53 - 8 - LEFT_BITS  # of the right operand: float64 holds every partial sum of TERMS products exactly
_WEIGHT_CHUNK_NUMBERS = 2**17  # of a weight that are converted to float64 at once, so that they stay in a CPU cache
_OUTPUT_CHUNK_NUMBERS = 2**22  # of products that are computed at once
_BITS: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
)
_EXPONENT = 0x7FF << 52  # mask of the exponent bits of a float64
_TINY = 2.0**-200  # far below every float32 and far above the smallest float64


def exact_sum(x: Tensor) -> Tensor:
    """The sum over the last axis, which is kept: float64 (..., 1), of numbers that are first rounded to fixed point.

    The fixed point has as many bits below the largest number of a row as keep every partial sum exact in any order.
    """
    return fixed_point(x, row_power(x), sum_bits(x.shape[-1])).sum(-1, keepdim=True)


def sum_bits(terms: int) -> int:
    """The most bits of fixed-point numbers such that float64 adds `terms` of them exactly."""
    return 53 - terms.bit_length()


def apply_to_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for an elementwise function, computed on contiguous pieces of whole vectors."""
    flat = x.reshape(-1)
    size = len(flat)
    flat = _pad_last_axis(flat, -size % VECTOR)
    if len(flat) <= CHUNK_NUMBERS:
        return function(flat)[:size].view(x.shape)
    out = torch.empty_like(flat)
    for first in range(0, len(flat), CHUNK_NUMBERS):
        out[first : first + CHUNK_NUMBERS] = function(flat[first : first + CHUNK_NUMBERS])
    return out[:size].view(x.shape)


def _pad_last_axis(x: Tensor, number: int) -> Tensor:
    """x with `number` zeros appended to its last axis."""
    return F.pad(x, (0, number)) if number else x


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """x (num_rows, in) times weight (out, in), plus bias (out,). The bits of a row depend on no other row.

    Both operands are rounded to fixed point: x to LEFT_BITS below the largest of TERMS numbers of a row, the weight to
    RIGHT_BITS below the largest of a row. Then every product and every sum of TERMS products is exact in float64 in
    any order of additions, so the index of a row, the shape and the number of threads do not matter. The sums of TERMS
    products are added in an order that depends on their number alone, and rounded once, to `dtype`. The method is that
    of Ozaki et al., Error-free transformations of matrix multiplication, 2012, with one slice of each matrix.

    The error is at most 2**-LEFT_BITS times the sum of |weight|, each times the largest |x| of its TERMS, plus
    2**-RIGHT_BITS times the sum of |x| times the largest |weight|. A row with a number that is not finite is NaN.
    """
    num_sums = -(-x.shape[1] // TERMS)
    at_once = max(64, _WEIGHT_CHUNK_NUMBERS // (num_sums * TERMS))
    rows = max(16, _OUTPUT_CHUNK_NUMBERS // (num_sums * at_once))
    out = x.new_empty(len(x), len(weight), dtype=dtype)
    for first in range(0, len(x), rows):
        _product(x[first : first + rows], weight, bias, at_once, out[first : first + rows])
    return out


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, at_once: int, out: Tensor) -> None:
    """Write the product to `out`: see `product`. at_once: rows of the weight that are converted at once."""
    num_rows, columns = x.shape
    num_sums = -(-columns // TERMS)
    left = _pad_last_axis(x, num_sums * TERMS - columns).reshape(num_rows, num_sums, TERMS)
    left = fixed_point(left, row_power(left), LEFT_BITS).transpose(0, 1)  # (num_sums, num_rows, TERMS)
    right = x.new_empty(min(at_once, len(weight)), num_sums * TERMS, dtype=torch.float64)
    right[:, columns:] = 0
    for start in range(0, len(weight), at_once):
        part = weight[start : start + at_once]
        magic = _rounding_constant(row_power(part), RIGHT_BITS)
        right[: len(part), :columns].copy_(part)
        rounded = right[: len(part)].add_(magic).sub_(magic).view(len(part), num_sums, TERMS)
        sums = _pairwise_sum(torch.bmm(left, rounded.permute(1, 2, 0)))
        out[:, start : start + at_once] = sums if bias is None else sums + bias[start : start + at_once]


def _pairwise_sum(parts: Tensor) -> Tensor:
    """The sum over the first axis. Halves are added in place until one is left."""
    while len(parts) > 1:
        half = (len(parts) + 1) // 2
        parts[: len(parts) - half] += parts[half:]
        parts = parts[:half]
    return parts[0]


def fixed_point(x: Tensor, power: Tensor | float, bits: int) -> Tensor:
    """x as float64, rounded to multiples of power * 2**-bits. `power`, a power of 2, must not be below any |x|."""
    magic = _rounding_constant(power, bits)
    return x.to(torch.float64, copy=True).add_(magic).sub_(magic)


def row_power(x: Tensor) -> Tensor:
    """The least power of 2 above all |x| of a row, which is the last axis: float64 (..., 1)."""
    kind = _BITS[x.dtype]
    magnitudes = x.view(kind) & torch.iinfo(kind).max  # integers in the order of the floats, NaN above all others
    return power_above(magnitudes.amax(-1, keepdim=True).view(x.dtype))


def power_above(x: Tensor) -> Tensor:
    """The least power of 2 above x >= 0, float64; _TINY for 0, and inf for numbers that are not finite."""
    exponents = x.double().view(torch.int64) & _EXPONENT
    return exponents.view(torch.float64).mul_(2).clamp_min_(_TINY)


def _rounding_constant(power: Tensor | float, bits: int) -> Tensor | float:
    """A constant that, added and subtracted again, rounds numbers of magnitude up to `power` to fixed point."""
    return power * (1.5 * 2.0 ** (52 - bits))
