"""Matrix products with packed weights by the C++ kernels, embedding lookup included: see `csrc/products.cpp`."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.contract import ACTIVATIONS, PackedWeight, Weight
from quire.kernels.cpu import _C, rowwise
from quire.kernels.cpu.memory import empty, pages
from quire.kernels.cpu.views import dtype_code

TILE_ROWS = 16  # rows of a tile of a packed weight
_PACK_CHUNK_ROWS = 1024  # rows that are converted at once, so that they are still in a CPU cache when they are packed


def allocate_weight(shape: Sequence[int], dtype: torch.dtype, parts: int = 1) -> PackedWeight:
    """A zeroed weight (rows, columns), or stack (number, rows, columns), in tiles of 16 rows.

    The rows are cut into `parts` equal parts, and each is padded to whole tiles. Raises ValueError if they cannot be
    cut, TypeError for a dtype that the kernels do not have.
    """
    *number, rows, columns = shape
    if rows % parts:
        raise ValueError(f"{rows} rows cannot be divided into {parts} parts")
    tiles = -(-(rows // parts) // TILE_ROWS)
    terms = columns if dtype == torch.float32 else -(-columns // 32) * 32
    sizes = (*number, parts, tiles, TILE_ROWS * terms)
    data = pages(prod(sizes) * dtype.itemsize, huge=True).view(dtype).view(sizes)
    dtype_code(data)  # raises for types that products do not support
    return PackedWeight(data, rows, columns, parts)


def write_rows(weight: PackedWeight, rows: Tensor, start: int, index: int = 0) -> None:
    """Write `rows` (n, columns) of any type to rows [start, start + n) of a weight. index: of the weight in a stack.

    Raises ValueError for rows of another width or outside of the weight.
    """
    data = weight.data if weight.data.dim() == 3 else weight.data[index]
    if rows.dim() != 2 or rows.shape[1] != weight.columns or not 0 <= start <= weight.rows - len(rows):
        raise ValueError(
            f"rows {tuple(rows.shape)} from {start} on do not fit a weight {(weight.rows, weight.columns)}"
        )
    code, per_part, end = dtype_code(data), weight.rows // weight.parts, start + len(rows)
    ready = rows.dtype == data.dtype and rows.is_contiguous()
    while start < end:
        part, place = divmod(start, per_part)
        count = min(end - start, per_part - place, end if ready else _PACK_CHUNK_ROWS)
        some = rows[len(rows) - (end - start) :][:count].to(data.dtype).contiguous()
        _C.pack_rows(some, data[part], code, count, weight.columns, place)
        start += count


def pack_weight(weight: Tensor, parts: int = 1) -> PackedWeight:
    """A weight (rows, columns), or stack (number, rows, columns), packed: see `allocate_weight`."""
    packed = allocate_weight(weight.shape, weight.dtype, parts)
    for index, one in enumerate(weight if weight.dim() == 3 else [weight]):
        write_rows(packed, one, 0, index)
    return packed


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, *, deterministic: bool = False) -> Tensor:
    """x (num_rows, in) times weight (out, in), plus bias (out,)."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if weight.parts != 1:  # each part is a product of its own
        _check(x, weight, bias)
        parts = [PackedWeight(data, weight.rows // weight.parts, weight.columns) for data in weight.data]
        biases = [None] * weight.parts if bias is None else list(bias.chunk(weight.parts))
        pairs = zip(parts, biases, strict=True)
        return torch.cat([_product(x, part, one, -1, deterministic=deterministic) for part, one in pairs], -1)
    return _product(x, weight, bias, -1, deterministic=deterministic)


def gated_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, activation: str, *, deterministic: bool = False
) -> Tensor:
    """activation(first half) * second half of the last axis of `linear`. Raises ValueError unless weight.parts is 2."""
    if isinstance(weight, Tensor):
        return rowwise.gate(F.linear(x, weight, bias), activation)
    if weight.parts != 2:
        raise ValueError(f"the weight of a gated product has 2 parts, not {weight.parts}")
    return _product(x, weight, bias, ACTIVATIONS.index(activation), deterministic=deterministic)


def _product(x: Tensor, weight: PackedWeight, bias: Tensor | None, gate: int, *, deterministic: bool) -> Tensor:
    _check(x, weight, bias)
    num_rows, columns = x.shape
    if x.dtype == torch.bfloat16:  # kernels read pairs of bfloat16
        if columns % 2:
            x, columns = F.pad(x, (0, 1)), columns + 1
        if x.stride(0) % 2 or x.storage_offset() % 2:
            x = x.clone(memory_format=torch.contiguous_format)
    if x.stride(1) != 1:
        x = x.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    width = weight.rows if gate < 0 else weight.rows // 2
    out = empty((num_rows, width), x.dtype)
    sizes = (num_rows, width, columns, x.stride(0), width, gate, int(not deterministic))
    _C.linear(x, weight.data, bias, out, dtype_code(x), *sizes)
    return out


def _check(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> None:
    if weight.data.dim() > 3:
        raise ValueError("a product needs one of the stacked weights, not the whole stack")
    dtype = weight.data.dtype
    if x.dim() != 2 or x.shape[1] != weight.columns or x.dtype != dtype:
        raise ValueError(
            f"x {tuple(x.shape)} of {x.dtype} does not match a weight {(weight.rows, weight.columns)} of {dtype}"
        )
    if bias is not None and (bias.shape != (weight.rows,) or bias.dtype != dtype):
        raise ValueError(
            f"a bias {tuple(bias.shape)} of {bias.dtype} does not match a weight of {weight.rows} rows of {dtype}"
        )


def embed(ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
    """Rows of weight (num_rows, size) for ids int64 (num_tokens,), times `scale`. An id without a row gives zeros."""
    if ids.dtype != torch.int64:
        raise TypeError(f"ids must be int64, not {ids.dtype}")
    if isinstance(weight, Tensor):
        return rowwise.embed(ids, weight, scale)
    if weight.data.dim() > 3:
        raise ValueError("a row lookup needs one of the stacked weights, not the whole stack")
    if weight.parts != 1:
        raise ValueError(f"a row lookup needs a weight of one part, not of {weight.parts}")
    out = empty((len(ids), weight.columns), weight.data.dtype)
    sizes = (len(ids), weight.columns, weight.rows)
    _C.unpack_rows(weight.data, ids.contiguous(), out, dtype_code(out), *sizes, float(scale))
    return out


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Weight,
    down: Weight,
    activation: str,
    *,
    deterministic: bool = False,
) -> Tensor:
    """The weighted sum of each token's experts: see Kernels. Terms are added in the order of expert ids."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in sorted(set(ids.flatten().tolist())):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        inner = gated_linear(x[tokens], up[expert], None, activation, deterministic=deterministic)
        out[tokens] += linear(inner, down[expert], None, deterministic=deterministic) * weights[
            tokens, places
        ].unsqueeze(1)
    return out.to(x.dtype)
