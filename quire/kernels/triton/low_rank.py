"""Adapters of products: low-rank matrices of any mix of slots, in two launches for all rows.

The first multiplies rows of x with the matrices `a` of their adapters, the second multiplies the results with `b`. A
program has a tile of rows, and multiplies those of one slot together. One tile shape and one order of sums make the
bits of a row independent of the other rows, so deterministic sequences use the same kernels.

An adapter is one piece of memory that begins with the shapes and offsets of its matrices (RECORD, PAIR). The table has
the addresses of adapters by slot. So an adapter takes memory for its own ranks alone, and a captured step reads what
the slots contain when it is replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.contract import LowRank, Weight
from quire.kernels.reference.low_rank import check_matrices, check_slot, weight_shape
from quire.kernels.triton.launch import INTERPRETED
from quire.kernels.triton.products import product, tile_of, with_contiguous_rows
from quire.kernels.triton.rounding import rounded
from quire.kernels.triton.rowwise import load_floats

RECORD = ("num_pairs", "rank", "a")  # int64; the matrices `a` of all pairs are one matrix (rank, in)
PAIR = ("first", "rank", "start", "rows", "b", "bias", "scale")  # int64; first: row of `a`; scale: bits of a float32
ALIGNMENT = 16  # bytes, of matrices; offsets are in bytes, and 0 for no bias
ROWS = 16  # of a tile of x
TERMS = 16  # rows of `a` that a program multiplies
COLUMNS = 64  # of the addend that a program computes
MANY_ROWS = 256  # with more, there are enough tiles for the device, and no tile is shared
_HEADER, _FIELDS = tl.constexpr(len(RECORD)), tl.constexpr(len(PAIR))
_NO_ROW = tl.constexpr(1 << 30)  # of a matrix


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrices:
    """The matrices of an adapter for a weight."""

    data: Tensor  # uint8: RECORD, then PAIR for each LowRank, then the matrices in the type of x
    width: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory that the adapter has."""
        return self.data.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class SlotTable:
    """The adapters of the products with a weight of `rows` rows."""

    rows: int
    addresses: Tensor  # int64 (num_slots + 1,), on the device: of PackedMatrices.data, 0 for an empty slot
    slots: list[PackedMatrices | None]  # they keep the memory


def new_adapter_table(weight: Weight, num_slots: int) -> SlotTable:
    """See Kernels."""
    addresses = torch.zeros(num_slots + 1, dtype=torch.int64, device=weight.data.device)
    return SlotTable(weight_shape(weight)[0], addresses, [None] * (num_slots + 1))


def pack_adapter(weight: Weight, matrices: Sequence[LowRank]) -> PackedMatrices:
    """See Kernels. The record is made on the host and copied once."""
    check_matrices(weight, matrices)
    size = 8 * (len(RECORD) + len(PAIR) * len(matrices))
    offset = size + -size % ALIGNMENT
    pieces, pairs, rank = [_bytes_of([one.a for one in matrices], weight.dtype)], [], 0
    header = [len(matrices), sum(len(one.a) for one in matrices), offset]
    offset += len(pieces[0])
    for one in matrices:
        offsets = []
        for part in (one.b, one.bias):
            offsets.append(0 if part is None else offset)
            if part is not None:
                pieces.append(_bytes_of([part], weight.dtype))
                offset += len(pieces[-1])
        pairs += [rank, len(one.a), one.start, len(one.b), *offsets, int(np.float32(one.scale).view(np.int32))]
        rank += len(one.a)
    first = torch.tensor(header + pairs).view(torch.uint8)
    data = torch.cat((pad(first, (0, -size % ALIGNMENT)), *pieces))
    return PackedMatrices(data.to(weight.data.device), sum(one.terms for one in matrices))


def _bytes_of(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The numbers of all parts as `dtype`, on the host, padded to whole units of ALIGNMENT."""
    numbers = torch.cat([torch.empty(0, dtype=dtype), *(part.detach().to("cpu", dtype).flatten() for part in parts)])
    return pad(numbers.view(torch.uint8), (0, -numbers.nbytes % ALIGNMENT))


def set_adapter(table: SlotTable, slot: int, packed: PackedMatrices | None) -> None:
    """See Kernels. The address is written in the order of the stream."""
    check_slot(slot, len(table.slots))
    table.addresses[slot] = 0 if packed is None else packed.data.data_ptr()
    table.slots[slot] = packed


def adapter_width(packed: PackedMatrices) -> int:
    """See Kernels."""
    return packed.width


@triton.jit
def _leading_slots(slots_ptr, rows, num_rows, ROWS: tl.constexpr):
    """(ROWS,) slots of the rows, -1 outside; and the same with 0 for rows whose slot an earlier row of the tile has."""
    slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    places = tl.arange(0, ROWS)
    before = (slots[:, None] == slots[None, :]) & (places[None, :] < places[:, None])
    return slots, tl.where((tl.sum(before.to(tl.int32), 1) == 0) & (slots > 0), slots, 0)


@triton.jit(do_not_specialize=["num_rows", "shares", "width"])
def _shrink(
    x_ptr,  # (num_rows, K)
    addresses_ptr,  # see `SlotTable`
    slots_ptr,  # (num_rows,)
    hidden_ptr,  # float32 (num_rows, width)
    num_rows,
    shares,  # programs of a tile: each takes the slots of some of its rows
    width,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TERMS: tl.constexpr,
    STEP: tl.constexpr,  # columns of x at once
    INTERPRET: tl.constexpr,
):
    """One tile of x times the matrices `a`."""
    across = tl.cdiv(width, TERMS)
    program = tl.program_id(0)
    terms = program % across * TERMS + tl.arange(0, TERMS)
    rows = program // across // shares * ROWS + tl.arange(0, ROWS)
    slots, leading = _leading_slots(slots_ptr, rows, num_rows, ROWS)
    for leader in range(program // across % shares, ROWS, shares):
        slot = tl.sum(tl.where(tl.arange(0, ROWS) == leader, leading, 0))
        address = tl.load(addresses_ptr + slot)
        if address != 0:
            record_ptr = address.to(tl.pointer_type(tl.int64))
            rank = tl.minimum(tl.load(record_ptr + 1), width)
            if program % across * TERMS < rank:
                a_ptr = (address + tl.load(record_ptr + 2)).to(tl.pointer_type(x_ptr.dtype.element_ty))
                a_ptr = tl.multiple_of(a_ptr, 16)
                mine = slots == slot
                total = product(
                    x_ptr, rows, mine, a_ptr, tl.where(terms < rank, terms, _NO_ROW),
                    _NO_ROW, K, STRIDE, ROWS, TERMS, STEP, INTERPRET,
                )  # fmt: skip
                places = rows.to(tl.int64)[:, None] * width + terms[None, :]
                tl.store(hidden_ptr + places, total, mask=mine[:, None] & (terms < rank)[None, :])


@triton.jit(do_not_specialize=["num_rows", "shares", "width"])
def _expand(
    x_ptr,  # gives the type of matrices
    hidden_ptr,  # float32 (num_rows, width)
    addresses_ptr,  # see `SlotTable`
    slots_ptr,  # (num_rows,)
    out_ptr,  # float32 (num_rows, N), zeros
    num_rows,
    shares,  # see `_shrink`
    width,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,  # terms at once
    INTERPRET: tl.constexpr,
):
    """One tile of the addend."""
    ACROSS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    columns = program % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
    rows = program // ACROSS // shares * ROWS + tl.arange(0, ROWS)
    slots, leading = _leading_slots(slots_ptr, rows, num_rows, ROWS)
    for leader in range(program // ACROSS % shares, ROWS, shares):
        slot = tl.sum(tl.where(tl.arange(0, ROWS) == leader, leading, 0))
        address = tl.load(addresses_ptr + slot)
        if address != 0:
            mine = slots == slot
            record_ptr = address.to(tl.pointer_type(tl.int64))
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for pair in range(0, tl.load(record_ptr).to(tl.int32)):
                total += _pair_product(
                    x_ptr, hidden_ptr, address, record_ptr + _HEADER + pair * _FIELDS, rows, mine, columns,
                    program % ACROSS * COLUMNS, width, ROWS, COLUMNS, STEP, INTERPRET,
                )  # fmt: skip
            places = rows.to(tl.int64)[:, None] * N + columns[None, :]
            tl.store(out_ptr + places, total, mask=mine[:, None] & (columns < N)[None, :])


@triton.jit
def _pair_product(
    x_ptr,  # see `_expand`
    hidden_ptr,
    address,  # of the adapter
    pair_ptr,  # PAIR
    rows,
    mine,  # (ROWS,): whether the row has this adapter
    columns,
    first_column,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """What one LowRank adds to a tile: zeros outside of its rows of the weight."""
    first = tl.load(pair_ptr)
    rank = tl.load(pair_ptr + 1).to(tl.int32)
    start = tl.load(pair_ptr + 2)
    stop = start + tl.load(pair_ptr + 3)
    b_ptr = (address + tl.load(pair_ptr + 4)).to(tl.pointer_type(x_ptr.dtype.element_ty))
    bias_offset = tl.load(pair_ptr + 5)
    bias_ptr = (address + bias_offset).to(tl.pointer_type(x_ptr.dtype.element_ty))
    scale = tl.load(pair_ptr + 6).to(tl.int32).to(tl.float32, bitcast=True)
    inside = (columns >= start) & (columns < stop)
    meets = (first_column < stop) & (first_column + COLUMNS > start)
    terms = tl.arange(0, STEP)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, tl.where(meets, rank, 0), STEP):
        left = (begin + terms < rank) & (first + begin + terms < width)
        sources = rows.to(tl.int64)[:, None] * width + (first + begin + terms)[None, :]
        hidden = tl.load(hidden_ptr + sources, mask=mine[:, None] & left[None, :], other=0.0) * scale
        hidden = rounded(hidden, x_ptr.dtype.element_ty, INTERPRET)
        places = (columns - start)[None, :] * rank + (begin + terms)[:, None]
        b = tl.load(b_ptr + places, mask=left[:, None] & inside[None, :], other=0.0)
        if INTERPRET:
            hidden, b = hidden.to(tl.float32), b.to(tl.float32)
        total = tl.dot(hidden, b, total, input_precision="ieee")
    bias = load_floats(bias_ptr + (columns - start), inside & (bias_offset != 0))
    return total + (bias * scale)[None, :]


def low_rank(x: Tensor, table: SlotTable, slots: Tensor, width: int) -> Tensor:
    """The addend, float32 (num_rows, rows of the weight). x times `a` is rounded to the type of x.

    The grid follows from shapes and `width` alone.
    """
    x, slots, (num_rows, columns) = with_contiguous_rows(x), slots.contiguous(), x.shape
    hidden = torch.empty((num_rows, width), dtype=torch.float32, device=x.device)
    addend = torch.zeros((num_rows, table.rows), dtype=torch.float32, device=x.device)
    shares = min(num_rows, ROWS) if num_rows <= MANY_ROWS else 1
    tiles = triton.cdiv(num_rows, ROWS) * shares
    tile = tile_of(ROWS, TERMS, x.dtype)
    _shrink[(tiles * triton.cdiv(width, TERMS),)](
        x,
        table.addresses,
        slots,
        hidden,
        num_rows,
        shares,
        width,
        K=columns,
        STRIDE=x.stride(0),
        ROWS=ROWS,
        TERMS=TERMS,
        STEP=tile.terms,
        INTERPRET=INTERPRETED,
        num_stages=tile.num_stages,
    )
    _expand[(tiles * triton.cdiv(table.rows, COLUMNS),)](
        x,
        hidden,
        table.addresses,
        slots,
        addend,
        num_rows,
        shares,
        width,
        N=table.rows,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        STEP=32,
        INTERPRET=INTERPRETED,
    )
    return addend
