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
    KEYS: tl.constexpr,  # KEY_DIM or more, a power of two
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
    keys = tl.arange(0, KEYS)
    columns = tl.program_id(1) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    are_keys, are_values = (keys < KEY_DIM)[None, :], (columns < VALUE_DIM)[None, :]
    inside = (keys < KEY_DIM)[:, None] & are_values
    places = (head * KEY_DIM + keys)[:, None] * VALUE_DIM + columns[None, :]
    q_channels = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + keys[None, :]
    k_channels = KEY_HEADS * KEY_DIM + q_channels
    v_channels = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns[None, :]
    layer_ptr = data_ptr + layer.to(tl.int64) * NUMBERS
    live_ptr = layer_ptr + block * BLOCK_STRIDE
    kept_ptr = live_ptr + (VALUE_HEADS * KEY_DIM * VALUE_DIM + (CONV - 1) * WIDTH)
    source = (kept_ptr, inputs_ptr + first * STRIDE, settled, start)
    rows = tl.arange(0, PIECE)

    state = load_floats(live_ptr + places, inside & (start > 0))
    position = settled
    while position < stop:
        to_snapshot = tl.load(snapshots_ptr + 2 * snapshot, mask=snapshot < last, other=-1).to(tl.int64)
        end = tl.minimum(position + PIECE, tl.where(position < settles, settles, stop))
        end = tl.where(snapshot < last, tl.minimum(end, to_snapshot), end)
        tokens = position + rows
        live = tokens < end
        at = tokens[:, None]
        log_decay, factor = gates(
            source, tokens, live, head, decay_ptr, time_bias_ptr, least_time, most_time,
            DELTA, CHANNELS, VALUE_HEADS, WIDTH, STRIDE,
        )  # fmt: skip
        factor = tl.where(live, factor, 0.0)
        sums = tl.cumsum(tl.where(live, log_decay, 0.0), 0)
        whole = tl.sum(tl.where(rows == PIECE - 1, sums, 0.0), 0)
        k = convolved(
            source, at, k_channels, live[:, None] & are_keys, conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV
        )
        k = activated(k, "silu")
        v = convolved(
            source, at, v_channels, live[:, None] & are_values, conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV
        )
        v = activated(v, "silu")
        if DELTA:
            k *= tl.rsqrt(tl.sum(k * k, 1) + NORM_EPS)[:, None]
            expected = tl.dot(k, state, input_precision="ieee") * tl.exp(sums)[:, None]
            pairs = tl.dot(k, tl.trans(k), input_precision="ieee")  # of an earlier token, and a later one
            between = tl.exp(tl.minimum(sums[None, :] - sums[:, None], 0.0)) * factor[None, :]
            pairs = tl.where(rows[:, None] < rows[None, :], pairs * between, 0.0)
            added = (v - expected) * factor[:, None]
            for i in range(1, (end - position).to(tl.int32)):
                weights = tl.sum(tl.where(rows[None, :] == i, pairs, 0.0), 1)
                known = tl.sum(weights[:, None] * added, 0)
                added = tl.where(rows[:, None] == i, added - known[None, :], added)
        else:
            added = v * factor[:, None]
        q = convolved(
            source, at, q_channels, live[:, None] & are_keys, conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV
        )
        q = activated(q, "silu")
        if DELTA:
            q *= tl.rsqrt(tl.sum(q * q, 1) + NORM_EPS)[:, None] * (KEY_DIM**-0.5)
        seen = tl.dot(q, tl.trans(k), input_precision="ieee")  # of a token, and one at most as late
        seen *= tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
        seen = tl.where(rows[:, None] >= rows[None, :], seen, 0.0)
        y = tl.dot(q, state, input_precision="ieee") * tl.exp(sums)[:, None]
        y += tl.dot(seen, added, input_precision="ieee")
        if skip_ptr is not None:
            y += tl.load(skip_ptr + head) * v
        tl.store(
            out_ptr + ((first + at - start) * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + columns[None, :]),
            rounded(y, out_ptr.dtype.element_ty, INTERPRET),
            mask=live[:, None] & are_values & (at >= start),
        )
        added *= tl.exp(whole - sums)[:, None]
        state = state * tl.exp(whole) + tl.dot(tl.trans(k), added, input_precision="ieee")
        stored = rounded(state, data_ptr.dtype.element_ty, INTERPRET)
        if end == settles:
            tl.store(live_ptr + places, stored, mask=inside)
        if end == to_snapshot:
            target = tl.load(snapshots_ptr + 2 * snapshot + 1).to(tl.int64)
            tl.store(layer_ptr + target * BLOCK_STRIDE + places, stored, mask=inside)
            snapshot += 1
        position = end
