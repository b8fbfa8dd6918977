"""Low-bit weights in memory: their layout for the Triton kernels, and rows that are written into it.

Columns are cut into tiles of at most 128. `data` int8 (tiles, rows, run): in 8 bits, a byte is the code of one column.
In 4 bits, the low halves of the bytes are the first run of columns of the tile, and the high halves the second run, so
that unpacking moves nothing between threads. All columns of a run are in one group. Codes of integers are stored minus
the zero point, in two's complement, and those of other grids as they are. Scales and offsets are (groups, rows), with
an even number of rows, so that kernels can load two of 16 bits as one word. All padding is zeros.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.contract import GRIDS, PackedWeight, QuantizedRows, Scheme
from quire.kernels.reference.codes import quantize_rows, require_codes
from quire.kernels.triton.launch import INTERPRETED, pow2

MAX_COLUMNS = 65536  # of a low-bit weight: sums of so many products of codes fit into 32 bits
TILE_COLUMNS = 128  # the most columns of a tile
_LEAST_TERMS = 32  # of an 8-bit product of tiles
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WRITTEN_AT_ONCE = 2**22  # codes that `write_rows` converts at once


class Layout(NamedTuple):
    """Layout of a low-bit weight: see above. A step is one tile, or all tiles of a group."""

    run: int  # columns
    halves: int  # runs of a tile: 1, or 2 for 4 bits
    tiles: int  # of a step
    steps: int
    grouped: bool  # whether each run is a group; otherwise each step is
    lookup: str | tuple[int, ...] | None = None  # see `_lookup`
    floats: bool = False  # whether codes are float8 numbers, and x is not rounded
    parts: int = 1  # groups of x in a run
    whole: bool = False  # whether x has one group

    @property
    def constants(self) -> dict[str, Any]:
        """Arguments of `code_product`."""
        names = ("RUN", "HALVES", "TILES", "STEPS", "GROUPED", "LOOKUP", "FLOATS", "PARTS", "WHOLE")
        return dict(zip(names, self, strict=True)) | {"TERMS": max(_LEAST_TERMS, pow2(self.run // self.parts))}

    @property
    def columns(self) -> int:
        """Number of columns, padding included."""
        return self.steps * self.tiles * self.halves * self.run

    @property
    def num_groups(self) -> int:
        """Number of scales of a row, padding included."""
        return self.steps * self.halves if self.grouped else self.steps

    @property
    def num_x_groups(self) -> int:
        """Number of scales of a row of x, padding included."""
        return 1 if self.whole else self.steps * self.tiles * self.halves * self.parts


def unsupported_scheme_reason(scheme: Scheme) -> str | None:
    """Why weights of this scheme are not multiplied, or None if they are."""
    if scheme.grid == "e4m3" and scheme.has_offsets:
        return f"it has no offsets of float8 numbers, as in {scheme}"
    if scheme.has_factors:
        return f"it has no factors of scales, as in {scheme}"
    if scheme.bits not in (4, 8):
        return f"it multiplies codes of 4 and 8 bits, not {scheme}"
    size, longest = scheme.group_size, TILE_COLUMNS * scheme.bits // 8
    if size > longest and size % TILE_COLUMNS:
        most = f"{longest} columns of int{scheme.bits}"
        return f"its groups have at most {most}, or a multiple of {TILE_COLUMNS}, not {size}"
    if scheme.scale_dtype not in _SCALE_DTYPES:
        return f"it has no scales of {scheme.scale_dtype}"
    return None


def layout_of(scheme: Scheme, columns: int) -> Layout:
    """The layout of a weight with so many columns."""
    halves = 8 // scheme.bits
    longest = TILE_COLUMNS // halves
    size = scheme.group_size if scheme.group_size < columns else 0
    run = min(longest, size or pow2(triton.cdiv(columns, halves)))
    tiles = triton.cdiv(columns, run * halves)
    lookup = _lookup(GRIDS[scheme.grid]) if scheme.grid in GRIDS else None
    floats, whole = scheme.grid == "e4m3", columns <= scheme.x_group_size
    parts = 1 if whole or floats else run // scheme.x_group_size
    each = max(1, size // TILE_COLUMNS) if size else tiles
    return Layout(run, halves, each, triton.cdiv(tiles, each), bool(size) and run == size, lookup, floats, parts, whole)


def _lookup(grid: tuple[int, ...]) -> str | tuple[int, ...]:
    """PTX that looks up the 16 numbers of a grid, or the grid itself in the interpreter.

    It replaces four bytes by the numbers of their low halves, and by those of their high halves. `prmt` selects four of
    eight bytes by three bits of a code each: from the first half of the grid, from the second half, then between both
    results by the fourth bit.
    """
    if INTERPRETED:
        return grid
    words = [int.from_bytes(bytes(number & 255 for number in grid[i : i + 4]), "little") for i in range(0, 16, 4)]
    first, second, third, fourth = (f"0x{word:08x}" for word in words)
    looked_up = f"prmt.b32 l, {first}, {second}, s; prmt.b32 h, {third}, {fourth}, s;"
    return f"""{{
        .reg .b32 s, i, l, h, even, odd;
        and.b32 s, $2, 0x77777777;
        and.b32 i, $2, 0x88888888; shr.b32 i, i, 1; or.b32 i, i, 0x32103210;
        {looked_up} prmt.b32 even, l, h, i;
        shr.b32 s, s, 16; shr.b32 i, i, 16;
        {looked_up} prmt.b32 odd, l, h, i;
        prmt.b32 $0, even, odd, 0x6420;
        prmt.b32 $1, even, odd, 0x7531;
    }}"""


def allocate(shape: Sequence[int], dtype: torch.dtype, parts: int, scheme: Scheme) -> PackedWeight:
    """A zeroed weight (rows, columns), or stack (number, rows, columns).

    Raises ValueError for a scheme or a number of columns that the kernels do not have.
    """
    *number, rows, columns = shape
    why = unsupported_scheme_reason(scheme)
    if why is None and columns > MAX_COLUMNS:
        why = f"a low-bit weight has at most {MAX_COLUMNS} columns, not {columns}"
    if why is not None:
        raise ValueError(f"the Triton kernels: {why}")
    layout = layout_of(scheme, columns)
    data = torch.zeros((*number, layout.tiles * layout.steps, rows, layout.run), dtype=torch.int8)
    scales = torch.zeros((*number, layout.num_groups, rows + rows % 2), dtype=scheme.scale_dtype)
    offsets = torch.zeros_like(scales) if scheme.has_offsets else None
    return PackedWeight(data, rows, columns, dtype, parts, scheme, scales, offsets)


def write_rows(weight: PackedWeight, rows: Tensor | QuantizedRows, start: int, index: int = 0) -> None:
    """See Kernels. Rows are rounded and packed on the weight's device, some at once. Raises TypeError, ValueError."""
    one = weight if weight.data.dim() == 3 else weight[index]
    scheme, _ = require_codes(one)
    shape = rows.shape if isinstance(rows, Tensor) else rows.codes.shape
    if len(shape) != 2 or shape[1] != weight.columns or not 0 <= start <= weight.rows - shape[0]:
        raise ValueError(f"rows {tuple(shape)} from {start} on do not fit a weight {(weight.rows, weight.columns)}")
    step, device = max(1, _WRITTEN_AT_ONCE // shape[1]), one.data.device
    for first in range(0, shape[0], step):
        some = itemgetter(slice(first, first + step))
        if isinstance(rows, Tensor):
            quantized = quantize_rows(some(rows).to(device), scheme)
        else:
            quantized = rows.map_rows(some).map_rows(lambda part: part.to(device))
        _write(one, scheme, quantized, start + first)


def _write(weight: PackedWeight, scheme: Scheme, rows: QuantizedRows, start: int) -> None:
    layout, (number, columns) = layout_of(scheme, weight.columns), rows.codes.shape
    codes = rows.codes ^ scheme.zero_point if scheme.grid == "int" else rows.codes
    codes = pad(codes, (0, layout.columns - columns))
    runs = codes.view(number, -1, layout.halves, layout.run)
    packed = runs[:, :, 0] if scheme.bits == 8 else runs[:, :, 0] & 15 | runs[:, :, 1] << 4
    weight.data[:, start : start + number] = packed.view(torch.int8).transpose(0, 1)
    scales = rows.scales
    if layout.floats:  # the kernels have no NaN in float8, so a group with one has NaN as its scale, and is all NaN
        size = scheme.group_size or columns
        groups = pad(rows.codes, (0, -columns % size)).view(number, -1, size)
        scales = torch.where(((groups & 127) == 127).any(-1), torch.nan, scales)
    for target, values in ((weight.scales, scales), (weight.offsets, rows.offsets)):
        if target is not None and values is not None:
            target[: values.shape[1], start : start + number] = values.T
