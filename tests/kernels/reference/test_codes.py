"""Low-bit weights in plain torch: rounding of weights and of x, exact products, errors of the rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import reference
from quire.kernels.contract import GRIDS, INT4, INT8, MXFP4, NVFP4, QuantizedRows, Scheme
from quire.kernels.deterministic import DETERMINISTIC as deterministic
from quire.kernels.reference.codes import dequantize, numbers_of, quantize_activations, quantize_rows

LINEAR = [INT8, INT4, Scheme(4, 128, torch.float16), Scheme(8, 32, torch.float16), Scheme(4, 64, has_offsets=True)]
FLOAT8 = [Scheme(8, grid="e4m3"), Scheme(8, 128, torch.bfloat16, grid="e4m3")]
SCHEMES = [*LINEAR, MXFP4, NVFP4, *FLOAT8]
STORED = [*SCHEMES, Scheme(4, 32, torch.float16, grid="iq4_nl")]  # also those to which nothing is rounded
SIZES = st.sampled_from([1, 2, 7, 31, 32, 33, 64, 100, 130])


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(weight, scheme, dtype=torch.float32, parts=1):
    room = reference.allocate_weight(weight.shape, dtype, parts, scheme)
    for index, one in enumerate(weight if weight.dim() == 3 else [weight]):
        reference.write_rows(room, one, 0, index)
    return room


def largest_error(scheme, extremes):
    """The most that a number of a group is rounded by, from the group's largest magnitude."""
    if scheme.grid == "int":
        return 0.51 * extremes / (scheme.zero_point - 1)  # of a grid that reaches both extremes
    return extremes * {MXFP4: 0.251, NVFP4: 0.18}.get(scheme, 0.04)


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
        assert (found <= some.shape[1] * largest_error(scheme, some.abs().amax(1)).square() + 1e-12).all()


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


def test_e2m1_is_rounded_to_the_nearest_number_and_ties_to_the_even_code():
    values = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0.26, 5.1, 6, -0.75, -5, -6])
    exact = torch.tensor([6.0, -6, 4, -4, 3, -3, 2, -2, 1.5, -1.5, 1, -1, 0.5, -0.5, 6])
    quantized = quantize_rows(torch.cat([values[:, None], exact.expand(len(values), -1)], 1), NVFP4)
    assert quantized.scales.eq(0.5).all()
    doubled = [0, 0, 2, 2, 4, 4, 8, 8, 1, 12, 12, -2, -8, -12]
    assert numbers_of(quantized.codes, NVFP4)[:, 0].tolist() == doubled


@pytest.mark.parametrize("scheme", [MXFP4, NVFP4])
@given(st.integers(0, 99), st.integers(-50, 50))
def test_scales_of_fp4_are_those_of_their_formats(scheme, seed, exponent):
    weight = torch.ldexp(normal(seed, 5, 96), torch.tensor(exponent))
    scales = 2 * quantize_rows(weight, scheme).scales.double()
    if scheme == MXFP4:
        assert (scales.frexp().mantissa == 0.5).all()
        return
    for row, of_row in zip(weight, scales, strict=True):
        factor = 2.0 ** torch.ceil(torch.log2(row.abs().max().double() / 4 / 448))
        stored = of_row / factor
        assert torch.equal(stored.to(torch.float8_e4m3fn).double(), stored)


def test_one_factor_for_a_tensor_of_nvfp4():
    weight = normal(0, 4, 32) * torch.tensor([[1e-3], [1], [10], [300]])
    quantized = quantize_rows(weight, NVFP4, largest=weight.abs().amax()[None, None])
    factor = 2.0 ** torch.ceil(torch.log2(weight.abs().max() / 4 / 448))
    stored = 2 * quantized.scales.float() / factor
    assert torch.equal(stored.to(torch.float8_e4m3fn).float(), stored)
    assert torch.equal(quantized.scales[3], quantize_rows(weight[3:], NVFP4).scales[0])


def test_float8_reaches_its_largest_number():
    quantized = quantize_rows(torch.tensor([[1.0, -896.0, 2.0, 0.0], [0, 0, 0, 0]]), FLOAT8[0])
    assert quantized.scales.tolist() == [[2.0], [0.0]]
    assert dequantize(quantized, FLOAT8[0]).tolist() == [[1, -896, 2, 0], [0, 0, 0, 0]]


def test_nothing_is_rounded_to_iq4_nl():
    with pytest.raises(ValueError, match="not rounded to iq4_nl"):
        quantize_rows(normal(0, 1, 32), STORED[-1])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_gives_nan_in_its_row_alone(scheme, bad):
    weight = normal(0, 3, 40)
    weight[1, 7] = bad
    found = reference.linear(normal(1, 2, 40), packed(weight, scheme))
    assert found.isfinite().logical_not().tolist() == [[False, True, False]] * 2


def test_groups_of_x_are_rounded_to_127_steps_on_each_side():
    bad = [[1, torch.nan, 0, 0], [1, 0, -torch.inf, 0]]
    x = torch.tensor([[127.0, -3.5, 2.5, 0.4], [0, 0, 0, 0], [1e-30, 0, 0, 0], *bad]).bfloat16()
    codes, scales = quantize_activations(x, 4)
    assert codes.tolist() == [[127, -4, 2, 0], *[[0, 0, 0, 0]] * 4]
    assert scales[:3].tolist() == [[1], [0], [0]]
    assert scales[3:].isnan().all()
    side_by_side = quantize_activations(torch.cat((x[:1], 2 * x[:1], x[:1, :2]), 1), 4)
    assert side_by_side[0].tolist() == [[*[127, -4, 2, 0] * 2, 127, -4]]
    assert side_by_side[1].tolist() == [[1, 2, 1]]


@pytest.mark.parametrize(
    ("group_size", "of_x"), [(0, 64), (16, 16), (32, 32), (64, 32), (128, 64), (256, 64), (96, 96), (12, 12)]
)
def test_groups_of_x_are_parts_of_the_groups_of_weights(group_size, of_x):
    assert Scheme(8, group_size).x_group_size == of_x


@pytest.mark.parametrize("scheme", [INT8, INT4, Scheme(4, 128)])
def test_an_outlier_costs_accuracy_in_its_group_alone(scheme):
    x, weight = normal(0, 8, 512), normal(1, 64, 512)
    room, exact = packed(weight, scheme), dequantize(quantize_rows(weight, scheme), scheme)
    smooth = (reference.linear(x, room) - x @ exact.T).square().mean().sqrt()
    x[:, 100] *= 100
    beside = torch.arange(512).div(scheme.x_group_size, rounding_mode="floor") != 100 // scheme.x_group_size
    rest = torch.where(beside, x, 0)
    assert (
        reference.linear(x, room) - reference.linear(x - rest, room) - rest @ exact.T
    ).square().mean().sqrt() < smooth * 1.1


@pytest.mark.parametrize("kernels", [reference, deterministic])
@pytest.mark.parametrize("scheme", STORED)
@settings(max_examples=20)
@given(st.integers(0, 99), st.integers(1, 5), SIZES, SIZES)
def test_products_of_integers_are_exact(kernels, scheme, seed, rows, n, k):
    """Codes with scale 1, and integer offsets, times rows of integers with scale 1."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << scheme.bits, (n, k), dtype=torch.uint8, generator=draw)
    if scheme.grid == "e4m3":
        codes = torch.randint(-16, 17, (n, k), generator=draw).to(torch.float8_e4m3fn).view(torch.uint8)
    ones = torch.ones(n, scheme.num_groups(k), dtype=scheme.scale_dtype)
    quantized = QuantizedRows(codes, ones, 3 * ones if scheme.has_offsets else None)
    weight = numbers_of(codes, scheme) + 3 * scheme.has_offsets
    x = torch.randint(-127, 128, (rows, k), generator=draw).float()
    x[:, :: scheme.x_group_size] = 127
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
    assert str(scheme).startswith({"e2m1": "fp4_e2m1, ", "e4m3": "fp8_e4m3, "}.get(scheme.grid, f"int{scheme.bits}, "))


def test_numbers_of_grids():
    codes = torch.arange(16, dtype=torch.uint8)
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (numbers_of(codes, MXFP4) / 2).tolist() == [*e2m1, *(-number for number in e2m1)]
    assert list(GRIDS["iq4_nl"]) == sorted(GRIDS["iq4_nl"])
    assert numbers_of(codes, STORED[-1]).tolist() == list(GRIDS["iq4_nl"])


@pytest.mark.parametrize("scheme", FLOAT8)
def test_products_with_float8_do_not_round_x(scheme):
    x, weight = normal(0, 4, 130), normal(1, 7, 130)
    expected = x.double() @ dequantize(quantize_rows(weight, scheme), scheme).double().T
    assert torch.allclose(reference.linear(x, packed(weight, scheme)).double(), expected, rtol=1e-6, atol=1e-6)


def test_a_weight_of_another_module_is_refused():
    weight = packed(normal(0, 5, 37), INT8)
    with pytest.raises(TypeError, match="another kernel module"):
        reference.linear(normal(0, 1, 37), type(weight)(weight.data, 5, 37, torch.float32))
