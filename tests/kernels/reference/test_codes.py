"""Low-bit weights in plain torch: rounding of weights and of x, exact products, errors of the rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import deterministic, reference
from quire.kernels.contract import INT4, INT8, QuantizedRows, Scheme
from quire.kernels.reference.codes import dequantize, quantize_activations, quantize_rows

SCHEMES = [INT8, INT4, Scheme(4, 128, torch.float16), Scheme(8, 32, torch.float16), Scheme(4, 64, has_offsets=True)]
SIZES = st.sampled_from([1, 2, 7, 31, 32, 33, 64, 100, 130])


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(weight, scheme, dtype=torch.float32, parts=1):
    room = reference.allocate_weight(weight.shape, dtype, parts, scheme)
    for index, one in enumerate(weight if weight.dim() == 3 else [weight]):
        reference.write_rows(room, one, 0, index)
    return room


@pytest.mark.parametrize("scheme", SCHEMES)
@given(st.integers(0, 99), SIZES, SIZES)
def test_rounding_is_as_good_as_its_scale(scheme, seed, rows, columns):
    weight = normal(seed, rows, columns)
    quantized = quantize_rows(weight, scheme)
    assert quantized.codes.shape == weight.shape
    assert quantized.scales.shape == (rows, scheme.num_groups(columns))
    assert quantized.scales.dtype == scheme.scale_dtype
    size = scheme.group_size or columns
    errors = dequantize(quantized, scheme) - weight
    for group in range(scheme.num_groups(columns)):
        some = weight[:, group * size : (group + 1) * size]
        found = errors[:, group * size : (group + 1) * size].square().sum(1)
        steps = some.abs().amax(1) / (scheme.zero_point - 1)  # of a grid that reaches both extremes
        assert (found <= some.shape[1] * (0.51 * steps).square() + 1e-12).all()


def test_a_row_of_8_bits_has_its_largest_number_at_the_end_of_the_codes():
    weight = torch.tensor([[0.0, 254.0, -100.0, 1.0], [0, 0, 0, 0]])
    quantized = quantize_rows(weight, INT8)
    assert quantized.scales.tolist() == [[2.0], [0.0]]
    assert quantized.codes.tolist() == [[128, 255, 78, 128], [128, 128, 128, 128]]  # half of 1 is even


def test_a_group_of_4_bits_may_use_all_sixteen_codes():
    weight = torch.arange(-8.0, 8.0)[None]
    for sign in (1, -1):
        quantized = quantize_rows(sign * weight, INT4)
        assert quantized.scales.item() == sign
        assert quantized.codes.tolist() == [list(range(16))]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_gives_nan_in_its_row_alone(scheme, bad):
    weight = normal(0, 3, 40)
    weight[1, 7] = bad
    found = reference.linear(normal(1, 2, 40), packed(weight, scheme))
    assert found.isfinite().logical_not().tolist() == [[False, True, False]] * 2


def test_x_is_rounded_row_by_row_to_127_steps_on_each_side():
    bad = [[1, torch.nan, 0, 0], [1, 0, -torch.inf, 0]]
    x = torch.tensor([[127.0, -3.5, 2.5, 0.4], [0, 0, 0, 0], [1e-30, 0, 0, 0], *bad])
    codes, scales = quantize_activations(x.bfloat16())
    assert codes.tolist() == [[127, -4, 2, 0], *[[0, 0, 0, 0]] * 4]
    assert scales[:3].tolist() == [[1], [0], [0]]
    assert scales[3:].isnan().all()


@pytest.mark.parametrize("kernels", [reference, deterministic])
@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=20)
@given(st.integers(0, 99), st.integers(1, 5), SIZES, SIZES)
def test_products_of_integers_are_exact(kernels, scheme, seed, rows, n, k):
    """Codes with scale 1, and integer offsets, times rows of integers with scale 1."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << scheme.bits, (n, k), dtype=torch.uint8, generator=draw)
    ones = torch.ones(n, scheme.num_groups(k), dtype=scheme.scale_dtype)
    quantized = QuantizedRows(codes, ones, 3 * ones if scheme.has_offsets else None)
    weight = codes.float() - scheme.zero_point + 3 * scheme.has_offsets
    x = torch.randint(-127, 128, (rows, k), generator=draw).float()
    x[:, 0] = 127
    room = reference.allocate_weight((n, k), torch.float32, 1, scheme)
    reference.write_rows(room, quantized, 0)
    assert torch.equal(dequantize(quantized, scheme), weight)
    assert torch.equal(kernels.linear(x, room).double(), x.double() @ weight.double().T)
    assert torch.equal(kernels.embed(torch.arange(n), room, 2.0), 2 * weight)


@pytest.mark.parametrize("kernels", [reference, deterministic])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_read_the_weights_of_a_stack(kernels, scheme):
    ups, downs = normal(0, 3, 24, 40) / 6, normal(1, 3, 40, 12) / 3
    x, ids, weights = normal(2, 4, 40), torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]]), torch.full((4, 2), 0.5)
    found = kernels.experts(x, ids, weights, packed(ups, scheme, parts=2), packed(downs, scheme), "silu")
    each = [packed(ups[expert], scheme) for expert in range(3)], [packed(downs[expert], scheme) for expert in range(3)]
    for token in range(4):
        one = x[token : token + 1]
        inner = [kernels.gated_linear(one, each[0][expert], None, "silu") for expert in ids[token]]
        parts = [kernels.linear(some, each[1][expert]) for some, expert in zip(inner, ids[token], strict=True)]
        assert torch.allclose(found[token], sum(parts)[0] / 2, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scheme_bytes_are_those_of_the_memory(scheme):
    weight = packed(normal(0, 5, 37), scheme)
    assert weight.num_bytes == scheme.num_bytes(5, 37)
    assert str(scheme).startswith(f"int{scheme.bits}")


def test_a_weight_of_another_module_is_refused():
    weight = packed(normal(0, 5, 37), INT8)
    with pytest.raises(TypeError, match="another kernel module"):
        reference.linear(normal(0, 1, 37), type(weight)(weight.data, 5, 37, torch.float32))
