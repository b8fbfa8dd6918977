"""Adapters of products in float64, and checks of a kernel module's adapters against them."""

from typing import NamedTuple

import pytest
import torch

from quire.kernels import reference
from quire.kernels.contract import FP8, INT4, INT8, MXFP4, LowRank, Scheme, low_rank_bytes

NUM_SLOTS = 7
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # largest relative error
SCHEMES = (INT8, INT4, MXFP4, FP8, Scheme(4, 32, torch.bfloat16, has_offsets=True))


class Piece(NamedTuple):
    """Shape of a LowRank."""

    start: int
    rows: int
    rank: int
    scale: float = 1.0
    biased: bool = False


class Case(NamedTuple):
    """Rows of x, a weight and its adapters. Slots without an adapter are empty, and rows have any slots."""

    num_rows: int
    inputs: int
    outputs: int
    adapters: dict[int, list[Piece]]  # by slot
    parts: int = 1  # of the weight: 2 for a gated product
    spare: int = 0  # of the width


_MIXED = {1: [Piece(0, 100, 1)], 2: [Piece(0, 100, 3, 2.0)], 4: [Piece(0, 100, 8, 0.5)], 7: [Piece(0, 100, 64, -1.5)]}
_QKV = {
    2: [Piece(0, 48, 8, 2.0), Piece(48, 16, 3, 0.5), Piece(64, 16, 64, 0.25)],
    3: [Piece(64, 16, 5)],
    5: [Piece(48, 16, 2, 3.0, biased=True), Piece(0, 48, 1, 1.0, biased=True)],
}
_GATED = {
    1: [Piece(0, 40, 3)],
    2: [Piece(0, 80, 8, 2.0)],
    3: [Piece(0, 40, 4), Piece(40, 40, 16, 0.5, biased=True)],
    6: [Piece(40, 40, 1)],
}
CASES = {
    "one row of rank 1": Case(1, 33, 40, {1: [Piece(0, 40, 1)]}),
    "mixed ranks": Case(40, 130, 100, _MIXED),
    "a spare width": Case(17, 64, 100, _MIXED, spare=37),
    "rank 512": Case(3, 64, 96, {1: [Piece(0, 96, 512, 0.25)], 3: [Piece(0, 96, 512, 0.25, biased=True)]}),
    "q, k and v": Case(19, 72, 80, _QKV),
    "odd places": Case(6, 20, 37, {1: [Piece(5, 3, 2), Piece(13, 17, 7, biased=True)], 2: [Piece(36, 1, 1)]}),
    "gated": Case(23, 48, 80, _GATED, parts=2),
    "more than a tile": Case(33, 300, 150, {slot: [Piece(9, 130, 2 * slot)] for slot in range(1, 8)}),
}


class Adapted:
    """The tensors of a case, and what a kernel module makes of them."""

    def __init__(self, kernels, case, dtype, *, scheme=None, device=None, seed=0):
        self.kernels, self.case, self.dtype, self.device = kernels, case, dtype, device
        self.random = torch.Generator().manual_seed(seed)
        self.x = self.normal(case.num_rows, case.inputs)
        self.plain = (self.normal(case.outputs, case.inputs).float() / case.inputs**0.5).to(dtype)
        self.bias = self.normal(case.outputs)
        self.matrices = {slot: [self.low_rank(piece) for piece in pieces] for slot, pieces in case.adapters.items()}
        slots = torch.randint(0, NUM_SLOTS + 1, (case.num_rows,), generator=self.random)
        sure = list(case.adapters)[: case.num_rows]  # the first rows have each adapter
        slots[: len(sure)] = torch.tensor(sure)
        self.slots = slots.int().to(device)
        self.weight = self.packed(self.plain, scheme)
        self.width = self.width_of(self.matrices) + case.spare
        self.table = self.table_of(self.weight)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.random).to(self.dtype).to(self.device)

    def low_rank(self, piece):
        """Matrices in float32, which are rounded as they are packed."""
        a = torch.randn(piece.rank, self.case.inputs, generator=self.random) / self.case.inputs**0.5
        b = torch.randn(piece.rows, piece.rank, generator=self.random) / piece.rank**0.5
        bias = torch.randn(piece.rows, generator=self.random) if piece.biased else None
        return LowRank(a, b, piece.start, piece.scale, bias)

    def packed(self, plain, scheme=None):
        """A weight in the module's layout."""
        weight = self.kernels.allocate_weight(plain.shape, self.dtype, self.case.parts, scheme)
        if weight is None:
            return plain
        if plain.any():
            self.kernels.write_rows(weight, plain, 0)
        return weight

    def width_of(self, adapters):
        packed = [self.kernels.pack_adapter(self.weight, matrices) for matrices in adapters.values()]
        return max(self.kernels.adapter_width(one) for one in packed)

    def table_of(self, weight):
        """A table with the adapters of the case."""
        table = self.kernels.new_adapter_table(weight, NUM_SLOTS)
        for slot, matrices in self.matrices.items():
            self.kernels.set_adapter(table, slot, self.kernels.pack_adapter(weight, matrices))
        return table

    def linear(self, rows=slice(None), x=None, table=None):
        """The product of some rows, with adapters."""
        x = (self.x if x is None else x)[rows].clone()
        addend = self.kernels.low_rank(x, table or self.table, self.slots[rows].clone(), self.width)
        return self.kernels.linear(x, self.weight, self.bias, addend)

    def gated(self, rows=slice(None)):
        x = self.x[rows].clone()
        addend = self.kernels.low_rank(x, self.table, self.slots[rows].clone(), self.width)
        return self.kernels.gated_linear(x, self.weight, self.bias, "silu", addend)

    def addend(self, weight):
        """The addend alone, as the product with a weight of zeros."""
        return self.kernels.linear(
            self.x, weight, None, self.kernels.low_rank(self.x, self.table_of(weight), self.slots, self.width)
        )

    def exact_addend(self):
        """In float64, and a bound of the error if x times `a` is rounded to the type of x."""
        out, error = (torch.zeros(self.case.num_rows, self.case.outputs, dtype=torch.float64) for _ in range(2))
        x, unit = self.x.double().cpu(), ROUNDING[self.dtype]
        for row, slot in enumerate(self.slots.tolist()):
            for one in self.matrices.get(slot, []):
                a, b = (part.to(self.dtype).double() for part in (one.a, one.b))
                bias = torch.zeros(len(b)) if one.bias is None else one.bias.to(self.dtype).double()
                place = slice(one.start, one.start + len(b))
                out[row, place] = one.scale * (b @ (a @ x[row]) + bias)
                sums = b.abs() @ (a.abs() @ x[row].abs())
                terms = self.case.inputs + len(a) + 8
                rounded = 1.01 * unit * (b.abs() @ (a @ x[row]).abs())
                error[row, place] = abs(one.scale) * (rounded + terms * 2**-22 * (sums + bias.abs()))
        return out, error

    def exact(self):
        """The product in float64, and a bound of its error, with one rounding before the addend and one after it."""
        addend, error = self.exact_addend()
        x, weight, bias = (part.double().cpu() for part in (self.x, self.plain, self.bias))
        product = x @ weight.T + bias
        error += (self.case.inputs + 8) * 2**-22 * (x.abs() @ weight.abs().T + bias.abs())
        out = product + addend
        return out, error + 1.02 * ROUNDING[self.dtype] * (product.abs() + out.abs() + error)


def assert_near(found, expected, error):
    assert found.shape == expected.shape
    distance = (found.double().cpu() - expected).abs()
    assert (distance <= error + 1e-7).all(), (distance - error).max()


def assert_exact(kernels, case, dtype, device=None):
    """The addend and the product are those of float64."""
    adapted = Adapted(kernels, case, dtype, device=device)
    expected, error = adapted.exact_addend()
    alone = adapted.addend(adapted.packed(torch.zeros_like(adapted.plain)))
    assert alone.dtype == dtype
    assert_near(alone, expected, error + 1.01 * ROUNDING[dtype] * expected.abs())
    assert alone.abs().amax(1).gt(0).tolist() == [slot in adapted.matrices for slot in adapted.slots.tolist()]
    expected, error = adapted.exact()
    assert_near(adapted.linear(), expected, error)
    if case.parts == 2:
        gates, values = expected.chunk(2, 1)
        near, near_values = error.chunk(2, 1)
        gated = reference.activate(gates, "silu")
        slack = 1.2 * near * values.abs() + (gated.abs() + 1.2 * near) * near_values
        assert_near(adapted.gated(), gated * values, slack + 3 * ROUNDING[dtype] * (gated * values).abs() + 1e-6)


def assert_same_on_low_bit_weights(kernels, dtype, scheme, device=None):
    """An addend has the same bits on a weight in any layout, and low-bit products add it."""
    adapted = Adapted(kernels, CASES["gated"]._replace(inputs=64), dtype, scheme=scheme, device=device)
    zeros = torch.zeros_like(adapted.plain)
    alone = adapted.addend(adapted.packed(zeros, scheme))
    assert torch.equal(alone, adapted.addend(adapted.packed(zeros)))
    expected, error = adapted.exact_addend()
    without = kernels.linear(adapted.x, adapted.weight, adapted.bias).double().cpu()
    slack = 1.02 * ROUNDING[dtype] * (2 * without.abs() + expected.abs() + error) + 2e-6
    assert_near(adapted.linear(), without + expected, error + slack)
    assert torch.equal(adapted.gated()[adapted.slots == 0], unadapted(adapted)[adapted.slots == 0])


def unadapted(adapted):
    """The gated product without an addend."""
    return adapted.kernels.gated_linear(adapted.x, adapted.weight, adapted.bias, "silu")


def assert_rows_are_independent(kernels, case, dtype, *, scheme=None, device=None):
    """Rows have the same bits alone, in any order and company; those without an adapter have those of no addend."""
    adapted = Adapted(kernels, case, dtype, scheme=scheme, device=device)
    together, num_rows = adapted.linear(), case.num_rows
    order = torch.randperm(num_rows, generator=adapted.random).to(device)
    assert torch.equal(adapted.linear(order), together[order])
    for row in {0, num_rows - 1}:
        assert torch.equal(adapted.linear(slice(row, row + 1)), together[row : row + 1])
    assert torch.equal(adapted.linear(slice(num_rows // 2, None)), together[num_rows // 2 :])
    adapted.width += 29
    assert torch.equal(adapted.linear(), together)
    without = ~torch.isin(adapted.slots, torch.tensor(list(adapted.matrices), device=device))
    plain = kernels.linear(adapted.x, adapted.weight, adapted.bias)
    assert torch.equal(plain[without], together[without])


def assert_nan_stays_alone(kernels, dtype, device=None):
    """NaN in a row, or in an adapter, changes only the rows that have it."""
    adapted = Adapted(
        kernels,
        CASES["odd places"]._replace(adapters={2: [Piece(0, 37, 3)], 4: [Piece(0, 37, 9)]}),
        dtype,
        device=device,
    )
    expected = adapted.linear()
    x = adapted.x.clone()
    x[1] = torch.nan
    found = adapted.linear(x=x)
    others = torch.arange(len(x)) != 1
    assert torch.equal(found[others], expected[others])
    assert found[1].isnan().all()
    slot = 4
    assert {2, slot} <= set(adapted.slots.tolist())
    spoiled = [one._replace(b=torch.full_like(one.b, torch.nan)) for one in adapted.matrices[slot]]
    table = adapted.table_of(adapted.weight)
    kernels.set_adapter(table, slot, kernels.pack_adapter(adapted.weight, spoiled))
    found, others = adapted.linear(table=table), adapted.slots != slot
    assert torch.equal(found[others], expected[others])
    assert found[~others].isnan().all()


def assert_slots_change(kernels, dtype, device=None):
    """A slot has what was put into it last."""
    adapted = Adapted(kernels, CASES["q, k and v"], dtype, device=device)
    first = adapted.linear()
    kernels.set_adapter(adapted.table, 2, kernels.pack_adapter(adapted.weight, adapted.matrices[3]))
    kernels.set_adapter(adapted.table, 3, None)
    kernels.set_adapter(adapted.table, 1, kernels.pack_adapter(adapted.weight, adapted.matrices[5]))
    adapted.matrices = {1: adapted.matrices[5], 2: adapted.matrices[3], 5: adapted.matrices[5]}
    found = adapted.linear()
    assert not torch.equal(found, first)
    assert_near(found, *adapted.exact())
    for slot in (0, NUM_SLOTS + 1):
        with pytest.raises(IndexError, match=f"slot {slot}"):
            kernels.set_adapter(adapted.table, slot, None)


def assert_bytes_are_bounded(kernels, dtype, device=None):
    """Packed adapters have room for their numbers, and at most what the contract says."""
    for case in CASES.values():
        adapted = Adapted(kernels, case, dtype, device=device)
        for matrices in adapted.matrices.values():
            packed = kernels.pack_adapter(adapted.weight, matrices)
            numbers = sum(len(one.a) * case.inputs + len(one.b) * one.terms for one in matrices)
            bounds = [
                low_rank_bytes(len(one.a), len(one.b), case.inputs, dtype.itemsize, has_bias=one.bias is not None)
                for one in matrices
            ]
            assert numbers * dtype.itemsize <= packed.num_bytes <= sum(bounds)
            assert kernels.adapter_width(packed) >= max(one.terms for one in matrices)


UNFIT = {
    "columns": ([LowRank(torch.zeros(2, 9), torch.zeros(4, 2), 0, 1.0)], r"\(2, 9\)"),
    "rank": ([LowRank(torch.zeros(2, 8), torch.zeros(4, 3), 0, 1.0)], r"\(4, 3\)"),
    "no rank": ([LowRank(torch.zeros(0, 8), torch.zeros(4, 0), 0, 1.0)], r"\(0, 8\)"),
    "bias": ([LowRank(torch.zeros(2, 8), torch.zeros(4, 2), 0, 1.0, torch.zeros(3))], r"bias \(3,\)"),
    "rows": ([LowRank(torch.zeros(2, 8), torch.zeros(4, 2), 7, 1.0)], "7 to 11"),
    "rows before": ([LowRank(torch.zeros(2, 8), torch.zeros(4, 2), -1, 1.0)], "-1 to 3"),
    "overlap": ([LowRank(torch.zeros(1, 8), torch.zeros(4, 1), start, 1.0) for start in (5, 2)], "row 5"),
}


def assert_unfit_refused(kernels, name, device=None):
    """Matrices that do not fit a weight (10, 8) raise ValueError."""
    matrices, message = UNFIT[name]
    adapted = Adapted(kernels, Case(1, 8, 10, {1: [Piece(0, 10, 1)]}), torch.float32, device=device)
    with pytest.raises(ValueError, match=message):
        kernels.pack_adapter(adapted.weight, matrices)
