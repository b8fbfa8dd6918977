"""Kernels give the same results with block tables on the device as with tables in the batch."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from triton_attention_cases import Case, resident
from triton_device import DEVICE
from triton_kernel_pairs import Pair, group_of

from quire.kernels.contract import Batch, ResidentTables
from quire.kernels.triton import attention as module
from quire.kernels.triton import blocks
from quire.kernels.triton.plan import plan as make_plan
from quire.kernels.triton.plan import refill

ROWS = (5, 0, 2)


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty gives NaN, so that values which a kernel does not write are found."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("window", [0, 40])
def test_attention_looks_its_table_up(split, window, monkeypatch):
    if split:
        for name, value in {"MIN_SPLIT_KEYS": 8, "KEY_BYTES": 1, "WAVES": 1000}.items():
            monkeypatch.setattr(module, name, value)
    case = Case(31, [(60, 61), (0, 20), (17, 20)], kv_heads=2, shared=1, dim=20, window=window)
    plan = make_plan(resident(case.batch(), ROWS, 7), case.storage)
    assert torch.equal(case.check(plan), case.run())


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_keys_and_values_are_written_through_it(stored):
    ours, theirs = Pair(group_of(stored), 16, seed=5), Pair(group_of(stored), 16, seed=5)
    batch = Batch(np.array([14, 32, 7]), np.array([20, 33, 8]), np.array([[4, 9, -1], [-1, -1, 2], [-1, -1, -1]]))
    q, k, v = ours.qkv(8, 3, torch.float32)
    rotation = ours.rotation(8, 4)
    for pair, wanted in ((ours, resident(batch, ROWS, 6)), (theirs, batch)):
        blocks.rotary_write(pair.fast, 1, q, k, v, rotation, make_plan(wanted, pair.fast))
    assert torch.equal(ours.fast.data.view(torch.uint8), theirs.fast.data.view(torch.uint8))


def test_a_plan_is_refilled_with_other_rows_of_tables_that_grew():
    """As in a captured step, all its inputs keep their addresses."""
    case = Case(32, [(40, 41), (95, 96)], kv_heads=1)
    tables = torch.full((4, 7), -1, dtype=torch.int32, device=DEVICE)
    rows = np.array([1, 3])

    def batch():
        spans = np.array(case.spans)
        return Batch(spans[:, 0].copy(), spans[:, 1].copy(), np.empty((2, 0), np.int64), ResidentTables(tables, rows))

    tables[1, :3] = torch.from_numpy(case.tables[0, :3]).int()
    tables[3, :6] = torch.from_numpy(case.tables[1, :6]).int()
    plan = make_plan(batch(), case.storage, width=7)
    assert plan.max_context == 7 * 16
    assert plan.tables is tables
    case.check(plan)
    addresses = [x.data_ptr() for x in (plan.packed_columns, plan.table_rows, plan.tables)]
    assert not any(address % 16 for address in addresses)
    other = Case(33, [(70, 71), (10, 11)], kv_heads=1)
    tables[[3, 2]] = -1
    tables[2, :5] = torch.from_numpy(other.tables[0, :5]).int()
    tables[1, :1] = torch.from_numpy(other.tables[1, :1]).int()
    case, rows = other, np.array([2, 1])
    refill(plan, batch())
    other.check(plan)
    assert addresses == [x.data_ptr() for x in (plan.packed_columns, plan.table_rows, plan.tables)]


def test_a_row_without_blocks_is_written_nowhere_and_gives_numbers():
    case = Case(34, [(50, 51)], kv_heads=1)
    expected, before = case.expected(), case.storage.data.clone()
    tables = torch.full((3, 4), -1, dtype=torch.int32, device=DEVICE)
    tables[0] = torch.from_numpy(case.tables[0, :4]).int()
    batch = Batch(
        np.array([50, 0]), np.array([51, 1]), np.empty((2, 0), np.int64), ResidentTables(tables, np.array([0, 2]))
    )
    plan = make_plan(batch, case.storage)
    case.q.append(case.draw(1, 2, 64))
    out = case.run(plan)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:1].double(), expected, atol=2e-5, rtol=1e-4)
    only = Batch(np.array([0]), np.array([1]), np.empty((1, 0), np.int64), ResidentTables(tables, np.array([2])))
    k = torch.ones(1, 1, 64, device=DEVICE)
    blocks.rotary_write(case.storage, 1, k, k, k, None, make_plan(only, case.storage))
    assert torch.equal(case.storage.data.view(torch.int32), before.view(torch.int32))


def test_tables_of_the_other_kind_are_refused():
    case = Case(35, [(3, 4)], kv_heads=1, dim=16)
    kinds = case.batch(), resident(case.batch(), [0], 1)
    for one, other in (kinds, kinds[::-1]):
        with pytest.raises(ValueError, match="one kind of tables"):
            refill(make_plan(one, case.storage), other)
