"""Products, rows of weights and mixtures of experts by the Triton kernels, beside float64."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE

from quire.kernels import reference
from quire.kernels.contract import ACTIVATIONS, Packed

pytest.importorskip("triton")
products = pytest.importorskip("quire.kernels.triton.products")
routing = pytest.importorskip("quire.kernels.triton.experts")

ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # parts of a number, at most
DTYPES = st.sampled_from(tuple(ROUNDING))
ROWS = st.sampled_from([1, 2, 5, 16, 17, 64, 65, 100])
SIZES = st.sampled_from([1, 3, 16, 20, 33, 64, 65, 130])
SEEDS = st.integers(0, 2**32 - 1)
drawn = settings(deadline=None, max_examples=8)


def _poisoned(*args, make=torch.empty, **kwargs):
    x = make(*args, **kwargs)
    return x.fill_(torch.nan if x.dtype.is_floating_point else -1)


@pytest.fixture(scope="module", autouse=True)
def poison():
    """What a kernel leaves out is seen: new memory is full of NaN."""
    with patch.object(torch, "empty", _poisoned):
        yield


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def weight_of(seed, *shape, dtype):
    """Products with it are about as large as what they are products of."""
    return (normal(seed, *shape) / shape[-1] ** 0.5).to(dtype)


def picks(seed, num_tokens, num_experts, k):
    """k different experts for each token, and their shares."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, num_experts, generator=random).argsort(1)[:, :k]
    return ids.to(DEVICE), normal(seed + 1, num_tokens, k).softmax(1)


def assert_near(found, expected, error):
    """Whether a result is `expected` (float64), but for `error` and one rounding to its own type."""
    assert found.shape == expected.shape
    distance = (found.double() - expected).abs()
    assert (distance <= error + 1.01 * ROUNDING[found.dtype] * expected.abs() + 1e-7).all(), distance.max()


def exact(x, weight, bias=None):
    """A product in float64, and a bound for the error of one whose terms are added up in float32, one by one."""
    x, weight = x.double(), weight.double()
    bias = torch.zeros(len(weight), dtype=torch.float64, device=DEVICE) if bias is None else bias.double()
    return x @ weight.T + bias, (x.shape[1] + 2) * 2**-23 * (x.abs() @ weight.abs().T + bias.abs())


def assert_gated(found, x, weight, bias, activation):
    """Whether `found` is the gated product: gates and what they gate are rounded before they meet."""
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
    found = products.linear(x, weight, bias, strict=True)
    assert found.dtype == dtype
    assert_near(found, *exact(x, weight, bias))


@drawn
@given(SEEDS, ROWS, SIZES, SIZES, DTYPES)
def test_ordinary_products_are_those_of_float64(seed, rows, n, k, dtype):
    x, weight, bias = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, n, k, dtype=dtype), normal(seed + 2, n)
    expected, error = exact(x, weight, bias.to(dtype))
    found = products.linear(x, weight, bias.to(dtype), strict=False)
    assert_near(found, expected, error + 4 * ROUNDING[dtype] * (1 + expected.abs()))  # libraries may round on their way


@drawn
@given(SEEDS, ROWS, SIZES, SIZES, DTYPES, st.booleans(), st.sampled_from(ACTIVATIONS))
def test_gated_products_are_those_of_float64(seed, rows, n, k, dtype, biased, activation):
    x, weight = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, 2 * n, k, dtype=dtype)
    bias = normal(seed + 2, 2 * n, dtype=dtype) if biased else None
    found = products.gated_linear(x, weight, bias, activation, strict=True)
    assert found.dtype == dtype
    assert_gated(found, x, weight, bias, activation)
    ordinary = products.gated_linear(x, weight, bias, activation, strict=False)
    error = 1e-5 + 16 * ROUNDING[dtype]
    assert (ordinary.double() - found.double()).abs().max() <= error * (1 + found.double().abs().max())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("rows", "n", "k"), [(3, 896, 896), (70, 150, 1000), (600, 70, 20)])
def test_products_of_real_sizes_are_those_of_float64(rows, n, k, dtype):
    x, weight, bias = normal(0, rows, k, dtype=dtype), weight_of(1, n, k, dtype=dtype), normal(2, n, dtype=dtype)
    assert_near(products.linear(x, weight, bias, strict=True), *exact(x, weight, bias))


@drawn
@given(SEEDS, ROWS, SIZES, SIZES, DTYPES, st.integers(0, 3), st.integers(0, 3))
def test_rows_may_be_a_view_into_a_wider_tensor(seed, rows, n, k, dtype, before, behind):
    x, weight = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, n, k, dtype=dtype)
    wide = torch.full((rows, before + k + behind), torch.nan, dtype=dtype, device=DEVICE)
    wide[:, before : before + k] = x
    for view in (wide[:, before : before + k], x.T.contiguous().T):
        assert_near(products.linear(view, weight, None, strict=True), *exact(x, weight))
    transposed = weight.T.contiguous().T
    assert_near(
        products.linear(x, transposed, normal(0, 2 * n, dtype=dtype)[::2], strict=True),
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
        lambda x: products.linear(x, weight, bias, strict=True),
        lambda x: products.gated_linear(x, weight, bias, activation, strict=True),
    ):
        together = product(x)
        assert torch.equal(product(x), together)
        assert torch.equal(product(x[start:stop].clone()), together[start:stop])
        assert torch.equal(product(x[start : start + 1].clone()), together[start : start + 1])
        assert torch.equal(product(x.roll(5, 0)), together.roll(5, 0))


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_long_row_has_the_same_bits_in_any_company(dtype):
    x, weight = normal(0, 70, 1000, dtype=dtype), weight_of(1, 100, 1000, dtype=dtype)
    together = products.linear(x, weight, None, strict=True)
    for one in (0, 15, 16, 63, 64, 69):
        assert torch.equal(products.linear(x[one : one + 1].clone(), weight, None, strict=True)[0], together[one])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's, of inf * 0
@drawn
@given(SEEDS, ROWS, SIZES, DTYPES, st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.data())
def test_what_is_not_finite_stays_in_its_row(seed, rows, k, dtype, value, data):
    x, weight = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, 40, k, dtype=dtype)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, k - 1))
    spoilt = x.clone()
    spoilt[row, column] = value
    others = torch.arange(rows, device=DEVICE) != row
    found = products.linear(spoilt, weight, None, strict=True)
    assert torch.equal(found[others], products.linear(x, weight, None, strict=True)[others])
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


@drawn
@given(SEEDS, st.integers(1, 60), st.integers(1, 9), st.sampled_from([16, 64]), st.data())
def test_tiles_hold_each_pair_once_and_beside_its_expert(seed, num_tokens, num_experts, rows, data):
    k = data.draw(st.integers(1, num_experts))
    ids, _ = picks(seed, num_tokens, num_experts, k)
    routes = routing.route(ids, num_experts, rows)
    order = routes.order.tolist()
    assert sorted(order) == list(range(num_tokens * k))
    of_pair, found = ids.flatten().tolist(), []
    for expert, first, end in zip(*routes.tiles.tolist(), strict=True):
        for place in range(first, min(first + rows, end)):
            assert of_pair[order[place]] == expert
            found.append(order[place])
    assert found == order
    assert [of_pair[pair] * len(order) + pair for pair in order] == sorted(
        of_pair[pair] * len(order) + pair for pair in order
    )


def assert_mixed(found, x, ids, weights, up, down, activation):
    expected = reference.experts(x.double(), ids, weights.double(), up.double(), down.double(), activation)
    assert found.dtype == x.dtype
    assert found.shape == x.shape
    # gated products are rounded on their way, and so is what they are products of
    error = 1e-5 + (6 * ROUNDING[x.dtype] if x.dtype != torch.float32 else 0)
    assert (found.double() - expected).abs().max() <= error * (1 + expected.abs().max())


@drawn
@given(
    SEEDS,
    st.sampled_from([1, 3, 20, 70]),
    st.sampled_from([20, 64, 100]),
    st.sampled_from([1, 20, 48]),
    st.integers(1, 5),
    DTYPES,
    st.booleans(),
    st.sampled_from(ACTIVATIONS),
)
def test_experts_are_those_of_float64(seed, num_tokens, hidden, inner, k, dtype, strict, activation):
    num_experts = 6
    x = normal(seed, num_tokens, hidden, dtype=dtype)
    up = weight_of(seed + 1, num_experts, 2 * inner, hidden, dtype=dtype)
    down = weight_of(seed + 2, num_experts, hidden, inner, dtype=dtype)
    ids, weights = picks(seed + 3, num_tokens, num_experts - 1, k)  # nobody wants the last expert
    found = products.experts(x, ids, weights, up, down, activation, strict=strict)
    assert_mixed(found, x, ids, weights, up, down, activation)
    assert torch.equal(products.experts(x, ids, weights, up, down, activation, strict=strict), found)


@pytest.mark.parametrize(
    ("dtype", "strict"),
    [(torch.float32, False), (torch.float16, False), (torch.bfloat16, False), (torch.float32, True)],
)
def test_all_tokens_may_want_the_same_experts(dtype, strict):
    x = normal(0, 70, 40, dtype=dtype)
    up, down = weight_of(1, 5, 48, 40, dtype=dtype), weight_of(2, 5, 40, 24, dtype=dtype)
    ids, weights = torch.tensor([3, 0], device=DEVICE).expand(70, 2), normal(3, 70, 2).softmax(1)
    found = products.experts(x, ids, weights, up, down, "silu", strict=strict)
    assert_mixed(found, x, ids, weights, up, down, "silu")
    ids = torch.full((70, 1), 2, device=DEVICE)
    found = products.experts(x, ids, weights[:, :1], up, down, "silu", strict=strict)
    assert_mixed(found, x, ids, weights[:, :1], up, down, "silu")


@pytest.mark.parametrize("strict", [False, True])
def test_experts_of_real_sizes_are_those_of_float64(strict):
    x = normal(0, 3, 1000, dtype=torch.bfloat16)
    up, down = weight_of(1, 16, 192, 1000, dtype=torch.bfloat16), weight_of(2, 16, 1000, 96, dtype=torch.bfloat16)
    ids, weights = picks(3, 3, 16, 4)
    assert_mixed(products.experts(x, ids, weights, up, down, "silu", strict=strict), x, ids, weights, up, down, "silu")


def test_tokens_and_shares_may_be_views():
    x, up, down = (
        normal(0, 12, 40),
        weight_of(1, 4, 48, 40, dtype=torch.float32),
        weight_of(2, 4, 40, 24, dtype=torch.float32),
    )
    ids, weights = picks(3, 12, 4, 4)
    some = x[::2], ids[::2, 1:3], weights[::2, 1:3]
    assert_mixed(products.experts(*some, up, down, "silu", strict=False), *some, up, down, "silu")
    turned = x.T.contiguous().T, ids[:, :2], weights[:, :2]
    assert_mixed(products.experts(*turned, up, down, "silu", strict=False), *turned, up, down, "silu")


@pytest.mark.parametrize("ids", [[0, 1, 2], [2, 0, 1], [1, 2, 0], [2, 1, 0]])
def test_results_are_added_in_the_order_of_experts(ids):
    """In any other order the smallest result would be lost, or would not."""
    x = torch.ones(1, 16, device=DEVICE)
    up = torch.full((3, 32, 16), 1 / 16, device=DEVICE)
    for results, total in (((1e8, -1e8, 1.0), 1.0), ((1e8, 1.0, -1e8), 0.0), ((1.0, 1e8, -1e8), 0.0)):
        down = torch.tensor(results, device=DEVICE).view(3, 1, 1) * torch.eye(16, device=DEVICE)
        shares = torch.ones(1, 3, device=DEVICE)
        found = products.experts(x, torch.tensor([ids], device=DEVICE), shares, up, down, "relu", strict=False)
        assert (found == total).all()


@settings(drawn, max_examples=4)
@given(SEEDS, st.sampled_from([2, 20, 40]), DTYPES, st.data())
def test_strict_experts_have_the_same_bits_alone_and_in_any_company(seed, num_tokens, dtype, data):
    x = normal(seed, num_tokens, 48, dtype=dtype)
    up, down = weight_of(seed + 1, 4, 66, 48, dtype=dtype), weight_of(seed + 2, 4, 48, 33, dtype=dtype)
    ids, weights = picks(seed + 3, num_tokens, 4, 2)
    one = slice(start := data.draw(st.integers(0, num_tokens - 1)), start + 1)
    together = products.experts(x, ids, weights, up, down, "silu", strict=True)
    for some in (one, slice(start, None), slice(None, start + 1)):
        alone = products.experts(x[some].clone(), ids[some], weights[some], up, down, "silu", strict=True)
        assert torch.equal(alone, together[some])
    turned = products.experts(x.roll(5, 0), ids.roll(5, 0), weights.roll(5, 0), up, down, "silu", strict=True)
    assert torch.equal(turned, together.roll(5, 0))


def test_no_rows_give_no_rows():
    x, weight = torch.zeros(0, 64, device=DEVICE), weight_of(1, 40, 64, dtype=torch.float32)
    for strict in (False, True):
        assert products.linear(x, weight, None, strict=strict).shape == (0, 40)
        assert products.gated_linear(x, weight, None, "silu", strict=strict).shape == (0, 20)
    no_ids = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert products.embed(no_ids, weight).shape == (0, 64)
    up, down = weight_of(1, 3, 40, 64, dtype=torch.float32), weight_of(2, 3, 64, 20, dtype=torch.float32)
    shares = torch.zeros(0, 2, device=DEVICE)
    assert products.experts(x, no_ids.view(0, 2), shares, up, down, "silu", strict=False).shape == (0, 64)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs are recorded on a GPU")
@pytest.mark.parametrize("strict", [False, True])
def test_experts_can_be_recorded_and_run_again_on_other_tokens(strict):
    up, down = weight_of(1, 8, 64, 48, dtype=torch.bfloat16), weight_of(2, 8, 48, 32, dtype=torch.bfloat16)
    inputs = [(normal(seed, 30, 48, dtype=torch.bfloat16), *picks(seed + 1, 30, 8, 2)) for seed in (3, 5)]
    expected = [products.experts(*some, up, down, "silu", strict=strict) for some in inputs]
    places = [x.clone() for x in inputs[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = products.experts(*places, up, down, "silu", strict=strict)
    for some, result in zip(inputs, expected, strict=True):
        for place, new in zip(places, some, strict=True):
            place.copy_(new)
        graph.replay()
        assert torch.equal(found, result)


def test_weights_of_other_modules_are_refused():
    x, packed = torch.zeros(1, 4, device=DEVICE), Packed(torch.zeros(4, 4, device=DEVICE), 4, 4)
    for strict in (False, True):
        with pytest.raises(TypeError, match="packed by another kernel module"):
            products.linear(x, packed, None, strict=strict)
