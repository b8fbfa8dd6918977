"""Adapters of products, in plain torch: the specification against float64, and the deterministic ones."""

import pytest
import torch
from low_rank_oracle import (
    CASES,
    SCHEMES,
    UNFIT,
    Adapted,
    assert_bytes_are_bounded,
    assert_exact,
    assert_nan_stays_alone,
    assert_rows_are_independent,
    assert_same_on_low_bit_weights,
    assert_slots_change,
    assert_unfit_refused,
)

from quire.kernels.deterministic import DETERMINISTIC
from quire.kernels.reference import REFERENCE

MODULES = {"reference": REFERENCE, "deterministic": DETERMINISTIC}
each_module = pytest.mark.parametrize("kernels", MODULES.values(), ids=MODULES)
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@each_module
@each_type
@pytest.mark.parametrize("name", CASES)
def test_products_with_adapters_are_those_of_float64(kernels, dtype, name):
    assert_exact(kernels, CASES[name], dtype)


@each_module
@each_type
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_low_bit_products_add_the_same(kernels, dtype, scheme):
    assert_same_on_low_bit_weights(kernels, dtype, scheme)


@each_type
@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_same_bits_in_any_company(dtype, name):
    assert_rows_are_independent(DETERMINISTIC, CASES[name], dtype)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rows_of_low_bit_products_have_the_same_bits_in_any_company(scheme):
    assert_rows_are_independent(DETERMINISTIC, CASES["gated"]._replace(inputs=64), torch.bfloat16, scheme=scheme)


@each_module
@each_type
def test_nan_changes_only_the_rows_that_have_it(kernels, dtype):
    assert_nan_stays_alone(kernels, dtype)


@each_module
@each_type
def test_a_slot_has_what_was_put_into_it_last(kernels, dtype):
    assert_slots_change(kernels, dtype)


@each_type
def test_packed_adapters_have_the_bytes_that_the_contract_allows(dtype):
    assert_bytes_are_bounded(REFERENCE, dtype)


@pytest.mark.parametrize("name", UNFIT)
def test_matrices_that_do_not_fit_are_refused(name):
    assert_unfit_refused(REFERENCE, name)


def test_a_width_below_that_of_an_adapter_is_refused():
    adapted = Adapted(REFERENCE, CASES["q, k and v"], torch.float32)
    adapted.width = 74
    with pytest.raises(ValueError, match="slot 2 needs a width of 75"):
        adapted.linear()
