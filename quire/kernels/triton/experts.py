"""Which token goes to which experts, and how their results come together. Nothing here waits for the device.

The number of tiles has a bound that depends on shapes alone; those that are not needed are empty.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import INTERPRETED, pow2
from quire.kernels.triton.rounding import rounded
from quire.kernels.triton.rowwise import BLOCK

TILES = 16  # that one program describes


class Routes(NamedTuple):
    """Pairs of a token and an expert, in the order of experts, and cut into tiles of pairs with the same one.

    A pair's number is its token's times k, and its place among that token's.
    """

    order: Tensor  # int64 (num_pairs,), pairs
    tiles: Tensor  # int32 (3, num_tiles): the expert, the first pair in that order, and where its expert's pairs end


@triton.jit
def _before(sorted_ptr, experts, number, steps):
    """How many of `number` sorted ids are below each of `experts`; found in so many halvings."""
    low = experts * 0
    high = low + number
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        below = tl.load(sorted_ptr + middle, mask=searching, other=0) < experts
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & (below == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "steps"])
def _cut(
    sorted_ptr,  # (num_pairs,): ids
    tiles_ptr,  # see `Routes`
    num_pairs,
    num_tiles,
    steps,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,  # EXPERTS or more, a power of two
    ROWS: tl.constexpr,  # of a tile
    TILES: tl.constexpr,
):
    """TILES of the tiles that sorted ids are cut into. Those behind the last one are empty."""
    experts = tl.arange(0, WIDTH)
    begins = _before(sorted_ptr, experts, num_pairs, steps)
    ends = _before(sorted_ptr, experts + 1, num_pairs, steps)
    numbers = tl.where(experts < EXPERTS, tl.cdiv(ends - begins, ROWS), 0)
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


def route(ids: Tensor, num_experts: int, rows: int) -> Routes:
    """Cut the pairs of ids (num_tokens, k) into tiles of so many rows. There is room for any distribution."""
    num_pairs = ids.numel()
    in_order, order = ids.flatten().sort(stable=True)
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (rows - 1)) // rows
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=ids.device)
    _cut[(triton.cdiv(num_tiles, TILES),)](
        in_order,
        tiles,
        num_pairs,
        num_tiles,
        num_pairs.bit_length(),
        EXPERTS=num_experts,
        WIDTH=pow2(num_experts),
        ROWS=rows,
        TILES=TILES,
    )
    return Routes(order, tiles)


@triton.jit
def _combine(
    results_ptr,  # float32 (num_tokens, SLOTS, SIZE)
    ids_ptr,  # (num_tokens, SLOTS), as for weights
    weights_ptr,
    out_ptr,  # (num_tokens, SIZE)
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,  # SLOTS or more, a power of two
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    UP: tl.constexpr,
):
    """One of PIECES pieces of the weighted sum of a token's results, in the order of its experts' numbers."""
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    columns = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    slots = tl.arange(0, WIDTH)
    ids = tl.load(ids_ptr + token * SLOTS + slots, mask=slots < SLOTS, other=2**62)
    # where two ids are the same one after all, still each place comes once
    sooner = (ids[None, :] < ids[:, None]) | ((ids[None, :] == ids[:, None]) & (slots[None, :] < slots[:, None]))
    ranks = tl.sum(sooner.to(tl.int32), 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SLOTS):
        pair = token * SLOTS + tl.sum(tl.where(ranks == rank, slots, 0), 0)
        result = tl.load(results_ptr + (pair * SIZE + columns), mask=columns < SIZE, other=0.0)
        total += result * tl.load(weights_ptr + pair)
    tl.store(out_ptr + (token * SIZE + columns), rounded(total, out_ptr.dtype.element_ty, UP), mask=columns < SIZE)


def combine(results: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The weighted sum of each token's results, float32 (num_tokens * k, size), rounded once.

    ids and weights (num_tokens, k), contiguous. It is added up in the order of the experts' numbers.
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
        UP=INTERPRETED,
    )
    return out
