"""Adapters of products with packed weights. `csrc/low_rank.h` has the layouts.

Weights that are plain tensors have the adapters of `quire.kernels.reference`.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.contract import LowRank, PackedWeight, Weight
from quire.kernels.cpu import _C
from quire.kernels.cpu.memory import empty
from quire.kernels.cpu.views import dtype_code
from quire.kernels.reference.low_rank import PackedMatrices as PlainMatrices
from quire.kernels.reference.low_rank import SlotTable as PlainTable
from quire.kernels.reference.low_rank import adapter_width as plain_width
from quire.kernels.reference.low_rank import check_matrices, check_slot, is_finite
from quire.kernels.reference.low_rank import low_rank as plain_low_rank
from quire.kernels.reference.low_rank import new_adapter_table as new_plain_table
from quire.kernels.reference.low_rank import pack_adapter as pack_plain
from quire.kernels.reference.low_rank import set_adapter as set_plain

TILE_ROWS = 16  # rows of a tile of a packed weight
_MAX_MATRICES = 8  # for a weight, of one adapter
_FIELDS = 8  # of matrices in a table, int64


class _Matrices(NamedTuple):
    """A LowRank in the type of x; its rows are in tiles [first, end) of the weight."""

    a: Tensor  # (rank, in)
    b: Tensor  # (tiles, terms / pair, 16, pair), with pairs of terms in bfloat16
    first: int
    scale: float
    is_finite: bool  # whether b has no NaN and no infinity

    @property
    def terms(self) -> int:
        """Columns of b, an even number."""
        return self.b.shape[1] * self.b.shape[3]

    def fields(self, place: int) -> tuple[int, ...]:
        """The matrices in a table. place: of their numbers among those of a row."""
        addresses, rank = (self.a.data_ptr(), self.b.data_ptr()), len(self.a)
        scale = int.from_bytes(struct.pack("=fi", self.scale, self.is_finite), "little", signed=True)
        return (*addresses, rank, self.terms, place, self.first, self.first + len(self.b), scale)


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrices:
    """The matrices of an adapter for a packed weight."""

    matrices: tuple[_Matrices, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices, padding included."""
        return sum(one.a.nbytes + one.b.nbytes for one in self.matrices)

    @property
    def width(self) -> int:
        """Numbers of a row, of all matrices."""
        return sum(one.terms for one in self.matrices)


@dataclass(frozen=True, slots=True, eq=False)
class SlotTable:
    """The adapters of the products with a packed weight."""

    fields: Tensor  # int64 (slots + 1, _MAX_MATRICES, _FIELDS), which the kernels read
    slots: list[PackedMatrices | None]  # whose addresses are in `fields`


class RowAddend(NamedTuple):
    """What adapters add to a product with rows x, before it is multiplied by their second matrices."""

    slots: Tensor  # int32 (num_rows,)
    table: SlotTable
    h: Tensor  # 32 bits (num_rows, width); numbers that no matrices have are undefined


AnyTable = SlotTable | PlainTable
AnyPacked = PackedMatrices | PlainMatrices
AnyAddend = RowAddend | Tensor


def new_adapter_table(weight: Weight, num_slots: int) -> AnyTable:
    """See Kernels."""
    if isinstance(weight, Tensor):
        return new_plain_table(weight, num_slots)
    fields = torch.zeros((num_slots + 1, _MAX_MATRICES, _FIELDS), dtype=torch.int64)
    return SlotTable(fields, [None] * (num_slots + 1))


def pack_adapter(weight: Weight, matrices: Sequence[LowRank]) -> AnyPacked:
    """See Kernels. Raises ValueError also for more than 8 matrices, and for a stack of weights."""
    if isinstance(weight, Tensor):
        return pack_plain(weight, matrices)
    check_matrices(weight, matrices)
    if len(matrices) > _MAX_MATRICES:
        raise ValueError(f"a weight has at most {_MAX_MATRICES} matrices of an adapter, not {len(matrices)}")
    if weight.data.dim() > 3:
        raise ValueError("an adapter needs one of the stacked weights, not the whole stack")
    return PackedMatrices(tuple(_packed(weight, one) for one in matrices))


def _packed(weight: PackedWeight, one: LowRank) -> _Matrices:
    rows, first = _in_whole_tiles(weight, one)
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    pairs = rows.view(torch.int32) if pair == 2 else rows  # of 32 bits, which torch transposes in one pass
    b = pairs.view(-1, TILE_ROWS, pairs.shape[1]).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    b = b.view(weight.dtype).view(*b.shape[:2], TILE_ROWS, pair)
    a = one.a.detach().to(weight.dtype, copy=True, memory_format=torch.contiguous_format)
    return _Matrices(a, b, first, one.scale, is_finite(b))


def _in_whole_tiles(weight: PackedWeight, one: LowRank) -> tuple[Tensor, int]:
    """b with the bias as (tiles * 16, terms), zeros where it has none, and the first of the tiles."""
    per_part, rows, columns = weight.rows // weight.parts, len(one.b), -(-one.terms // 2) * 2
    b = one.b.detach().to(weight.dtype).contiguous()
    if b.shape[1] == columns and not any(count % TILE_ROWS for count in (per_part, one.start, rows)):
        return b, one.start // TILE_ROWS
    tiles = -(-per_part // TILE_ROWS)  # of a part
    numbers = torch.arange(one.start, one.start + rows)
    places = numbers // per_part * tiles * TILE_ROWS + numbers % per_part  # with the padding of the parts before
    first, end = int(places[0]) // TILE_ROWS, int(places[-1]) // TILE_ROWS + 1
    whole = torch.zeros(((end - first) * TILE_ROWS, columns), dtype=weight.dtype)
    if one.bias is not None:
        b = torch.cat([b, one.bias.detach().to(weight.dtype).unsqueeze(1)], 1)
    whole[places - first * TILE_ROWS, : one.terms] = b
    return whole, first


def set_adapter(table: AnyTable, slot: int, packed: AnyPacked | None) -> None:
    """See Kernels."""
    if isinstance(table, PlainTable):
        set_plain(table, slot, packed)  # type: ignore[arg-type]  # packed for the same weight
        return
    check_slot(slot, len(table.slots))
    if isinstance(packed, PlainMatrices):
        raise TypeError("the adapter is packed for a weight that is a plain tensor")
    fields, place = torch.zeros_like(table.fields[slot]), 0
    for index, one in enumerate(() if packed is None else packed.matrices):
        fields[index] = torch.tensor(one.fields(place))
        place += one.terms
    table.fields[slot] = fields
    table.slots[slot] = packed


def adapter_width(packed: AnyPacked) -> int:
    """See Kernels."""
    return packed.width if isinstance(packed, PackedMatrices) else plain_width(packed)


def low_rank(x: Tensor, table: AnyTable, slots: Tensor, width: int, *, deterministic: bool = False) -> AnyAddend:
    """See Kernels. Raises ValueError if slots are not int32 (num_rows,)."""
    if isinstance(table, PlainTable):
        return plain_low_rank(x, table, slots, width)
    num_rows, columns = x.shape
    if slots.dtype != torch.int32 or slots.shape != (num_rows,):
        raise ValueError(f"{num_rows} rows need as many slots in int32, not {tuple(slots.shape)} in {slots.dtype}")
    slots, x = slots.contiguous(), x if x.stride(1) == 1 else x.contiguous()
    width += width % 2
    h = empty((num_rows, width), torch.float32)
    _C.low_rank(
        *(x, slots, table.fields, h),
        *(dtype_code(x), num_rows, columns, x.stride(0), len(table.slots) - 1, width, int(not deterministic)),
    )
    return RowAddend(slots, table, h)


def kernel_arguments(addend: RowAddend | None, tiles_before: int) -> Iterable[Tensor | int | None]:
    """The last arguments of a product. tiles_before: tiles of the weight before those of the product."""
    if addend is None:
        return (None, None, None, 0, 0)
    return (addend.slots, addend.table.fields, addend.h, addend.h.shape[1], tiles_before)
