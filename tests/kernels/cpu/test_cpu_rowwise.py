"""Rowwise operations of the CPU kernels, against the reference, for every build and number of threads."""

import numpy as np
import pytest
import torch
from cpu_kernel_builds import each_with, in_use
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import reference
from quire.kernels.contract import ACTIVATIONS
from quire.kernels.reference.rowwise import gate

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
cpu = pytest.importorskip("quire.kernels.cpu.rowwise")

DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = st.one_of(st.integers(1, 200), st.sampled_from([512, 1000, 3000]))
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", params=each_with(1, 2))
def build(request):
    with in_use(request.param) as threads:
        yield threads


pytestmark = pytest.mark.usefixtures("build")
drawn = settings(deadline=None, max_examples=10)


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(result, expected, atol=1e-6):
    """Asserts that a result equals one computed in float32, up to one rounding to its type."""
    assert result.shape == expected.shape
    assert expected.dtype == torch.float32
    rtol = 2**-8 if result.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(result.float(), expected, rtol=rtol, atol=atol)


XIELU = [(0.8, 0.8, 0.5, -1e-6), (-1.3, 2.0, 0.25, -0.1), (3.0, -4.0, 0.0, 0.0)]  # a, b, beta and eps


def exact_xielu(x, parameters):
    """xIELU in float64."""
    a, b, beta, eps = parameters.double()
    x, softplus = x.double(), torch.nn.functional.softplus
    below = (beta + softplus(b)) * (torch.expm1(x.minimum(eps)) - x)
    return torch.where(x > 0, softplus(a) * x**2, below) + beta * x


def heads_of_product(x):
    """The same numbers as views of a wider product: (num_tokens, heads, head_dim) with gaps between tokens."""
    wide = torch.full((x.shape[0], x.shape[1] + 3, x.shape[2]), torch.nan, dtype=x.dtype)
    wide[:, 2:-1] = x
    return wide[:, 2:-1]


@drawn
@given(SEEDS, st.integers(1, 40), WIDTHS, st.sampled_from(DTYPES), st.booleans())
def test_rms_norm_is_that_of_the_reference(seed, rows, size, dtype, wide_weight):
    x, weight = (
        normal(seed, rows, size, dtype=dtype),
        normal(seed + 1, size, dtype=torch.float32 if wide_weight else dtype),
    )
    expected = reference.rms_norm(x.float(), weight.float(), 1e-5)
    close(cpu.rms_norm(x, weight, 1e-5), expected)
    assert torch.equal(cpu.rms_norm(x.view(rows, 1, size), weight, 1e-5)[:, 0], cpu.rms_norm(x, weight, 1e-5))


@drawn
@given(SEEDS, st.integers(1, 40), st.integers(1, 5), WIDTHS, st.sampled_from(DTYPES))
def test_norms_take_heads_that_are_views_into_a_product(seed, rows, heads, size, dtype):
    x, weight = normal(seed, rows, heads, size, dtype=dtype), normal(seed + 1, heads, size, dtype=dtype)
    view = heads_of_product(x)
    assert torch.equal(cpu.rms_norm(view, weight[0], 1e-5), cpu.rms_norm(x, weight[0], 1e-5))
    assert torch.equal(cpu.layer_norm(view, weight, None, 1e-5), cpu.layer_norm(x, weight, None, 1e-5))
    expected = reference.layer_norm(x.float(), weight.float(), weight.flip(0).float(), 1e-5)
    close(cpu.layer_norm(view, weight, weight.flip(0), 1e-5), expected, atol=1e-5)


@drawn
@given(SEEDS, st.integers(1, 40), WIDTHS, st.sampled_from(DTYPES), st.booleans())
def test_the_sum_is_rounded_before_it_is_normalised(seed, rows, size, dtype, wide_weight):
    x, residual = normal(seed, rows, size, dtype=dtype), 30 * normal(seed + 1, rows, size, dtype=dtype)
    weight = normal(seed + 2, size, dtype=torch.float32 if wide_weight else dtype)
    before = x.clone(), residual.clone()
    normed, total = cpu.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, cpu.rms_norm(total, weight, 1e-6))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@drawn
@given(SEEDS, st.integers(1, 40), WIDTHS, st.sampled_from(DTYPES), st.booleans())
def test_layer_norm_is_that_of_the_reference(seed, rows, size, dtype, biased):
    x, weight = 3 + normal(seed, rows, size, dtype=dtype), normal(seed + 1, size, dtype=dtype)
    bias = normal(seed + 2, size, dtype=dtype) if biased else None
    expected = reference.layer_norm(x.float(), weight.float(), None if bias is None else bias.float(), 1e-5)
    close(cpu.layer_norm(x, weight, bias, 1e-5), expected, atol=2e-5 if size > 2 else 2e-3)


@drawn
@given(SEEDS, st.integers(1, 20), WIDTHS, st.sampled_from(DTYPES), st.sampled_from(ACTIVATIONS))
def test_activations_and_gates_are_those_of_the_reference(seed, rows, size, dtype, activation):
    x = 4 * normal(seed, rows, 2 * size, dtype=dtype)
    close(cpu.activate(x, activation), reference.activate(x.double(), activation).float())
    close(cpu.gate(x, activation), gate(x.double(), activation).float())
    strided = torch.cat((x, x), 1)[:, : 2 * size]
    assert torch.equal(cpu.gate(strided, activation), cpu.gate(x, activation))
    assert torch.equal(cpu.activate(strided, activation), cpu.activate(x, activation))
    heads = x.view(rows, 2, size)
    assert torch.equal(cpu.activate(heads_of_product(heads), activation), cpu.activate(heads, activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_precise_far_out_and_near_zero(activation):
    x = torch.cat((torch.linspace(-12, 12, 4001), torch.logspace(-20, 0, 500), -torch.logspace(-20, 0, 500)))
    exact = reference.activate(x.double(), activation).float()
    torch.testing.assert_close(cpu.activate(x, activation), exact, rtol=5e-6, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_nan(activation, dtype):
    x = torch.zeros(50, dtype=dtype)
    x[[3, 49]] = torch.nan
    assert cpu.activate(x, activation).isnan().nonzero().flatten().tolist() == [3, 49]


@drawn
@given(SEEDS, st.integers(1, 20), WIDTHS, st.sampled_from(DTYPES), st.sampled_from(XIELU))
def test_xielu_is_that_of_float64(seed, rows, size, dtype, parameters):
    x, parameters = 3 * normal(seed, rows, size, dtype=dtype), torch.tensor(parameters)
    found = cpu.xielu(x, parameters)
    close(found, exact_xielu(x, parameters).float())
    assert torch.equal(found, cpu.xielu(x.float(), parameters).to(dtype)), "rounded once"
    assert torch.equal(cpu.xielu(torch.cat((x, x), 1)[:, :size], parameters), found)


@pytest.mark.parametrize("parameters", XIELU)
def test_xielu_is_precise_far_out_and_near_zero(parameters):
    x = torch.cat((torch.linspace(-30, 12, 4001), torch.logspace(-20, 0, 500), -torch.logspace(-20, 0, 500)))
    parameters = torch.tensor(parameters)
    found = cpu.xielu(x, parameters)
    torch.testing.assert_close(found, exact_xielu(x, parameters).float(), rtol=5e-6, atol=1e-7)
    assert cpu.xielu(torch.tensor([1.0, torch.nan, -1]), parameters).isnan().tolist() == [False, True, False]


@drawn
@given(SEEDS, st.integers(1, 40), st.sampled_from([1, 2, 5]), WIDTHS, st.sampled_from(DTYPES), st.booleans(), st.data())
def test_products_with_factors_and_sums_are_rounded_once(seed, rows, parts, size, dtype, wide_factors, data):
    x, addend = (normal(seed + i, rows, parts * size, dtype=dtype) for i in range(2))
    table = normal(seed + 2, rows, parts, dtype=torch.float32 if wide_factors else dtype)
    factors = data.draw(st.sampled_from([table, torch.cat((table, table), 1)[:, parts:], table[:1], -0.37, 1.0]))
    wide = torch.cat((x, addend), 1)  # views of wider rows
    view, addend_view = wide[:, : parts * size], wide[:, parts * size :]
    for given_addend, its_view in ((None, None), (addend, addend_view)):
        found = cpu.multiply_add(view, factors, its_view)
        wide_addend = None if given_addend is None else given_addend.float()
        in_floats = factors.float() if isinstance(factors, torch.Tensor) else factors
        close(found, reference.multiply_add(x.float(), in_floats, wide_addend), atol=3e-6)
        assert torch.equal(found, cpu.multiply_add(x.float(), in_floats, wide_addend).to(dtype))


@drawn
@given(SEEDS, st.integers(1, 40), WIDTHS, WIDTHS, st.sampled_from(DTYPES))
def test_rows_are_put_side_by_side(seed, rows, size, other, dtype):
    wide = normal(seed, rows, size + other + 5, dtype=dtype)
    x, y = wide[:, 1 : 1 + size], wide[:, -other:]
    found = cpu.concatenate(x, y)
    assert found.is_contiguous()
    assert torch.equal(found, torch.cat((x, y), 1))
    assert torch.equal(cpu.concatenate(x.contiguous(), y[:, :0]), x)


@drawn
@given(SEEDS, st.integers(1, 40), WIDTHS, st.sampled_from(DTYPES))
def test_numbers_are_widened_as_they_are(seed, rows, size, dtype):
    x = normal(seed, rows, size + 3, dtype=dtype)[:, 1:-2]
    found = cpu.widen(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, x.float())


@drawn
@given(SEEDS, st.integers(1, 20), st.integers(1, 5), st.integers(1, 70), st.sampled_from(DTYPES), st.data())
def test_heads_are_rotated_as_in_the_reference(seed, rows, heads, size, dtype, data):
    x = normal(seed, rows, heads, size, dtype=dtype)
    half = data.draw(st.integers(0, size // 2))
    angles = 3 * normal(seed + 1, rows, half)
    rotation = angles.cos(), angles.sin()
    found = cpu.rotate(heads_of_product(x), rotation)
    close(found, reference.rotate(x.float(), rotation))
    assert torch.equal(found, cpu.rotate(x.float(), rotation).to(dtype))
    assert torch.equal(found[..., 2 * half :], x[..., 2 * half :])


@drawn
@given(SEEDS, st.integers(1, 40), st.integers(1, 70), st.sampled_from([1.0, 1.37]))
def test_rotations_are_those_of_exact_cosines(seed, rows, half, magnitude):
    random = np.random.default_rng(seed)
    positions = random.integers(0, 10 ** random.integers(1, 7), rows)
    frequencies = (10.0 ** -random.uniform(0, 6, half)).astype(np.float32)
    frequencies[0] = 1
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    cos, sin = cpu.rotation(torch.from_numpy(positions), torch.from_numpy(frequencies), magnitude)
    assert cos.dtype == sin.dtype == torch.float32
    assert np.abs(cos.numpy() - magnitude * np.cos(angles)).max() < 1e-7
    assert np.abs(sin.numpy() - magnitude * np.sin(angles)).max() < 1e-7


@drawn
@given(SEEDS, st.integers(1, 40), WIDTHS, st.sampled_from(DTYPES), st.sampled_from([1.0, 0.3, 45.25]))
def test_embeddings_are_rows_times_a_factor(seed, count, size, dtype, scale):
    weight = normal(seed, 11, size, dtype=dtype)
    ids = torch.randint(0, 11, (count,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(cpu.embed(ids, weight, scale), weight[ids] * scale)


def test_ids_without_a_row_give_zeros():
    weight = normal(0, 3, 20)
    result = cpu.embed(torch.tensor([2, -1, 3]), weight)
    assert torch.equal(result, torch.stack((weight[2], torch.zeros(20), torch.zeros(20))))


@drawn
@given(SEEDS, st.integers(2, 40), WIDTHS, st.sampled_from(DTYPES), st.data())
def test_a_row_has_the_same_bits_alone_and_in_company(seed, rows, size, dtype, data):
    x, weight = 4 * normal(seed, rows, 2 * size, dtype=dtype), normal(seed + 1, 2 * size, dtype=dtype)
    one = data.draw(st.integers(0, rows - 1))
    activation = data.draw(st.sampled_from(ACTIVATIONS))
    functions = [
        lambda x: cpu.rms_norm(x, weight, 1e-5),
        lambda x: cpu.add_rms_norm(x, x.flip(1), weight, 1e-5)[0],
        lambda x: cpu.layer_norm(x, weight, weight, 1e-5),
        lambda x: cpu.gate(x, activation),
        lambda x: cpu.activate(x, activation),
        lambda x: cpu.rotation((1e4 * x[:, 0].abs()).long(), weight.float().abs(), 1.0)[0],
        lambda x: cpu.xielu(x, torch.tensor(XIELU[0])),
        lambda x: cpu.multiply_add(x, x[:, -2:], x.flip(1)),
        lambda x: cpu.widen(x),
        lambda x: cpu.rotate(x.view(len(x), 2, size), (x[:, : size // 2].float(), x.flip(1)[:, : size // 2].float())),
    ]
    for function in functions:
        assert torch.equal(function(x)[one : one + 1], function(x[one : one + 1].clone()))


@drawn
@given(SEEDS, st.integers(1, 100), st.integers(0, 40), st.sampled_from(DTYPES), st.sampled_from(ACTIVATIONS))
def test_a_number_has_the_same_bits_wherever_it_stands(seed, size, before, dtype, activation):
    x = 4 * normal(seed, size, dtype=dtype)
    moved = torch.cat((torch.ones(before, dtype=dtype), x))
    assert torch.equal(cpu.activate(moved, activation)[before:], cpu.activate(x, activation))
    parameters = torch.tensor(XIELU[0])
    assert torch.equal(cpu.xielu(moved, parameters)[before:], cpu.xielu(x, parameters))
    cos, _ = cpu.rotation(torch.tensor([12345]), moved.float().abs(), 1.0)
    assert torch.equal(cos[:, before:], cpu.rotation(torch.tensor([12345]), x.float().abs(), 1.0)[0])


def test_shapes_and_types_that_do_not_match_are_refused():
    with pytest.raises(TypeError, match="float16"):
        cpu.activate(torch.zeros(3, dtype=torch.float16), "silu")
    x = torch.zeros(2, 6)
    for call in (
        lambda: cpu.add_rms_norm(x, torch.zeros(3, 6), torch.ones(6), 1e-5),
        lambda: cpu.multiply_add(x, torch.zeros(3, 1)),
        lambda: cpu.multiply_add(x, torch.zeros(2, 4)),
        lambda: cpu.multiply_add(x, torch.zeros(2, 1, dtype=torch.bfloat16)),
        lambda: cpu.multiply_add(x, 2.0, torch.zeros(2, 5)),
        lambda: cpu.multiply_add(x, 2.0, x.bfloat16()),
        lambda: cpu.concatenate(x, x[:1]),
        lambda: cpu.concatenate(x, x.bfloat16()),
        lambda: cpu.rotate(x.view(2, 1, 6), (torch.zeros(3, 2), torch.zeros(3, 2))),
        lambda: cpu.rotate(x.view(2, 1, 6), (torch.zeros(2, 2), torch.zeros(2, 3))),
        lambda: cpu.rotate(x.view(2, 1, 6), (torch.zeros(2, 4), torch.zeros(2, 4))),
    ):
        with pytest.raises(ValueError, match="do not match"):
            call()
    half = torch.zeros(2, 6, dtype=torch.float16)
    for call in (lambda: cpu.xielu(half, torch.zeros(4)), lambda: cpu.widen(half), lambda: cpu.multiply_add(half, 2.0)):
        with pytest.raises(TypeError, match="float16"):
            call()
