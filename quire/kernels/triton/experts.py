"""Matrix products of tokens with the weights of their experts, without waiting for the device.

Tiles gather their rows by the sorted order of pairs, and the bound on their number depends on shapes alone. With many
tokens, torch's grouped matrix product computes the gated product. It needs contiguous rows and rounds its result to
their type, which the gated product requires anyway. The product with `down` stays in float32.

With low-bit weights, rows of x and of the gated product are rounded to 8 bits first, unless the weights are float8.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.contract import PackedWeight, Weight
from quire.kernels.reference.codes import require_codes
from quire.kernels.triton.code_products import check, code_product, fitting_tile, prepare_rows
from quire.kernels.triton.code_weights import layout_of
from quire.kernels.triton.launch import INTERPRETED
from quire.kernels.triton.products import SHORT_TILE_ROWS, Tile, product, tile_of, with_contiguous_rows
from quire.kernels.triton.rounding import rounded
from quire.kernels.triton.routing import Routes, align_block_size, combine
from quire.kernels.triton.rowwise import activate, gate

_GROUPED_MM_CAPABILITIES = (9, 10)  # compute capabilities
_ALIGNED = 8  # numbers of 16 bits: rows begin at multiples of 16 bytes


@triton.jit
def _pairs(order_ptr, tiles_ptr, tile, num_tiles, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """Of a tile: the expert, and for each pair whether it exists, its row of x and its row of the results.

    SLOTS above 0: x has one row per token, which SLOTS pairs share, and results are in the order of experts.
    SLOTS 0: the rows of x are in the order of experts, and results are in the order of pairs.
    """
    places = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, ROWS)
    present = places < tl.load(tiles_ptr + 2 * num_tiles + tile)
    pairs = tl.load(order_ptr + places, mask=present, other=0)
    sources = pairs // SLOTS if SLOTS else places
    targets = places.to(tl.int64) if SLOTS else pairs
    return tl.load(tiles_ptr + tile).to(tl.int64), present, sources, targets


@triton.jit
def _is_empty(tiles_ptr, tile, num_tiles):
    """Whether a tile has no pairs."""
    return tl.load(tiles_ptr + num_tiles + tile) >= tl.load(tiles_ptr + 2 * num_tiles + tile)


@triton.jit
def _store(out_ptr, total, targets, present, columns, N: tl.constexpr, INTERPRET: tl.constexpr):
    """Store a tile of results (num_pairs, N)."""
    places = targets[:, None] * N + columns[None, :]
    inside = present[:, None] & (columns < N)[None, :]
    tl.store(out_ptr + places, rounded(total, out_ptr.dtype.element_ty, INTERPRET), mask=inside)


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
    """One tile of rows times the weight (N, K) of its expert. SLOTS: see `_pairs`."""
    ACROSS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // ACROSS
    if _is_empty(tiles_ptr, tile, num_tiles):
        return
    expert, present, sources, targets = _pairs(order_ptr, tiles_ptr, tile, num_tiles, SLOTS, ROWS)
    columns = tl.program_id(0) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
    weight_ptr += expert * (N * K)
    total = product(x_ptr, sources, present, weight_ptr, columns, N, K, STRIDE, ROWS, COLUMNS, TERMS, INTERPRET)
    _store(out_ptr, total, targets, present, columns, N, INTERPRET)


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_codes(
    codes_ptr,  # numbers, scales and sums of x: see `PreparedRows`
    x_scales_ptr,
    x_sums_ptr,
    data_ptr,  # data, scales and offsets of the stack
    scales_ptr,
    offsets_ptr,
    order_ptr,  # order and tiles: see `Routes`
    tiles_ptr,
    out_ptr,  # (num_pairs, N)
    num_tiles,
    DATA_SIZE: tl.constexpr,  # elements of data, and of scales and offsets, of one weight
    SCALES_SIZE: tl.constexpr,
    N: tl.constexpr,
    RUN: tl.constexpr,  # see `code_product`
    HALVES: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPED: tl.constexpr,
    LOOKUP: tl.constexpr,
    FLOATS: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    TERMS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One tile of rows times the low-bit weight of its expert. SLOTS: see `_pairs`."""
    ACROSS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // ACROSS
    if _is_empty(tiles_ptr, tile, num_tiles):
        return
    expert, present, sources, targets = _pairs(order_ptr, tiles_ptr, tile, num_tiles, SLOTS, ROWS)
    first = tl.program_id(0) % ACROSS * COLUMNS
    data_ptr += expert * DATA_SIZE
    scales_ptr += expert * SCALES_SIZE
    if offsets_ptr is not None:
        offsets_ptr += expert * SCALES_SIZE
    total = code_product(
        codes_ptr, x_scales_ptr, x_sums_ptr, sources, present, data_ptr, scales_ptr, offsets_ptr, first,
        N, RUN, HALVES, TILES, STEPS, GROUPED, LOOKUP, FLOATS, PARTS, WHOLE, TERMS, ROWS, COLUMNS, STAGES, INTERPRET,
    )  # fmt: skip
    _store(out_ptr, total, targets, present, first + tl.arange(0, COLUMNS), N, INTERPRET)


def _expert_products(x: Tensor, weight: Weight, routes: Routes, slots: int, tile: Tile, dtype: torch.dtype) -> Tensor:
    """The product of each pair with its expert's weight. slots: see `_pairs`. Raises ValueError for x that differs."""
    rows, columns = (weight.rows, weight.columns) if isinstance(weight, PackedWeight) else weight.shape[1:]
    num_tiles = routes.tiles.shape[1]
    out = torch.empty((len(routes.order), rows), dtype=dtype, device=x.device)
    if isinstance(weight, PackedWeight):
        scheme, scales = require_codes(weight)
        check(x, weight)
        prepared, layout = prepare_rows(x, weight), layout_of(scheme, columns)
        across, stages = fitting_tile(tile.rows, tile.columns, tile.num_stages, layout, prepared.numbers.itemsize)
        _grouped_codes[(num_tiles * triton.cdiv(rows, across),)](
            *prepared,
            weight.data,
            scales,
            weight.offsets,
            routes.order,
            routes.tiles,
            out,
            num_tiles,
            DATA_SIZE=weight.data.stride(0),
            SCALES_SIZE=scales.stride(0),
            N=rows,
            **layout.constants,
            SLOTS=slots,
            ROWS=tile.rows,
            COLUMNS=across,
            STAGES=stages,
            INTERPRET=INTERPRETED,
            num_stages=stages,
        )
        return out
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
    gated: bool = True,
    deterministic: bool = False,
) -> Tensor:
    """The weighted sum of each token's experts: see Kernels. Terms are added in the order of expert ids.

    Results of `up` and of the activation are rounded to x's type, products with `down` are float32.
    """
    x, num_experts = with_contiguous_rows(x), len(up.data)
    ids, weights = ids.contiguous(), weights.contiguous()
    slots = ids.shape[1]
    few = not deterministic and ids.numel() <= SHORT_TILE_ROWS * num_experts
    tile = tile_of(SHORT_TILE_ROWS, 64, x.dtype) if few else tile_of(64, 128, x.dtype)
    routes = align_block_size(ids, num_experts, tile.rows)
    if not (deterministic or few or isinstance(up, PackedWeight)) and has_grouped_mm(x, up):
        rows = x.index_select(0, routes.order // slots)
        inner = F.grouped_mm(rows, up.transpose(1, 2), offs=routes.ends)
    else:
        inner = _expert_products(x, up, routes, slots, tile, x.dtype)
    inner = gate(inner, activation) if gated else activate(inner, activation)
    results = _expert_products(inner, down, routes, 0, tile, torch.float32)
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
