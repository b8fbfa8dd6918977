"""Matrix products with low-bit weights: see `quire.kernels.reference.codes`.

A kernel rounds x to 8 bits, with a scale for each group of columns of a row. Products of codes are summed in int32,
which is exact. The sum of a group of x is multiplied by its scale and by that of the weight's group, and groups are
added in order in float32 by fused operations.
So the bits of a row depend neither on the other rows nor on the tile, and deterministic products are the same.

Products with float8 weights do not round x: float8 numbers become x's type in registers, and sums are float32. Their
order depends on the tile, so deterministic products have the same tile for any number of rows.

`code_weights` has the layout of the weights.
"""
# ruff: noqa: ANN201 -- Triton reads annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.runtime import driver

from quire.kernels.contract import PackedWeight
from quire.kernels.reference.codes import require_codes
from quire.kernels.triton.code_weights import Layout, layout_of
from quire.kernels.triton.float8 import widened_e4m3
from quire.kernels.triton.launch import CONSECUTIVE_TILES, INTERPRETED, pow2
from quire.kernels.triton.rounding import rounded
from quire.kernels.triton.rowwise import BLOCK, load_floats

_TOGETHER = 4  # numbers that an instruction of `_numbers` takes
_STAGE_BYTES = 2**15  # bytes of a weight that a program loads ahead: an estimate, not measured
_SMALL_TILE_BYTES = 96 * 1024  # at most, of tiles for GPUs of compute capability 8.6 and 8.9, which share 99 KiB
_LARGE_TILE_BYTES = 160 * 1024  # shared memory that the largest tile takes
_MOST_STAGES = 8  # of products with few rows
_STRICT_ROWS = 64  # deterministic products with float8 weights have the tile for so many rows
_SMALLEST = tl.constexpr(2.0**-96)  # as in the reference: rows with a smaller largest magnitude count as zeros


# ---- rounding of x ----


class PreparedRows(NamedTuple):
    """Rows of x rounded to 8 bits for a weight. For a float8 weight, x itself, padded with zeros."""

    numbers: Tensor  # int8, or x's type (num_rows, Layout.columns)
    scales: Tensor | None  # float32 (num_rows, Layout.num_x_groups); None if x is not rounded
    sums: Tensor | None  # like scales: sums of x as it is rounded, for weights with offsets


@triton.jit
def _quantize(
    x_ptr,  # (num_rows, K)
    codes_ptr,  # codes, scales and sums: see `PreparedRows`
    scales_ptr,
    sums_ptr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,  # elements from one row of x to the next
    GROUPS: tl.constexpr,  # of x
    SIZE: tl.constexpr,  # columns of a group
    HEIGHT: tl.constexpr,  # groups at once
    WIDTH: tl.constexpr,  # SIZE or more, a power of two
):
    """Round one row."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * STRIDE
    codes_ptr += row * (GROUPS * SIZE)
    limit = tl.full((HEIGHT,), 127.0, tl.float32)
    places = tl.arange(0, WIDTH)
    for first_group in range(0, GROUPS, HEIGHT):
        groups = first_group + tl.arange(0, HEIGHT)
        columns = groups[:, None] * SIZE + places[None, :]
        inside = (groups < GROUPS)[:, None] & (places < SIZE)[None, :]
        x = load_floats(x_ptr + columns, inside & (columns < K))
        most = tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf")), 1)
        finite = most < float("inf")
        used = finite & (most >= _SMALLEST)
        factor = tl.where(used, tl.div_rn(limit, tl.where(used, most, 1.0)), 0.0)
        scale = tl.where(used, tl.div_rn(most, limit), tl.where(finite, 0.0, float("nan")))
        tl.store(scales_ptr + row * GROUPS + groups, scale, mask=groups < GROUPS)
        x = tl.where(used[:, None], x, 0.0)
        # float32 from 2^23 on has no fraction bits, so the addition rounds to an integer, ties to even; the
        # product is an operation of its own, because it would otherwise be fused with the addition
        codes = ((tl.fma(x, factor[:, None], 0.0) + 12582912.0) - 12582912.0).to(tl.int8)
        tl.store(codes_ptr + columns, codes, mask=inside)
        if sums_ptr is not None:
            sums = tl.sum(codes.to(tl.int32), 1).to(tl.float32)
            tl.store(sums_ptr + row * GROUPS + groups, sums * scale, mask=groups < GROUPS)


def prepare_rows(x: Tensor, weight: PackedWeight) -> PreparedRows:
    """x (num_rows, columns), with contiguous rows, rounded to 8 bits for products with `weight`; see `PreparedRows`."""
    scheme, _ = require_codes(weight)
    layout, (num_rows, columns) = layout_of(scheme, weight.columns), x.shape
    if layout.floats:
        padded = x.contiguous() if columns == layout.columns else pad(x, (0, layout.columns - columns))
        return PreparedRows(padded, None, None)
    codes = torch.empty((num_rows, layout.columns), dtype=torch.int8, device=x.device)
    scales = torch.empty((num_rows, layout.num_x_groups), dtype=torch.float32, device=x.device)
    sums = torch.empty_like(scales) if scheme.has_offsets else None
    size = layout.columns // layout.num_x_groups
    width = pow2(size)
    _quantize[(num_rows,)](
        x,
        codes,
        scales,
        sums,
        K=columns,
        STRIDE=x.stride(0),
        GROUPS=layout.num_x_groups,
        SIZE=size,
        HEIGHT=min(BLOCK // width, pow2(layout.num_x_groups)),
        WIDTH=width,
    )
    return PreparedRows(codes, scales, sums)


# ---- products ----


@triton.jit
def _numbers(packed, HALF: tl.constexpr, HALVES: tl.constexpr, LOOKUP: tl.constexpr, INTERPRET: tl.constexpr):
    """The numbers of a run, as int8. Integers of 4 bits are times 16."""
    if HALVES == 1:
        return packed
    if LOOKUP is not None:
        if INTERPRET:
            codes = (packed >> (4 * HALF)) & 15
            numbers = codes
            for code in tl.static_range(16):
                numbers = tl.where(codes == code, LOOKUP[code], numbers).to(tl.int8)
            return numbers
        low, high = tl.inline_asm_elementwise(LOOKUP, "=r,=r,r", [packed], (tl.int8, tl.int8), is_pure=True, pack=4)
        return low if HALF == 0 else high
    if INTERPRET:
        return packed << 4 if HALF == 0 else packed & -16
    # four at once
    if HALF == 0:
        packed = tl.inline_asm_elementwise("shl.b32 $0, $1, 4;", "=r,r", [packed], tl.int8, is_pure=True, pack=4)
    return tl.inline_asm_elementwise("and.b32 $0, $1, 0xF0F0F0F0;", "=r,r", [packed], tl.int8, is_pure=True, pack=4)


@triton.jit
def _load_scales(scales_ptr, group, first, N: tl.constexpr, COLUMNS: tl.constexpr):
    """Scales or offsets of a group and of COLUMNS rows of the weight, in float32.

    Two of 16 bits are loaded as one word: asynchronous copies have 32 bits at least.
    """
    SPAN: tl.constexpr = N + N % 2
    if scales_ptr.dtype.element_ty == tl.float32:
        columns = first + tl.arange(0, COLUMNS)
        scales = tl.load(scales_ptr + group * SPAN + columns, mask=columns < SPAN, other=0.0)
    else:
        pairs = first // 2 + tl.arange(0, COLUMNS // 2)
        words_ptr = scales_ptr.to(tl.pointer_type(tl.int32))
        words = tl.load(words_ptr + group * (SPAN // 2) + pairs, mask=pairs < SPAN // 2, other=0)
        if scales_ptr.dtype.element_ty == tl.bfloat16:
            even, odd = (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
        else:
            even = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            odd = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        scales = tl.interleave(even, odd)
    return scales


@triton.jit
def _add_group(
    total,  # float32 (COLUMNS, ROWS)
    sums,  # float32, like total
    moved,  # float32 (ROWS,): sums of x
    scales_ptr,
    offsets_ptr,
    group,
    first,
    N: tl.constexpr,
    UNIT: tl.constexpr,
):
    """The total plus the sums of a group of the weight times its scales, and its offsets times sums of x."""
    scales = _load_scales(scales_ptr, group, first, N, total.shape[0]) * UNIT
    total = tl.fma(sums, scales[:, None], total)
    if offsets_ptr is not None:
        offsets = _load_scales(offsets_ptr, group, first, N, total.shape[0])
        total = tl.fma(offsets[:, None], moved[None, :], total)
    return total


@triton.jit
def code_product(
    codes_ptr,  # numbers, scales and sums of x: see `PreparedRows`
    x_scales_ptr,
    x_sums_ptr,
    sources,  # (ROWS,): indices of rows of x
    present,  # (ROWS,): whether the row exists; otherwise its results are undefined
    data_ptr,  # data, scales and offsets of the weight
    scales_ptr,
    offsets_ptr,
    first,  # index of the first of COLUMNS rows of the weight, even
    N: tl.constexpr,  # number of rows of the weight
    RUN: tl.constexpr,  # see `Layout`
    HALVES: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPED: tl.constexpr,
    LOOKUP: tl.constexpr,
    FLOATS: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    TERMS: tl.constexpr,  # columns of a part or more, a power of two
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Rows of x times rows of a low-bit weight: float32 (ROWS, COLUMNS).

    The weight is the left operand, so that it can stay in registers after it is unpacked.
    """
    X_GROUPS: tl.constexpr = 1 if WHOLE else STEPS * TILES * HALVES * PARTS
    WIDTH: tl.constexpr = RUN // PARTS
    UNIT: tl.constexpr = 1.0 / 16 if HALVES == 2 and LOOKUP is None else 1.0  # see `_numbers`
    terms = tl.arange(0, TERMS)
    columns = first + tl.arange(0, COLUMNS)
    sources = sources.to(tl.int64)
    codes_ptrs = codes_ptr + (sources * (STEPS * TILES * HALVES * RUN))[None, :] + terms[:, None]
    data_ptrs = data_ptr + (columns * RUN)[:, None] + terms[None, :]
    codes_inside = present[None, :] & (terms < WIDTH)[:, None]
    data_inside = (columns < N)[:, None] & (terms < WIDTH)[None, :]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        group_sums = tl.zeros((COLUMNS, ROWS), tl.float32)
        moved = tl.zeros((ROWS,), tl.float32)
        for tile in range(TILES):
            sums = tl.zeros((COLUMNS, ROWS), tl.int32)
            for part in tl.static_range(PARTS):
                packed = tl.load(data_ptrs + part * WIDTH, mask=data_inside, other=0)
                for half in tl.static_range(HALVES):
                    x = tl.load(codes_ptrs + (half * RUN + part * WIDTH), mask=codes_inside, other=0)
                    if FLOATS:
                        if INTERPRET:
                            x = x.to(tl.float32)
                        numbers = widened_e4m3(packed, x.dtype, INTERPRET)
                        group_sums = tl.dot(numbers, x, group_sums, input_precision="ieee")
                    else:
                        sums = tl.dot(_numbers(packed, half, HALVES, LOOKUP, INTERPRET), x, sums, out_dtype=tl.int32)
                        if not WHOLE or half == HALVES - 1:
                            x_group = 0 if WHOLE else ((step * TILES + tile) * HALVES + half) * PARTS + part
                            x_places = sources * X_GROUPS + x_group
                            x_scales = load_floats(x_scales_ptr + x_places, present)
                            x_sums = tl.zeros((ROWS,), tl.float32)
                            if x_sums_ptr is not None:
                                x_sums = load_floats(x_sums_ptr + x_places, present)
                            if GROUPED:
                                group = step * HALVES + half
                                scaled = sums.to(tl.float32) * x_scales[None, :]
                                total = _add_group(
                                    total, scaled, x_sums, scales_ptr, offsets_ptr, group, first, N, UNIT
                                )
                            else:
                                group_sums = tl.fma(sums.to(tl.float32), x_scales[None, :], group_sums)
                                moved += x_sums
                            sums = tl.zeros((COLUMNS, ROWS), tl.int32)
            codes_ptrs += HALVES * RUN
            data_ptrs += N * RUN
        if not GROUPED or FLOATS:
            total = _add_group(total, group_sums, moved, scales_ptr, offsets_ptr, step, first, N, UNIT)
    return tl.trans(total)


@triton.jit(do_not_specialize=["num_rows"])
def _code_linear(
    codes_ptr,  # numbers, scales and sums of x: see `PreparedRows`
    x_scales_ptr,
    x_sums_ptr,
    data_ptr,  # data, scales and offsets of the weight
    scales_ptr,
    offsets_ptr,
    bias_ptr,  # (N,), or None
    addend_ptr,  # float32 (num_rows, N), or None
    out_ptr,  # (num_rows, N)
    num_rows,
    N: tl.constexpr,
    RUN: tl.constexpr,  # see `code_product`
    HALVES: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPED: tl.constexpr,
    LOOKUP: tl.constexpr,
    FLOATS: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    TERMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One tile of a product."""
    ACROSS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    down, across = tl.swizzle2d(program // ACROSS, program % ACROSS, tl.cdiv(num_rows, ROWS), ACROSS, TOGETHER)
    rows = down * ROWS + tl.arange(0, ROWS)
    columns = across * COLUMNS + tl.arange(0, COLUMNS)
    total = code_product(
        codes_ptr, x_scales_ptr, x_sums_ptr, rows, rows < num_rows, data_ptr, scales_ptr, offsets_ptr, across * COLUMNS,
        N, RUN, HALVES, TILES, STEPS, GROUPED, LOOKUP, FLOATS, PARTS, WHOLE, TERMS, ROWS, COLUMNS, STAGES, INTERPRET,
    )  # fmt: skip
    inside = (rows < num_rows)[:, None] & (columns < N)[None, :]
    places = rows.to(tl.int64)[:, None] * N + columns[None, :]
    if addend_ptr is not None:
        total += load_floats(addend_ptr + places, inside)
    if bias_ptr is not None:
        total += load_floats(bias_ptr + columns, columns < N)[None, :]
    tl.store(out_ptr + places, rounded(total, out_ptr.dtype.element_ty, INTERPRET), mask=inside)


class Tile(NamedTuple):
    """Tile of a product: rows of x and of the weight that one program multiplies, and its launch options."""

    rows: int
    columns: int
    num_stages: int
    num_warps: int


def tile_of(num_rows: int, layout: Layout, item_size: int, shared_bytes: int) -> Tile:
    """A tile for products of so many rows. Sums of integers do not depend on it.

    item_size: bytes of a number of x. shared_bytes: memory that a program can share on the device.
    """
    if num_rows <= 16:
        most = _MOST_STAGES if item_size <= 2 else _MOST_STAGES // 2
        return Tile(8 if num_rows <= 8 else 16, 32, max(3, min(_STAGE_BYTES // (32 * layout.run), most)), 2)
    if num_rows <= 64 or (shared_bytes < _LARGE_TILE_BYTES and not layout.floats):
        return Tile(64, *fitting_tile(64, 64, 4, layout, item_size), 4)
    return Tile(64, *fitting_tile(64, 128, 3, layout, item_size), 4) if layout.floats else Tile(128, 128, 3, 8)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _LARGE_TILE_BYTES
    active = driver.active
    return int(active.utils.get_device_properties(active.get_current_device())["max_shared_mem"])


def fitting_tile(rows: int, columns: int, stages: int, layout: Layout, item_size: int) -> tuple[int, int]:
    """Columns and stages, at most these, with which tiles of x and of the weight fit into shared memory."""
    columns = min(columns, 64) if item_size == 4 else columns
    return columns, max(2, min(stages, _SMALL_TILE_BYTES // ((rows * item_size + columns) * layout.run)))


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, addend: Tensor | None = None, *, deterministic: bool = False
) -> Tensor:
    """x (num_rows, in), with contiguous rows, times a low-bit weight (out, in), plus addend and bias, rounded once.

    deterministic: float8 weights are multiplied with one tile for any number of rows. Other products are the same.
    Raises ValueError if x or the bias do not match the weight.
    """
    check(x, weight)
    if bias is not None and bias.shape != (weight.rows,):
        raise ValueError(f"a bias {tuple(bias.shape)} does not match a weight of {weight.rows} rows")
    num_rows, layout = len(x), layout_of(require_codes(weight)[0], weight.columns)
    prepared = prepare_rows(x, weight)
    tile_rows = _STRICT_ROWS if deterministic and layout.floats else num_rows
    tile = tile_of(tile_rows, layout, prepared.numbers.itemsize, _shared_bytes(x.device))
    out = torch.empty((num_rows, weight.rows), dtype=x.dtype, device=x.device)
    _code_linear[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(weight.rows, tile.columns),)](
        *prepared,
        weight.data,
        weight.scales,
        weight.offsets,
        None if bias is None else bias.contiguous(),
        addend,
        out,
        num_rows,
        N=weight.rows,
        **layout.constants,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STAGES=tile.num_stages,
        TOGETHER=CONSECUTIVE_TILES,
        INTERPRET=INTERPRETED,
        num_stages=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return out


def check(x: Tensor, weight: PackedWeight) -> None:
    """Raise ValueError unless x (num_rows, columns) has the type and the columns of `weight`."""
    if x.dim() != 2 or x.shape[1] != weight.columns or x.dtype != weight.dtype:
        raise ValueError(
            f"x {tuple(x.shape)} of {x.dtype} does not match a weight {(weight.rows, weight.columns)} of {weight.dtype}"
        )


# ---- rows of a weight ----


@triton.jit(do_not_specialize=["num_rows"])
def _code_embed(
    ids_ptr,
    data_ptr,  # data, scales and offsets of the weight
    scales_ptr,
    offsets_ptr,
    out_ptr,
    num_rows,
    scale,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a group
    RUN: tl.constexpr,  # see `Layout`
    HALVES: tl.constexpr,
    LOOKUP: tl.constexpr,
    FLOATS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One of PIECES pieces of a token's row."""
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    columns = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token)
    inside = (columns < SIZE) & (row >= 0) & (row < num_rows)
    runs = columns // RUN
    packed = tl.load(data_ptr + ((runs // HALVES * num_rows + row) * RUN + columns % RUN), mask=inside, other=0)
    if FLOATS:
        numbers = widened_e4m3(packed, tl.float32, INTERPRET)
    else:
        numbers = _numbers(packed, 0, HALVES, LOOKUP, INTERPRET).to(tl.float32)
    if HALVES == 2:
        high = _numbers(packed, 1, HALVES, LOOKUP, INTERPRET).to(tl.float32)
        numbers = tl.where(runs % 2 == 0, numbers, high)
        if LOOKUP is None:
            numbers /= 16
    places = columns // GROUP * (num_rows + num_rows % 2) + row
    x = numbers * load_floats(scales_ptr + places, inside)
    if offsets_ptr is not None:
        x += load_floats(offsets_ptr + places, inside)
    tl.store(
        out_ptr + (token * SIZE + columns), rounded(x * scale, out_ptr.dtype.element_ty, INTERPRET), mask=columns < SIZE
    )


def embed(ids: Tensor, weight: PackedWeight, scale: float) -> Tensor:
    """Rows of a low-bit weight (num_rows, size) for ids int64, times `scale`. An id without a row gives zeros."""
    layout = layout_of(require_codes(weight)[0], weight.columns)
    out = torch.empty((len(ids), weight.columns), dtype=weight.dtype, device=weight.data.device)
    block = min(BLOCK, max(_TOGETHER, pow2(weight.columns)))
    pieces = triton.cdiv(weight.columns, block)
    _code_embed[(len(ids) * pieces,)](
        ids.contiguous(),
        weight.data,
        weight.scales,
        weight.offsets,
        out,
        weight.rows,
        float(scale),
        SIZE=weight.columns,
        GROUP=layout.columns // layout.num_groups,
        RUN=layout.run,
        HALVES=layout.halves,
        LOOKUP=layout.lookup,
        FLOATS=layout.floats,
        PIECES=pieces,
        BLOCK=block,
        INTERPRET=INTERPRETED,
    )
    return out
