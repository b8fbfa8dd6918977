"""Products with packed weights by the CPU kernels, against float64, for every build and number of threads."""

import pytest
import torch
from cpu_kernel_builds import each_with, in_use
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_oracle import MODES, assert_routes, cases

from quire.kernels import reference
from quire.kernels.contract import ACTIVATIONS, Routing

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
cpu = pytest.importorskip("quire.kernels.cpu.products")

DTYPES = st.sampled_from((torch.float32, torch.bfloat16))
COUNTS = (*range(1, 10), 16, 17, 33, 64, 100, 300)  # for the paths of few rows, registers, tiles and blocks
ROWS = st.sampled_from(COUNTS)
SIZES = st.sampled_from([1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 64, 65, 100, 130])
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", params=each_with(1, 2, 3))
def build(request):
    with in_use(request.param) as threads:
        yield threads


pytestmark = pytest.mark.usefixtures("build")
drawn = settings(max_examples=8)


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(seed, *shape, dtype):
    """A random weight, scaled so that products have the magnitude of their inputs."""
    return normal(seed, *shape, dtype=torch.float32).div(shape[-1] ** 0.5).to(dtype)


def rounding(dtype):
    """The largest relative error of one rounding."""
    return 2**-8 if dtype == torch.bfloat16 else 2**-24


def assert_near(found, expected, error):
    """Asserts that `found` differs from `expected` (float64) by at most `error` and one rounding to its type."""
    assert found.shape == expected.shape
    distance = (found.double() - expected).abs()
    assert (distance <= error + 1.01 * rounding(found.dtype) * expected.abs()).all(), distance.max()


def exact(x, weight, bias=None):
    """A product in float64, and an error bound for sequential float32 sums."""
    x, weight = x.double(), weight.double()
    bias = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.double()
    return x @ weight.T + bias, (x.shape[1] + 2) * 2**-23 * (x.abs() @ weight.abs().T + bias.abs())


def assert_gated(found, x, weight, bias, activation):
    """Asserts that `found` is the gated product. Gates and gated values are rounded before the multiplication."""
    (gates, gated), (near_gates, near_gated) = (both.chunk(2, 1) for both in exact(x, weight, bias))
    each = near_gates + 1.01 * rounding(found.dtype) * gates.abs()
    shares = [reference.activate(gates + shift, activation) for shift in (-each, 0, each)]
    error = torch.maximum(*((shares[1] - other).abs() for other in shares[::2])) + 2e-6 * shares[1].abs() + 1e-7
    each_gated = near_gated + 1.01 * rounding(found.dtype) * gated.abs()
    assert_near(found, shares[1] * gated, error * (gated.abs() + each_gated) + shares[1].abs() * each_gated)


@drawn
@given(SEEDS, ROWS, SIZES, SIZES, DTYPES, st.booleans(), st.booleans(), st.booleans())
def test_products_are_those_of_float64(seed, rows, n, k, dtype, biased, strict, halved):
    n *= 1 + halved
    x, weight = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, n, k, dtype=dtype)
    bias = normal(seed + 2, n, dtype=dtype) if biased else None
    packed = cpu.pack_weight(weight, 1 + halved)
    found = cpu.linear(x, packed, bias, deterministic=strict)
    assert found.dtype == dtype
    assert_near(found, *exact(x, weight, bias))
    assert_near(cpu.linear(x, weight, bias, deterministic=strict), *exact(x, weight, bias))


@drawn
@given(SEEDS, ROWS, SIZES, SIZES, DTYPES, st.booleans(), st.booleans(), st.sampled_from(ACTIVATIONS))
def test_gated_products_are_those_of_float64(seed, rows, n, k, dtype, biased, strict, activation):
    x, weight = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, 2 * n, k, dtype=dtype)
    bias = normal(seed + 2, 2 * n, dtype=dtype) if biased else None
    found = cpu.gated_linear(x, cpu.pack_weight(weight, 2), bias, activation, deterministic=strict)
    assert found.dtype == dtype
    assert_gated(found, x, weight, bias, activation)
    assert_gated(cpu.gated_linear(x, weight, bias, activation, deterministic=strict), x, weight, bias, activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(17, 33), (100, 96)])
def test_every_number_of_rows_is_computed(n, k, dtype):
    weight, bias = weight_of(1, 2 * n, k, dtype=dtype), normal(2, 2 * n, dtype=dtype)
    plain, gates = cpu.pack_weight(weight), cpu.pack_weight(weight, 2)
    for rows in COUNTS:
        x = normal(rows, rows, k, dtype=dtype)
        for strict in (False, True):
            assert_near(cpu.linear(x, plain, bias, deterministic=strict), *exact(x, weight, bias))
            assert_gated(cpu.gated_linear(x, gates, bias, "silu", deterministic=strict), x, weight, bias, "silu")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), [(300, 70, 4096), (420, 100, 64), (1000, 40, 130), (257, 17, 2080)])
def test_many_rows_go_block_by_block(rows, n, k, strict):
    x, weight = normal(0, rows, k, dtype=torch.bfloat16), weight_of(1, 2 * n, k, dtype=torch.bfloat16)
    bias = normal(2, 2 * n, dtype=torch.bfloat16)
    assert_near(cpu.linear(x, cpu.pack_weight(weight), bias, deterministic=strict), *exact(x, weight, bias))
    found = cpu.gated_linear(x, cpu.pack_weight(weight, 2), bias, "silu", deterministic=strict)
    assert_gated(found, x, weight, bias, "silu")


def test_no_rows_give_no_rows():
    for dtype in (torch.float32, torch.bfloat16):
        weight = weight_of(1, 40, 64, dtype=dtype)
        x = torch.empty(0, 64, dtype=dtype)
        assert cpu.linear(x, cpu.pack_weight(weight), None, deterministic=False).shape == (0, 40)
        assert cpu.gated_linear(x, cpu.pack_weight(weight, 2), None, "silu", deterministic=False).shape == (0, 20)
        assert cpu.embed(torch.empty(0, dtype=torch.int64), cpu.pack_weight(weight)).shape == (0, 64)


@drawn
@given(SEEDS, SIZES, SIZES, DTYPES, st.integers(1, 3))
def test_a_packed_weight_can_be_read_back(seed, rows, size, dtype, number):
    weight = normal(seed, number, rows, size, dtype=dtype)
    kept = weight.clone()
    packed = cpu.pack_weight(weight)
    every = torch.arange(rows)
    for one, part in zip(weight, [packed[index] for index in range(number)], strict=True):
        assert torch.equal(cpu.embed(every, part), one)
        assert torch.equal(cpu.embed(every, cpu.pack_weight(one.clone())), one)
        assert torch.equal(cpu.embed(every, cpu.pack_weight(one.T.contiguous().T)), one)
    assert torch.equal(weight, kept)


@drawn
@given(SEEDS, st.integers(1, 40), SIZES, DTYPES, st.sampled_from([1.0, 0.3, 45.25]), st.booleans())
def test_embeddings_are_rows_times_a_factor_and_zeros_for_others(seed, count, size, dtype, scale, packed):
    weight = normal(seed, 19, size, dtype=dtype)
    ids = torch.randint(-3, 23, (2 * count,), generator=torch.Generator().manual_seed(seed))[::2]
    inside = (ids >= 0) & (ids < 19)
    expected = torch.where(inside[:, None], weight[ids.clamp(0, 18)] * scale, torch.zeros((), dtype=dtype))
    assert torch.equal(cpu.embed(ids, cpu.pack_weight(weight) if packed else weight, scale), expected)


@drawn
@given(SEEDS, st.integers(1, 40), SIZES, SIZES, DTYPES, *[st.booleans()] * 3, st.sampled_from(ACTIVATIONS))
def test_experts_are_those_of_float64(seed, num_tokens, hidden, inner, dtype, packed, strict, gated, activation):
    num_experts, each = 5, 2
    x = normal(seed, num_tokens, hidden, dtype=dtype)
    up = weight_of(seed + 1, num_experts, 2 * inner if gated else inner, hidden, dtype=dtype)
    down = weight_of(seed + 2, num_experts, hidden, inner, dtype=dtype)
    order = torch.rand(num_tokens, num_experts - 1, generator=torch.Generator().manual_seed(seed)).argsort(1)
    ids = order[:, :each]  # no token picks the last expert
    weights = normal(seed + 3, num_tokens, each).softmax(1)
    packs = (cpu.pack_weight(up, 2 if gated else 1), cpu.pack_weight(down)) if packed else (up, down)
    found = cpu.experts(x, ids, weights, *packs, activation, gated=gated, deterministic=strict)
    assert found.dtype == dtype
    expected = reference.experts(x.double(), ids, weights.double(), up.double(), down.double(), activation, gated=gated)
    error = 3e-2 if dtype == torch.bfloat16 else 1e-5  # intermediate gated products are rounded
    assert (found.double() - expected).abs().max() <= error * (1 + expected.abs().max())


@drawn
@given(SEEDS, st.integers(1, 40), st.sampled_from([1, 2, 5, 8, 60, 128]), DTYPES, st.booleans(), st.data())
def test_routes_are_those_of_plain_torch(seed, num_tokens, number, dtype, normalise, data):
    k = data.draw(st.integers(1, min(number, 8)))
    logits = 3 * normal(seed, num_tokens, number + 3)[:, :number]  # rows with a stride
    logits = logits.argsort(1).to(dtype) / 8 if number < 64 else logits.float()  # no ties
    ids, weights = cpu.route(logits, k, Routing(normalise))
    expected_ids, expected = reference.route(logits, k, Routing(normalise))
    assert torch.equal(ids, expected_ids)
    assert torch.allclose(weights, expected, rtol=1e-5, atol=1e-7)


@settings(max_examples=20)
@given(cases((torch.float32, torch.bfloat16)))
def test_routes_of_all_modes_are_those_of_loops(case):
    logits, *rules = case
    found = cpu.route(*case)
    assert_routes(found, *case)
    alone = cpu.route(logits[-1:].clone(), *rules)
    assert torch.equal(alone[0], found[0][-1:])
    assert torch.equal(alone[1], found[1][-1:])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("routing", MODES, ids=str)
def test_tokens_with_nan_have_different_experts_and_their_mates_have_their_own(routing, biased):
    logits = normal(0, 12, 24)
    logits[8, 3], logits[9], logits[10, 2:], logits[11] = torch.nan, torch.nan, torch.nan, -torch.inf
    bias = normal(1, 24) / 4 if biased else None
    ids, weights = cpu.route(logits, 3, routing, bias)
    assert all(len(set(row)) == 3 and set(row) <= set(range(24)) for row in ids.tolist())
    assert_routes((ids[:8], weights[:8]), logits[:8], 3, routing, bias)
    assert weights[9].isnan().all()


def test_a_token_with_nan_has_experts_and_nan_weights():
    logits = torch.tensor([[1.0, torch.nan, 3.0], [torch.nan] * 3, [-torch.inf] * 3])
    ids, weights = cpu.route(logits, 2, Routing(normalise=True))
    assert ids[0].tolist() == [2, 0]
    assert sorted(ids[1].tolist()) == sorted(ids[2].tolist()) == [0, 1]
    assert weights[:3].isnan().all()
    with pytest.raises(ValueError, match="4 experts cannot be selected of 3"):
        cpu.route(logits, 4, Routing(normalise=True))


@drawn
@given(SEEDS, SIZES, SIZES, DTYPES, st.integers(1, 40))
def test_one_of_several_weights_is_as_if_it_was_packed_alone(seed, n, k, dtype, rows):
    weights, x = weight_of(seed, 3, 2 * n, k, dtype=dtype), normal(seed + 1, rows, k, dtype=dtype)
    plain, gates = cpu.pack_weight(weights), cpu.pack_weight(weights, 2)
    for index in (0, 2, -1):
        alone = cpu.linear(x, cpu.pack_weight(weights[index]), None, deterministic=False)
        assert torch.equal(cpu.linear(x, plain[index], None, deterministic=False), alone)
        gated = cpu.gated_linear(x, cpu.pack_weight(weights[index], 2), None, "silu", deterministic=False)
        assert torch.equal(cpu.gated_linear(x, gates[index], None, "silu", deterministic=False), gated)


@drawn
@given(SEEDS, ROWS, SIZES, SIZES, DTYPES, st.integers(0, 3), st.integers(0, 3))
def test_rows_may_be_a_view_into_a_wider_tensor(seed, rows, n, k, dtype, before, behind):
    x, weight = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, 2 * n, k, dtype=dtype)
    wide = torch.full((rows, before + k + behind), torch.nan, dtype=dtype)
    wide[:, before : before + k] = x
    for view in (wide[:, before : before + k], x.T.contiguous().T):
        for strict in (False, True):
            found = cpu.linear(view, cpu.pack_weight(weight), None, deterministic=strict)
            assert torch.equal(found, cpu.linear(x, cpu.pack_weight(weight), None, deterministic=strict))
            found = cpu.gated_linear(view, cpu.pack_weight(weight, 2), None, "gelu", deterministic=strict)
            assert torch.equal(
                found, cpu.gated_linear(x, cpu.pack_weight(weight, 2), None, "gelu", deterministic=strict)
            )


@drawn
@given(SEEDS, ROWS, SIZES, DTYPES, st.booleans(), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.data())
def test_a_value_that_is_not_finite_changes_no_other_row(seed, rows, k, dtype, strict, value, data):
    n = data.draw(SIZES)
    x, weight = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, 2 * n, k, dtype=dtype)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, k - 1))
    spoilt = x.clone()
    spoilt[row, column] = value
    others = torch.arange(rows) != row
    plain, gates = cpu.pack_weight(weight), cpu.pack_weight(weight, 2)
    for product in (
        lambda x: cpu.linear(x, plain, None, deterministic=strict),
        lambda x: cpu.gated_linear(x, gates, None, "silu", deterministic=strict),
    ):
        found = product(spoilt)
        assert torch.equal(found[others], product(x)[others])
    assert not cpu.linear(spoilt, plain, None, deterministic=strict)[row].isfinite().any()


@drawn
@given(SEEDS, ROWS, SIZES, SIZES, DTYPES, st.sampled_from(ACTIVATIONS), st.data())
def test_strict_products_have_the_same_bits_alone_and_in_any_company(build, seed, rows, n, k, dtype, activation, data):
    x, weight = normal(seed, rows, k, dtype=dtype), weight_of(seed + 1, 2 * n, k, dtype=dtype)
    bias = normal(seed + 2, 2 * n, dtype=dtype)
    up, gates = cpu.pack_weight(weight), cpu.pack_weight(weight, 2)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    for product in (
        lambda x: cpu.linear(x, up, bias, deterministic=True),
        lambda x: cpu.linear(x, gates, bias, deterministic=True),
        lambda x: cpu.gated_linear(x, gates, bias, activation, deterministic=True),
    ):
        together = product(x)
        assert torch.equal(product(x[start:stop].clone()), together[start:stop])
        assert torch.equal(product(x[start : start + 1].clone()), together[start : start + 1])
        _C.set_threads(5 - build)
        elsewhere = product(x)
        _C.set_threads(build)
        assert torch.equal(elsewhere, together)


@drawn
@given(SEEDS, st.integers(2, 40), DTYPES, st.data())
def test_strict_experts_have_the_same_bits_alone_and_in_any_company(seed, num_tokens, dtype, data):
    x = normal(seed, num_tokens, 48, dtype=dtype)
    up = cpu.pack_weight(weight_of(seed + 1, 4, 66, 48, dtype=dtype), 2)
    down = cpu.pack_weight(weight_of(seed + 2, 4, 48, 33, dtype=dtype))
    ids = torch.rand(num_tokens, 4, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :2]
    weights = normal(seed + 3, num_tokens, 2).softmax(1)
    one = slice(start := data.draw(st.integers(0, num_tokens - 1)), start + 1)
    together = cpu.experts(x, ids, weights, up, down, "silu", deterministic=True)
    assert torch.equal(cpu.experts(x[one], ids[one], weights[one], up, down, "silu", deterministic=True), together[one])


def test_inputs_that_do_not_match_a_packed_weight_are_refused():
    x, weight = torch.zeros(2, 8), torch.zeros(6, 8)
    packed, gates, several = cpu.pack_weight(weight), cpu.pack_weight(weight, 2), cpu.pack_weight(torch.zeros(3, 6, 8))
    with pytest.raises(TypeError, match="float16"):
        cpu.pack_weight(weight.half())
    with pytest.raises(ValueError, match="6 rows cannot be divided into 4 parts"):
        cpu.pack_weight(weight, 4)
    for wrong in (torch.zeros(2, 7), x.bfloat16(), x.double(), torch.zeros(8), torch.zeros(1, 2, 8)):
        for product in (
            lambda x: cpu.linear(x, packed, None, deterministic=False),
            lambda x: cpu.linear(x, gates, None, deterministic=False),
            lambda x: cpu.gated_linear(x, gates, None, "silu", deterministic=False),
        ):
            with pytest.raises(ValueError, match="does not match a weight"):
                product(wrong)
    for wrong in (torch.zeros(5), torch.zeros(7), torch.zeros(1, 6), torch.zeros(6).bfloat16()):
        with pytest.raises(ValueError, match="bias"):
            cpu.linear(x, packed, wrong, deterministic=False)
        with pytest.raises(ValueError, match="bias"):
            cpu.linear(x, gates, wrong, deterministic=False)
        with pytest.raises(ValueError, match="bias"):
            cpu.gated_linear(x, gates, wrong, "silu", deterministic=False)
    with pytest.raises(ValueError, match="2 parts"):
        cpu.gated_linear(x, packed, None, "silu", deterministic=False)
    for product in (cpu.linear, lambda x, weight, bias, deterministic: cpu.embed(torch.tensor([0]), weight)):
        with pytest.raises(ValueError, match="stacked weights"):
            product(x, several, None, deterministic=False)
    with pytest.raises(ValueError, match="one part, not of 2"):
        cpu.embed(torch.tensor([0]), gates)
    for some in (weight, packed):
        with pytest.raises(TypeError, match="int32"):
            cpu.embed(torch.tensor([0], dtype=torch.int32), some)


def test_a_bias_may_be_a_view():
    x, weight = normal(0, 3, 8), normal(1, 6, 8)
    bias = normal(2, 12)
    for parts in (1, 2):
        found = cpu.linear(x, cpu.pack_weight(weight, parts), bias[::2], deterministic=False)
        assert_near(found, *exact(x, weight, bias[::2]))
