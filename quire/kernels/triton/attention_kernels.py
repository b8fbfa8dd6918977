"""Triton kernels of paged attention: `attend`, and `merge` for the partial results of split contexts.

Rows of a tile are queries of one chunk, each with all heads that share a KV head: row r is query r // SHARED, head
r % SHARED. A program processes the keys of its split in tiles of KEYS, which begin at multiples of KEYS. Per row it
keeps the largest score, the sum of exponentials and the weighted sum of values (Milakov and Gimelshein, Online
normalizer calculation for softmax, 2018), to base 2.

A tile of keys that are all masked for a row does not change that row's state, bit for bit: the largest score stays, the
factor of the others is exp2(0), and zeros are added. So a row does not depend on the other rows of its tile.

Tiles of keys to which all rows attend come first, without masks in a pipelined loop. The few others follow.
"""
# ruff: noqa: ANN201 -- Triton reads annotations

import triton
import triton.language as tl

from quire.kernels.triton.float8 import widened_e4m3

SPLITS_PER_STEP = 16  # splits that `merge` reads at once


@triton.jit
def _span(tiles_ptr, begins_ptr, starts_ptr, stops_ptr, tile):
    """A tile's chunk, the index of its first token in the step, the position of that token, and the chunk's stop."""
    chunk = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    token = tl.load(begins_ptr + chunk) + first
    start = tl.load(starts_ptr + chunk) + first
    return chunk, token, start, tl.load(stops_ptr + chunk)


@triton.jit
def _tanh(x):
    """tanh(x), computed from the exponential of a negative number, which cannot overflow."""
    shrunk = tl.exp2(tl.abs(x) * -2.8853900817779268)  # 2 * log2(e)
    size = (1 - shrunk) / (1 + shrunk)
    return tl.where(x < 0, -size, size)


@triton.jit
def _split_range(start, stop, KEYS: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr):
    """The first key that queries at [start, stop) attend to, and the keys [low, high) of this program's split."""
    begin = 0
    if WINDOW:
        begin = tl.maximum(start - WINDOW + 1, 0)
    first_tile = begin // KEYS
    low = first_tile * KEYS
    high = stop
    if SPLIT:
        each = tl.maximum(tl.cdiv(tl.cdiv(stop, KEYS) - first_tile, tl.num_programs(2)), LEAST)
        low += tl.program_id(2) * each * KEYS
        high = tl.minimum(low + each * KEYS, stop)
    return begin, low, high


@triton.jit
def _key_offsets(
    table_ptr, first_key, begin, high, kv_head, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of keys: positions, which of them to read, and the offsets of keys and of scales.

    Keys that no query of the tile attends to are not read. They may have no block, or NaN in it, and 0 * NaN is NaN.
    Without MASKED, every query attends to each of them. Then a chunk without blocks, whose output is not used, reads
    block 0.
    """
    key = first_key + tl.arange(0, KEYS)
    place = key.to(tl.uint32)  # divisions of unsigned numbers are shifts
    if MASKED:
        block = tl.load(table_ptr + place // BLOCK_SIZE, mask=(key >= begin) & (key < high), other=-1)
    else:
        block = tl.maximum(tl.load(table_ptr + place // BLOCK_SIZE), 0)
    block_at = (block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_STRIDE
    inside = place % BLOCK_SIZE
    scale_at = (block_at + BLOCK_SIZE * HEAD_DIM) // 4 + inside
    return key, block >= 0, block_at + inside * HEAD_DIM, scale_at


@triton.jit
def _widened(x, TYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """Stored numbers as TYPE. NaN in fp8 becomes 480: a row of keys or values with NaN has NaN as its scale."""
    if x.dtype == tl.float8e4nv and tl.bfloat16 == TYPE and not INTERPRET:
        return widened_e4m3(x.to(tl.uint8, bitcast=True), TYPE, INTERPRET)
    else:
        return x.to(TYPE)


@triton.jit
def _weights(scores, largest, factor):
    """Exponentials of scores * factor relative to the new maximum, the factor of earlier sums, and the maximum.

    factor: float32 (ROWS,), above 0.
    """
    new = tl.maximum(largest, tl.max(scores, 1) * factor)
    base = tl.where(new == float("-inf"), 0.0, new)  # while all keys of a row are masked: -inf - -inf is NaN
    return tl.exp2(scores * factor[:, None] - base[:, None]), tl.exp2(largest - base), new


@triton.jit
def _attend_tile(
    q, largest, total, output, first_key, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr,
    begin, high, kv_head, position, factor, cap,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr, WEIGHT: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One tile of keys. Returns the new state of the rows. factor: see `_weights`."""
    key, held, at, scale_at = _key_offsets(
        table_ptr, first_key, begin, high, kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, KEYS, MASKED
    )
    dim = tl.arange(0, DIM)
    at = at[:, None] + dim[None, :]
    if MASKED or DIM != HEAD_DIM:
        mask = held[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(keys_ptr + at, mask=mask, other=0.0)
        v = tl.load(values_ptr + at, mask=mask, other=0.0)
    else:
        k = tl.load(keys_ptr + at)
        v = tl.load(values_ptr + at)
    if QUANTIZED:
        if MASKED:
            k_scales = tl.load(key_scales_ptr + scale_at, mask=held, other=0.0)
            v_scales = tl.load(value_scales_ptr + scale_at, mask=held, other=0.0)
        else:
            k_scales = tl.load(key_scales_ptr + scale_at)
            v_scales = tl.load(value_scales_ptr + scale_at)
    k = _widened(k, q.dtype, INTERPRET)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if QUANTIZED:
        scores *= k_scales[None, :]
    if SOFTCAP:
        scores = cap * _tanh(scores * factor[:, None])
        factor = tl.full(factor.shape, 1.0, tl.float32)
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    weights, kept, largest = _weights(scores, largest, factor)
    total = total * kept + tl.sum(weights, 1)
    if QUANTIZED:
        weights *= v_scales[None, :]
    output = tl.dot(weights.to(WEIGHT), _widened(v, WEIGHT, INTERPRET), output * kept[:, None], input_precision="ieee")
    return largest, total, output


@triton.jit(do_not_specialize=["table_width", "used"])
def attend(
    q_ptr,  # (num_tokens, heads, HEAD_DIM), stride of tokens q_stride
    keys_ptr,  # (num_blocks, KV_HEADS, BLOCK_STRIDE) of the layer, in the stored type
    values_ptr,
    key_scales_ptr,  # the same memory as float32, or anything unless QUANTIZED
    value_scales_ptr,
    tiles_ptr,
    begins_ptr,
    starts_ptr,
    stops_ptr,
    rows_ptr,
    tables_ptr,  # (num_tables, table_width)
    out_ptr,  # (num_tokens, heads, HEAD_DIM)
    partials_ptr,  # float32 (num_tiles, KV_HEADS, used, splits, HEAD_DIM), if SPLIT
    states_ptr,  # float32 (num_tiles, KV_HEADS, used, splits, 2): largest score, sum; the sum of an empty split is 0
    q_stride,
    table_width,
    used,  # rows of each tile that may exist
    factor,  # of q * k: gives scores to base 2, with SOFTCAP the argument of tanh
    cap,  # of tanh, gives scores to base 2, if SOFTCAP
    SHARED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,  # stored numbers of one head in a block
    WINDOW: tl.constexpr,  # 0 is none
    SOFTCAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WEIGHT: tl.constexpr,  # the type in which weights and values are multiplied
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,  # fewest tiles of keys of a split
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,  # of a tile: at most ROWS // SHARED
    KEYS: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM, padded to a power of two
    INTERPRET: tl.constexpr,
):
    """Attention of one tile, KV head and split. Grid (num_tiles, KV_HEADS, splits)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a chunk have most keys, so they start first
    kv_head = tl.program_id(1)
    chunk, token, start, stop = _span(tiles_ptr, begins_ptr, starts_ptr, stops_ptr, tile)
    stop = tl.minimum(stop, start + QUERIES)
    begin, low, high = _split_range(start, stop, KEYS, WINDOW, SPLIT, LEAST)
    row = tl.arange(0, ROWS)
    query = row // SHARED
    position = start + query
    real = position < stop
    state = ((tile * KV_HEADS + kv_head) * used + row) * tl.num_programs(2) + tl.program_id(2)
    if SPLIT and low >= high:
        tl.store(states_ptr + 2 * state, float("-inf"), mask=real)
        tl.store(states_ptr + 2 * state + 1, 0.0, mask=real)
        return

    dim = tl.arange(0, DIM)
    inside = dim < HEAD_DIM
    head = kv_head * SHARED + row % SHARED
    q_at = (token + query).to(tl.int64) * q_stride + head * HEAD_DIM
    q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    if INTERPRET:
        q = q.to(tl.float32)
    factor = tl.full([ROWS], 1.0, tl.float32) * factor
    if keys_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:  # fp8 becomes float16 fast
        size = tl.max(tl.abs(q.to(tl.float32)), 1)
        size = tl.where(size == 0, 1.0, size)
        q = (q.to(tl.float32) / size[:, None]).to(tl.float16)
        factor *= size

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, DIM], tl.float32)
    table_ptr = tables_ptr + tl.load(rows_ptr + chunk).to(tl.int64) * table_width
    seen_by_all = low  # no key before it is masked for any row
    if not WINDOW:
        seen_by_all = tl.maximum(tl.minimum(start + 1, high) // KEYS * KEYS, low)
        for first_key in tl.range(low, seen_by_all, KEYS):
            largest, total, output = _attend_tile(
                q, largest, total, output, first_key, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
                table_ptr, begin, high, kv_head, position, factor, cap, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE,
                WINDOW, SOFTCAP, QUANTIZED, WEIGHT, KEYS, DIM, MASKED=False, INTERPRET=INTERPRET,
            )  # fmt: skip
    for first_key in tl.range(seen_by_all, high, KEYS, num_stages=1):
        largest, total, output = _attend_tile(
            q, largest, total, output, first_key, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
            table_ptr, begin, high, kv_head, position, factor, cap, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE,
            WINDOW, SOFTCAP, QUANTIZED, WEIGHT, KEYS, DIM, MASKED=True, INTERPRET=INTERPRET,
        )  # fmt: skip

    mask = real[:, None] & inside[None, :]
    if SPLIT:
        tl.store(partials_ptr + state[:, None] * HEAD_DIM + dim[None, :], output, mask=mask)
        tl.store(states_ptr + 2 * state, largest, mask=real)
        tl.store(states_ptr + 2 * state + 1, total, mask=real)
    else:
        output /= tl.where(total == 0, 1.0, total)[:, None]
        out_at = ((token + query).to(tl.int64) * (KV_HEADS * SHARED) + head) * HEAD_DIM
        tl.store(out_ptr + out_at[:, None] + dim[None, :], output, mask=mask)


@triton.jit(do_not_specialize=["splits"])
def merge(
    partials_ptr,  # see `attend`
    states_ptr,
    tiles_ptr,
    begins_ptr,
    starts_ptr,
    stops_ptr,
    out_ptr,
    splits,
    SHARED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Merge the partial results of one row. Grid (num_tiles, used, KV_HEADS)."""
    tile, row, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, token, start, stop = _span(tiles_ptr, begins_ptr, starts_ptr, stops_ptr, tile)
    query = row // SHARED
    if start + query >= stop:
        return
    dim = tl.arange(0, DIM)
    inside = dim < HEAD_DIM
    first = ((tile * KV_HEADS + kv_head) * tl.num_programs(1) + row) * splits

    largest = -float("inf")
    total = 0.0
    output = tl.zeros([DIM], tl.float32)
    for first_split in tl.range(0, splits, TOGETHER):
        split = first_split + tl.arange(0, TOGETHER)
        state = first + split
        totals = tl.load(states_ptr + 2 * state + 1, mask=split < splits, other=0.0)
        met = totals != 0  # true for NaN, which must reach the output
        each = tl.load(states_ptr + 2 * state, mask=met, other=float("-inf"))
        parts_at = state[:, None] * HEAD_DIM + dim[None, :]
        parts = tl.load(partials_ptr + parts_at, mask=met[:, None] & inside[None, :], other=0.0)
        new = tl.maximum(largest, tl.max(each, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        kept = tl.exp2(largest - base)
        weights = tl.exp2(each - base)
        largest = new
        total = total * kept + tl.sum(weights * totals, 0)
        output = output * kept + tl.sum(weights[:, None] * parts, 0)
    out_at = ((token + query).to(tl.int64) * (KV_HEADS * SHARED) + kv_head * SHARED + row % SHARED) * HEAD_DIM
    tl.store(out_ptr + out_at + dim, output / tl.where(total == 0, 1.0, total), mask=inside)
