"""Recurrent states of prompts: pieces of up to 64 tokens at a time, with matrix products (Yang et al., 2024).

With G the sum of the logarithms of decays from the beginning of a piece, S the state before it and u what each token
adds, the state behind token i is exp(G_i) S + sum over j <= i of exp(G_i - G_j) k_j u_j^T. For the delta rule
u_i = beta_i (v_i - exp(G_i) S^T k_i - sum over j < i of exp(G_i - G_j) (k_j . k_i) u_j), by forward substitution.
"""
# ruff: noqa: ANN201 -- values in kernels have no types

import triton
import triton.language as tl

from quire.kernels.triton.rounding import rounded
from quire.kernels.triton.rowwise import activated, load_floats
from quire.kernels.triton.state_inputs import NORM_EPS, convolved, gates, load_chunk

# Three products of TF32 for one of float32, whose error is about that of float32. Products without tensor cores
# ("ieee") take more registers than a program has.
_PRECISION = tl.constexpr("tf32x3")


@triton.jit
def _store_state(
    state_ptr, state, keys, columns, INTERPRET: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    for i in tl.static_range(PARTS):
        rows = i * PART + keys
        places = state_ptr + (rows * VALUE_DIM + columns)
        tl.store(
            places,
            rounded(state[i], state_ptr.dtype.element_ty, INTERPRET),
            mask=(rows < KEY_DIM) & (columns < VALUE_DIM),
        )


@triton.jit(do_not_specialize=["layer", "first_chunk"])
def recur_pieces(
    data_ptr,  # (num_blocks, num_layers, NUMBERS)
    inputs_ptr,
    out_ptr,  # (num_tokens, VALUE_HEADS * VALUE_DIM)
    table_ptr,
    snapshots_ptr,
    order_ptr,
    conv_weight_ptr,
    conv_bias_ptr,
    decay_ptr,
    time_bias_ptr,
    skip_ptr,  # (VALUE_HEADS,), or None
    layer,
    least_time,
    most_time,
    first_chunk,
    BLOCK_STRIDE: tl.constexpr,
    NUMBERS: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    CONV: tl.constexpr,
    DELTA: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PART: tl.constexpr,  # keys that are multiplied at once
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,  # value columns of a program
    PIECE: tl.constexpr,  # the most tokens of a piece
    INTERPRET: tl.constexpr,
):
    """The chunks of the plan's order from `first_chunk` on. Grid (num_chunks, VALUE_HEADS * tiles of COLUMNS).

    Pieces end at snapshots and where the live block is to stand. At least one token settles.
    """
    TILES: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    chunk = tl.load(order_ptr + first_chunk + tl.program_id(0))
    start, stop, settled, settles, block, first, snapshot, last = load_chunk(table_ptr, chunk)
    head = tl.program_id(1) // TILES
    keys = tl.arange(0, PART)[:, None]  # of the first part
    columns = (tl.program_id(1) % TILES * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    are_values = columns < VALUE_DIM
    q_channel = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    k_channel = KEY_HEADS * KEY_DIM + q_channel
    v_channels = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns
    state_ptr = data_ptr + (layer.to(tl.int64) * NUMBERS + head * (KEY_DIM * VALUE_DIM))  # in block 0
    kept_ptr = data_ptr + (layer.to(tl.int64) * NUMBERS + block * BLOCK_STRIDE)
    kept_ptr += VALUE_HEADS * KEY_DIM * VALUE_DIM + (CONV - 1) * WIDTH
    source = (kept_ptr, inputs_ptr + first * STRIDE, settled, start)
    rows = tl.arange(0, PIECE)

    state = ()  # parts of (PART, COLUMNS)
    for i in tl.static_range(PARTS):
        places = state_ptr + (block * BLOCK_STRIDE + (i * PART + keys) * VALUE_DIM + columns)
        state += (load_floats(places, (i * PART + keys < KEY_DIM) & are_values & (start > 0)),)  # type: ignore[assignment]  # a tuple grows
    position = settled
    while position < stop:
        to_snapshot = tl.load(snapshots_ptr + 2 * snapshot, mask=snapshot < last, other=-1).to(tl.int64)
        end = tl.minimum(position + PIECE, tl.where(position < settles, settles, stop))
        end = tl.where(snapshot < last, tl.minimum(end, to_snapshot), end)
        tokens = position + rows
        live = tokens < end
        at, inside = tokens[:, None], live[:, None]
        log_decay, factor = gates(
            source, tokens, live, head, decay_ptr, time_bias_ptr, least_time, most_time,
            DELTA, CHANNELS, VALUE_HEADS, WIDTH, STRIDE,
        )  # fmt: skip
        factor = tl.where(live, factor, 0.0)
        sums = tl.cumsum(tl.where(live, log_decay, 0.0), 0)
        whole = tl.sum(tl.where(rows == PIECE - 1, sums, 0.0), 0)
        v = convolved(source, at, v_channels, inside & are_values, conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV)
        v = activated(v, "silu")

        # all products with keys and the state come first, so that operands do not stay in registers
        k = ()  # parts of (PIECE, PART)
        k_square = tl.full((PIECE,), NORM_EPS, tl.float32)
        q_square = tl.full((PIECE,), NORM_EPS, tl.float32)
        pairs = tl.zeros((PIECE, PIECE), tl.float32)  # of the keys of an earlier token and a later one
        seen = tl.zeros((PIECE, PIECE), tl.float32)  # of a query, and a key at most as late
        expected = tl.zeros((PIECE, COLUMNS), tl.float32)
        y = tl.zeros((PIECE, COLUMNS), tl.float32)
        for i in tl.static_range(PARTS):
            of_part = i * PART + tl.arange(0, PART)[None, :]
            mask = inside & (of_part < KEY_DIM)
            k_part = convolved(
                source, at, k_channel + of_part, mask, conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV
            )
            k_part = activated(k_part, "silu")
            q_part = convolved(
                source, at, q_channel + of_part, mask, conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV
            )
            q_part = activated(q_part, "silu")
            if DELTA:
                k_square += tl.sum(k_part * k_part, 1)
                q_square += tl.sum(q_part * q_part, 1)
                pairs = tl.dot(k_part, tl.trans(k_part), pairs, input_precision=_PRECISION)
                expected = tl.dot(k_part, state[i], expected, input_precision=_PRECISION)
            seen = tl.dot(q_part, tl.trans(k_part), seen, input_precision=_PRECISION)
            y = tl.dot(q_part, state[i], y, input_precision=_PRECISION)
            k += (k_part,)  # type: ignore[assignment]
        if DELTA:
            k_norm, q_norm = tl.rsqrt(k_square), tl.rsqrt(q_square) * (KEY_DIM**-0.5)
            added = (v - expected * (tl.exp(sums) * k_norm)[:, None]) * factor[:, None]
            pairs *= tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)) * k_norm[None, :]
            pairs = tl.where(rows[:, None] > rows[None, :], pairs * (factor * k_norm)[:, None], 0.0)
            for i in range(1, (end - position).to(tl.int32)):
                weights = tl.sum(tl.where(rows[:, None] == i, pairs, 0.0), 0)
                known = tl.sum(weights[:, None] * added, 0)
                added = tl.where(rows[:, None] == i, added - known[None, :], added)
        else:
            k_norm, q_norm = tl.full((PIECE,), 1.0, tl.float32), tl.full((PIECE,), 1.0, tl.float32)
            added = v * factor[:, None]
        seen *= tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)) * k_norm[None, :]
        seen = tl.where(rows[:, None] >= rows[None, :], seen, 0.0)
        y = tl.dot(seen, added, y * tl.exp(sums)[:, None], input_precision=_PRECISION) * q_norm[:, None]
        if skip_ptr is not None:
            y += tl.load(skip_ptr + head) * v
        tl.store(
            out_ptr + ((first + at - start) * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + columns),
            rounded(y, out_ptr.dtype.element_ty, INTERPRET),
            mask=inside & are_values & (at >= start),
        )
        added *= (tl.exp(whole - sums) * k_norm)[:, None]
        before = state
        state = ()
        for i in tl.static_range(PARTS):
            state += (tl.dot(tl.trans(k[i]), added, before[i] * tl.exp(whole), input_precision=_PRECISION),)  # type: ignore[assignment]
        if end == settles:
            live_ptr = state_ptr + block * BLOCK_STRIDE
            _store_state(live_ptr, state, keys, columns, INTERPRET, KEY_DIM, VALUE_DIM, PART, PARTS)
        if end == to_snapshot:
            target = tl.load(snapshots_ptr + 2 * snapshot + 1).to(tl.int64)
            snapshot_ptr = state_ptr + target * BLOCK_STRIDE
            _store_state(snapshot_ptr, state, keys, columns, INTERPRET, KEY_DIM, VALUE_DIM, PART, PARTS)
            snapshot += 1
        position = end
