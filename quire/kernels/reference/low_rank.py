"""Adapters of products: what low-rank matrices add (Hu et al., LoRA, 2021), one slot and one matrix pair at a time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.contract import LowRank, PackedWeight, Weight


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrices:
    """The matrices of an adapter for a weight, in the type of x."""

    matrices: tuple[LowRank, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices and biases."""
        return sum(part.nbytes for one in self.matrices for part in (one.a, one.b, one.bias) if part is not None)


@dataclass(frozen=True, slots=True, eq=False)
class SlotTable:
    """The adapters of the products with a weight of `rows` rows."""

    rows: int
    slots: list[PackedMatrices | None]  # the first has never one


def is_finite(numbers: Tensor) -> bool:
    """Whether all numbers are finite; there is at least one. Several times as fast as `isfinite`."""
    return all(map(math.isfinite, (float(end) for end in numbers.aminmax())))  # NaN if any number is


def new_adapter_table(weight: Weight, num_slots: int) -> SlotTable:
    """See Kernels."""
    return SlotTable(weight_shape(weight)[0], [None] * (num_slots + 1))


def pack_adapter(weight: Weight, matrices: Sequence[LowRank]) -> PackedMatrices:
    """See Kernels."""
    check_matrices(weight, matrices)
    device = weight.data.device

    def converted(part: Tensor) -> Tensor:
        return part.detach().to(device, weight.dtype).contiguous()

    return PackedMatrices(
        tuple(
            one._replace(a=converted(one.a), b=converted(one.b), bias=None if one.bias is None else converted(one.bias))
            for one in matrices
        )
    )


def weight_shape(weight: Weight) -> tuple[int, int]:
    """Rows and columns of a weight."""
    if isinstance(weight, PackedWeight):
        return weight.rows, weight.columns
    rows, columns = weight.shape
    return rows, columns


def check_matrices(weight: Weight, matrices: Sequence[LowRank]) -> None:
    """Raises ValueError unless the matrices fit the weight, and no row of it belongs to two of them."""
    (rows, columns), end = weight_shape(weight), 0
    for one in sorted(matrices, key=lambda one: one.start):
        rank, stop = len(one.a), one.start + len(one.b)
        if rank < 1 or one.a.shape != (rank, columns) or one.b.shape[1:] != (rank,):
            raise ValueError(
                f"matrices {tuple(one.a.shape)} and {tuple(one.b.shape)} are not (rank, {columns}) and (rows, rank)"
            )
        if one.bias is not None and one.bias.shape != (len(one.b),):
            raise ValueError(f"a bias {tuple(one.bias.shape)} does not match a matrix {tuple(one.b.shape)}")
        if one.start < 0 or stop > rows:
            raise ValueError(f"rows {one.start} to {stop} are outside of a weight of {rows} rows")
        if one.start < end:
            raise ValueError(f"row {one.start} belongs to two matrices")
        end = stop


def set_adapter(table: SlotTable, slot: int, packed: PackedMatrices | None) -> None:
    """See Kernels."""
    check_slot(slot, len(table.slots))
    table.slots[slot] = packed


def check_slot(slot: int, number: int) -> None:
    """Raises IndexError unless an adapter can be put into the slot of a table of `number` slots, slot 0 included."""
    if not 0 < slot < number:
        raise IndexError(f"slot {slot} is not in 1 to {number - 1}")


def in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x (num_rows, in) times weight (out, in)."""
    return F.linear(x.float(), weight.float())


def low_rank(
    x: Tensor,
    table: SlotTable,
    slots: Tensor,
    width: int,
    *,
    multiply: Callable[[Tensor, Tensor], Tensor] = in_float32,
) -> Tensor:
    """The addend, float32 (num_rows, rows of the weight). Raises ValueError if `width` is too small."""
    addend = torch.zeros((len(x), table.rows), dtype=torch.float32, device=x.device)
    for slot in sorted(set(slots.tolist())):
        packed = table.slots[slot]
        if packed is None:
            continue
        if adapter_width(packed) > width:
            raise ValueError(f"the adapter in slot {slot} needs a width of {adapter_width(packed)}, not {width}")
        rows = (slots == slot).nonzero().squeeze(1)
        for one in packed.matrices:
            part = multiply(multiply(x[rows], one.a) * one.scale, one.b)
            if one.bias is not None:
                part += one.bias.float() * one.scale
            addend[rows, one.start : one.start + len(one.b)] = part.float()
    return addend


def adapter_width(packed: PackedMatrices) -> int:
    """See Kernels."""
    return sum(one.terms for one in packed.matrices)
