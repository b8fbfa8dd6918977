"""Products with low-bit weights by the Triton kernels, against plain torch."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE
from triton_random_tensors import DTYPES, ROUNDING, SEEDS, drawn, normal, poisoned_empty

from quire.kernels import reference
from quire.kernels.contract import INT4, INT8, MXFP4, NVFP4, QuantizedRows, Requirements, Scheme
from quire.kernels.reference.codes import dequantize, quantize_activations

pytest.importorskip("triton")
code_products = pytest.importorskip("quire.kernels.triton.code_products")
code_weights = pytest.importorskip("quire.kernels.triton.code_weights")
kernels = pytest.importorskip("quire.kernels.triton.kernels")
deterministic = pytest.importorskip("quire.kernels.triton.deterministic").TRITON_DETERMINISTIC

BF16, F16 = torch.bfloat16, torch.float16
EACH = [
    *(INT8, Scheme(8, 0, F16, has_offsets=True), Scheme(8, 16, BF16, has_offsets=True), Scheme(8, 32, F16)),
    *(Scheme(8, 128), Scheme(8, 12), Scheme(8, 256), INT4, Scheme(4), Scheme(4, 0, has_offsets=True)),
    *(Scheme(4, 16, F16, has_offsets=True), Scheme(4, 32, F16, has_offsets=True), Scheme(4, 64)),
    *(Scheme(4, 128, BF16, has_offsets=True), MXFP4, NVFP4, Scheme(4, 32, F16, grid="iq4_nl")),
    *(Scheme(4, 128, grid="iq4_nl", has_offsets=True), Scheme(4, 0, grid="e2m1")),
]
FLOAT8 = [Scheme(8, grid="e4m3"), Scheme(8, 128, grid="e4m3"), Scheme(8, 32, BF16, grid="e4m3")]
SCHEMES, ALL_SCHEMES = st.sampled_from(EACH), st.sampled_from(EACH + FLOAT8)
few = settings(drawn, max_examples=3)
ROWS = st.sampled_from([1, 2, 5, 16, 17, 70])
WIDTHS = st.sampled_from([1, 3, 20, 33, 65])
SIZES = st.sampled_from([1, 3, 16, 31, 33, 64, 100, 130, 200, 300])


@pytest.fixture(scope="module", autouse=True)
def poison():
    """torch.empty gives NaN and -1, so that values which a kernel does not write are found."""
    with patch.object(torch, "empty", poisoned_empty):
        yield


def drawn_rows(seed, n, k, scheme):
    """Random codes with scales and offsets, as a checkpoint has them, on the CPU."""
    codes = torch.randint(0, 1 << scheme.bits, (n, k), generator=torch.Generator().manual_seed(seed))
    if scheme.grid == "e4m3":
        codes[codes & 127 == 127] = 0  # NaN
    shape = n, scheme.num_groups(k)
    scales = (normal(seed + 1, *shape) / (1 << scheme.bits)).to(scheme.scale_dtype).cpu()
    offsets = (normal(seed + 2, *shape) / 4).to(scheme.scale_dtype).cpu()
    return QuantizedRows(codes.to(torch.uint8), scales, offsets if scheme.has_offsets else None)


def allocated(module, shape, dtype, scheme, parts=1):
    with torch.device("cpu" if module is reference else DEVICE):
        return module.allocate_weight(shape, dtype, parts, scheme)


def packed(rows, scheme, dtype, module=kernels):
    """A weight of these rows, which are written in pieces."""
    weight = allocated(module, rows.codes.shape, dtype, scheme)
    for first in range(0, len(rows.codes), 21):
        module.write_rows(weight, rows.map_rows(lambda part, first=first: part[first : first + 21]), first)
    return weight


def bound(x, rows, scheme):
    """A bound for the error of float32 sums over groups."""
    values = dequantize(rows, scheme).double().abs()
    if scheme.grid == "e4m3":  # sums of products in float32
        return (x.shape[1] + 4) * 2**-24 * (x.cpu().double().abs() @ values.T)
    codes, scales = quantize_activations(x.cpu(), scheme.x_group_size)
    rounded = codes * scales.repeat_interleave(scheme.x_group_size, 1)[:, : x.shape[1]]
    if scheme.has_offsets:  # terms that cancel
        values += 2 * dequantize(rows._replace(offsets=None), scheme).double().abs()
    return (4 * scales.shape[1] + 4) * 2**-23 * (rounded.double().abs() @ values.T)


def assert_near(found, expected, error):
    """Asserts that `found` differs from `expected` by at most `error` and the rounding of both."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    distance = (found.cpu().double() - expected.double()).abs()
    assert (distance <= error + 2.02 * ROUNDING[found.dtype] * expected.double().abs() + 1e-7).all(), distance.max()


@drawn
@given(SEEDS, ROWS, WIDTHS, SIZES, ALL_SCHEMES, DTYPES, st.booleans())
def test_products_are_those_of_plain_torch(seed, num_rows, n, k, scheme, dtype, biased):
    x, rows = normal(seed, num_rows, k, dtype=dtype), drawn_rows(seed, n, k, scheme)
    bias = normal(seed + 2, n, dtype=dtype) if biased else None
    expected = reference.linear(x.cpu(), packed(rows, scheme, dtype, reference), None if bias is None else bias.cpu())
    assert_near(kernels.linear(x, packed(rows, scheme, dtype), bias), expected, bound(x, rows, scheme))


@pytest.mark.parametrize("scheme", EACH + FLOAT8)
def test_every_scheme_is_multiplied_over_several_tiles(scheme):
    x, rows = normal(1, 18, 400), drawn_rows(2, 35, 400, scheme)
    expected = reference.linear(x.cpu(), packed(rows, scheme, x.dtype, reference))
    assert_near(kernels.linear(x, packed(rows, scheme, x.dtype)), expected, bound(x, rows, scheme))


@drawn
@given(SEEDS, ROWS, SIZES, SCHEMES, DTYPES)
def test_rows_of_x_are_rounded_as_in_plain_torch(seed, num_rows, k, scheme, dtype):
    x = normal(seed, num_rows, k, dtype=dtype)
    x[num_rows // 2, : k // 2] *= 2.0**-110 if dtype != F16 else 0
    codes, scales = quantize_activations(x.cpu(), scheme.x_group_size)
    found = code_products.prepare_rows(x, allocated(kernels, (1, k), dtype, scheme))
    assert torch.equal(found.numbers[:, :k].cpu(), codes.to(torch.int8))
    assert not found.numbers[:, k:].any()
    assert torch.equal(found.scales[:, : scales.shape[1]].cpu(), scales)
    assert not found.scales[:, scales.shape[1] :].any()
    if scheme.has_offsets:
        rounded = codes * scales.repeat_interleave(scheme.x_group_size, 1)[:, :k]
        assert torch.allclose(found.sums.sum(1).cpu(), rounded.sum(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_tiny_huge_and_tied_rows_are_rounded_as_in_plain_torch(dtype):
    tied = torch.cat((torch.tensor([127.0]), torch.arange(-20, 43) + 0.5))
    x = torch.stack([*(torch.full((64,), 2.0**power) for power in (-97, -96, 100)), tied]).to(dtype).to(DEVICE)
    codes, scales = quantize_activations(x.cpu(), 64)
    found = code_products.prepare_rows(x, allocated(kernels, (1, 64), dtype, INT8))
    assert torch.equal(found.numbers.cpu(), codes.to(torch.int8))
    assert torch.equal(found.scales.cpu(), scales)


@few
@given(SEEDS, st.sampled_from([1, 5, 17, 70]), WIDTHS, SIZES, SCHEMES, st.sampled_from([torch.float32, BF16]))
def test_products_of_integers_are_exact(seed, num_rows, n, k, scheme, dtype):
    """Codes with scale 1, and integer offsets, times rows of integers with scale 1. Results are rounded once."""
    rows = drawn_rows(seed, n, k, scheme)
    offsets = None if rows.offsets is None else (rows.offsets * 20).round()
    rows = rows._replace(scales=torch.ones_like(rows.scales), offsets=offsets)
    x = torch.randint(-127, 128, (num_rows, k), generator=torch.Generator().manual_seed(seed)).float()
    x[:, :: scheme.x_group_size] = 127
    found = kernels.linear(x.to(dtype).to(DEVICE), packed(rows, scheme, dtype))
    assert torch.equal(found.cpu(), (x.double() @ dequantize(rows, scheme).double().T).to(dtype))


@few
@given(SEEDS, st.sampled_from([18, 65]), st.sampled_from([3, 65]), SIZES, SCHEMES, DTYPES, st.booleans())
def test_a_row_has_the_same_bits_in_any_company(seed, num_rows, n, k, scheme, dtype, biased):
    x, weight = normal(seed, num_rows, k, dtype=dtype), packed(drawn_rows(seed, n, k, scheme), scheme, dtype)
    bias = normal(seed + 2, n, dtype=dtype) if biased else None
    together = deterministic.linear(x, weight, bias)
    assert torch.equal(kernels.linear(x, weight, bias), together)
    for start, stop in ((3, 4), (2, 18)):
        assert torch.equal(kernels.linear(x[start:stop], weight, bias), together[start:stop])


@few
@given(SEEDS, st.sampled_from([18, 65]), st.sampled_from([3, 65]), SIZES, st.sampled_from(FLOAT8), DTYPES)
def test_a_row_has_the_same_bits_in_any_company_of_deterministic_float8_products(seed, num_rows, n, k, scheme, dtype):
    x, weight = normal(seed, num_rows, k, dtype=dtype), packed(drawn_rows(seed, n, k, scheme), scheme, dtype)
    together = deterministic.linear(x, weight)
    for start, stop in ((3, 4), (2, 18)):
        assert torch.equal(deterministic.linear(x[start:stop], weight), together[start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16])
def test_each_float8_number_is_exact_and_nan_stays_in_its_rows(dtype):
    scheme, codes = FLOAT8[0], torch.arange(256, dtype=torch.uint8)
    rows = QuantizedRows(codes[:, None].expand(256, 16).contiguous(), torch.ones(256, 1))
    weight, x = packed(rows, scheme, dtype), torch.zeros(1, 16, dtype=dtype, device=DEVICE)
    x[0, 3] = 1
    expected = codes.view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(kernels.linear(x, weight)[0].cpu().nan_to_num(999), expected.nan_to_num(999))
    found = kernels.embed(torch.arange(256, device=DEVICE), weight, 1.0)[:, 3].cpu()
    assert torch.equal(found.nan_to_num(999), expected.nan_to_num(999))


@pytest.mark.parametrize("scheme", [INT8, INT4])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_nan_and_the_others_stay(scheme, bad):
    x, weight = normal(0, 6, 100, dtype=BF16), packed(drawn_rows(1, 40, 100, scheme), scheme, BF16)
    expected = kernels.linear(x, weight)
    x[3, 99] = bad
    found = kernels.linear(x, weight)
    assert found[3].isnan().all()
    others = [row for row in range(6) if row != 3]
    assert torch.equal(found[others], expected[others])


def test_weights_of_floats_are_rounded_where_they_are_written():
    weight = normal(0, 40, 100)
    weight[7, 50] = torch.nan
    for scheme in (INT8, INT4, FLOAT8[0]):
        room, plain = allocated(kernels, (40, 100), BF16, scheme), allocated(reference, (40, 100), BF16, scheme)
        kernels.write_rows(room, weight.cpu(), 0)
        reference.write_rows(plain, weight.cpu(), 0)
        x = normal(1, 3, 100, dtype=BF16)
        found, expected = kernels.linear(x, room).cpu(), reference.linear(x.cpu(), plain)
        assert found[:, 7].isnan().all()
        assert torch.allclose(found, expected, rtol=2**-6, atol=1e-3, equal_nan=True)


@few
@given(SEEDS, ROWS, st.sampled_from([1, 20, 33]), SIZES, ALL_SCHEMES, DTYPES, st.sampled_from(["silu", "gelu_tanh"]))
def test_gated_products_are_gates_of_products(seed, num_rows, n, k, scheme, dtype, activation):
    x, rows = normal(seed, num_rows, k, dtype=dtype), drawn_rows(seed, 2 * n, k, scheme)
    bias, weight = normal(seed + 2, 2 * n, dtype=dtype), packed(rows, scheme, dtype)
    both = kernels.linear(x, weight, bias)
    expected = (reference.activate(both[:, :n].double(), activation) * both[:, n:].double()).to(dtype)
    assert_near(kernels.gated_linear(x, weight, bias, activation), expected.cpu(), 1e-6 * (1 + both[:, n:].cpu().abs()))


@few
@given(SEEDS, WIDTHS, SIZES, ALL_SCHEMES, DTYPES)
def test_rows_are_looked_up_as_they_are_multiplied(seed, n, k, scheme, dtype):
    rows = drawn_rows(seed, n, k, scheme)
    weight, values = packed(rows, scheme, dtype), dequantize(rows, scheme)
    ids = torch.tensor([n - 1, 0, -1, n, 2**62])
    found = kernels.embed(ids.to(DEVICE), weight, 3.0).cpu()
    assert_near(found[:2], (3 * values[ids[:2]]).to(dtype), 1e-6)
    assert not found[2:].any()


@few
@given(SEEDS, st.sampled_from([1, 7, 17]), st.sampled_from([20, 64]), st.sampled_from([16, 33]), ALL_SCHEMES, DTYPES)
def test_experts_are_the_products_of_their_weights(seed, num_tokens, hidden, inner, scheme, dtype):
    x = normal(seed, num_tokens, hidden, dtype=dtype)
    stacks = []
    for place, shape in enumerate(((2, 2 * inner, hidden), (2, hidden, inner))):
        stacks.append(allocated(kernels, shape, dtype, scheme))
        for index in range(2):
            kernels.write_rows(stacks[-1], drawn_rows(seed + 2 * place + index, *shape[1:], scheme), 0, index)
    up, down = stacks
    ids = torch.rand(num_tokens, 2, generator=torch.Generator().manual_seed(seed)).argsort(1).to(DEVICE)
    weights = normal(seed + 9, num_tokens, 2).softmax(1)
    found = deterministic.experts(x, ids, weights, up, down, "relu")
    alone = deterministic if scheme.grid == "e4m3" else kernels
    assert torch.equal(alone.experts(x[:1], ids[:1], weights[:1], up, down, "relu"), found[:1])
    expected = torch.zeros(num_tokens, hidden, device=DEVICE)
    for expert in range(2):
        inside = (ids == expert).float() * weights
        results = kernels.linear(kernels.gated_linear(x, up[expert], None, "relu"), down[expert])
        expected += results.float() * inside.sum(1, keepdim=True)
    assert_near(found, expected.to(dtype).cpu(), 6 * ROUNDING[dtype] * expected.abs().max().item())


@pytest.mark.parametrize("module", [deterministic, kernels])
def test_low_bit_experts_may_have_no_gates(module):
    x, ids, weights = normal(0, 5, 32), torch.zeros(5, 1, dtype=torch.int64, device=DEVICE), normal(1, 5, 1)
    up, down = (allocated(kernels, (1, *shape), x.dtype, INT8) for shape in ((20, 32), (32, 20)))
    for place, stack in enumerate((up, down)):
        kernels.write_rows(stack, normal(3 + place, *((20, 32), (32, 20))[place]), 0)
    found = module.experts(x, ids, weights, up, down, "relu2", gated=False)
    expected = kernels.linear(kernels.activate(kernels.linear(x, up[0]), "relu2"), down[0]) * weights
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_only_one_stack_may_be_low_bit():
    x, ids, weights = normal(0, 5, 32), torch.zeros(5, 1, dtype=torch.int64, device=DEVICE), normal(1, 5, 1)
    up, down = allocated(kernels, (1, 40, 32), x.dtype, INT8), normal(2, 1, 32, 20)
    kernels.write_rows(up, normal(3, 40, 32), 0)
    found = kernels.experts(x, ids, weights, up, down, "silu")
    expected = kernels.gated_linear(x, up[0], None, "silu") @ down[0].T * weights
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_tiles_fit_into_the_shared_memory_of_the_device():
    """163,840 bytes: compiled for Hopper. GPUs of compute capability 8.6 and 8.9 have 101,376."""
    layout = code_weights.layout_of(INT8, 4096)
    large, small = (code_products.tile_of(300, layout, 1, shared) for shared in (163_840, 101_376))
    assert (large.rows, large.columns) == (128, 128)
    assert (small.rows, small.columns) == (64, 64)


def test_no_rows_give_no_rows():
    weight = allocated(kernels, (40, 64), torch.float32, Scheme(4, 32, has_offsets=True))
    x = torch.zeros(0, 64, device=DEVICE)
    assert kernels.linear(x, weight).shape == (0, 40)
    assert kernels.gated_linear(x, weight, None, "silu").shape == (0, 20)
    assert kernels.embed(torch.zeros(0, dtype=torch.int64, device=DEVICE), weight).shape == (0, 64)


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        (Scheme(2), "it multiplies codes of 4 and 8 bits, not int2"),
        (Scheme(6, 32, torch.float16), "it multiplies codes of 4 and 8 bits, not int6"),
        (
            Scheme(4, 32, torch.float16, has_factors=True),
            "it has no factors of scales, as in int4, groups of 32 with factors",
        ),
        (
            Scheme(8, grid="e4m3", has_offsets=True),
            "it has no offsets of float8 numbers, as in fp8_e4m3",
        ),
        (Scheme(4, 96), "its groups have at most 64 columns of int4, or a multiple of 128, not 96"),
        (Scheme(8, 200), "its groups have at most 128 columns of int8"),
        (Scheme(8, 0, torch.float64), "it has no scales of torch.float64"),
    ],
)
def test_schemes_that_the_kernels_do_not_have_are_refused(scheme, why):
    with pytest.raises(ValueError, match=f"the Triton kernels: {why}"):
        kernels.allocate_weight((16, 64), BF16, scheme=scheme)
    needed = Requirements(DEVICE, "bfloat16", "bfloat16", 16, (64,), (INT8, scheme))
    assert kernels.unsupported_reason(needed).startswith(why)


def test_wrong_shapes_and_types_are_refused():
    weight = allocated(kernels, (20, 64), BF16, INT8)
    with pytest.raises(ValueError, match="at most 65536 columns"):
        kernels.allocate_weight((1, 65537), BF16, scheme=INT8)
    for rows, start in ((normal(0, 20, 63), 0), (normal(0, 3, 64), 18), (normal(0, 3, 64), -1)):
        with pytest.raises(ValueError, match="do not fit a weight"):
            kernels.write_rows(weight, rows, start)
    for x in (normal(0, 2, 63, dtype=BF16), normal(0, 2, 64)):
        with pytest.raises(ValueError, match="does not match a weight"):
            kernels.linear(x, weight)
    with pytest.raises(ValueError, match="a bias"):
        kernels.linear(normal(0, 2, 64, dtype=BF16), weight, normal(0, 19, dtype=BF16))
