"""Rowwise operations of the Triton kernels, against the reference."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE

from quire.kernels import reference
from quire.kernels.contract import ACTIVATIONS
from quire.kernels.reference.rowwise import gate

pytest.importorskip("triton")
rowwise = pytest.importorskip("quire.kernels.triton.rowwise")
writing = pytest.importorskip("quire.kernels.triton.writing")

ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # largest relative error
DTYPES = st.sampled_from(tuple(ROUNDING))
SIZES = st.sampled_from([1, 3, 16, 20, 64, 100, 128, 896, 1000])
SEEDS = st.integers(0, 2**32 - 1)
XIELU = [(0.8, 0.8, 0.5, -1e-6), (-1.3, 2.0, 0.25, -0.1), (3.0, -4.0, 0.0, 0.0)]  # a, b, beta and eps
drawn = settings(deadline=None, max_examples=8)


def exact_xielu(x, parameters):
    """xIELU in float64."""
    a, b, beta, eps = parameters.double()
    x, softplus = x.double(), torch.nn.functional.softplus
    below = (beta + softplus(b)) * (torch.expm1(x.minimum(eps)) - x)
    return torch.where(x > 0, softplus(a) * x**2, below) + beta * x


def _poisoned(*args, make=torch.empty, **kwargs):
    return make(*args, **kwargs).fill_(torch.nan)


@pytest.fixture(scope="module", autouse=True)
def poison():
    """torch.empty gives NaN, so that values which a kernel does not write are found."""
    with patch.object(torch, "empty", _poisoned):
        yield


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def close(result, expected, rtol=2e-6, atol=1e-6):
    """Asserts that a result equals one of float32 or more, up to an error and one rounding to its type."""
    assert result.shape == expected.shape
    rtol += 1.001 * ROUNDING[result.dtype]
    torch.testing.assert_close(result.double(), expected.double(), rtol=rtol, atol=atol)


def heads_of_product(x):
    """The same numbers as views of a wider product: (num_tokens, heads, head_dim) with gaps between tokens."""
    wide = torch.full((x.shape[0], x.shape[1] + 3, x.shape[2]), torch.nan, dtype=x.dtype, device=DEVICE)
    wide[:, 2:-1] = x
    return wide[:, 2:-1]


@drawn
@given(SEEDS, st.integers(1, 40), SIZES, DTYPES, st.booleans())
def test_rms_norm_is_that_of_the_reference(seed, rows, size, dtype, wide_weight):
    x = normal(seed, rows, size, dtype=dtype)
    weight = normal(seed + 1, size, dtype=torch.float32 if wide_weight else dtype)
    before = x.clone()
    close(rowwise.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))
    assert torch.equal(x, before)


@drawn
@given(SEEDS, st.integers(1, 20), st.integers(1, 5), SIZES, DTYPES, st.booleans())
def test_norms_take_heads_that_are_views_into_a_product(seed, rows, heads, size, dtype, biased):
    x, weight = normal(seed, rows, heads, size, dtype=dtype), normal(seed + 1, heads, size, dtype=dtype)
    bias = normal(seed + 2, heads, size, dtype=dtype) if biased else None
    view, wide_bias = heads_of_product(x), bias.double() if biased else None
    close(rowwise.rms_norm(view, weight[0], 1e-5), reference.rms_norm(x.double(), weight[0].double(), 1e-5))
    expected = reference.layer_norm(x.double(), weight.double(), wide_bias, 1e-5)
    near_zero = 1e-5 if size > 3 else 1e-3  # equal numbers: the result is only error
    close(rowwise.layer_norm(view, weight, bias, 1e-5), expected, atol=near_zero)
    flat = view.transpose(0, 1)  # no two of its axes can be merged
    close(rowwise.rms_norm(flat, weight[0], 1e-5), reference.rms_norm(flat.double(), weight[0].double(), 1e-5))


@drawn
@given(SEEDS, st.integers(1, 40), SIZES, DTYPES, st.booleans())
def test_the_sum_is_rounded_before_it_is_normalised(seed, rows, size, dtype, wide_weight):
    x, residual = normal(seed, rows, size, dtype=dtype), 30 * normal(seed + 1, rows, size, dtype=dtype)
    weight = normal(seed + 2, size, dtype=torch.float32 if wide_weight else dtype)
    before = x.clone(), residual.clone()
    normed, total = rowwise.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    close(normed, reference.rms_norm(total.double(), weight.double(), 1e-6))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@drawn
@given(SEEDS, st.integers(1, 20), SIZES, DTYPES)
def test_sums_may_be_of_views(seed, rows, size, dtype):
    x, residual = normal(seed, rows, 2 * size, dtype=dtype).chunk(2, 1)
    weight = normal(seed + 1, 2 * size, dtype=dtype)[::2]
    normed, total = rowwise.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    close(normed, reference.rms_norm(total.double(), weight.double(), 1e-6))


@drawn
@given(SEEDS, st.integers(1, 40), SIZES, DTYPES, st.booleans(), st.booleans())
def test_layer_norm_is_that_of_the_reference(seed, rows, size, dtype, biased, wide_weight):
    x, weight = 3 + normal(seed, rows, size, dtype=dtype), normal(seed + 1, size, dtype=dtype)
    bias = normal(seed + 2, size, dtype=dtype) if biased else None
    if wide_weight:
        weight = weight.float() + 1e-4
    expected = reference.layer_norm(x.double(), weight.double(), bias.double() if biased else None, 1e-5)
    close(rowwise.layer_norm(x, weight, bias, 1e-5), expected, atol=2e-5 if size > 3 else 2e-3)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [4096, 5120, 32768])
def test_rows_may_be_as_long_as_those_of_large_models(size, dtype):
    x, weight = normal(0, 3, size, dtype=dtype), normal(1, size, dtype=dtype)
    close(rowwise.rms_norm(x, weight, 1e-6), reference.rms_norm(x.double(), weight.double(), 1e-6))
    normed, total = rowwise.add_rms_norm(x, x.flip(0), weight, 1e-6)
    assert torch.equal(total, x + x.flip(0))
    close(normed, reference.rms_norm(total.double(), weight.double(), 1e-6))
    expected = reference.layer_norm(x.double(), weight.double(), weight.double(), 1e-6)
    close(rowwise.layer_norm(x, weight, weight, 1e-6), expected)


@pytest.mark.parametrize("size", [20, 128])
def test_nan_changes_no_other_row(size):
    x, weight = normal(0, 20, size), normal(1, size)
    spoilt = x.clone()
    spoilt[7, 3] = torch.nan
    others = torch.arange(20, device=DEVICE) != 7
    for norm in (
        lambda x: rowwise.rms_norm(x, weight, 1e-5),
        lambda x: rowwise.add_rms_norm(x, x, weight, 1e-5)[0],
        lambda x: rowwise.layer_norm(x, weight, weight, 1e-5),
    ):
        found = norm(spoilt)
        assert torch.equal(found[others], norm(x)[others])
        assert found[7].isnan().all()


@drawn
@given(SEEDS, st.integers(1, 12), st.sampled_from([1, 20, 96, 1000, 1500]), DTYPES, st.sampled_from(ACTIVATIONS))
def test_activations_and_gates_are_those_of_the_reference(seed, rows, size, dtype, activation):
    x = 4 * normal(seed, rows, 2 * size, dtype=dtype)
    close(rowwise.activate(x, activation), reference.activate(x.double(), activation), atol=2e-6)
    expected = gate(x.double(), activation)
    close(rowwise.gate(x, activation), expected, atol=1e-5)
    close(rowwise.gate(torch.cat((x, x), 1)[:, : 2 * size], activation), expected, atol=1e-5)
    close(rowwise.gate(x.T.contiguous().T, activation), expected, atol=1e-5)
    close(rowwise.activate(x[:, ::2], activation), reference.activate(x[:, ::2].double(), activation), atol=2e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_precise_far_out_and_near_zero(activation):
    small = torch.logspace(-20, 0, 500)
    x = torch.cat((torch.linspace(-12, 12, 4001), small, -small)).to(DEVICE)
    exact = reference.activate(x.double(), activation).float()
    lost = 1e-6 if activation == "gelu" else 1e-12  # cancellation in 1 + erf of a negative number
    torch.testing.assert_close(rowwise.activate(x, activation), exact, rtol=1e-5, atol=lost)
    far = torch.tensor([1e3, 6e4, 1e15, -1e3, -6e4, -1e15], device=DEVICE)
    exact = reference.activate(far.double(), activation).float()
    torch.testing.assert_close(rowwise.activate(far, activation), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_nan(activation, dtype):
    x = torch.zeros(50, dtype=dtype, device=DEVICE)
    x[[3, 49]] = torch.nan
    assert rowwise.activate(x, activation).isnan().nonzero().flatten().tolist() == [3, 49]
    assert rowwise.gate(x.view(1, 50), activation).isnan().nonzero().tolist() == [[0, 3], [0, 24]]


@drawn
@given(SEEDS, st.integers(1, 12), st.sampled_from([1, 20, 1000, 1500]), DTYPES, st.sampled_from(XIELU))
def test_xielu_is_that_of_float64(seed, rows, size, dtype, parameters):
    x, parameters = 3 * normal(seed, rows, size, dtype=dtype), torch.tensor(parameters, device=DEVICE)
    found = rowwise.xielu(x, parameters)
    close(found, exact_xielu(x, parameters))
    assert torch.equal(found, rowwise.xielu(x.float(), parameters).to(dtype)), "rounded once"
    assert torch.equal(rowwise.xielu(torch.cat((x, x), 1)[:, :size], parameters), found)


@pytest.mark.parametrize("parameters", XIELU)
def test_xielu_is_precise_far_out_and_near_zero(parameters):
    small = torch.logspace(-20, 0, 500)
    x, parameters = torch.cat((torch.linspace(-30, 12, 4001), small, -small)).to(DEVICE), torch.tensor(parameters)
    found = rowwise.xielu(x, parameters.to(DEVICE))
    torch.testing.assert_close(found.cpu(), exact_xielu(x.cpu(), parameters).float(), rtol=5e-6, atol=1e-7)
    some = torch.tensor([1.0, torch.nan, -1], device=DEVICE)
    assert rowwise.xielu(some, parameters.to(DEVICE)).isnan().tolist() == [False, True, False]


@drawn
@given(SEEDS, st.integers(1, 12), st.sampled_from([1, 2, 5]), SIZES, DTYPES, st.booleans(), st.data())
def test_products_with_factors_and_sums_are_rounded_once(seed, rows, parts, size, dtype, wide_factors, data):
    x, addend = (normal(seed + i, rows, parts * size, dtype=dtype) for i in range(2))
    table = normal(seed + 2, rows, parts, dtype=torch.float32 if wide_factors else dtype)
    factors = data.draw(st.sampled_from([table, torch.cat((table, table), 1)[:, parts:], table[:1], -0.37, 1.0]))
    wide = torch.cat((x, addend), 1)  # views of wider rows
    view, addend_view = wide[:, : parts * size], wide[:, parts * size :]
    for given_addend, its_view in ((None, None), (addend, addend_view)):
        found = rowwise.multiply_add(view, factors, its_view)
        assert found.dtype == dtype
        exact_addend = None if given_addend is None else given_addend.float()
        in_floats = factors.float() if isinstance(factors, torch.Tensor) else factors
        close(found, reference.multiply_add(x.float(), in_floats, exact_addend), atol=3e-6)
        assert torch.equal(found, rowwise.multiply_add(x.float(), in_floats, exact_addend).to(dtype))


@drawn
@given(SEEDS, st.integers(1, 9), st.integers(1, 9), st.integers(1, 70), DTYPES, st.data())
def test_heads_are_rotated_as_in_the_reference(seed, rows, heads, size, dtype, data):
    x = normal(seed, rows, heads, size, dtype=dtype)
    half = data.draw(st.integers(0, size // 2))
    angles = 3 * normal(seed + 1, rows, half)
    rotation = angles.cos(), angles.sin()
    found = writing.rotate(heads_of_product(x), rotation)
    close(found, reference.rotate(x.float(), rotation), atol=2e-6)
    assert torch.equal(found, writing.rotate(x.float(), rotation).to(dtype))
    assert torch.equal(found[..., 2 * half :], x[..., 2 * half :])


@drawn
@given(SEEDS, st.integers(1, 40), st.integers(1, 70), st.sampled_from([1.0, 1.37]))
def test_rotations_are_those_of_exact_cosines(seed, rows, half, magnitude):
    random = np.random.default_rng(seed)
    positions = random.integers(0, 10 ** random.integers(1, 7), rows)
    positions[0] = 999_983
    frequencies = (10.0 ** -random.uniform(0, 6, half)).astype(np.float32)
    frequencies[0] = 1
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    on_device = torch.from_numpy(positions).to(DEVICE), torch.from_numpy(frequencies).to(DEVICE)
    cos, sin = rowwise.rotation(*on_device, magnitude)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (rows, half)
    assert np.abs(cos.cpu().numpy() - magnitude * np.cos(angles)).max() < 2e-7
    assert np.abs(sin.cpu().numpy() - magnitude * np.sin(angles)).max() < 2e-7


def test_the_first_position_is_not_rotated():
    cos, sin = rowwise.rotation(torch.zeros(1, dtype=torch.int64, device=DEVICE), normal(0, 30).abs(), 1.0)
    assert (cos == 1).all()
    assert (sin == 0).all()


@drawn
@given(SEEDS, st.integers(2, 40), SIZES, DTYPES, st.data())
def test_a_row_has_the_same_bits_alone_and_in_company(seed, rows, size, dtype, data):
    x, weight = 4 * normal(seed, rows, 2 * size, dtype=dtype), normal(seed + 1, 2 * size, dtype=dtype)
    one = data.draw(st.integers(0, rows - 1))
    activation = data.draw(st.sampled_from(ACTIVATIONS))
    for function in (
        lambda x: rowwise.rms_norm(x, weight, 1e-5),
        lambda x: rowwise.add_rms_norm(x, x.flip(1), weight, 1e-5)[0],
        lambda x: rowwise.layer_norm(x, weight, weight, 1e-5),
        lambda x: rowwise.gate(x, activation),
        lambda x: rowwise.activate(x, activation),
        lambda x: rowwise.rotation((1e4 * x[:, 0].float().abs()).long(), weight.float().abs(), 1.0)[0],
    ):
        together = function(x)
        assert torch.equal(function(x), together)
        assert torch.equal(function(x[one : one + 1].clone()), together[one : one + 1])
        assert torch.equal(function(x[one:].clone()), together[one:])


@settings(drawn, max_examples=4)
@given(SEEDS, st.integers(2, 9), SIZES, DTYPES, st.data())
def test_a_row_of_heads_or_parts_has_the_same_bits_alone_and_in_company(seed, rows, size, dtype, data):
    x, half = 4 * normal(seed, rows, 2 * size, dtype=dtype), size // 2
    one = data.draw(st.integers(0, rows - 1))
    for function in (
        lambda x: rowwise.xielu(x, torch.tensor(XIELU[0], device=DEVICE)),
        lambda x: rowwise.multiply_add(x, x[:, -2:], x.flip(1)),
        lambda x: writing.rotate(x.view(len(x), 2, size), (x[:, :half].float(), x.flip(1)[:, :half].float())),
    ):
        together = function(x)
        assert torch.equal(function(x[one : one + 1].clone()), together[one : one + 1])
        assert torch.equal(function(x[one:].clone()), together[one:])


def test_no_rows_give_no_rows():
    x, weight = torch.zeros(0, 20, device=DEVICE), torch.ones(20, device=DEVICE)
    assert rowwise.rms_norm(x, weight, 1e-5).shape == (0, 20)
    assert rowwise.layer_norm(x, weight, None, 1e-5).shape == (0, 20)
    assert rowwise.gate(x, "silu").shape == (0, 10)
    assert rowwise.activate(x, "silu").shape == (0, 20)
    assert rowwise.xielu(x, torch.zeros(4, device=DEVICE)).shape == (0, 20)
    assert rowwise.multiply_add(x, 2.0, x).shape == (0, 20)
    none = torch.zeros(0, 5, device=DEVICE)
    assert writing.rotate(x.view(0, 2, 10), (none, none)).shape == (0, 2, 10)


def test_shapes_and_types_that_do_not_match_are_refused():
    x = torch.zeros(2, 4, device=DEVICE)
    for other in (torch.zeros(3, 4, device=DEVICE), x.half()):
        with pytest.raises(ValueError, match="do not match"):
            rowwise.add_rms_norm(x, other, torch.ones(4, device=DEVICE), 1e-5)
    for cos, sin in ((3, 2), (3, 2)), ((2, 1), (2, 2)), ((2, 2), (2, 2)):
        with pytest.raises(ValueError, match="do not match"):
            writing.rotate(torch.zeros(2, 3, 3), (torch.zeros(cos), torch.zeros(sin)))
    for function in (rowwise.activate, rowwise.gate):
        with pytest.raises(ValueError, match="'swish' is not one of silu, "):
            function(x, "swish")
