"""Routing of tokens to experts and combination of the experts' results, without waiting for the device.

Three launches route a step. The first selects experts and their weights. The second sorts pairs by expert: each program
counts the pairs of all experts before its own, then writes its own pairs. The third cuts the pairs into tiles. The
bound on the number of tiles depends on shapes alone; surplus tiles are empty.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.contract import Routing
from quire.kernels.triton.launch import INTERPRETED, pow2
from quire.kernels.triton.rounding import rounded
from quire.kernels.triton.rowwise import BLOCK, load_floats, sigmoid

TILES = 16  # tiles that one program describes
PAIRS_PER_STEP = 4096  # pairs that a program reads at once
_LEAST = tl.constexpr(-(2**63))


class Routes(NamedTuple):
    """Pairs of a token and an expert, sorted by expert and cut into tiles of pairs of one expert.

    Pair token * k + i is the token's i-th expert.
    """

    order: Tensor  # int32 (num_pairs,): pairs, sorted by expert
    ends: Tensor  # int32 (num_experts,): end of each expert's pairs in `order`
    tiles: Tensor  # int32 (3, num_tiles): expert, begin of the tile in `order`, end of the expert's pairs in `order`


@triton.jit
def _ordered(x):
    """Integers in the order of floats: bits of negative floats are inverted. NaN is the largest."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _in_top_groups(values, experts, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Whether each expert is in one of the groups with the largest sum of two values. The first wins ties."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    sums = tl.zeros_like(values)  # of the expert's own group
    for group in tl.static_range(GROUPS):
        inside = (experts // SIZE == group) & (experts < EXPERTS)
        mine = tl.where(inside, values, float("-inf"))
        best = tl.max(mine, 0)
        first = tl.min(tl.where(mine == best, experts, EXPERTS), 0)
        second = tl.max(tl.where(experts == first, float("-inf"), mine), 0)
        sums = tl.where(inside, best + second, sums)
    before = tl.zeros_like(experts)  # groups that are selected before the expert's own
    for group in tl.static_range(GROUPS):
        other = tl.max(tl.where(experts == group * SIZE, sums, float("-inf")), 0)
        before += ((other > sums) | ((other == sums) & (group < experts // SIZE))).to(tl.int32)
    return before < TOP_GROUPS


@triton.jit
def _select_experts(
    logits_ptr,  # (num_tokens, EXPERTS)
    bias_ptr,  # bias and scales: (EXPERTS,), or None
    scales_ptr,
    ids_ptr,  # ids and weights: (num_tokens, SLOTS)
    weights_ptr,
    stride,  # of rows of logits
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,  # EXPERTS or more, a power of two
    SLOTS: tl.constexpr,
    PLACES: tl.constexpr,  # SLOTS or more, a power of two
    scale,  # of the weights
    jitter,
    NORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    MIXER: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
    """The experts of one token. NaN counts as the largest value, so that each row gets SLOTS different experts."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, WIDTH)
    x = load_floats(logits_ptr + token * stride + experts, experts < EXPERTS)
    x = tl.where(experts < EXPERTS, x, float("-inf"))
    if SIGMOID:
        shares = sigmoid(x)
        values = shares
    else:
        exponentials = tl.exp(x - tl.max(x, 0))
        shares = tl.div_rn(exponentials, tl.sum(exponentials, 0) + tl.zeros_like(exponentials))
        values = x  # in the order of shares
    if bias_ptr is not None:
        values = shares + load_floats(bias_ptr + experts, experts < EXPERTS)
    elif GROUPS > 1:
        values = shares
    if GROUPS > 1:
        values = tl.where(_in_top_groups(values, experts, EXPERTS, GROUPS, TOP_GROUPS), values, float("-inf"))
    keys = (_ordered(values).to(tl.int64) << 32) | (WIDTH - 1 - experts)  # ties are won by the first expert
    keys = tl.where(experts < EXPERTS, keys, _LEAST)
    slots = tl.arange(0, PLACES)
    ids = tl.zeros_like(slots)
    weights = ids.to(tl.float32)
    for slot in tl.static_range(SLOTS):
        best = keys == tl.max(keys, 0)
        ids = tl.where(slots == slot, tl.sum(tl.where(best, experts, 0), 0), ids)
        if MIXER:
            most = tl.max(tl.where(best, x, float("-inf")), 0)
            others = tl.where(keys == _LEAST, most, x)
            is_far = most - others > 2 * jitter * tl.maximum(tl.abs(others), most)
            near = tl.where((keys == _LEAST) | is_far, 0.0, tl.exp(others - most))
            weights = tl.where(slots == slot, 1.0 / tl.sum(near, 0), weights)
        else:
            weights = tl.where(slots == slot, tl.sum(tl.where(best, shares, 0.0), 0), weights)
        keys = tl.where(best, _LEAST, keys)
    if NORMALISE:
        weights = tl.div_rn(weights, tl.sum(weights, 0) + 1e-20 + tl.zeros_like(weights))
    if scales_ptr is not None:
        weights *= load_floats(scales_ptr + ids, slots < SLOTS)
    at = token * SLOTS + slots
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=slots < SLOTS)
    tl.store(weights_ptr + at, weights * scale, mask=slots < SLOTS)


def route(
    logits: Tensor, k: int, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k experts of each token and their weights: see Kernels. The first wins ties."""
    num_tokens, num_experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids = torch.empty((num_tokens, k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        _select_experts[(num_tokens,)](
            logits,
            bias,
            scales,
            ids,
            weights,
            logits.stride(0),
            EXPERTS=num_experts,
            WIDTH=pow2(num_experts),
            SLOTS=k,
            PLACES=pow2(k),
            scale=float(routing.scale),
            jitter=float(routing.jitter),
            NORMALISE=routing.normalise,
            SIGMOID=routing.score == "sigmoid",
            MIXER=routing.score == "sparsemixer",
            GROUPS=routing.num_groups,
            TOP_GROUPS=routing.top_groups,
            num_warps=1,
        )
    return ids, weights


@triton.jit(do_not_specialize=["num_pairs"])
def _sort(
    ids_ptr,  # (num_pairs,)
    order_ptr,  # see `Routes`
    ends_ptr,
    num_pairs,
    BLOCK: tl.constexpr,
):
    """Write one expert's pairs, in their order, after those of experts with smaller ids."""
    expert = tl.program_id(0)
    end = expert * 0
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=expert)
        end += tl.sum((ids < expert).to(tl.int32), 0)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        inside = pairs < num_pairs
        mine = (tl.load(ids_ptr + pairs, mask=inside, other=0) == expert) & inside
        places = end + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order_ptr + places, pairs, mask=mine)
        end += tl.sum(mine.to(tl.int32), 0)
    tl.store(ends_ptr + expert, end)


@triton.jit(do_not_specialize=["num_tiles"])
def _cut(
    ends_ptr,  # ends and tiles: see `Routes`
    tiles_ptr,
    num_tiles,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,  # EXPERTS or more, a power of two
    ROWS: tl.constexpr,  # of a tile
    TILES: tl.constexpr,
):
    """Describe TILES of the tiles that sorted pairs are cut into. Surplus tiles are empty."""
    experts = tl.arange(0, WIDTH)
    ends = tl.load(ends_ptr + experts, mask=experts < EXPERTS, other=0)
    begins = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < EXPERTS), other=0)
    numbers = tl.cdiv(ends - begins, ROWS)
    ends_of_tiles = tl.cumsum(numbers, 0)
    tiles = tl.program_id(0) * TILES + tl.arange(0, TILES)
    within = tiles[:, None] - (ends_of_tiles - numbers)[None, :]  # tiles of an expert before this one
    is_of = (within >= 0) & (within < numbers[None, :])
    expert = tl.sum(tl.where(is_of, experts[None, :], 0), 1)
    first = tl.sum(tl.where(is_of, begins[None, :] + within * ROWS, 0), 1)
    end = tl.sum(tl.where(is_of, ends[None, :], 0), 1)
    inside = tiles < num_tiles
    tl.store(tiles_ptr + tiles, expert, mask=inside)
    tl.store(tiles_ptr + num_tiles + tiles, first, mask=inside)
    tl.store(tiles_ptr + 2 * num_tiles + tiles, end, mask=inside)


def align_block_size(ids: Tensor, num_experts: int, rows: int) -> Routes:
    """Sort the pairs of ids (num_tokens, k), contiguous, by expert, and cut them into tiles of `rows` pairs.

    The number of tiles is enough for any distribution. Every id must be that of an expert. The order depends on ids
    alone.
    """
    num_pairs = ids.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (rows - 1)) // rows
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=ids.device)
    block = min(max(pow2(num_pairs), 16), PAIRS_PER_STEP)
    _sort[(num_experts,)](
        ids,
        order,
        ends,
        num_pairs,
        BLOCK=block,
        num_warps=8 if block == PAIRS_PER_STEP else 4,
    )
    if num_tiles:
        _cut[(triton.cdiv(num_tiles, TILES),)](
            ends,
            tiles,
            num_tiles,
            EXPERTS=num_experts,
            WIDTH=pow2(num_experts),
            ROWS=rows,
            TILES=TILES,
        )
    return Routes(order, ends, tiles)


@triton.jit
def _combine(
    results_ptr,  # float32 (num_tokens, SLOTS, SIZE)
    ids_ptr,  # ids and weights: (num_tokens, SLOTS)
    weights_ptr,
    out_ptr,  # (num_tokens, SIZE)
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,  # SLOTS or more, a power of two
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One of PIECES pieces of the weighted sum of a token's results, added in the order of expert ids."""
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    columns = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    slots = tl.arange(0, WIDTH)
    ids = tl.load(ids_ptr + token * SLOTS + slots, mask=slots < SLOTS, other=2**62)
    # if two ids are equal, both results are still added once
    sooner = (ids[None, :] < ids[:, None]) | ((ids[None, :] == ids[:, None]) & (slots[None, :] < slots[:, None]))
    ranks = tl.sum(sooner.to(tl.int32), 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SLOTS):
        pair = token * SLOTS + tl.sum(tl.where(ranks == rank, slots, 0), 0)
        result = tl.load(results_ptr + (pair * SIZE + columns), mask=columns < SIZE, other=0.0)
        total += result * tl.load(weights_ptr + pair)
    tl.store(
        out_ptr + (token * SIZE + columns), rounded(total, out_ptr.dtype.element_ty, INTERPRET), mask=columns < SIZE
    )


def combine(results: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The weighted sum of each token's `results`, float32 (num_tokens * k, size), rounded once to `dtype`.

    ids and weights (num_tokens, k), contiguous. Terms are added in the order of expert ids.
    """
    (num_tokens, slots), size = ids.shape, results.shape[1]
    out = torch.empty((num_tokens, size), dtype=dtype, device=results.device)
    block = min(BLOCK, pow2(size))
    pieces = triton.cdiv(size, block)
    _combine[(num_tokens * pieces,)](
        results,
        ids,
        weights,
        out,
        SIZE=size,
        SLOTS=slots,
        WIDTH=pow2(slots),
        PIECES=pieces,
        BLOCK=block,
        INTERPRET=INTERPRETED,
    )
    return out
