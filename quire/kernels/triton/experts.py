"""Products of tokens with the weights of their experts. Nothing here waits for the device.

Tiles gather their rows through the order of pairs, and their number has a bound that depends on shapes alone. Where
tokens are many, the library's grouped product does what the gated half takes: it needs its rows beside one another,
and sums that it rounds to their type, which gated products are anyway. Others are added up as float32.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.contract import Weight
from quire.kernels.reference.products import plain
from quire.kernels.triton.launch import INTERPRETED
from quire.kernels.triton.products import FEW, Tile, along_rows, product, tile_of
from quire.kernels.triton.rounding import rounded
from quire.kernels.triton.routing import Routes, arrange, combine
from quire.kernels.triton.rowwise import gate

_GROUPED = (9, 10)  # compute capabilities
_ALIGNED = 8  # numbers of 16 bits: rows begin at multiples of 16 bytes


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped(
    x_ptr,
    weight_ptr,  # (num_experts, N, K)
    order_ptr,  # see `Routes`, as for tiles
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
    UP: tl.constexpr,
):
    """One tile of rows times the weight (N, K) of its expert.

    SLOTS above 0: x has a row for each token, SLOTS pairs share it, and results stand in the order of experts.
    SLOTS 0: x has rows in the order of experts, and results stand in that of pairs.
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
    total = product(x_ptr, sources, present, weight_ptr, columns, N, K, STRIDE, ROWS, COLUMNS, TERMS, UP)
    inside = present[:, None] & (columns < N)[None, :]
    tl.store(
        out_ptr + (targets[:, None] * N + columns[None, :]), rounded(total, out_ptr.dtype.element_ty, UP), mask=inside
    )


def _of_experts(x: Tensor, weight: Tensor, routes: Routes, slots: int, tile: Tile, dtype: torch.dtype) -> Tensor:
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
        UP=INTERPRETED,
        num_stages=tile.num_stages,
    )
    return out


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, activation: str, *, strict: bool
) -> Tensor:
    """The weighted sum of each token's experts, added up in the order of the experts' numbers.

    x (num_tokens, hidden_size), ids int64 and weights float32 (num_tokens, k), up (num_experts, 2 * inner,
    hidden_size), down (num_experts, hidden_size, inner). Gated products are rounded, those with `down` are not.
    """
    ups, downs, x = plain(up), plain(down), along_rows(x)
    ids, weights = ids.contiguous(), weights.contiguous()
    slots = ids.shape[1]
    few = not strict and ids.numel() <= FEW * len(ups)
    tile = tile_of(FEW, 64, x.dtype) if few else tile_of(64, 128, x.dtype)
    routes = arrange(ids, len(ups), tile.rows)
    if not (strict or few) and library_takes(x, ups):
        rows = x.index_select(0, routes.order // slots)
        inner = F.grouped_mm(rows, ups.transpose(1, 2), offs=routes.ends)
    else:
        inner = _of_experts(x, ups, routes, slots, tile, x.dtype)
    results = _of_experts(gate(inner, activation), downs, routes, 0, tile, torch.float32)
    return combine(results, ids, weights, x.dtype)


def library_takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the library has a grouped product of x (num_tokens, K) with weight (num_experts, N, K), a good one.

    Elsewhere than on these devices it computes one expert after another, and asks the device how many rows each has.
    """
    if x.dtype != torch.bfloat16 or any(size % _ALIGNED for size in weight.shape[1:]):
        return False
    return hasattr(F, "grouped_mm") and _has_grouped(x.device)


@functools.cache
def _has_grouped(device: torch.device) -> bool:
    return INTERPRETED if device.type == "cpu" else torch.cuda.get_device_capability(device)[0] in _GROUPED
