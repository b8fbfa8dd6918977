"""Rotary embedding fused with the write of new keys and values into blocks, quantized if the blocks are.

A head is read as two halves of columns. A rotated pair has one column in each half, and the columns after the rotated
ones are divided in the same way. `blocks` describes the layout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.contract import Rotation, Storage
from quire.kernels.reference.quantized import MAX_QUANTIZED
from quire.kernels.triton.launch import INTERPRETED, pow2
from quire.kernels.triton.plan import TritonPlan
from quire.kernels.triton.rounding import nearest, rounded

MAX_PROGRAM_HEADS = 8  # the most heads that one program writes
_WARPS = 2


def rotary_write(
    storage: Storage, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, plan: TritonPlan
) -> Tensor:
    """Rotate q and k, and store k and v by the plan's block tables. Returns the rotated q, or q itself if not rotated.

    q (num_tokens, num_heads, head_dim), k and v (num_tokens, num_kv_heads, head_dim), with any stride of tokens.
    A token whose block is -1 is not stored. Raises IndexError for a layer that the group does not have, and
    ValueError for shapes that do not match.
    """
    group = storage.group
    _check(storage, layer, k, v, plan)
    k, v = _with_contiguous_heads(k), _with_contiguous_heads(v)
    num_tokens, num_kv_heads, head_dim = k.shape
    num_heads, half = 0, 0
    turned, cos, sin = q, k, k  # cos and sin are placeholders, which are not read without a rotation
    if rotation is not None:
        cos, sin = (x.contiguous() for x in rotation)
        num_heads, half = q.shape[1], cos.shape[1]
        if not len(q) == len(cos) == len(sin) == num_tokens or q.shape[2] != head_dim or 2 * half > head_dim:
            raise ValueError(f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and {2 * half} rotated dims do not fit")
        q = _with_contiguous_heads(q)
        turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    in_8_bits = group.dtype in MAX_QUANTIZED
    data = storage.data[layer]
    together = min(MAX_PROGRAM_HEADS, pow2(max(num_heads, num_kv_heads)))
    parts = -(-num_heads // together) + 2 * -(-num_kv_heads // together)
    _rotary_write[(num_tokens, parts)](
        *(q, k, v, cos, sin, turned, data, data.view(torch.float32) if in_8_bits else data),
        *(plan.chunks, plan.positions, plan.ends, plan.table_rows, plan.tables),
        *(q.stride(0), k.stride(0), v.stride(0), data.stride(0), plan.tables.shape[1]),
        HEADS=together,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        PADDED=pow2(-(-head_dim // 2)),
        BLOCK_SIZE=storage.block_size,
        STORED=group.dtype if in_8_bits else "",
        LARGEST=MAX_QUANTIZED.get(group.dtype, 0.0),
        INTERPRET=INTERPRETED,
        num_warps=_WARPS,
    )
    return turned


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x (num_tokens, num_heads, head_dim) rotated, contiguous."""
    cos, sin = (part.contiguous() for part in rotation)
    x = _with_contiguous_heads(x)
    num_tokens, num_heads, head_dim = x.shape
    if num_tokens != len(cos) or cos.shape != sin.shape or 2 * cos.shape[1] > head_dim:
        raise ValueError(f"heads {tuple(x.shape)} and cosines {tuple(cos.shape)} do not match")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    together = min(MAX_PROGRAM_HEADS, pow2(num_heads))
    _rotate[(num_tokens, -(-num_heads // together))](
        *(x, cos, sin, out, x.stride(0)),
        HEADS=together,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HALF=cos.shape[1],
        PADDED=pow2(-(-head_dim // 2)),
        INTERPRET=INTERPRETED,
        num_warps=_WARPS,
    )
    return out


def _check(storage: Storage, layer: int, k: Tensor, v: Tensor, plan: TritonPlan) -> None:
    group, kind = storage.group, storage.group.kind
    if not 0 <= layer < len(group.layers):
        raise IndexError(f"there is no layer {layer} of {len(group.layers)}")
    if k.shape != v.shape or k.dtype != v.dtype or len(k) != len(plan.chunks):
        raise ValueError(f"keys {tuple(k.shape)}, values {tuple(v.shape)} and {len(plan.chunks)} tokens do not match")
    if k.shape[1:] != (kind.num_kv_heads, kind.head_dim):
        raise ValueError(f"blocks of {kind.num_kv_heads} heads of {kind.head_dim} cannot hold keys {tuple(k.shape)}")


def _with_contiguous_heads(x: Tensor) -> Tensor:
    """x (num_tokens, heads, head_dim), copied unless the heads of each token are contiguous."""
    _, heads, head_dim = x.shape
    return x if x.stride(2) == 1 and (x.stride(1) == head_dim or heads == 1) else x.contiguous()


@triton.jit
def _rotate_token(
    x_ptr, cos_ptr, sin_ptr, out_ptr, heads,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Write some heads of a token, rotated. The pointers are those of the token."""
    first, second = _halves(x_ptr, heads, NUM_HEADS, HEAD_DIM, HALF, PADDED)
    first, second = _rotated(first, second, cos_ptr, sin_ptr, HALF, PADDED, INTERPRET)
    _store_halves(out_ptr, first, second, heads, NUM_HEADS, HEAD_DIM, HEAD_DIM, HALF, PADDED)


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, stride,
    HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Process HEADS heads of a token. Grid (num_tokens, parts of the heads)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cos_ptr += token * HALF
    sin_ptr += token * HALF
    out_ptr += token * (NUM_HEADS * HEAD_DIM)
    _rotate_token(
        x_ptr + token * stride, cos_ptr, sin_ptr, out_ptr, heads, NUM_HEADS, HEAD_DIM, HALF, PADDED, INTERPRET
    )


@triton.jit(do_not_specialize=["width"])
def _rotary_write(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, turned_ptr, data_ptr, scales_ptr,
    chunks_ptr, positions_ptr, ends_ptr, rows_ptr, tables_ptr,
    q_stride, k_stride, v_stride, values_stride, width,
    HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STORED: tl.constexpr, LARGEST: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Process HEADS heads of a token's queries, keys or values. Grid (num_tokens, parts of q, then of k, then of v)."""
    Q_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos_ptr += token * HALF
    sin_ptr += token * HALF
    if part < Q_PARTS:
        heads = part * HEADS + tl.arange(0, HEADS)
        _rotate_token(
            q_ptr + token * q_stride, cos_ptr, sin_ptr, turned_ptr + token * (NUM_HEADS * HEAD_DIM),
            heads, NUM_HEADS, HEAD_DIM, HALF, PADDED, INTERPRET,
        )  # fmt: skip
    else:
        chunk = tl.load(chunks_ptr + token)
        position = tl.load(positions_ptr + token)
        row = tl.load(rows_ptr + chunk).to(tl.int64)
        block = tl.load(tables_ptr + row * width + position // BLOCK_SIZE).to(tl.int64)
        if block >= 0:
            left = tl.load(ends_ptr + chunk) - position
            if part < Q_PARTS + KV_PARTS:
                heads = (part - Q_PARTS) * HEADS + tl.arange(0, HEADS)
                first, second = _halves(k_ptr + token * k_stride, heads, NUM_KV_HEADS, HEAD_DIM, HALF, PADDED)
                if HALF > 0:
                    first, second = _rotated(first, second, cos_ptr, sin_ptr, HALF, PADDED, INTERPRET)
            else:
                heads = (part - Q_PARTS - KV_PARTS) * HEADS + tl.arange(0, HEADS)
                first, second = _halves(v_ptr + token * v_stride, heads, NUM_KV_HEADS, HEAD_DIM, HALF, PADDED)
                data_ptr += values_stride
                scales_ptr += values_stride // 4
            _store_token(
                data_ptr, scales_ptr, first, second, heads, block, position % BLOCK_SIZE, left,
                NUM_KV_HEADS, HEAD_DIM, HALF, PADDED, BLOCK_SIZE, STORED, LARGEST, INTERPRET,
            )  # fmt: skip


@triton.jit
def _columns(HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr):
    """Column indices of both halves of a head, and masks of those that exist; each (PADDED,)."""
    PAIRS: tl.constexpr = (HEAD_DIM + 1) // 2
    pairs = tl.arange(0, PADDED)
    first = pairs
    second = pairs + PAIRS
    if HALF > 0 and HALF < PAIRS:  # the columns after the rotated ones are halved separately
        first = tl.where(pairs < HALF, pairs, pairs + HALF)
        second = first + tl.where(pairs < HALF, HALF, PAIRS - HALF)
    return first, second, pairs < PAIRS, (pairs < PAIRS) & (second < HEAD_DIM)


@triton.jit
def _halves(
    x_ptr, heads, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Both halves of a token's heads, each (HEADS, PADDED), padded with 0."""
    first, second, in_first, in_second = _columns(HEAD_DIM, HALF, PADDED)
    rows = x_ptr + heads[:, None] * HEAD_DIM
    real = (heads < NUM_HEADS)[:, None]
    return (
        tl.load(rows + first[None, :], mask=real & in_first[None, :], other=0),
        tl.load(rows + second[None, :], mask=real & in_second[None, :], other=0),
    )


@triton.jit
def _store_halves(
    target_ptr, first, second, heads, NUM_HEADS: tl.constexpr, STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The inverse of `_halves`, for heads with a stride of STRIDE."""
    at_first, at_second, in_first, in_second = _columns(HEAD_DIM, HALF, PADDED)
    rows = target_ptr + heads[:, None] * STRIDE
    real = (heads < NUM_HEADS)[:, None]
    tl.store(rows + at_first[None, :], first, mask=real & in_first[None, :])
    tl.store(rows + at_second[None, :], second, mask=real & in_second[None, :])


@triton.jit
def _rotated(first, second, cos_ptr, sin_ptr, HALF: tl.constexpr, PADDED: tl.constexpr, INTERPRET: tl.constexpr):
    """Both halves with their first HALF pairs rotated in float32 and rounded once."""
    pairs = tl.arange(0, PADDED)
    turns = pairs < HALF
    cos = tl.load(cos_ptr + pairs, mask=turns, other=1)[None, :]
    sin = tl.load(sin_ptr + pairs, mask=turns, other=0)[None, :]
    x, y = first.to(tl.float32), second.to(tl.float32)
    new_first = tl.where(turns[None, :], x * cos - y * sin, x)
    new_second = tl.where(turns[None, :], y * cos + x * sin, y)
    return rounded(new_first, first.dtype, INTERPRET), rounded(new_second, second.dtype, INTERPRET)


@triton.jit
def _store_token(
    data_ptr, scales_ptr, first, second, heads, block, place, left,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STORED: tl.constexpr, LARGEST: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Store heads of a token at slot `place` of its block. left: tokens of its sequence in this step from this one on.

    The program that writes slot 0 also zeroes the slots after the last of these, which this step does not write.
    """
    VALUES: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    STRIDE: tl.constexpr = VALUES if STORED == "" else VALUES + 4 * BLOCK_SIZE
    data_ptr += block * (NUM_HEADS * STRIDE)
    scales_ptr += block * (NUM_HEADS * STRIDE // 4) + VALUES // 4
    x, y = first.to(tl.float32), second.to(tl.float32)
    if STORED == "":
        x, y = rounded(x, data_ptr.dtype.element_ty, INTERPRET), rounded(y, data_ptr.dtype.element_ty, INTERPRET)
    else:
        scales = _scales(x, y, LARGEST)
        x, y = _quantized(x, scales, STORED, LARGEST, INTERPRET), _quantized(y, scales, STORED, LARGEST, INTERPRET)
        tl.store(scales_ptr + heads * (STRIDE // 4) + place, scales, mask=heads < NUM_HEADS)
    _store_halves(data_ptr + place * HEAD_DIM, x, y, heads, NUM_HEADS, STRIDE, HEAD_DIM, HALF, PADDED)
    if (place == 0) & (left < BLOCK_SIZE):
        _clear(data_ptr, heads, left * HEAD_DIM, VALUES, NUM_HEADS, STRIDE, 512)
        if STORED != "":
            _clear(scales_ptr, heads, left, BLOCK_SIZE, NUM_HEADS, STRIDE // 4, 16)


@triton.jit
def _clear(
    data_ptr, heads, begin, END: tl.constexpr, NUM_HEADS: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Zero [begin, END) of each head's row, SPAN elements at a time."""
    rows = data_ptr + heads[:, None] * STRIDE
    real = (heads < NUM_HEADS)[:, None]
    zeros = tl.zeros((heads.shape[0], SPAN), data_ptr.dtype.element_ty)
    for at in range(begin, END, SPAN):
        places = at + tl.arange(0, SPAN)[None, :]
        tl.store(rows + places, zeros, mask=real & (places < END))


@triton.jit
def _scales(x, y, LARGEST: tl.constexpr):
    """The scale of each row of two halves (float32). Magnitudes are compared as integers, so NaN is the largest."""
    x_bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    y_bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.maximum(x_bits, y_bits), 1).to(tl.float32, bitcast=True)
    return tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))


@triton.jit
def _quantized(x, scales, STORED: tl.constexpr, LARGEST: tl.constexpr, INTERPRET: tl.constexpr):
    """x / scales as the bits of 8-bit numbers, rounded to nearest, ties to even."""
    x = tl.div_rn(x, tl.where(scales == 0, 1.0, scales)[:, None])
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)  # NaN becomes a number here; the scale is NaN then
    if STORED == "int8":
        # float32 from 2^23 on has no fraction bits, so the addition rounds to an integer, ties to even
        x = ((x + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        if INTERPRET:  # the interpreter rounds wrongly; fp8 below 2^-6 has steps of 2^-9, like float32 at 1.5 * 2^14
            x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, nearest(x, 20))
        x = x.to(tl.float8e4nv)
    return x.to(tl.uint8, bitcast=True)
