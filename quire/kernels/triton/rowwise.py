"""Operations on each token alone.

The bits of a row do not depend on the other rows: the number of rows of a program depends on their size alone, and
each row has its own sums. Norms and activations are computed in float32 and rounded once.
"""
# ruff: noqa: ANN201 -- values in kernels have no types

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.contract import ACTIVATIONS
from quire.kernels.triton.launch import INTERPRETED, pow2
from quire.kernels.triton.rounding import rounded

BLOCK = 1024  # numbers of one program in elementwise kernels
ROWS = 16  # the most rows of a program, for short rows


@triton.jit
def load_floats(pointers, mask):
    """The numbers at `pointers` in float32; 0 where `mask` is false."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


# ---- norms ----


class _Rows(NamedTuple):
    """Rows of a tensor: row r begins at element r // inner * stride + r % inner * inner_stride."""

    x: Tensor
    number: int
    inner: int
    stride: int
    inner_stride: int


def _rows(x: Tensor, heads: int) -> _Rows:
    """The rows of x (..., size), or (..., heads, size). Slices of a wider product are not copied."""
    size = x.shape[-1]
    if x.dim() == 3 and x.stride(2) == 1:
        return _Rows(x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1))
    if x.dim() == 2 and heads == 1 and x.stride(1) == 1:
        return _Rows(x, x.shape[0], 1, x.stride(0), 0)
    x = x.contiguous()
    return _Rows(x, x.numel() // size, heads, heads * size, size)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,
    residual_ptr,  # (num_rows, SIZE), or None
    weight_ptr,  # (SIZE,)
    total_ptr,  # like the residual
    out_ptr,  # (num_rows, SIZE)
    num_rows,
    eps,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,  # see `_Rows`
    STRIDE: tl.constexpr,
    INNER_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # SIZE or more, a power of two
    INTERPRET: tl.constexpr,
):
    """RMS norm of ROWS rows of x, or of x + residual if there is a residual. The sum is then stored at total_ptr."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    sources = rows // INNER * STRIDE + rows % INNER * INNER_STRIDE
    places = rows[:, None] * SIZE + columns[None, :]
    x = load_floats(x_ptr + (sources[:, None] + columns[None, :]), inside)
    if residual_ptr is not None:
        total = rounded(x + load_floats(residual_ptr + places, inside), total_ptr.dtype.element_ty, INTERPRET)
        tl.store(total_ptr + places, total, mask=inside)
        x = total.to(tl.float32)
    factors = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
    weight = load_floats(weight_ptr + columns, columns < SIZE)
    tl.store(
        out_ptr + places,
        rounded(x * factors[:, None] * weight[None, :], out_ptr.dtype.element_ty, INTERPRET),
        mask=inside,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm(
    x_ptr,
    weight_ptr,  # (HEADS, SIZE)
    bias_ptr,  # (HEADS, SIZE), or None
    out_ptr,  # (num_rows, SIZE)
    num_rows,
    eps,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # row r has the weights of head r % HEADS
    INNER: tl.constexpr,  # see `_Rows`
    STRIDE: tl.constexpr,
    INNER_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # SIZE or more, a power of two
    INTERPRET: tl.constexpr,
):
    """Layer norm of ROWS rows of x."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    sources = rows // INNER * STRIDE + rows % INNER * INNER_STRIDE
    beside = (rows % HEADS * SIZE)[:, None] + columns[None, :]
    x = load_floats(x_ptr + (sources[:, None] + columns[None, :]), inside)
    means = tl.sum(x, 1) / SIZE
    centred = tl.where(inside, x - means[:, None], 0.0)
    factors = tl.rsqrt(tl.sum(centred * centred, 1) / SIZE + eps)
    normed = centred * factors[:, None] * load_floats(weight_ptr + beside, inside)
    if bias_ptr is not None:
        normed += load_floats(bias_ptr + beside, inside)
    tl.store(
        out_ptr + (rows[:, None] * SIZE + columns[None, :]),
        rounded(normed, out_ptr.dtype.element_ty, INTERPRET),
        mask=inside,
    )


def _shape(size: int) -> tuple[int, int, int]:
    """(rows, width, warps) of a program for rows of `size` numbers."""
    width = pow2(size)
    return max(1, min(ROWS, BLOCK // width)), width, min(max(width // 512, 4), 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x (..., size)."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norms(_rows(x, 1), None, weight, None, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), in one pass. The sum is rounded before it is normalised.

    Raises ValueError if x and residual differ in shape or type.
    """
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(f"{tuple(x.shape)} of {x.dtype} and {tuple(residual.shape)} of {residual.dtype} do not match")
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _rms_norms(_rows(x, 1), residual.contiguous(), weight, total, out, eps)
    return out, total


def _rms_norms(
    rows: _Rows, residual: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float
) -> None:
    size = out.shape[-1]
    at_once, width, warps = _shape(size)
    _rms_norm[(triton.cdiv(rows.number, at_once),)](
        rows.x,
        residual,
        weight.contiguous(),
        total,
        out,
        rows.number,
        eps,
        SIZE=size,
        INNER=rows.inner,
        STRIDE=rows.stride,
        INNER_STRIDE=rows.inner_stride,
        ROWS=at_once,
        WIDTH=width,
        INTERPRET=INTERPRETED,
        num_warps=warps,
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm of x (..., size); weight and bias (size,), or (heads, size) for x (..., heads, size)."""
    size, heads = x.shape[-1], 1 if weight.dim() == 1 else weight.shape[0]
    rows = _rows(x, heads)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    at_once, width, warps = _shape(size)
    _layer_norm[(triton.cdiv(rows.number, at_once),)](
        rows.x,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        out,
        rows.number,
        eps,
        SIZE=size,
        HEADS=heads,
        INNER=rows.inner,
        STRIDE=rows.stride,
        INNER_STRIDE=rows.inner_stride,
        ROWS=at_once,
        WIDTH=width,
        INTERPRET=INTERPRETED,
        num_warps=warps,
    )
    return out


# ---- activations ----


@triton.jit
def sigmoid(x):
    """sigmoid(x) of float32 x. A NaN stays one."""
    e = tl.exp(-tl.abs(x))  # at most 1: cannot overflow
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _tanh(x):
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    small = tl.minimum(size, 0.25)  # here 1 - e would lose digits
    square = small * small
    series = small * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    found = tl.where(size < 0.25, series, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -found, found)


@triton.jit
def _softplus(x):
    """max(x, 0) + log(1 + e^-|x|), whose logarithm is 2 atanh(z / (z + 2)) with z up to 1."""
    z = tl.exp(-tl.abs(x))
    s = z / (z + 2.0)
    t = s * s
    series = 1.0 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13))))))
    return tl.where(x < 0, 0.0, x) + 2.0 * s * series


@triton.jit
def _gelu_tanh(x):
    near = tl.minimum(tl.maximum(x, -30.0), 30.0)  # beyond, the result is 0 or x, and the cube could overflow
    # (1 + tanh(y)) / 2 is sigmoid(2 y)
    return x * sigmoid(1.5957691216057308 * (near + 0.044715 * near * near * near))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """activation(x) of float32 x. A NaN stays one."""
    if ACTIVATION == "silu":
        y = x * sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = _gelu_tanh(x)
    elif ACTIVATION == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "relu2":
        y = tl.where(x < 0, 0.0, x * x)
    elif ACTIVATION == "sigmoid":
        y = sigmoid(x)
    elif ACTIVATION == "softplus":
        y = _softplus(x)
    else:
        tl.static_assert(ACTIVATION == "tanh")
        y = _tanh(x)
    return y


@triton.jit
def _activate(
    x_ptr,
    out_ptr,  # (rows, SIZE)
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,  # elements from one row of x to the next
    PIECES: tl.constexpr,  # pieces of a row
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,  # whether rows of x have 2 * SIZE numbers, the second half being factors
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One piece of a row."""
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    columns = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    y = activated(load_floats(x_ptr + (row * STRIDE + columns), inside), ACTIVATION)
    if GATED:
        y *= load_floats(x_ptr + (row * STRIDE + SIZE + columns), inside)
    tl.store(out_ptr + (row * SIZE + columns), rounded(y, out_ptr.dtype.element_ty, INTERPRET), mask=inside)


def activate(x: Tensor, activation: str) -> Tensor:
    """activation(x). Raises ValueError for an activation that is not among ACTIVATIONS."""
    return _activated(x, x.shape[-1], activation, gated=False)


def gate(x: Tensor, activation: str) -> Tensor:
    """activation(first half of the last axis) * second half, rounded once.

    Raises ValueError for an activation that is not among ACTIVATIONS.
    """
    return _activated(x, x.shape[-1] // 2, activation, gated=True)


def _activated(x: Tensor, size: int, activation: str, *, gated: bool) -> Tensor:
    if activation not in ACTIVATIONS:
        raise ValueError(f"{activation!r} is not one of {', '.join(ACTIVATIONS)}")
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    block = min(BLOCK, pow2(size))
    pieces = triton.cdiv(size, block)
    _activate[(len(rows) * pieces,)](
        rows,
        out,
        SIZE=size,
        STRIDE=rows.stride(0),
        PIECES=pieces,
        ACTIVATION=activation,
        GATED=gated,
        BLOCK=block,
        INTERPRET=INTERPRETED,
    )
    return out


@triton.jit(do_not_specialize=["number"])
def _xielu(
    x_ptr,
    parameters_ptr,  # float32: a, b, beta, eps
    out_ptr,
    number,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < number
    x = load_floats(x_ptr + places, inside)
    beta, eps = tl.load(parameters_ptr + 2), tl.load(parameters_ptr + 3)
    positive, negative = _softplus(tl.load(parameters_ptr)), beta + _softplus(tl.load(parameters_ptr + 1))
    low = tl.where(x > eps, eps, x)
    small = tl.maximum(low, -0.5)  # here e^x - 1 would lose digits
    series = 0.5 + small * (1 / 6 + small * (1 / 24 + small * (1 / 120 + small * (1 / 720 + small * (1 / 5040)))))
    less_one = tl.where(low < -0.5, tl.exp(low) - 1.0, small + small * small * series)
    y = tl.where(x > 0, positive * x * x, (less_one - x) * negative) + beta * x
    tl.store(out_ptr + places, rounded(y, out_ptr.dtype.element_ty, INTERPRET), mask=inside)


def xielu(x: Tensor, parameters: Tensor) -> Tensor:
    """The activation of Apertus: see Kernels."""
    x = x.contiguous()
    out = torch.empty_like(x)
    block = min(BLOCK, pow2(x.numel()))
    _xielu[(triton.cdiv(x.numel(), block),)](x, parameters, out, x.numel(), BLOCK=block, INTERPRET=INTERPRETED)
    return out


@triton.jit
def _multiply_add(
    x_ptr,
    factors_ptr,  # (rows, WIDTH / SIZE), or one row for all, or None
    addend_ptr,  # (rows, WIDTH), or None
    out_ptr,
    factor,  # where there are no factors
    stride,  # elements from one row of x to the next
    factor_stride,  # the same of factors; 0: one row for all
    WIDTH: tl.constexpr,  # of a row
    SIZE: tl.constexpr,  # numbers that share a factor
    PIECES: tl.constexpr,  # of a row
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One piece of a row."""
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    columns = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    y = load_floats(x_ptr + (row * stride + columns), inside)
    if factors_ptr is not None:
        y *= load_floats(factors_ptr + (row * factor_stride + columns // SIZE), inside)
    else:
        y *= factor
    if addend_ptr is not None:
        y += load_floats(addend_ptr + (row * WIDTH + columns), inside)
    tl.store(out_ptr + (row * WIDTH + columns), rounded(y, out_ptr.dtype.element_ty, INTERPRET), mask=inside)


def multiply_add(x: Tensor, factors: Tensor | float, addend: Tensor | None = None) -> Tensor:
    """x * factors + addend: see Kernels."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    table = None
    if isinstance(factors, Tensor):
        table = factors if factors.stride(-1) == 1 else factors.contiguous()
    width, parts = x.shape[-1], 1 if table is None else table.shape[-1]
    block = min(BLOCK, pow2(width))
    pieces = triton.cdiv(width, block)
    if not x.numel():
        return out
    _multiply_add[(len(x) * pieces,)](
        x,
        table,
        None if addend is None else addend.contiguous(),
        out,
        0.0 if isinstance(factors, Tensor) else float(factors),
        x.stride(0),
        table.stride(0) if table is not None and len(table) > 1 else 0,
        WIDTH=width,
        SIZE=width // parts,
        PIECES=pieces,
        BLOCK=block,
        INTERPRET=INTERPRETED,
    )
    return out


def widen(x: Tensor) -> Tensor:
    """x in float32."""
    return x.float()


# ---- positions ----


@triton.jit
def _cos_sin(angle):
    """Cosine and sine of float64 angles, within 1e-11 up to 2^20 quarters of a turn."""
    quarters = tl.floor(angle * 0.63661977236758134 + 0.5)
    # pi / 2 in two parts: the first has 33 bits, so that its product with `quarters` is exact
    r = angle - quarters * 1.57079632673412561417 - quarters * 6.07710050650619224932e-11
    z = r * r
    sin = 1 / 362880 - z * (1 / 39916800)
    sin = r + r * z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * sin)))
    cos = 1 / 40320 + z * (-1 / 3628800 + z * (1 / 479001600))
    cos = 1.0 + z * (-0.5 + z * (1 / 24 + z * (-1 / 720 + z * cos)))
    quarter = quarters.to(tl.int64)
    odd = (quarter & 1) == 1
    turned_cos, turned_sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    turned_cos = tl.where(((quarter + 1) & 2) == 2, -turned_cos, turned_cos)
    turned_sin = tl.where((quarter & 2) == 2, -turned_sin, turned_sin)
    return turned_cos, turned_sin


@triton.jit(do_not_specialize=["number"])
def _rotation(
    positions_ptr,
    frequencies_ptr,
    cos_ptr,
    sin_ptr,
    number,
    magnitude,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK of `number` angles, in the order of (num_tokens, HALF)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < number
    positions = tl.load(positions_ptr + places // HALF, mask=inside, other=0)
    frequencies = tl.load(frequencies_ptr + places % HALF, mask=inside, other=0.0)
    angles = positions.to(tl.float32) * frequencies  # rounded to float32, as in training
    cos, sin = _cos_sin(angles.to(tl.float64))
    tl.store(cos_ptr + places, (cos * magnitude).to(tl.float32), mask=inside)
    tl.store(sin_ptr + places, (sin * magnitude).to(tl.float32), mask=inside)


def rotation(positions: Tensor, frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (num_tokens,) int64, float32 (num_tokens, dim / 2), times `magnitude`.

    Angles are rounded to float32. For angles up to 1.6 million, the only other error is the rounding to float32. The
    sine instructions of GPUs are not used, because they are inaccurate far from 0.
    """
    num_tokens, half = len(positions), len(frequencies)
    cos, sin = torch.empty((2, num_tokens, half), dtype=torch.float32, device=positions.device)
    number, block = num_tokens * half, BLOCK // 2
    _rotation[(triton.cdiv(number, block),)](
        positions.contiguous(), frequencies.contiguous(), cos, sin, number, float(magnitude), HALF=half, BLOCK=block
    )
    return cos, sin
