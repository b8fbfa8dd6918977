"""Adapters of products by the Triton kernels, against float64."""

from unittest.mock import patch

import pytest
import torch
from low_rank_oracle import (
    CASES,
    UNFIT,
    Adapted,
    assert_bytes_are_bounded,
    assert_exact,
    assert_nan_stays_alone,
    assert_near,
    assert_rows_are_independent,
    assert_same_on_low_bit_weights,
    assert_slots_change,
    assert_unfit_refused,
)
from triton_device import DEVICE
from triton_random_tensors import poisoned_empty

from quire.kernels.contract import FP8, INT4, INT8, Scheme

pytest.importorskip("triton")
from quire.kernels.triton import low_rank
from quire.kernels.triton.deterministic import TRITON_DETERMINISTIC
from quire.kernels.triton.kernels import TRITON

MODULES = {"ordinary": TRITON, "deterministic": TRITON_DETERMINISTIC}
each_module = pytest.mark.parametrize("kernels", MODULES.values(), ids=MODULES)
TYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def poison():
    """torch.empty gives NaN, so that values which a kernel does not write are found."""
    with patch.object(torch, "empty", poisoned_empty):
        yield


@each_module
@pytest.mark.parametrize("name", CASES)
def test_products_with_adapters_are_those_of_float64(kernels, name):
    """Each case in one type with the ordinary kernels, and in the other one with the deterministic ones."""
    dtype = TYPES[(list(CASES).index(name) + (kernels is TRITON)) % 2]
    assert_exact(kernels, CASES[name], dtype, DEVICE)


def test_products_with_adapters_in_float16_are_those_of_float64():
    assert_exact(TRITON, CASES["odd places"], torch.float16, DEVICE)


@pytest.mark.parametrize(
    ("kernels", "scheme"),
    [(TRITON, INT8), (TRITON_DETERMINISTIC, Scheme(4, 32, torch.bfloat16, has_offsets=True)), (TRITON, FP8)],
    ids=["int8", "deterministic, int4 with offsets", "fp8"],
)
def test_low_bit_products_add_the_same(kernels, scheme):
    assert_same_on_low_bit_weights(kernels, torch.bfloat16, scheme, DEVICE)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mixed ranks", torch.bfloat16), ("q, k and v", torch.float32), ("odd places", torch.bfloat16)],
    ids=str,
)
def test_rows_have_the_same_bits_in_any_company(name, dtype):
    assert_rows_are_independent(TRITON_DETERMINISTIC, CASES[name], dtype, device=DEVICE)


@pytest.mark.parametrize("scheme", [INT4, FP8], ids=str)
def test_rows_of_low_bit_products_have_the_same_bits_in_any_company(scheme):
    case = CASES["gated"]._replace(inputs=64)
    assert_rows_are_independent(TRITON_DETERMINISTIC, case, torch.bfloat16, scheme=scheme, device=DEVICE)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_without_adapters_have_the_bits_of_products_without_an_addend(dtype):
    adapted = Adapted(TRITON, CASES["q, k and v"], dtype, device=DEVICE)
    found, plain = adapted.linear(), TRITON.linear(adapted.x, adapted.weight, adapted.bias)
    assert torch.equal(found[adapted.slots == 0], plain[adapted.slots == 0])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter
@each_module
def test_nan_changes_only_the_rows_that_have_it(kernels):
    assert_nan_stays_alone(kernels, torch.bfloat16, DEVICE)


def test_a_slot_has_what_was_put_into_it_last():
    assert_slots_change(TRITON, torch.bfloat16, DEVICE)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed_adapters_have_the_bytes_that_the_contract_allows(dtype):
    assert_bytes_are_bounded(TRITON, dtype, DEVICE)


@pytest.mark.parametrize("name", UNFIT)
def test_matrices_that_do_not_fit_are_refused(name):
    assert_unfit_refused(TRITON, name, DEVICE)


def test_tiles_of_many_rows_are_not_shared_and_have_the_same_bits(monkeypatch):
    adapted = Adapted(TRITON, CASES["more than a tile"]._replace(inputs=40), torch.bfloat16, device=DEVICE)
    shared = adapted.linear()
    monkeypatch.setattr(low_rank, "MANY_ROWS", 0)
    assert torch.equal(adapted.linear(), shared)
    assert_near(shared, *adapted.exact())


def test_rows_may_be_a_view_into_a_wider_tensor():
    adapted = Adapted(TRITON, CASES["q, k and v"], torch.float32, device=DEVICE)
    expected = TRITON.low_rank(adapted.x, adapted.table, adapted.slots, adapted.width)
    wide = torch.full((len(adapted.x), 100), torch.nan, device=DEVICE)
    wide[:, 7 : 7 + adapted.case.inputs] = adapted.x
    slots = torch.stack((adapted.slots, adapted.slots), 1)[:, 0]
    view = wide[:, 7 : 7 + adapted.case.inputs]
    assert torch.equal(TRITON.low_rank(view, adapted.table, slots, adapted.width), expected)


def test_a_captured_step_reads_the_contents_of_a_table_at_a_fixed_address():
    adapted = Adapted(TRITON, CASES["q, k and v"], torch.float32, device=DEVICE)
    addresses = adapted.table.addresses
    before = addresses.data_ptr()
    for matrices in (adapted.matrices[3], adapted.matrices[5]):
        packed = TRITON.pack_adapter(adapted.weight, matrices)
        TRITON.set_adapter(adapted.table, 2, packed)
        assert addresses[2] == packed.data.data_ptr()
    TRITON.set_adapter(adapted.table, 2, None)
    assert addresses.tolist()[:3] == [0, 0, 0]
    assert adapted.table.addresses.data_ptr() == before
