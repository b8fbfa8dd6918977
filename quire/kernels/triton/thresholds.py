"""top_k and top_p without sorting: a search for the threshold score in the bits of the scores.

The distance of a score from the largest one, which is 0, is a non-negative float, so its bits as an integer have the
same order. Both filters search the largest distance `far` with

    weight of all tokens with a smaller distance  <  limit.

For top_k each token has weight 1 and the limit is k. For top_p a token has weight exp(score) and the limit is top_p
times the sum. Tokens at a distance of at most `far` are kept: ties are kept together, and the most likely token is
always kept.

The first pass over a row sums the weights below each of 16 pivots. Every later pass divides the interval between the
last pivot below the limit and the next one by 16. Once few tokens are below the upper end of the interval, their
distances are copied, and the row is not read again. Sums of exponentials are in float64, in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import pow2
from quire.kernels.triton.rows import (
    EDITED,
    MIN_SCORE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WORDS,
    final_logits,
    largest_of_row,
    load_field,
    load_float_field,
    num_tiles,
)

MAX_COPIED = 8192  # the most tokens of a row that are copied
_BLOCK = 1024  # tokens that are read at once
_INFINITE = tl.constexpr(0x7F800000)  # distance of -inf
_BEYOND = tl.constexpr(0x7F800001)


def apply_top_k_top_p(logits: Tensor, edited: Tensor | None, row_metadata: Tensor, peaks: Tensor, rows: Tensor) -> None:
    """Raise the field `min_score` of `rows` to the threshold of their top_k and top_p; see `rows.ROW_METADATA`.

    logits (num_rows, vocab_size), edited (edited rows, vocab_size), peaks (num_rows, tiles): the largest of each tile.
    """
    nearest = torch.empty(len(rows), MAX_COPIED, dtype=torch.int32, device=logits.device)
    _apply_top_k_top_p[(len(rows),)](
        logits,
        row_metadata if edited is None else edited,
        row_metadata,
        peaks,
        rows,
        nearest,
        logits.stride(0),
        logits.shape[1],
        num_tiles(logits.shape[1]),
        ANY_EDITED=edited is not None,
        TILES=pow2(num_tiles(logits.shape[1])),
        COPIED=MAX_COPIED,
        BLOCK=_BLOCK,
        num_warps=16,
        enable_fp_fusion=False,
    )


@triton.jit
def _apply_top_k_top_p(
    logits_ptr,
    edited_ptr,
    metadata_ptr,
    peaks_ptr,
    rows_ptr,
    nearest_ptr,
    stride,
    vocab_size,
    num_tiles,
    ANY_EDITED: tl.constexpr,
    TILES: tl.constexpr,
    COPIED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,). Each program copies distances to its own row of nearest_ptr (rows, COPIED)."""
    row = tl.load(rows_ptr + tl.program_id(0))
    nearest_ptr += tl.program_id(0).to(tl.int64) * COPIED
    top = largest_of_row(peaks_ptr, row, num_tiles, TILES)
    top_k = load_field(metadata_ptr, row, TOP_K)
    top_p = load_float_field(metadata_ptr, row, TOP_P)
    furthest = tl.abs(load_float_field(metadata_ptr, row, MIN_SCORE)).to(tl.int32, bitcast=True)
    num_copied = tl.full([], COPIED + 1, tl.int32)  # above COPIED: nothing is copied yet
    slot = load_field(metadata_ptr, row, EDITED)
    temperature = load_float_field(metadata_ptr, row, TEMPERATURE)
    source = (logits_ptr, edited_ptr, nearest_ptr, row, slot, stride, vocab_size, top, temperature)
    if top_k > 0:
        far, num_copied = _search(source, num_copied, top_k, furthest, ANY_EDITED, COPIED, BLOCK, BY_SHARE=False)
        furthest = tl.minimum(furthest, far)
    if top_p < 1:
        limit = top_p.to(tl.float64)
        far, num_copied = _search(source, num_copied, limit, furthest, ANY_EDITED, COPIED, BLOCK, BY_SHARE=True)
        furthest = tl.minimum(furthest, far)
    tl.store(
        metadata_ptr + row * WORDS + MIN_SCORE, (-furthest.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    )


@triton.jit
def _search(
    source,
    num_copied,
    limit,
    furthest,
    ANY_EDITED: tl.constexpr,
    COPIED: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_SHARE: tl.constexpr,
):
    """The largest distance such that the weight of all smaller distances is below `limit`, and the number of copies.

    BY_SHARE: weights are exp(score) of tokens up to `furthest`, and `limit` is a share of their sum. If at most COPIED
    tokens are copied, they are all tokens below some distance that is larger than the one returned.
    """
    steps = tl.arange(0, 16) + 1
    squares = (steps * steps).to(tl.float32) * 0.25  # 0.25, 1, 2.25 ... 56.25
    pivots = tl.where(steps == 16, _BEYOND, squares.to(tl.int32, bitcast=True))
    near = tl.full([], 0, tl.int32)
    far = tl.full([], _BEYOND, tl.int32)
    weights = _weights(source, num_copied, pivots, furthest, ANY_EDITED, COPIED, BLOCK, BY_SHARE)
    if BY_SHARE:
        limit = limit * tl.max(weights, 0)  # the last weight is that of all tokens
    near, far = _narrow(near, far, pivots, weights < limit)
    while far - near > 1:
        if num_copied > COPIED:
            num_copied = _copy(source, far, ANY_EDITED, COPIED, BLOCK)
        pivots = near + steps * ((far - near + 15) // 16)
        weights = _weights(source, num_copied, pivots, furthest, ANY_EDITED, COPIED, BLOCK, BY_SHARE)
        near, far = _narrow(near, far, pivots, weights < limit)
    return near, num_copied


@triton.jit
def _narrow(near, far, pivots, are_below):
    """The narrowed interval [near, far): between the pivots, or former ends, between which the limit is reached."""
    are_below = are_below & (pivots < far)
    near = tl.max(tl.where(are_below, pivots, near), 0)
    return near, tl.min(tl.where(are_below, far, tl.minimum(pivots, far)), 0)


@triton.jit
def _weights(
    source,
    num_copied,
    pivots,
    furthest,
    ANY_EDITED: tl.constexpr,
    COPIED: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_SHARE: tl.constexpr,
):
    """Per pivot, the weight of all tokens below it, from the copied distances if there are any."""
    _, _, nearest_ptr, _, _, _, vocab_size, _, _ = source
    sums = tl.zeros([BLOCK, 16], tl.float64 if BY_SHARE else tl.int32)
    if num_copied <= COPIED:
        for first in range(0, num_copied, BLOCK):
            places = first + tl.arange(0, BLOCK)
            distances = tl.load(nearest_ptr + places, mask=places < num_copied, other=_INFINITE)
            sums += _weights_below(distances, pivots, furthest, BY_SHARE)
    else:
        for first in range(0, vocab_size, BLOCK):
            distances = _distances(source, first + tl.arange(0, BLOCK), ANY_EDITED)
            sums += _weights_below(distances, pivots, furthest, BY_SHARE)
    return tl.sum(sums, 0)


@triton.jit
def _weights_below(distances, pivots, furthest, BY_SHARE: tl.constexpr):
    """(tokens, pivots): the weight of a token if its distance is below the pivot, else 0."""
    are_nearer = distances[:, None] < pivots[None, :]
    if BY_SHARE:
        shares = tl.where(distances <= furthest, tl.exp(-distances.to(tl.float32, bitcast=True)), 0.0)
        weights = tl.where(are_nearer, shares.to(tl.float64)[:, None], 0.0)
    else:
        weights = are_nearer.to(tl.int32)
    return weights


@triton.jit
def _distances(source, tokens, ANY_EDITED: tl.constexpr):
    """Distances of tokens from the largest score, as bits."""
    logits_ptr, edited_ptr, _, row, slot, stride, vocab_size, top, temperature = source
    x = final_logits(logits_ptr, edited_ptr, row, slot, stride, tokens, vocab_size, ANY_EDITED)
    return tl.div_rn(top - x, temperature).to(tl.int32, bitcast=True)


@triton.jit
def _copy(source, far, ANY_EDITED: tl.constexpr, COPIED: tl.constexpr, BLOCK: tl.constexpr):
    """Copy up to COPIED distances below `far`, in the order of tokens. Returns how many there are."""
    _, _, nearest_ptr, _, _, _, vocab_size, _, _ = source
    number = tl.full([], 0, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        distances = _distances(source, first + tl.arange(0, BLOCK), ANY_EDITED)
        are_near = (distances < tl.minimum(far, _INFINITE)).to(tl.int32)
        places = number + tl.cumsum(are_near, 0) - 1
        tl.store(nearest_ptr + places, distances, mask=(are_near != 0) & (places < COPIED))
        number += tl.sum(are_near, 0)
    tl.debug_barrier()  # other threads read them
    return number
