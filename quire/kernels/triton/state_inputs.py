"""The inputs of tokens around a state: what kernels of recurrences read, and what they leave in blocks."""
# ruff: noqa: ANN201 -- values in kernels have no types

import triton
import triton.language as tl

from quire.kernels.triton.rounding import rounded
from quire.kernels.triton.rowwise import activated, load_floats, sigmoid

NORM_EPS = tl.constexpr(1e-6)  # added to the sum of squares of a key or query
_FIELDS = tl.constexpr(8)  # of a chunk in the table of a plan


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
def raw_inputs(source, position, columns, inside, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """The inputs at `position`, float32: of the block below `start`, else of the step; zeros below position 0.

    source: pointer to the block's inputs at position `settled`, whose rows have WIDTH numbers; pointer to the step's
    inputs at `start`, whose rows are STRIDE numbers apart; settled, start. The other arguments are broadcast.
    """
    kept_ptr, new_ptr, settled, start = source
    old = (position < start) & (position >= 0)
    kept = load_floats(kept_ptr + ((position - settled) * WIDTH + columns), inside & old)
    new = load_floats(new_ptr + ((position - start) * STRIDE + columns), inside & (position >= start))
    return tl.where(position < start, kept, new)


@triton.jit
def convolved(
    source,
    position,
    channels,
    inside,
    weight_ptr,  # (num_channels, CONV)
    bias_ptr,  # (num_channels,), or None
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    CONV: tl.constexpr,
):
    """The convolution of `channels` at `position`: see `raw_inputs`. 0 where `inside` is false."""
    total = 0.0
    for tap in tl.static_range(CONV):
        x = raw_inputs(source, position + (tap + 1 - CONV), channels, inside, WIDTH, STRIDE)
        total += x * load_floats(weight_ptr + (channels * CONV + tap), inside)
    if bias_ptr is not None:
        total += load_floats(bias_ptr + channels, inside)
    return total


@triton.jit
def gates(
    source,
    position,
    inside,
    head,
    decay_ptr,
    time_bias_ptr,
    least_time,
    most_time,
    DELTA: tl.constexpr,
    CHANNELS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Logarithm of the factor of a head's state, and the factor of what is added to it: beta, or the time step."""
    decay, bias = tl.load(decay_ptr + head), tl.load(time_bias_ptr + head)
    gate = raw_inputs(source, position, CHANNELS + head, inside, WIDTH, STRIDE)
    if DELTA:
        factor = sigmoid(gate)
        a = raw_inputs(source, position, CHANNELS + VALUE_HEADS + head, inside, WIDTH, STRIDE)
        time = activated(a + bias, "softplus")
    else:
        time = activated(gate + bias, "softplus")
        time = tl.where(time < least_time, least_time, time)  # a NaN stays one
        time = tl.where(time > most_time, most_time, time)
        factor = time
    return decay * time, factor


@triton.jit
def key_gates(
    source,
    position,
    head,
    keys,  # of all key heads
    inside,
    decay_ptr,
    time_bias_ptr,
    CHANNELS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Of "kda": logarithms of the factors of the rows of a head's state, and beta."""
    beta = sigmoid(raw_inputs(source, position, CHANNELS + head, head >= 0, WIDTH, STRIDE))
    a = raw_inputs(source, position, CHANNELS + VALUE_HEADS + keys, inside, WIDTH, STRIDE)
    times = activated(a + tl.load(time_bias_ptr + keys, mask=inside, other=0.0), "softplus")
    return tl.load(decay_ptr + head) * times, beta


@triton.jit(do_not_specialize=["layer"])
def convolve(
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
    start, _, settled, _, block, first, _, _ = load_chunk(table_ptr, tl.load(token_chunks_ptr + tl.program_id(0)))
    channels = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(0).to(tl.int64)
    kept_ptr = data_ptr + (block * BLOCK_STRIDE + layer.to(tl.int64) * NUMBERS + (CONV - 1) * WIDTH)
    source = (kept_ptr, inputs_ptr + first * STRIDE, settled, start)
    inside = channels < WIDTH
    x = convolved(source, start + token - first, channels, inside, conv_weight_ptr, conv_bias_ptr, WIDTH, STRIDE, CONV)
    places = out_ptr + (token * WIDTH + channels)
    tl.store(places, rounded(x, out_ptr.dtype.element_ty, INTERPRET), mask=inside)


@triton.jit(do_not_specialize=["layer"])
def keep_inputs(
    data_ptr,  # (num_blocks, num_layers, NUMBERS)
    inputs_ptr,
    table_ptr,
    snapshots_ptr,
    layer,
    BLOCK_STRIDE: tl.constexpr,
    NUMBERS: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    CONV: tl.constexpr,
    RECURRENT: tl.constexpr,
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
    source = (live_ptr + (RECURRENT + (CONV - 1) * WIDTH), inputs_ptr + first * STRIDE, settled, start)
    for i in range(snapshot, last):
        position = tl.load(snapshots_ptr + 2 * i) - (CONV - 1) + rows
        known = inside & (position < stop)
        x = rounded(raw_inputs(source, position, columns, known, WIDTH, STRIDE), data_ptr.dtype.element_ty, INTERPRET)
        target = tl.load(snapshots_ptr + 2 * i + 1).to(tl.int64)
        tl.store(layer_ptr + target * BLOCK_STRIDE + places, x, mask=known)
    position = settles - (CONV - 1) + rows
    known = inside & (position < stop) & (block >= 0)
    x = rounded(raw_inputs(source, position, columns, known, WIDTH, STRIDE), data_ptr.dtype.element_ty, INTERPRET)
    tl.debug_barrier()  # other threads of the program may still read where this one writes
    tl.store(live_ptr + places, x, mask=known)
