"""Matrix products with packed weights by the C++ kernels, embedding lookup included.

See `csrc/products.cpp`, and `csrc/code_products.cpp` for low-bit weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import itemgetter
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.contract import (
    ACTIVATIONS,
    FACTOR_COLUMNS,
    Grid,
    PackedWeight,
    QuantizedRows,
    Routing,
    Scheme,
    Weight,
)
from quire.kernels.cpu import _C, rowwise
from quire.kernels.cpu.low_rank import TILE_ROWS, AnyAddend, kernel_arguments
from quire.kernels.cpu.memory import empty, pages
from quire.kernels.cpu.views import dtype_code
from quire.kernels.reference.codes import quantize_rows as plain_rows
from quire.kernels.reference.codes import with_offsets
from quire.kernels.reference.products import experts as plain_experts
from quire.kernels.reference.products import linear as plain_linear

_VECTOR_BYTES = 64  # of a tile: the next terms of its rows
_SCALE_CODES: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})
_FACTORED = 3  # code of scales with factors; 4 with offsets
_GRID_CODES: Mapping[Grid, int] = MappingProxyType({"int": 0, "e2m1": 1, "iq4_nl": 2, "e4m3": 3})
_MAX_CODE_COLUMNS = 65536  # of a low-bit weight: sums of so many products of codes fit into 32 bits
_PACK_CHUNK_ROWS = 1024  # rows that are converted at once, so that they are still in a CPU cache when they are packed


def allocate_weight(
    shape: Sequence[int], dtype: torch.dtype, parts: int = 1, scheme: Scheme | None = None
) -> PackedWeight:
    """A zeroed weight (rows, columns), or stack (number, rows, columns), in tiles of 16 rows.

    The rows are cut into `parts` equal parts, and each is padded to whole tiles. Raises ValueError if they cannot be
    cut, or if the kernels do not have the scheme for so many columns; TypeError for a dtype that they do not have.
    """
    *number, rows, columns = shape
    if rows % parts:
        raise ValueError(f"{rows} rows cannot be divided into {parts} parts")
    dtype_code(torch.empty(0, dtype=dtype))  # raises for types that products do not support
    tiles = (*number, parts, -(-(rows // parts) // TILE_ROWS))
    if scheme is None:
        terms = columns if dtype == torch.float32 else -(-columns // 32) * 32
        return PackedWeight(_zeros((*tiles, TILE_ROWS * terms), dtype), rows, columns, dtype, parts)
    _check_scheme(scheme, columns)
    vectors, terms = (3, 16) if scheme.bits == 6 else (1, 32 // scheme.bits)  # terms of a row in so many vectors
    codes = _zeros((*tiles, -(-columns // terms) * vectors * _VECTOR_BYTES), torch.uint8)
    if scheme.has_factors:
        each = 1 + scheme.has_offsets
        block = TILE_ROWS * each * (scheme.scale_dtype.itemsize + FACTOR_COLUMNS // scheme.group_size)
        scales = _zeros((*tiles, scheme.num_factors(columns), block), torch.uint8)
        return PackedWeight(codes, rows, columns, dtype, parts, scheme, scales)
    shape = (*tiles, scheme.num_groups(columns), TILE_ROWS)
    scales = _zeros(shape, scheme.scale_dtype)
    offsets = _zeros(shape, scheme.scale_dtype) if scheme.has_offsets else None
    return PackedWeight(codes, rows, columns, dtype, parts, scheme, scales, offsets)


def _zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    zeros = pages(prod(shape) * dtype.itemsize, huge=True).view(dtype).view(*shape)
    return zeros.detach()  # a view refers to this memory also after the weight cache has given the tensor other memory


def multiplies(scheme: Scheme) -> bool:
    """Whether products have weights in this scheme."""
    if scheme.grid not in _GRID_CODES:
        return False
    bits, unit = {"int": (4, 6, 8), "e4m3": (8,)}.get(scheme.grid, (4,)), 16 if scheme.bits == 6 else 8
    if scheme.bits not in bits or scheme.group_size % unit or scheme.scale_dtype not in _SCALE_CODES:
        return False
    if not scheme.has_factors:
        return not (scheme.grid == "e4m3" and scheme.has_offsets)
    fits = scheme.group_size > 0 and FACTOR_COLUMNS % scheme.group_size == 0
    return fits and scheme.bits < 8 and scheme.scale_dtype == torch.float16


def _check_scheme(scheme: Scheme, columns: int) -> None:
    if not multiplies(scheme):
        raise ValueError(
            "the CPU kernels have 8, 6 and 4 bits with groups of a multiple of 8 columns, or of 16 for 6 bits. 6 and 4 "
            f"bits may have float16 factors if groups divide {FACTOR_COLUMNS}. Not {scheme}, {scheme.scale_dtype}"
        )
    if columns > _MAX_CODE_COLUMNS:
        raise ValueError(f"a low-bit weight has at most {_MAX_CODE_COLUMNS} columns, not {columns}")


def write_rows(weight: PackedWeight, rows: Tensor | QuantizedRows, start: int, index: int = 0) -> None:
    """Write `rows` (n, columns) to rows [start, start + n) of a weight: see Kernels. index: of the weight in a stack.

    Raises ValueError for rows of another width or outside of the weight.
    """
    one = weight if weight.data.dim() == 3 else weight[index]
    shape = rows.shape if isinstance(rows, Tensor) else rows.codes.shape
    if len(shape) != 2 or shape[1] != weight.columns or not 0 <= start <= weight.rows - shape[0]:
        raise ValueError(f"rows {tuple(shape)} from {start} on do not fit a weight {(weight.rows, weight.columns)}")
    per_part, first, end = weight.rows // weight.parts, start, start + shape[0]
    ready = not isinstance(rows, Tensor) or (rows.dtype == one.data.dtype and rows.is_contiguous())
    while start < end:
        part, place = divmod(start, per_part)
        count = min(end - start, per_part - place, end if ready else _PACK_CHUNK_ROWS)
        some = slice(start - first, start - first + count)
        _write_part(one, part, rows[some] if isinstance(rows, Tensor) else rows.map_rows(itemgetter(some)), place)
        start += count


def _write_part(weight: PackedWeight, part: int, rows: Tensor | QuantizedRows, start: int) -> None:
    data = weight.data[part]
    if weight.scheme is None:
        if not isinstance(rows, Tensor):
            raise TypeError("rows of codes need a weight with their scheme")
        _C.pack_rows(rows.to(data.dtype).contiguous(), data, dtype_code(data), len(rows), weight.columns, start)
        return
    quantized = quantize_rows(rows, weight.scheme) if isinstance(rows, Tensor) else rows
    codes = quantized.codes.contiguous()
    _C.pack_codes(codes, data, len(codes), weight.columns, start, *_format(weight.scheme))
    places = torch.arange(start, start + len(codes))
    has_whole_tiles = start % TILE_ROWS == len(codes) % TILE_ROWS == 0
    for packed, values in _scale_views(weight, part, quantized):
        if has_whole_tiles:
            tiles = values.reshape(-1, TILE_ROWS, *values.shape[1:]).movedim(1, -1)
            packed[start // TILE_ROWS : (start + len(codes)) // TILE_ROWS] = tiles
        else:
            packed[places // TILE_ROWS, ..., places % TILE_ROWS] = values


def _scale_views(weight: PackedWeight, part: int, rows: QuantizedRows) -> Iterator[tuple[Tensor, Tensor]]:
    """Views (tiles, ..., 16) of a part's scales, offsets and factors, and the values (n, ...) of rows for them."""
    scheme = weight.scheme
    if scheme is None or weight.scales is None:
        raise TypeError("the weight has no codes")
    if (rows.factors is None) == scheme.has_factors:
        raise ValueError(f"rows {'with' if rows.factors is not None else 'without'} factors do not fit {scheme}")
    if rows.factors is None:
        yield weight.scales[part], rows.scales
        if weight.offsets is not None and rows.offsets is not None:
            yield weight.offsets[part], rows.offsets
        return
    blocks, each = weight.scales[part], 1 + scheme.has_offsets  # see csrc/factors.h
    tiles, number = blocks.shape[:2]
    half = TILE_ROWS * scheme.scale_dtype.itemsize * each
    yield blocks[..., :half].view(scheme.scale_dtype).view(tiles, number, each, TILE_ROWS), rows.factors
    integers = blocks[..., half:].view(torch.int8).view(tiles, number, each, -1, TILE_ROWS)
    groups = integers.shape[3]
    for index, values in enumerate((rows.scales, rows.offsets)):
        if values is not None:
            padded = F.pad(values, (0, number * groups - values.shape[1]))
            yield integers[:, :, index], padded.view(len(values), number, groups)


def quantize_rows(rows: Tensor, scheme: Scheme) -> QuantizedRows:
    """Rows of a weight (n, columns), of any float type, rounded to codes: see `quire.kernels.reference.codes`."""
    if scheme.grid == "iq4_nl":
        raise ValueError("weights are not rounded to iq4_nl; only GGUF files have it")
    if scheme.grid == "e4m3" or scheme.bits == 6 or scheme.has_factors:
        return plain_rows(rows, scheme)
    n, columns = rows.shape
    codes = torch.empty((n, columns), dtype=torch.uint8)
    scales = torch.empty((n, scheme.num_groups(columns)), dtype=scheme.scale_dtype)
    bits, group_size, scale_code, grid, _ = _format(scheme)
    _C.quantize_rows(rows.float().contiguous(), codes, scales, scale_code, n, columns, bits, group_size, grid)
    return with_offsets(QuantizedRows(codes, scales), scheme)


def pack_weight(weight: Tensor, parts: int = 1, scheme: Scheme | None = None) -> PackedWeight:
    """A weight (rows, columns), or stack (number, rows, columns), packed: see `allocate_weight`."""
    packed = allocate_weight(weight.shape, weight.dtype, parts, scheme)
    for index, one in enumerate(weight if weight.dim() == 3 else [weight]):
        write_rows(packed, one, 0, index)
    return packed


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    addend: AnyAddend | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """x (num_rows, in) times weight (out, in), plus addend, plus bias (out,)."""
    if isinstance(weight, Tensor):
        return plain_linear(x, weight, bias, _plain(addend))
    if weight.parts == 1:
        return _product(x, weight, bias, addend, -1, deterministic=deterministic)
    _check(x, weight, bias)  # each part is a product of its own
    size = weight.rows // weight.parts
    found = []
    for part in range(weight.parts):
        one, some = replace(weight[part], rows=size, parts=1), slice(part * size, (part + 1) * size)
        before = part * weight.data.shape[1]
        of_part = None if bias is None else bias[some]
        found.append(_product(x, one, of_part, addend, -1, tiles_before=before, deterministic=deterministic))
    return torch.cat(found, -1)


def gated_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    activation: str,
    addend: AnyAddend | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """activation(first half) * second half of the last axis of `linear`. Raises ValueError unless weight.parts is 2."""
    if isinstance(weight, Tensor):
        return rowwise.gate(plain_linear(x, weight, bias, _plain(addend)), activation)
    if weight.parts != 2:
        raise ValueError(f"the weight of a gated product has 2 parts, not {weight.parts}")
    return _product(x, weight, bias, addend, ACTIVATIONS.index(activation), deterministic=deterministic)


def _plain(addend: AnyAddend | None) -> Tensor | None:
    if addend is None or isinstance(addend, Tensor):
        return addend
    raise TypeError("the adapters are packed, and the weight is a plain tensor")


def _product(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    addend: AnyAddend | None,
    gate: int,
    *,
    tiles_before: int = 0,
    deterministic: bool,
) -> Tensor:
    _check(x, weight, bias)
    num_rows, columns = x.shape
    if isinstance(addend, Tensor) or (addend is not None and len(addend.slots) != num_rows):
        raise ValueError(f"the addend is not one of a packed weight and {num_rows} rows")
    adapters = kernel_arguments(addend, tiles_before)
    if x.dtype == torch.bfloat16 and weight.scheme is None:  # kernels read pairs of bfloat16
        if columns % 2:
            x, columns = F.pad(x, (0, 1)), columns + 1
        if x.stride(0) % 2 or x.storage_offset() % 2:
            x = x.clone(memory_format=torch.contiguous_format)
    if x.stride(1) != 1:
        x = x.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    width = weight.rows if gate < 0 else weight.rows // 2
    out = empty((num_rows, width), x.dtype)
    code, sizes = dtype_code(x), (num_rows, width, columns, x.stride(0), width, gate)
    if weight.scheme is None:
        _C.linear(x, weight.data, bias, out, code, *sizes, int(not deterministic), *adapters)
    else:
        _C.code_linear(x, *_codes(weight), bias, out, code, *_format(weight.scheme), *sizes, *adapters)
    return out


def _check(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> None:
    if weight.data.dim() > 3:
        raise ValueError("a product needs one of the stacked weights, not the whole stack")
    dtype = weight.dtype
    if x.dim() != 2 or x.shape[1] != weight.columns or x.dtype != dtype:
        raise ValueError(
            f"x {tuple(x.shape)} of {x.dtype} does not match a weight {(weight.rows, weight.columns)} of {dtype}"
        )
    if bias is not None and (bias.shape != (weight.rows,) or bias.dtype != dtype):
        raise ValueError(
            f"a bias {tuple(bias.shape)} of {bias.dtype} does not match a weight of {weight.rows} rows of {dtype}"
        )


def embed(ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
    """Rows of weight (num_rows, size) for ids int64 (num_tokens,), times `scale`. An id without a row gives zeros."""
    if ids.dtype != torch.int64:
        raise TypeError(f"ids must be int64, not {ids.dtype}")
    if isinstance(weight, Tensor):
        return rowwise.embed(ids, weight, scale)
    if weight.data.dim() > 3:
        raise ValueError("a row lookup needs one of the stacked weights, not the whole stack")
    if weight.parts != 1:
        raise ValueError(f"a row lookup needs a weight of one part, not of {weight.parts}")
    out = empty((len(ids), weight.columns), weight.dtype)
    code, sizes = dtype_code(out), (len(ids), weight.columns, weight.rows)
    if weight.scheme is None:
        _C.unpack_rows(weight.data, ids.contiguous(), out, code, *sizes, float(scale))
    else:
        some = (*sizes, *_format(weight.scheme), float(scale))
        _C.unpack_codes(*_codes(weight), ids.contiguous(), out, code, *some)
    return out


def _codes(weight: PackedWeight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return weight.data, weight.scales, weight.offsets


def _format(scheme: Scheme) -> tuple[int, int, int, int, int]:
    scales = _FACTORED + scheme.has_offsets if scheme.has_factors else _SCALE_CODES[scheme.scale_dtype]
    return scheme.bits, scheme.group_size, scales, _GRID_CODES[scheme.grid], scheme.x_group_size


_SCORES = ("softmax", "sigmoid", "sparsemixer")  # by the numbers of the extension


def route(
    logits: Tensor, k: int, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k experts of each token and their weights: see Kernels. Raises ValueError if there are fewer than k."""
    num_tokens, number = logits.shape
    if not 0 < k <= number:
        raise ValueError(f"{k} experts cannot be selected of {number}")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids, weights = empty((num_tokens, k), torch.int64), empty((num_tokens, k), torch.float32)
    sizes = (num_tokens, number, k, logits.stride(0))
    rules = (int(routing.normalise), _SCORES.index(routing.score), routing.num_groups, routing.top_groups)
    _C.route(logits, ids, bias, scales, weights, dtype_code(logits), *sizes, *rules, routing.scale, routing.jitter)
    return ids, weights


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Weight,
    down: Weight,
    activation: str,
    *,
    gated: bool = True,
    deterministic: bool = False,
) -> Tensor:
    """The weighted sum of each token's experts: see Kernels. Terms are added in the order of expert ids."""
    if isinstance(up, Tensor) or isinstance(down, Tensor):
        return plain_experts(x, ids, weights, up, down, activation, gated=gated)
    (num_tokens, size), (_, each), parts = x.shape, ids.shape, 2 if gated else 1
    inner = up.rows // parts
    if up.parts != parts or (up.columns, down.rows, down.columns) != (size, size, inner) or x.dtype != up.dtype:
        raise ValueError(f"x {tuple(x.shape)} of {x.dtype} does not match the weights of the experts")
    pairs, number = ids.numel(), len(up.data)
    out = empty((num_tokens, size), x.dtype)
    memory = [
        empty((pairs, size + size % 2), x.dtype),
        empty((pairs, inner + inner % 2), x.dtype),
        empty((pairs, size), x.dtype),
        empty((2 * pairs + number + 1,), torch.int64),
    ]
    tensors = (x.contiguous(), ids.contiguous(), weights.contiguous(), *_codes(up), *_codes(down), out, *memory)
    sizes = (num_tokens, each, number, size, inner)
    rules = (ACTIVATIONS.index(activation), int(gated), int(not deterministic))
    _C.experts(*tensors, dtype_code(x), *sizes, *rules, *_stack(up), *_stack(down))
    return out


def _stack(weight: PackedWeight) -> tuple[int, ...]:
    """Bytes of one weight of a stack, bytes of its scales, and its format, which is zeros without a scheme."""
    scale_bytes = 0 if weight.scales is None else weight.scales[0].nbytes
    return weight.data[0].nbytes, scale_bytes, *((0,) * 5 if weight.scheme is None else _format(weight.scheme))
