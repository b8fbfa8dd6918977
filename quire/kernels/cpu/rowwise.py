"""Operations on each token alone by the C++ kernels: see `csrc/rowwise.cpp`.

The bits of a row depend neither on the other rows nor on the number of threads.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.contract import ACTIVATIONS, Rotation
from quire.kernels.cpu import _C
from quire.kernels.cpu.memory import empty
from quire.kernels.cpu.views import dtype_code, with_contiguous_heads

_CODES: Mapping[str, int] = MappingProxyType({name: code for code, name in enumerate(ACTIVATIONS)})


class _Rows(NamedTuple):
    """outer * inner rows of `size` numbers. The rows of one outer index are contiguous."""

    x: Tensor
    outer: int
    inner: int
    size: int
    stride: int  # elements from one outer index to the next


def _rows(x: Tensor, heads: int) -> _Rows:
    """The rows of x (..., size), or (..., heads, size). Slices of a wider product are not copied."""
    size = x.shape[-1]
    if x.dim() == 3:
        x = with_contiguous_heads(x)
        return _Rows(x, x.shape[0], x.shape[1], size, x.stride(0))
    if x.dim() == 2 and heads == 1 and x.stride(1) == 1:
        return _Rows(x, x.shape[0], 1, size, x.stride(0))
    x = x.contiguous()
    return _Rows(x, x.numel() // (heads * size), heads, size, heads * size)


def _norm_weight(weight: Tensor, x: Tensor) -> Tensor:
    """The weight in a type that the kernels accept with x: x's type, or float32."""
    return (weight if weight.dtype == x.dtype else weight.float()).contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x (..., size)."""
    rows, weight = _rows(x, 1), _norm_weight(weight, x)
    out = empty(x.shape, x.dtype)
    sizes = (rows.outer, rows.inner, rows.size, rows.stride)
    _C.rms_norm(rows.x, weight, out, dtype_code(x), dtype_code(weight), *sizes, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    x, residual, weight = x.contiguous(), residual.contiguous(), _norm_weight(weight, x)
    _check_same_shape(x, residual)
    size = x.shape[-1]
    out, total = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    sizes = (x.numel() // size, size)
    _C.add_rms_norm(x, residual, weight, total, out, dtype_code(x), dtype_code(weight), *sizes, eps)
    return out, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm of x (..., size); weight and bias (size,), or (heads, size) for x (..., heads, size)."""
    heads = 1 if weight.dim() == 1 else weight.shape[0]
    rows, weight = _rows(x, heads), _norm_weight(weight, x)
    if bias is not None:
        bias = bias.to(weight.dtype).contiguous()
    out = empty(x.shape, x.dtype)
    sizes = (rows.outer, rows.inner, rows.size, rows.stride, int(heads > 1))
    _C.layer_norm(rows.x, weight, bias, out, dtype_code(x), dtype_code(weight), *sizes, eps)
    return out


def gate(x: Tensor, activation: str) -> Tensor:
    """activation(first half of the last axis) * second half."""
    size = x.shape[-1] // 2
    rows = _rows(x.flatten(0, -2), 1)
    out = empty((*x.shape[:-1], size), x.dtype)
    _C.activate(rows.x, out, dtype_code(x), _CODES[activation], 1, rows.outer, size, rows.stride)
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    """activation(x)."""
    is_slice = x.dim() == 2 and x.stride(1) == 1 and not x.is_contiguous()  # of a wider product
    x = x if is_slice else x.contiguous()
    rows, size, stride = (*x.shape, x.stride(0)) if is_slice else (1, x.numel(), 0)
    out = empty(x.shape, x.dtype)
    _C.activate(x, out, dtype_code(x), _CODES[activation], 0, rows, size, stride)
    return out


def xielu(x: Tensor, parameters: Tensor) -> Tensor:
    """The activation of Apertus. parameters: float32 (4,)."""
    x = x.contiguous()
    out = empty(x.shape, x.dtype)
    _C.xielu(x, parameters, out, dtype_code(x), x.numel())
    return out


def multiply_add(x: Tensor, factors: Tensor | float, addend: Tensor | None = None) -> Tensor:
    """x (num_rows, n * size) times factors (num_rows, n), or a number, plus addend."""
    rows = _rows(x, 1)
    parts = factors.shape[-1] if isinstance(factors, Tensor) else 1
    number, table, stride, kind = 1.0, None, 0, dtype_code(x)
    if isinstance(factors, Tensor):
        table = factors if factors.stride(-1) == 1 else factors.contiguous()
        kind += int(table.dtype != x.dtype)
        stride = table.stride(0) if len(table) > 1 else 0
        if len(table) not in (1, rows.outer) or rows.size % parts or table.dtype not in (x.dtype, torch.float32):
            raise ValueError(
                f"factors {tuple(table.shape)} of {table.dtype} do not match {tuple(x.shape)} of {x.dtype}"
            )
    else:
        number = float(factors)
    if addend is not None:
        _check_same_shape(x, addend)
        addend = addend.contiguous()
    out = empty(x.shape, x.dtype)
    sizes = (rows.outer, parts, rows.size // parts, rows.stride, stride)
    _C.multiply_add(rows.x, table, addend, out, kind, *sizes, number)
    return out


def concatenate(x: Tensor, y: Tensor) -> Tensor:
    """x (num_rows, n) and y (num_rows, m), side by side."""
    if x.dtype != y.dtype or len(x) != len(y):
        raise ValueError(f"{tuple(x.shape)} of {x.dtype} and {tuple(y.shape)} of {y.dtype} do not match")
    first, second = _rows(x, 1), _rows(y, 1)
    out = empty((len(x), first.size + second.size), x.dtype)
    sizes = (first.size, first.stride, second.size, second.stride)
    _C.concatenate(first.x, second.x, out, x.element_size(), len(x), *sizes)
    return out


def widen(x: Tensor) -> Tensor:
    """x (num_rows, size) in float32."""
    if x.dtype == torch.float32:
        return x
    rows = _rows(x, 1)
    out = empty(x.shape, torch.float32)
    dtype_code(x)  # a type that the kernels lack is refused
    _C.widen(rows.x, out, rows.outer, rows.size, rows.stride)
    return out


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x (num_tokens, num_heads, head_dim) rotated."""
    cos, sin = (part.contiguous() for part in rotation)
    if len(x) != len(cos) or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[2]:
        raise ValueError(f"heads {tuple(x.shape)} and cosines {tuple(cos.shape)} do not match")
    x = with_contiguous_heads(x)
    out = empty(x.shape, x.dtype)
    _C.rotate(x, cos, sin, out, dtype_code(x), *x.shape, x.stride(0), cos.shape[1])
    return out


def rotation(positions: Tensor, frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (num_tokens,) int64, float32 (num_tokens, dim / 2), times `magnitude`.

    Angles are rounded to float32. For angles up to 1.6 million, the only other error is the rounding to float32.
    """
    positions, frequencies = positions.contiguous(), frequencies.contiguous()
    num_tokens, half = len(positions), len(frequencies)
    cos, sin = empty((2, num_tokens, half), torch.float32)
    _C.rotation(positions, frequencies, cos, sin, num_tokens, half, float(magnitude))
    return cos, sin


def embed(ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """Rows of weight (num_rows, size) for ids int64 (num_tokens,), times `scale`. An id without a row gives zeros."""
    ids, weight = ids.contiguous(), weight.contiguous()
    num_rows, size = weight.shape
    out = empty((len(ids), size), weight.dtype)
    _C.embed(ids, weight, out, dtype_code(weight), len(ids), size, num_rows, float(scale))
    return out


def _check_same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"{tuple(a.shape)} of {a.dtype} and {tuple(b.shape)} of {b.dtype} do not match")
