"""Matrix products and embedding rows by the Triton kernels, against float64."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE
from triton_random_tensors import DTYPES, ROUNDING, SEEDS, drawn, normal, poisoned_empty, weight_of

from quire.kernels import reference
from quire.kernels.contract import ACTIVATIONS, PackedWeight

pytest.importorskip("triton")
products = pytest.importorskip("quire.kernels.triton.products")

ROWS = st.sampled_from([1, 2, 5, 16, 17, 64, 65, 100])
SIZES = st.sampled_from([1, 3, 16, 20, 33, 64, 65, 130])


@pytest.fixture(scope="module", autouse=True)
def poison():
    """torch.empty gives NaN, so that values which a kernel does not write are found."""
    with patch.object(torch, "empty", poisoned_empty):
        yield


def assert_near(found, expected, error):
    """Asserts that `found` differs from `expected` (float64) by at most `error` and one rounding to its type."""
    assert found.shape == expected.shape
    distance = (found.double() - expected).abs()
    assert (distance <= error + 1.01 * ROUNDING[found.dtype] * expected.abs() + 1e-7).all(), distance.max()


def exact(x, weight, bias=None):
    """A product in float64, and an error bound for sequential float32 sums."""
    x, weight = x.double(), weight.double()
    bias = torch.zeros(len(weight), dtype=torch.float64, device=DEVICE) if bias is None else bias.double()
    return x @ weight.T + bias, (x.shape[1] + 2) * 2**-23 * (x.abs() @ weight.abs().T + bias.abs())


def assert_gated(found, x, weight, bias, activation):
    """Asserts that `found` is the gated product. Gates and gated values are rounded before the multiplication."""
    (gates, gated), (near_gates, near_gated) = (both.chunk(2, 1) for both in exact(x, weight, bias))
    each = near_gates + 1.01 * ROUNDING[found.dtype] * gates.abs()
    shares = [reference.activate(gates + shift, activation) for shift in (-each, 0, each)]
    error = torch.maximum(*((shares[1] - other).abs() for other in shares[::2])) + 2e-6 * shares[1].abs() + 1e-6
    each_gated = near_gated + 1.01 * ROUNDING[found.dtype] * gated.abs()
    assert_near(found, shares[1] * gated, error * (gated.abs() + each_gated) + shares[1].abs() * each_gated)


@drawn
@given(SEEDS, ROWS, SIZES, SIZES, DTYPES, st.booleans())
def test_strict_products_are_those_of_float64_rounded_once(seed, rows, n, k, dtype, biased):
    x, weight = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, n, k, dtype=dtype)
    bias = normal(seed + 2, n, dtype=dtype) if biased else None
    found = products.linear(x, weight, bias, deterministic=True)
    assert found.dtype == dtype
    assert_near(found, *exact(x, weight, bias))


@drawn
@given(SEEDS, ROWS, SIZES, SIZES, DTYPES)
def test_ordinary_products_are_those_of_float64(seed, rows, n, k, dtype):
    x, weight, bias = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, n, k, dtype=dtype), normal(seed + 2, n)
    expected, error = exact(x, weight, bias.to(dtype))
    found = products.linear(x, weight, bias.to(dtype), deterministic=False)
    assert_near(found, expected, error + 4 * ROUNDING[dtype] * (1 + expected.abs()))  # libraries may round in between


@drawn
@given(SEEDS, ROWS, SIZES, SIZES, DTYPES, st.booleans(), st.sampled_from(ACTIVATIONS))
def test_gated_products_are_those_of_float64(seed, rows, n, k, dtype, biased, activation):
    x, weight = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, 2 * n, k, dtype=dtype)
    bias = normal(seed + 2, 2 * n, dtype=dtype) if biased else None
    found = products.gated_linear(x, weight, bias, activation, deterministic=True)
    assert found.dtype == dtype
    assert_gated(found, x, weight, bias, activation)
    ordinary = products.gated_linear(x, weight, bias, activation, deterministic=False)
    error = 1e-5 + 16 * ROUNDING[dtype]
    assert (ordinary.double() - found.double()).abs().max() <= error * (1 + found.double().abs().max())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("rows", "n", "k"), [(3, 896, 896), (70, 150, 1000), (600, 70, 20)])
def test_products_of_real_sizes_are_those_of_float64(rows, n, k, dtype):
    x, weight, bias = normal(0, rows, k, dtype=dtype), weight_of(1, n, k, dtype=dtype), normal(2, n, dtype=dtype)
    assert_near(products.linear(x, weight, bias, deterministic=True), *exact(x, weight, bias))


@drawn
@given(SEEDS, ROWS, SIZES, SIZES, DTYPES, st.integers(0, 3), st.integers(0, 3))
def test_rows_may_be_a_view_into_a_wider_tensor(seed, rows, n, k, dtype, before, behind):
    x, weight = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, n, k, dtype=dtype)
    wide = torch.full((rows, before + k + behind), torch.nan, dtype=dtype, device=DEVICE)
    wide[:, before : before + k] = x
    for view in (wide[:, before : before + k], x.T.contiguous().T):
        assert_near(products.linear(view, weight, None, deterministic=True), *exact(x, weight))
    transposed = weight.T.contiguous().T
    assert_near(
        products.linear(x, transposed, normal(0, 2 * n, dtype=dtype)[::2], deterministic=True),
        *exact(x, weight, normal(0, 2 * n, dtype=dtype)[::2]),
    )


@settings(drawn, max_examples=6)
@given(SEEDS, st.sampled_from([2, 17, 70]), SIZES, SIZES, DTYPES, st.sampled_from(ACTIVATIONS), st.data())
def test_strict_products_have_the_same_bits_alone_and_in_any_company(seed, rows, n, k, dtype, activation, data):
    x, weight = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, 2 * n, k, dtype=dtype)
    bias = normal(seed + 2, 2 * n, dtype=dtype)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    for product in (
        lambda x: products.linear(x, weight, bias, deterministic=True),
        lambda x: products.gated_linear(x, weight, bias, activation, deterministic=True),
    ):
        together = product(x)
        assert torch.equal(product(x), together)
        assert torch.equal(product(x[start:stop].clone()), together[start:stop])
        assert torch.equal(product(x[start : start + 1].clone()), together[start : start + 1])
        assert torch.equal(product(x.roll(5, 0)), together.roll(5, 0))


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_long_row_has_the_same_bits_in_any_company(dtype):
    x, weight = normal(0, 70, 1000, dtype=dtype), weight_of(1, 100, 1000, dtype=dtype)
    together = products.linear(x, weight, None, deterministic=True)
    for one in (0, 15, 16, 63, 64, 69):
        assert torch.equal(
            products.linear(x[one : one + 1].clone(), weight, None, deterministic=True)[0], together[one]
        )


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter: inf * 0
@drawn
@given(SEEDS, ROWS, SIZES, DTYPES, st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.data())
def test_a_value_that_is_not_finite_changes_no_other_row(seed, rows, k, dtype, value, data):
    x, weight = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, 40, k, dtype=dtype)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, k - 1))
    spoilt = x.clone()
    spoilt[row, column] = value
    others = torch.arange(rows, device=DEVICE) != row
    found = products.linear(spoilt, weight, None, deterministic=True)
    assert torch.equal(found[others], products.linear(x, weight, None, deterministic=True)[others])
    assert not found[row].isfinite().any()


@drawn
@given(SEEDS, st.integers(1, 20), st.sampled_from([1, 20, 96, 896, 1000, 2050]), DTYPES, st.sampled_from([1.0, 45.25]))
def test_embeddings_are_rows_times_a_factor_and_zeros_for_others(seed, count, size, dtype, scale):
    weight = normal(seed, 19, size, dtype=dtype)
    ids = torch.randint(-3, 23, (2 * count,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)[::2]
    inside = (ids >= 0) & (ids < 19)
    zero = torch.zeros((), dtype=dtype, device=DEVICE)
    expected = torch.where(inside[:, None], weight[ids.clamp(0, 18)] * scale, zero)
    assert torch.equal(products.embed(ids, weight, scale), expected)


def test_ids_far_outside_give_zeros():
    ids = torch.tensor([2**62, -(2**62), -1, 3, 1], device=DEVICE)
    weight = normal(0, 3, 20)
    found = products.embed(ids, weight)
    assert torch.equal(found[4], weight[1])
    assert (found[:4] == 0).all()


def test_no_rows_give_no_rows():
    x, weight = torch.zeros(0, 64, device=DEVICE), weight_of(1, 40, 64, dtype=torch.float32)
    for strict in (False, True):
        assert products.linear(x, weight, None, deterministic=strict).shape == (0, 40)
        assert products.gated_linear(x, weight, None, "silu", deterministic=strict).shape == (0, 20)
    no_ids = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert products.embed(no_ids, weight).shape == (0, 64)


def test_weights_of_other_modules_are_refused():
    x, packed = torch.zeros(1, 4, device=DEVICE), PackedWeight(torch.zeros(4, 4, device=DEVICE), 4, 4, torch.float32)
    for strict in (False, True):
        with pytest.raises(TypeError, match="packed by another kernel module"):
            products.linear(x, packed, None, deterministic=strict)
