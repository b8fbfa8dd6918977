"""Recurrent states: see `reference.states`. A program has some value columns of one head of a chunk.

It goes through the inputs that its block has beside the state, then through the chunk's tokens: one by one, or in
pieces of prompts, which "kda" does not have. The block's inputs are replaced by a second kernel, because programs of
several value heads read those of their common key head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.core.states import StateKind
from quire.kernels.reference import REFERENCE
from quire.kernels.state_contract import RecurrenceWeights, StateStorage
from quire.kernels.triton.launch import INTERPRETED, pow2
from quire.kernels.triton.products import with_contiguous_rows
from quire.kernels.triton.rounding import rounded
from quire.kernels.triton.rowwise import activated, load_floats
from quire.kernels.triton.state_inputs import NORM_EPS, convolve, convolved, gates, keep_inputs, key_gates, load_chunk
from quire.kernels.triton.state_pieces import recur_pieces
from quire.kernels.triton.state_plan import StatePlan
from quire.kernels.triton.upload import to_device

MAX_KEY_DIM = 256
_STATE_TILE = 2048  # numbers of the state in the registers of a warp
_PIECE_TILE = 2**13  # numbers of the keys of a piece
_PART = 32  # keys that are multiplied at once in a piece
_PIECE_COLUMNS = 32  # value columns of a program for pieces
_LEAST_TILE = 16  # of an axis in a product
_INPUT_TILE = 4096  # numbers of a program that copies inputs
_CHANNELS = 256  # of a program that only convolves


@triton.jit(do_not_specialize=["layer"])
def _recur_tokens(
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
    BLOCK_STRIDE: tl.constexpr,
    NUMBERS: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    CONV: tl.constexpr,
    DELTA: tl.constexpr,
    KDA: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM or more, a power of two
    COLUMNS: tl.constexpr,  # value columns of a program
    INTERPRET: tl.constexpr,
):
    """The first chunks of the plan's order, token by token. Grid (num_chunks, VALUE_HEADS * tiles of COLUMNS)."""
    TILES: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    chunk = tl.load(order_ptr + tl.program_id(0))
    start, stop, settled, settles, block, first, snapshot, last = load_chunk(table_ptr, chunk)
    head = tl.program_id(1) // TILES
    keys = tl.arange(0, KEYS)
    columns = tl.program_id(1) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    are_keys, are_values = keys < KEY_DIM, columns < VALUE_DIM
    inside = are_keys[:, None] & are_values[None, :]
    places = (head * KEY_DIM + keys)[:, None] * VALUE_DIM + columns[None, :]
    q_channels = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + keys
    k_channels = KEY_HEADS * KEY_DIM + q_channels
    v_channels = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns
    layer_ptr = data_ptr + layer.to(tl.int64) * NUMBERS
    live_ptr = layer_ptr + block * BLOCK_STRIDE
    kept_ptr = live_ptr + (VALUE_HEADS * KEY_DIM * VALUE_DIM + (CONV - 1) * WIDTH)
    source = (kept_ptr, inputs_ptr + first * STRIDE, settled, start)

    state = load_floats(live_ptr + places, inside & (start > 0))
    if settles == settled:
        tl.store(live_ptr + places, rounded(state, data_ptr.dtype.element_ty, INTERPRET), mask=inside & (block >= 0))
    for position in range(settled, stop):
        q = convolved(source, position, q_channels, are_keys, conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV)
        k = convolved(source, position, k_channels, are_keys, conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV)
        v = convolved(source, position, v_channels, are_values, conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV)
        q, k, v = activated(q, "silu"), activated(k, "silu"), activated(v, "silu")
        if KDA:
            log_decays, factor = key_gates(
                source, position, head, q_channels, are_keys, decay_ptr, time_bias_ptr,
                CHANNELS, VALUE_HEADS, WIDTH, STRIDE,
            )  # fmt: skip
            state *= tl.exp(log_decays)[:, None]
        else:
            log_decay, factor = gates(
                source, position, position < stop, head, decay_ptr, time_bias_ptr, least_time, most_time,
                DELTA, CHANNELS, VALUE_HEADS, WIDTH, STRIDE,
            )  # fmt: skip
            state *= tl.exp(log_decay)
        if DELTA or KDA:
            q *= tl.rsqrt(tl.sum(q * q, 0) + NORM_EPS) * (KEY_DIM**-0.5)
            k *= tl.rsqrt(tl.sum(k * k, 0) + NORM_EPS)
            added = (v - tl.sum(state * k[:, None], 0)) * factor
        else:
            added = v * factor
        state += k[:, None] * added[None, :]
        y = tl.sum(state * q[:, None], 0)
        if skip_ptr is not None:
            y += tl.load(skip_ptr + head) * v
        tl.store(
            out_ptr + ((first + position - start) * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + columns),
            rounded(y, out_ptr.dtype.element_ty, INTERPRET),
            mask=are_values & (position >= start),
        )
        stored = rounded(state, data_ptr.dtype.element_ty, INTERPRET)
        if position + 1 == settles:
            tl.store(live_ptr + places, stored, mask=inside & (block >= 0))
        if position + 1 == tl.load(snapshots_ptr + 2 * snapshot, mask=snapshot < last, other=-1):
            target = tl.load(snapshots_ptr + 2 * snapshot + 1).to(tl.int64)
            tl.store(layer_ptr + target * BLOCK_STRIDE + places, stored, mask=inside)
            snapshot += 1


def unsupported_state_reason(kind: StateKind | None) -> str | None:
    """Why the kernels do not compute a recurrence, or None if they do."""
    if kind is not None and kind.key_dim > MAX_KEY_DIM:
        return f"keys of {kind.key_dim} numbers in a recurrence are longer than {MAX_KEY_DIM}"
    return None


def copy_states(storage: StateStorage, pairs: Tensor) -> None:
    """See Kernels."""
    REFERENCE.copy_states(storage, to_device(pairs, storage.data.device))


def recur(
    storage: StateStorage,
    layer: int,
    inputs: Tensor,
    weights: RecurrenceWeights,
    plan: StatePlan,
    *,
    deterministic: bool = False,
) -> Tensor:
    """See Kernels. deterministic: all chunks go token by token, because bits of pieces depend on where they end."""
    kind, inputs = storage.group.kind, with_contiguous_rows(inputs)
    out = torch.empty((len(inputs), kind.num_values), dtype=inputs.dtype, device=inputs.device)
    convolution = weights.conv_weight.contiguous(), weights.conv_bias
    sizes = {
        "BLOCK_STRIDE": storage.data.stride(0),
        "NUMBERS": storage.data.stride(1),
        "STRIDE": inputs.stride(0),
        "WIDTH": kind.width,
        "CONV": kind.conv_width,
        "INTERPRET": INTERPRETED,
    }
    if kind.rule == "convolution":
        columns = min(_CHANNELS, pow2(kind.width))
        convolve[(len(inputs), triton.cdiv(kind.width, columns))](
            *(storage.data, inputs, out, plan.table, plan.token_chunks, *convolution, layer),
            COLUMNS=columns,
            **sizes,
        )
    else:
        tensors = (storage.data, inputs, out, plan.table, plan.snapshots, plan.order, *convolution)
        parameters = (weights.decay, weights.time_bias, weights.skip, layer, *weights.time_limits)
        num_long = 0 if deterministic or kind.rule == "kda" else plan.num_long
        _launch_recurrence(kind, (*tensors, *parameters), sizes, len(plan.order), num_long)
    _keep_inputs(storage, layer, inputs, plan, sizes)
    return out


def _launch_recurrence(
    kind: StateKind, arguments: tuple[Any, ...], sizes: dict[str, Any], num_chunks: int, num_long: int
) -> None:
    """Compute the last `num_long` chunks of the plan's order in pieces, and the others token by token."""
    sizes = sizes | {
        "DELTA": kind.rule == "delta",
        "KEY_HEADS": kind.num_key_heads,
        "VALUE_HEADS": kind.num_value_heads,
        "KEY_DIM": kind.key_dim,
        "VALUE_DIM": kind.value_dim,
    }
    if num_long < num_chunks:
        keys = pow2(kind.key_dim)
        columns = min(_STATE_TILE // keys, pow2(kind.value_dim))
        _recur_tokens[(num_chunks - num_long, kind.num_value_heads * triton.cdiv(kind.value_dim, columns))](
            *arguments,
            KDA=kind.rule == "kda",
            KEYS=keys,
            COLUMNS=columns,
            num_warps=1,
            **sizes,
        )
    if num_long:
        keys = max(pow2(kind.key_dim), _LEAST_TILE)
        columns = max(min(pow2(kind.value_dim), _PIECE_COLUMNS), _LEAST_TILE)
        recur_pieces[(num_long, kind.num_value_heads * triton.cdiv(kind.value_dim, columns))](
            *arguments,
            num_chunks - num_long,
            PART=min(keys, _PART),
            PARTS=keys // min(keys, _PART),
            COLUMNS=columns,
            PIECE=min(_PIECE_TILE // keys, 64),
            num_warps=8,
            **sizes,
        )


def _keep_inputs(storage: StateStorage, layer: int, inputs: Tensor, plan: StatePlan, sizes: dict[str, Any]) -> None:
    """Write the inputs of all blocks of a step."""
    rows = pow2(storage.num_inputs)
    columns = min(max(_INPUT_TILE // rows, 16), pow2(sizes["WIDTH"]))
    keep_inputs[(len(plan.table), triton.cdiv(sizes["WIDTH"], columns))](
        *(storage.data, inputs, plan.table, plan.snapshots, layer),
        RECURRENT=storage.num_recurrent,
        INPUTS=storage.num_inputs,
        ROWS=rows,
        COLUMNS=columns,
        **sizes,
    )
