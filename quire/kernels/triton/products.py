"""Matrix products with plain and low-bit weights, embedding lookup included. `code_products` has the low-bit ones.

With plain weights torch computes ordinary products. Strict products use one tile shape and one order of sums, so that
the bits of a row do not depend on the rest of the batch.
"""
# ruff: noqa: ANN201 -- Triton reads annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.contract import PackedWeight, Scheme, Weight
from quire.kernels.triton import code_products, code_weights
from quire.kernels.triton.launch import CONSECUTIVE_TILES, INTERPRETED, pow2
from quire.kernels.triton.rounding import rounded
from quire.kernels.triton.rowwise import BLOCK, gate, load_floats

SHORT_TILE_ROWS = 16  # pairs per expert up to which a short tile is used; also its rows


class Tile(NamedTuple):
    """Tile of a product: rows and columns that one program computes, and terms per step."""

    rows: int
    columns: int
    terms: int
    num_stages: int


def tile_of(rows: int, columns: int, dtype: torch.dtype) -> Tile:
    """A tile of this shape for products of this type."""
    terms = 64 if rows > SHORT_TILE_ROWS else 128
    return Tile(rows, columns, terms // 2 if dtype == torch.float32 else terms, 4 if rows > SHORT_TILE_ROWS else 3)


def allocate_weight(
    shape: Sequence[int], dtype: torch.dtype, parts: int = 1, scheme: Scheme | None = None
) -> PackedWeight | None:
    """A low-bit weight, or None without a scheme: other products read plain tensors."""
    return None if scheme is None else code_weights.allocate(shape, dtype, parts, scheme)


def with_contiguous_rows(x: Tensor) -> Tensor:
    """x, or a copy if its last axis is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def product(
    x_ptr,
    sources,  # (ROWS,): indices of rows of x
    present,  # (ROWS,): whether the row exists; otherwise it is zeros
    weight_ptr,  # (N, K)
    columns,  # (COLUMNS,): indices of rows of the weight
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,  # elements from one row of x to the next
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Rows of x times rows of the weight: float32 (ROWS, COLUMNS), steps of TERMS terms added in order."""
    terms = tl.arange(0, TERMS)
    x_ptrs = x_ptr + (sources.to(tl.int64) * STRIDE)[:, None] + terms[None, :]
    weight_ptrs = weight_ptr + (columns.to(tl.int64) * K)[None, :] + terms[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, K, TERMS):
        left = terms < K - first
        x = tl.load(x_ptrs, mask=present[:, None] & left[None, :], other=0.0)
        weight = tl.load(weight_ptrs, mask=(columns < N)[None, :] & left[:, None], other=0.0)
        if INTERPRET:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_ptrs += TERMS
        weight_ptrs += TERMS
    return total


# ---- products of all rows with one weight ----


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr,  # (num_rows, K)
    weight_ptr,  # (N, K)
    bias_ptr,  # (N,), or None
    addend_ptr,  # float32 (num_rows, N), or None
    out_ptr,  # (num_rows, N)
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    TOGETHER: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One tile of a product."""
    ACROSS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    down, across = tl.swizzle2d(program // ACROSS, program % ACROSS, tl.cdiv(num_rows, ROWS), ACROSS, TOGETHER)
    rows = down * ROWS + tl.arange(0, ROWS)
    columns = across * COLUMNS + tl.arange(0, COLUMNS)
    total = product(x_ptr, rows, rows < num_rows, weight_ptr, columns, N, K, STRIDE, ROWS, COLUMNS, TERMS, INTERPRET)
    inside = (rows < num_rows)[:, None] & (columns < N)[None, :]
    places = rows.to(tl.int64)[:, None] * N + columns[None, :]
    if addend_ptr is not None:
        total += load_floats(addend_ptr + places, inside)
    if bias_ptr is not None:
        total += load_floats(bias_ptr + columns, columns < N)[None, :]
    tl.store(out_ptr + places, rounded(total, out_ptr.dtype.element_ty, INTERPRET), mask=inside)


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """x (num_rows, in) times weight (out, in), plus addend, float32 (num_rows, out), plus bias (out,).

    Low-bit and deterministic products are rounded once, after the bias. torch's are rounded before an addend, too. An
    addend of zeros changes no bit.
    """
    if isinstance(weight, PackedWeight):
        return code_products.linear(with_contiguous_rows(x), weight, bias, addend, deterministic=deterministic)
    if not deterministic:
        out = F.linear(x, weight, bias)
        return out if addend is None else out.add_(addend)
    x, (num_rows, columns) = with_contiguous_rows(x), x.shape
    out = torch.empty((num_rows, len(weight)), dtype=x.dtype, device=x.device)
    tile = tile_of(64, 64, x.dtype)
    _linear[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(len(weight), tile.columns),)](
        x,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        addend,
        out,
        num_rows,
        N=len(weight),
        K=columns,
        STRIDE=x.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        TERMS=tile.terms,
        TOGETHER=CONSECUTIVE_TILES,
        INTERPRET=INTERPRETED,
        num_stages=tile.num_stages,
    )
    return out


def gated_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    activation: str,
    addend: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """activation(first half) * second half of the last axis of `linear`, whose result is rounded first."""
    return gate(linear(x, weight, bias, addend, deterministic=deterministic), activation)


# ---- rows of a weight ----


@triton.jit(do_not_specialize=["num_rows"])
def _embed(
    ids_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    scale,
    SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One of PIECES pieces of a token's row."""
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    columns = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token)
    exists = (row >= 0) & (row < num_rows)
    x = load_floats(weight_ptr + (row * SIZE + columns), (columns < SIZE) & exists)
    tl.store(
        out_ptr + (token * SIZE + columns), rounded(x * scale, out_ptr.dtype.element_ty, INTERPRET), mask=columns < SIZE
    )


def embed(ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
    """Rows of weight (num_rows, size) for ids int64 (num_tokens,), times `scale`. An id without a row gives zeros."""
    if isinstance(weight, PackedWeight):
        return code_products.embed(ids, weight, scale)
    weight = weight.contiguous()
    num_rows, size = weight.shape
    out = torch.empty((len(ids), size), dtype=weight.dtype, device=weight.device)
    block = min(BLOCK, pow2(size))
    pieces = triton.cdiv(size, block)
    _embed[(len(ids) * pieces,)](
        ids.contiguous(),
        weight,
        out,
        num_rows,
        float(scale),
        SIZE=size,
        PIECES=pieces,
        BLOCK=block,
        INTERPRET=INTERPRETED,
    )
    return out
