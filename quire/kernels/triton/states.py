"""Recurrent states: see `reference.states`. A program has some value columns of one head of a chunk.

It goes through the inputs that its block has beside the state, then through the chunk's tokens. The block's inputs are
replaced by a second kernel, because programs of several value heads read those of their common key head.
"""
# ruff: noqa: ANN201 -- values in kernels have no types

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
from quire.kernels.triton.rowwise import activated, load_floats, sigmoid
from quire.kernels.triton.state_plan import StatePlan
from quire.kernels.triton.upload import to_device

MAX_KEY_DIM = 256
NORM_EPS = tl.constexpr(1e-6)
_FIELDS = tl.constexpr(8)  # of a chunk in the table of a plan
_STATE_TILE = 2048  # numbers of the state in the registers of a warp
_INPUT_TILE = 4096  # numbers of a program that copies inputs
_CHANNELS = 256  # of a program that only convolves


# ---- reading ----


@triton.jit
def load_chunk(table_ptr, chunk):
    """Start, stop, settled, settles, block, first token and range of snapshots of a chunk."""
    table_ptr += chunk * _FIELDS
    return (
        tl.load(table_ptr).to(tl.int64),
        tl.load(table_ptr + 1).to(tl.int64),
        tl.load(table_ptr + 2).to(tl.int64),
        tl.load(table_ptr + 3).to(tl.int64),
        tl.load(table_ptr + 4).to(tl.int64),
        tl.load(table_ptr + 5).to(tl.int64),
        tl.load(table_ptr + 6),
        tl.load(table_ptr + 7),
    )


@triton.jit
def raw_inputs(kept_ptr, new_ptr, position, start, settled, columns, inside, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """The inputs at `position`, float32: of the block below `start`, else of the step; zeros below position 0.

    kept_ptr: the block's inputs at position `settled`, whose rows have WIDTH numbers. new_ptr: inputs of the token at
    `start`, STRIDE numbers before the next one. `position`, `columns` and `inside` are broadcast.
    """
    old = (position < start) & (position >= 0)
    kept = load_floats(kept_ptr + ((position - settled) * WIDTH + columns), inside & old)
    new = load_floats(new_ptr + ((position - start) * STRIDE + columns), inside & (position >= start))
    return tl.where(position < start, kept, new)


@triton.jit
def convolved(
    kept_ptr,
    new_ptr,
    position,
    start,
    settled,
    channels,
    inside,
    weight_ptr,  # (num_channels, CONV)
    bias_ptr,  # (num_channels,), or None
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    CONV: tl.constexpr,
):
    """The convolution of `channels` at `position`: see `raw_inputs`."""
    total = 0.0
    for tap in tl.static_range(CONV):
        x = raw_inputs(kept_ptr, new_ptr, position + (tap + 1 - CONV), start, settled, channels, inside, WIDTH, STRIDE)
        total += x * load_floats(weight_ptr + (channels * CONV + tap), inside)
    if bias_ptr is not None:
        total += load_floats(bias_ptr + channels, inside)
    return total


@triton.jit
def limited(x, least, most):
    """x within limits. A NaN stays one."""
    x = tl.where(x < least, least, x)
    return tl.where(x > most, most, x)


# ---- token by token ----


@triton.jit(do_not_specialize=["layer"])
def _recur_tokens(
    data_ptr,  # (num_blocks, num_layers, NUMBERS)
    inputs_ptr,
    out_ptr,  # (num_tokens, VALUE_HEADS * VALUE_DIM)
    table_ptr,
    snapshots_ptr,
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
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM or more, a power of two
    COLUMNS: tl.constexpr,  # value columns of a program
    INTERPRET: tl.constexpr,
):
    """All tokens of a chunk. Grid (num_chunks, VALUE_HEADS * tiles of COLUMNS)."""
    TILES: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    start, stop, settled, settles, block, first, snapshot, last = load_chunk(table_ptr, tl.program_id(0))
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
    new_ptr = inputs_ptr + first * STRIDE
    decay, time_bias = tl.load(decay_ptr + head), tl.load(time_bias_ptr + head)

    state = load_floats(live_ptr + places, inside & (start > 0))
    if settles == settled:
        tl.store(live_ptr + places, rounded(state, data_ptr.dtype.element_ty, INTERPRET), mask=inside & (block >= 0))
    for position in range(settled, stop):
        q = convolved(
            kept_ptr, new_ptr, position, start, settled, q_channels, are_keys,
            conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV,
        )  # fmt: skip
        k = convolved(
            kept_ptr, new_ptr, position, start, settled, k_channels, are_keys,
            conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV,
        )  # fmt: skip
        v = convolved(
            kept_ptr, new_ptr, position, start, settled, v_channels, are_values,
            conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV,
        )  # fmt: skip
        q, k, v = activated(q, "silu"), activated(k, "silu"), activated(v, "silu")
        gate = raw_inputs(
            kept_ptr, new_ptr, position, start, settled, CHANNELS + head, inside=True, WIDTH=WIDTH, STRIDE=STRIDE
        )
        if DELTA:
            q *= tl.rsqrt(tl.sum(q * q, 0) + NORM_EPS) * (KEY_DIM**-0.5)
            k *= tl.rsqrt(tl.sum(k * k, 0) + NORM_EPS)
            time = raw_inputs(
                kept_ptr,
                new_ptr,
                position,
                start,
                settled,
                CHANNELS + VALUE_HEADS + head,
                inside=True,
                WIDTH=WIDTH,
                STRIDE=STRIDE,
            )
            state *= tl.exp(decay * activated(time + time_bias, "softplus"))
            added = (v - tl.sum(state * k[:, None], 0)) * sigmoid(gate)
        else:
            time = limited(activated(gate + time_bias, "softplus"), least_time, most_time)
            state *= tl.exp(decay * time)
            added = v * time
        state += k[:, None] * added[None, :]
        y = tl.sum(state * q[:, None], 0)
        if skip_ptr is not None:
            y += tl.load(skip_ptr + head) * v
        token = first + position - start
        tl.store(
            out_ptr + (token * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + columns),
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


@triton.jit(do_not_specialize=["layer"])
def _convolve(
    data_ptr,  # (num_blocks, num_layers, NUMBERS)
    inputs_ptr,
    out_ptr,  # (num_tokens, WIDTH)
    table_ptr,
    token_chunks_ptr,
    conv_weight_ptr,
    conv_bias_ptr,
    layer,
    BLOCK_STRIDE: tl.constexpr,
    NUMBERS: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    CONV: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """The rule "convolution". Grid (num_tokens, tiles of COLUMNS)."""
    chunk = tl.load(token_chunks_ptr + tl.program_id(0))
    start, _, settled, _, block, first, _, _ = load_chunk(table_ptr, chunk)
    channels = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(0).to(tl.int64)
    kept_ptr = data_ptr + (block * BLOCK_STRIDE + layer.to(tl.int64) * NUMBERS + (CONV - 1) * WIDTH)
    x = convolved(
        kept_ptr, inputs_ptr + first * STRIDE, start + token - first, start, settled, channels, channels < WIDTH,
        conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV,
    )  # fmt: skip
    places = out_ptr + (token * WIDTH + channels)
    tl.store(places, rounded(x, out_ptr.dtype.element_ty, INTERPRET), mask=channels < WIDTH)


# ---- inputs beside the state ----


@triton.jit(do_not_specialize=["layer"])
def _keep_inputs(
    data_ptr,  # (num_blocks, num_layers, NUMBERS)
    inputs_ptr,
    table_ptr,
    snapshots_ptr,
    layer,
    BLOCK_STRIDE: tl.constexpr,
    NUMBERS: tl.constexpr,
    RECURRENT: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    CONV: tl.constexpr,
    INPUTS: tl.constexpr,  # tokens of a block
    ROWS: tl.constexpr,  # INPUTS or more, a power of two
    COLUMNS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Write the inputs of a chunk's snapshots and of its live block. Grid (num_chunks, tiles of COLUMNS)."""
    start, stop, settled, settles, block, first, snapshot, last = load_chunk(table_ptr, tl.program_id(0))
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < INPUTS) & (columns < WIDTH)
    places = RECURRENT + rows * WIDTH + columns
    layer_ptr = data_ptr + layer.to(tl.int64) * NUMBERS
    live_ptr = layer_ptr + block * BLOCK_STRIDE
    kept_ptr = live_ptr + (RECURRENT + (CONV - 1) * WIDTH)
    new_ptr = inputs_ptr + first * STRIDE
    for i in range(snapshot, last):
        position = tl.load(snapshots_ptr + 2 * i) - (CONV - 1) + rows
        known = inside & (position < stop)
        x = raw_inputs(kept_ptr, new_ptr, position, start, settled, columns, known, WIDTH, STRIDE)
        target = tl.load(snapshots_ptr + 2 * i + 1).to(tl.int64)
        x = rounded(x, data_ptr.dtype.element_ty, INTERPRET)
        tl.store(layer_ptr + target * BLOCK_STRIDE + places, x, mask=known)
    position = settles - (CONV - 1) + rows
    known = inside & (position < stop) & (block >= 0)
    x = raw_inputs(kept_ptr, new_ptr, position, start, settled, columns, known, WIDTH, STRIDE)
    tl.debug_barrier()  # other threads of the program may still read where this one writes
    tl.store(live_ptr + places, rounded(x, data_ptr.dtype.element_ty, INTERPRET), mask=known)


# ---- functions of the contract ----


def unsupported_state_reason(kind: StateKind | None) -> str | None:
    """Why the kernels do not compute a recurrence, or None if they do."""
    if kind is not None and kind.key_dim > MAX_KEY_DIM:
        return f"keys of {kind.key_dim} numbers in a recurrence are longer than {MAX_KEY_DIM}"
    return None


def copy_states(storage: StateStorage, pairs: Tensor) -> None:
    """See Kernels."""
    REFERENCE.copy_states(storage, to_device(pairs, storage.data.device))


def recur(storage: StateStorage, layer: int, inputs: Tensor, weights: RecurrenceWeights, plan: StatePlan) -> Tensor:
    """See Kernels."""
    kind, inputs = storage.group.kind, with_contiguous_rows(inputs)
    out = torch.empty((len(inputs), kind.num_values), dtype=inputs.dtype, device=inputs.device)
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
        _convolve[(len(inputs), triton.cdiv(kind.width, columns))](
            storage.data,
            inputs,
            out,
            plan.table,
            plan.token_chunks,
            weights.conv_weight.contiguous(),
            weights.conv_bias,
            layer,
            COLUMNS=columns,
            **sizes,
        )
    else:
        keys = pow2(kind.key_dim)
        columns = min(_STATE_TILE // keys, pow2(kind.value_dim))
        _recur_tokens[(len(plan.table), kind.num_value_heads * triton.cdiv(kind.value_dim, columns))](
            storage.data,
            inputs,
            out,
            plan.table,
            plan.snapshots,
            *_parameters(weights),
            layer,
            *weights.time_limits,
            KEYS=keys,
            COLUMNS=columns,
            num_warps=1,
            **_head_sizes(kind),
            **sizes,
        )
    _keep(storage, layer, inputs, plan, sizes)
    return out


def _parameters(weights: RecurrenceWeights) -> tuple[Tensor | None, ...]:
    """The tensors of a recurrence in the order of the kernels' arguments."""
    return weights.conv_weight.contiguous(), weights.conv_bias, weights.decay, weights.time_bias, weights.skip


def _head_sizes(kind: StateKind) -> dict[str, Any]:
    """The compile-time arguments that a recurrence adds to those of a convolution."""
    return {
        "DELTA": kind.rule == "delta",
        "KEY_HEADS": kind.num_key_heads,
        "VALUE_HEADS": kind.num_value_heads,
        "KEY_DIM": kind.key_dim,
        "VALUE_DIM": kind.value_dim,
    }


def _keep(storage: StateStorage, layer: int, inputs: Tensor, plan: StatePlan, sizes: dict[str, Any]) -> None:
    """Write the inputs of all blocks of a step."""
    kind = storage.group.kind
    rows = pow2(storage.num_inputs)
    columns = min(max(_INPUT_TILE // rows, 16), pow2(kind.width))
    _keep_inputs[(len(plan.table), triton.cdiv(kind.width, columns))](
        storage.data,
        inputs,
        plan.table,
        plan.snapshots,
        layer,
        RECURRENT=storage.num_recurrent,
        INPUTS=storage.num_inputs,
        ROWS=rows,
        COLUMNS=columns,
        **sizes,
    )
