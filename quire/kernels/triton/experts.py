"""Matrix products of tokens with the weights of their experts, without waiting for the device.

Tiles gather their rows by the sorted order of pairs, and the bound on their number depends on shapes alone. With many
tokens, torch's grouped matrix product computes the gated product. It needs contiguous rows and rounds its result to
their type, which the gated product requires anyway. The product with `down` stays in float32.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.contract import Weight
from quire.kernels.reference.products import require_unpacked
from quire.kernels.triton.launch import INTERPRETED
from quire.kernels.triton.products import SHORT_TILE_ROWS, Tile, product, tile_of, with_contiguous_rows
from quire.kernels.triton.rounding import rounded
from quire.kernels.triton.routing import Routes, align_block_size, combine
from quire.kernels.triton.rowwise import gate

_GROUPED_MM_CAPABILITIES = (9, 10)  # compute capabilities
_ALIGNED = 8  # numbers of 16 bits: rows begin at multiples of 16 bytes


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped(
    x_ptr,
    weight_ptr,  # (num_experts, N, K)
    order_ptr,  # order and tiles: see `Routes`
    tiles_ptr,
    out_ptr,  # (num_pairs, N)
    num_tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One tile of rows times the weight (N, K) of its expert.

    SLOTS above 0: x has one row per token, which SLOTS pairs share, and results are in the order of experts.
    SLOTS 0: the rows of x are in the order of experts, and results are in the order of pairs.
    """
    ACROSS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // ACROSS
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    first = tl.load(tiles_ptr + num_tiles + tile)
    end = tl.load(tiles_ptr + 2 * num_tiles + tile)
    if first >= end:
        return
    places = first + tl.arange(0, ROWS)
    present = places < end
    pairs = tl.load(order_ptr + places, mask=present, other=0)
    sources = pairs // SLOTS if SLOTS else places
    targets = places.to(tl.int64) if SLOTS else pairs
    columns = tl.program_id(0) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
    weight_ptr += expert * (N * K)
    total = product(x_ptr, sources, present, weight_ptr, columns, N, K, STRIDE, ROWS, COLUMNS, TERMS, INTERPRET)
    inside = present[:, None] & (columns < N)[None, :]
    tl.store(
        out_ptr + (targets[:, None] * N + columns[None, :]),
        rounded(total, out_ptr.dtype.element_ty, INTERPRET),
        mask=inside,
    )


def _expert_products(x: Tensor, weight: Tensor, routes: Routes, slots: int, tile: Tile, dtype: torch.dtype) -> Tensor:
    """The product of each pair with its expert's weight. slots: see `_grouped`."""
    _, rows, columns = weight.shape
    num_tiles = routes.tiles.shape[1]
    out = torch.empty((len(routes.order), rows), dtype=dtype, device=x.device)
    _grouped[(num_tiles * triton.cdiv(rows, tile.columns),)](
        x,
        weight.contiguous(),
        routes.order,
        routes.tiles,
        out,
        num_tiles,
        N=rows,
        K=columns,
        STRIDE=x.stride(0),
        SLOTS=slots,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        TERMS=tile.terms,
        INTERPRET=INTERPRETED,
        num_stages=tile.num_stages,
    )
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
    """The weighted sum of each token's experts: see Kernels. Terms are added in the order of expert ids.

    Gated products are rounded to x's type, products with `down` are float32.
    """
    ups, downs, x = require_unpacked(up), require_unpacked(down), with_contiguous_rows(x)
    ids, weights = ids.contiguous(), weights.contiguous()
    slots = ids.shape[1]
    few = not deterministic and ids.numel() <= SHORT_TILE_ROWS * len(ups)
    tile = tile_of(SHORT_TILE_ROWS, 64, x.dtype) if few else tile_of(64, 128, x.dtype)
    routes = align_block_size(ids, len(ups), tile.rows)
    if not (deterministic or few) and has_grouped_mm(x, ups):
        rows = x.index_select(0, routes.order // slots)
        inner = F.grouped_mm(rows, ups.transpose(1, 2), offs=routes.ends)
    else:
        inner = _expert_products(x, ups, routes, slots, tile, x.dtype)
    results = _expert_products(gate(inner, activation), downs, routes, 0, tile, torch.float32)
    return combine(results, ids, weights, x.dtype)


def has_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Whether torch has a fast grouped product of x (num_tokens, K) with weight (num_experts, N, K).

    On other devices torch computes one expert after the other, and waits for the device to get their numbers of rows.
    """
    if x.dtype != torch.bfloat16 or any(size % _ALIGNED for size in weight.shape[1:]):
        return False
    return hasattr(F, "grouped_mm") and _device_has_grouped_mm(x.device)


@functools.cache
def _device_has_grouped_mm(device: torch.device) -> bool:
    return (
        INTERPRETED if device.type == "cpu" else torch.cuda.get_device_capability(device)[0] in _GROUPED_MM_CAPABILITIES
    )
