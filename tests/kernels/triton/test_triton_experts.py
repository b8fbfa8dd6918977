"""Mixtures of experts by the Triton kernels, against float64: routing tables and results."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_oracle import MODES, assert_routes, cases
from triton_device import DEVICE
from triton_random_tensors import DTYPES, ROUNDING, SEEDS, drawn, normal, poisoned_empty, weight_of

from quire.kernels import reference
from quire.kernels.contract import ACTIVATIONS, Routing

pytest.importorskip("triton")
experts = pytest.importorskip("quire.kernels.triton.experts")
products = pytest.importorskip("quire.kernels.triton.products")
routing = pytest.importorskip("quire.kernels.triton.routing")


@pytest.fixture(scope="module", autouse=True)
def poison():
    """torch.empty gives NaN, so that values which a kernel does not write are found."""
    with patch.object(torch, "empty", poisoned_empty):
        yield


def picks(seed, num_tokens, num_experts, k):
    """k different experts per token, and their weights."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, num_experts, generator=random).argsort(1)[:, :k]
    return ids.to(DEVICE), normal(seed + 1, num_tokens, k).softmax(1)


# ---- routing tables ----


@drawn
@given(SEEDS, st.integers(1, 30), st.sampled_from([1, 3, 8, 60, 128]), DTYPES, st.booleans(), st.data())
def test_chosen_experts_are_the_largest_and_weighed_by_a_softmax(seed, num_tokens, num_experts, dtype, normalise, data):
    k = data.draw(st.integers(1, min(8, num_experts)))
    logits = normal(seed, num_tokens, 2 * num_experts, dtype=dtype)[:, :num_experts]
    ids, weights = routing.route(logits, k, Routing(normalise))
    assert (ids.dtype, weights.dtype, ids.shape) == (torch.int64, torch.float32, (num_tokens, k))
    expected, shares = reference.route(logits.cpu(), k, Routing(normalise))
    torch.testing.assert_close(weights.cpu(), shares, rtol=1e-5, atol=1e-7)
    chosen = logits.gather(1, ids).cpu()
    assert torch.equal(chosen, logits.cpu().gather(1, expected)), "equal logits may stand for one another"
    assert all(len(set(row)) == k for row in ids.tolist())
    alone = routing.route(logits[-1:], k, Routing(normalise))
    assert torch.equal(alone[0], ids[-1:]) and torch.equal(alone[1], weights[-1:])


def on_device(logits, k, rules, *factors):
    moved = [None if one is None else one.to(DEVICE) for one in factors]
    ids, weights = routing.route(logits.to(DEVICE), k, rules, *moved)
    return ids.cpu(), weights.cpu()


@settings(drawn, max_examples=12)
@given(cases(tuple(ROUNDING)))
def test_routes_of_all_modes_are_those_of_loops(case):
    logits, *rules = case
    found = on_device(*case)
    assert_routes(found, *case)
    alone = on_device(logits[-1:].clone(), *rules)
    assert torch.equal(alone[0], found[0][-1:]) and torch.equal(alone[1], found[1][-1:])


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("rules", MODES, ids=str)
def test_tokens_with_nan_have_different_experts_and_their_mates_have_their_own(rules):
    logits, bias = normal(0, 12, 24).cpu(), normal(1, 24).cpu() / 4
    logits[8, 3], logits[9], logits[10, 2:], logits[11] = torch.nan, torch.nan, torch.nan, -torch.inf
    for some in (None, bias):
        ids, weights = on_device(logits, 3, rules, some)
        assert all(len(set(row)) == 3 and set(row) <= set(range(24)) for row in ids.tolist())
        assert_routes((ids[:8], weights[:8]), logits[:8], 3, rules, some)
        assert weights[9].isnan().all()


def test_of_equal_logits_the_first_are_chosen():
    logits = torch.tensor([[1.0, 2, 2, 1, 2, 0], [0, -0.0, 0, -0.0, -1, -1]], device=DEVICE)
    assert routing.route(logits, 4, Routing(normalise=False))[0].tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_a_row_of_nan_or_infinity_has_experts_and_its_mates_have_their_own():
    nan, inf = torch.nan, torch.inf
    rows = [[1.0, nan, 2, 3], [0.5, 0.25, -1, -2], [-inf] * 4, [inf, 0, inf, 1], [-inf, -3, -inf, -4]]
    ids, weights = routing.route(torch.tensor(rows, device=DEVICE), 3, Routing(normalise=True))
    assert all(len(set(row)) == 3 and set(row) < set(range(4)) for row in ids.tolist())
    assert weights[[0, 2, 3]].isnan().any(1).all()
    torch.testing.assert_close(weights[1].cpu(), torch.tensor([0.5, 0.25, -1]).softmax(0), rtol=1e-5, atol=1e-7)
    assert ids[4, :2].tolist() == [1, 3] and weights[4, 2] == 0


@drawn
@given(SEEDS, st.integers(1, 60), st.integers(1, 9), st.sampled_from([16, 64]), st.sampled_from([16, 4096]), st.data())
def test_tiles_hold_each_pair_once_and_beside_its_expert(seed, num_tokens, num_experts, rows, together, data):
    k = data.draw(st.integers(1, num_experts))
    ids, _ = picks(seed, num_tokens, num_experts, k)
    with patch.object(routing, "PAIRS_PER_STEP", together):
        routes = routing.align_block_size(ids.contiguous(), num_experts, rows)
    order, of_pair = routes.order.tolist(), ids.flatten().tolist()
    assert order == sorted(range(num_tokens * k), key=lambda pair: of_pair[pair])
    assert routes.ends.tolist() == [sum(id <= expert for id in of_pair) for expert in range(num_experts)]
    found = []
    for expert, first, end in zip(*routes.tiles.tolist(), strict=True):
        for place in range(first, min(first + rows, end)):
            assert of_pair[order[place]] == expert
            found.append(order[place])
    assert found == order


# ---- results ----


def assert_mixed(found, x, ids, weights, up, down, activation, *, gated=True):
    expected = reference.experts(x.double(), ids, weights.double(), up.double(), down.double(), activation, gated=gated)
    assert found.dtype == x.dtype
    assert found.shape == x.shape
    # intermediate results of gated products are rounded, and so are the inputs of the second product
    error = 1e-5 + (6 * ROUNDING[x.dtype] if x.dtype != torch.float32 else 0)
    assert (found.double() - expected).abs().max() <= error * (1 + expected.abs().max())


@settings(drawn, max_examples=5)
@given(
    SEEDS,
    st.sampled_from([1, 3, 20, 70]),
    st.sampled_from([20, 64, 100]),
    st.sampled_from([1, 20, 48]),
    st.integers(1, 5),
    DTYPES,
    st.booleans(),
    st.booleans(),
    st.sampled_from(ACTIVATIONS),
)
def test_experts_are_those_of_float64(seed, num_tokens, hidden, inner, k, dtype, strict, gated, activation):
    num_experts = 6
    x = normal(seed, num_tokens, hidden, dtype=dtype)
    up = weight_of(seed + 1, num_experts, 2 * inner if gated else inner, hidden, dtype=dtype)
    down = weight_of(seed + 2, num_experts, hidden, inner, dtype=dtype)
    ids, weights = picks(seed + 3, num_tokens, num_experts - 1, k)  # no token picks the last expert
    found = experts.experts(x, ids, weights, up, down, activation, gated=gated, deterministic=strict)
    assert_mixed(found, x, ids, weights, up, down, activation, gated=gated)
    assert torch.equal(experts.experts(x, ids, weights, up, down, activation, gated=gated, deterministic=strict), found)


@pytest.mark.parametrize(
    ("dtype", "strict"),
    [(torch.float32, False), (torch.float16, False), (torch.bfloat16, False), (torch.float32, True)],
)
def test_all_tokens_may_want_the_same_experts(dtype, strict):
    x = normal(0, 70, 40, dtype=dtype)
    up, down = weight_of(1, 5, 48, 40, dtype=dtype), weight_of(2, 5, 40, 24, dtype=dtype)
    ids, weights = torch.tensor([3, 0], device=DEVICE).expand(70, 2), normal(3, 70, 2).softmax(1)
    found = experts.experts(x, ids, weights, up, down, "silu", deterministic=strict)
    assert_mixed(found, x, ids, weights, up, down, "silu")
    ids = torch.full((70, 1), 2, device=DEVICE)
    found = experts.experts(x, ids, weights[:, :1], up, down, "silu", deterministic=strict)
    assert_mixed(found, x, ids, weights[:, :1], up, down, "silu")


@pytest.mark.parametrize(
    ("num_experts", "k", "hidden", "normalise", "strict"),
    [(8, 2, 4096, True, False), (8, 2, 4096, True, True), (128, 8, 2048, True, False), (60, 4, 2048, False, False)],
)
def test_numbers_of_experts_of_real_models(num_experts, k, hidden, normalise, strict):
    """Mixtral 8x7B, Qwen3-30B-A3B and Qwen1.5-MoE with narrow experts. Routing is as in the layer."""
    x, inner = normal(0, 2, hidden, dtype=torch.bfloat16), 16
    up = weight_of(1, num_experts, 2 * inner, hidden, dtype=torch.bfloat16)
    down = weight_of(2, num_experts, hidden, inner, dtype=torch.bfloat16)
    logits = products.linear(x, weight_of(3, num_experts, hidden, dtype=torch.bfloat16), None, deterministic=strict)
    ids, weights = routing.route(logits, k, Routing(normalise))
    assert_mixed(
        experts.experts(x, ids, weights, up, down, "silu", deterministic=strict), x, ids, weights, up, down, "silu"
    )


@pytest.fixture
def grouped(monkeypatch):
    """Calls of torch's grouped product: shape of their rows and their ends."""
    calls, product = [], experts.F.grouped_mm

    def counted(rows, weight, *, offs):
        calls.append((rows.shape, offs.tolist()))
        return product(rows, weight, offs=offs)

    monkeypatch.setattr(experts.F, "grouped_mm", counted)
    return calls


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped product")
def test_the_librarys_grouped_product_gives_what_ours_does(grouped, monkeypatch):
    activation = "silu"
    x = normal(0, 25, 40, dtype=torch.bfloat16)
    up, down = weight_of(1, 3, 48, 40, dtype=torch.bfloat16), weight_of(2, 3, 40, 24, dtype=torch.bfloat16)
    ids, weights = picks(3, 25, 3, 2)
    found = experts.experts(x, ids, weights, up, down, activation, deterministic=False)
    assert_mixed(found, x, ids, weights, up, down, activation)
    ends = [sum(id <= expert for id in ids.flatten().tolist()) for expert in range(3)]
    assert grouped == [((50, 40), ends)]
    assert torch.equal(experts.experts(x, ids, weights, up, down, activation, deterministic=False), found)
    monkeypatch.setattr(experts, "has_grouped_mm", lambda x, weight: False)
    own = experts.experts(x, ids, weights, up, down, activation, deterministic=False)
    assert len(grouped) == 2, "the last one was our own"
    torch.testing.assert_close(own, found, rtol=0.02, atol=0.02)


def test_the_library_is_not_asked_for_what_it_does_badly(grouped, monkeypatch):
    def calls(num_tokens, inner, dtype, *, strict):
        grouped.clear()
        up, down = weight_of(1, 2, 2 * inner, 40, dtype=dtype), weight_of(2, 2, 40, inner, dtype=dtype)
        ids, weights = picks(3, num_tokens, 2, 1)
        experts.experts(normal(0, num_tokens, 40, dtype=dtype), ids, weights, up, down, "silu", deterministic=strict)
        return len(grouped)

    assert calls(33, 24, torch.bfloat16, strict=False) == 1
    assert calls(32, 24, torch.bfloat16, strict=False) == 0, "few rows"
    assert calls(33, 22, torch.bfloat16, strict=False) == 0, "rows of weights begin at odd places"
    assert calls(33, 24, torch.float16, strict=False) == 0
    assert calls(33, 24, torch.bfloat16, strict=True) == 0
    for capability, takes in (((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert experts._device_has_grouped_mm.__wrapped__(torch.device("cuda")) == takes
    monkeypatch.delattr(experts.F, "grouped_mm")
    assert not experts.has_grouped_mm(torch.empty(1, 8, dtype=torch.bfloat16), torch.empty(1, 8, 8))


def test_tokens_and_shares_may_be_views():
    x, up, down = (
        normal(0, 12, 40),
        weight_of(1, 4, 48, 40, dtype=torch.float32),
        weight_of(2, 4, 40, 24, dtype=torch.float32),
    )
    ids, weights = picks(3, 12, 4, 4)
    some = x[::2], ids[::2, 1:3], weights[::2, 1:3]
    assert_mixed(experts.experts(*some, up, down, "silu", deterministic=False), *some, up, down, "silu")
    turned = x.T.contiguous().T, ids[:, :2], weights[:, :2]
    assert_mixed(experts.experts(*turned, up, down, "silu", deterministic=False), *turned, up, down, "silu")


@pytest.mark.parametrize("ids", [[0, 1, 2], [2, 0, 1], [1, 2, 0], [2, 1, 0]])
def test_results_are_added_in_the_order_of_experts(ids):
    """The order of the additions decides whether the smallest result is lost."""
    x = torch.ones(1, 16, device=DEVICE)
    up = torch.full((3, 32, 16), 1 / 16, device=DEVICE)
    for results, total in (((1e8, -1e8, 1.0), 1.0), ((1e8, 1.0, -1e8), 0.0), ((1.0, 1e8, -1e8), 0.0)):
        down = torch.tensor(results, device=DEVICE).view(3, 1, 1) * torch.eye(16, device=DEVICE)
        shares = torch.ones(1, 3, device=DEVICE)
        found = experts.experts(x, torch.tensor([ids], device=DEVICE), shares, up, down, "relu", deterministic=False)
        assert (found == total).all()


@settings(drawn, max_examples=4)
@given(SEEDS, st.sampled_from([2, 20, 40]), DTYPES, st.data())
def test_strict_experts_have_the_same_bits_alone_and_in_any_company(seed, num_tokens, dtype, data):
    x = normal(seed, num_tokens, 48, dtype=dtype)
    up, down = weight_of(seed + 1, 4, 66, 48, dtype=dtype), weight_of(seed + 2, 4, 48, 33, dtype=dtype)
    ids, weights = picks(seed + 3, num_tokens, 4, 2)
    one = slice(start := data.draw(st.integers(0, num_tokens - 1)), start + 1)
    together = experts.experts(x, ids, weights, up, down, "silu", deterministic=True)
    for some in (one, slice(start, None), slice(None, start + 1)):
        alone = experts.experts(x[some].clone(), ids[some], weights[some], up, down, "silu", deterministic=True)
        assert torch.equal(alone, together[some])
    turned = experts.experts(x.roll(5, 0), ids.roll(5, 0), weights.roll(5, 0), up, down, "silu", deterministic=True)
    assert torch.equal(turned, together.roll(5, 0))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs are recorded on a GPU")
@pytest.mark.parametrize(("num_tokens", "strict"), [(30, False), (100, False), (30, True)])
def test_experts_can_be_recorded_and_run_again_on_other_tokens(num_tokens, strict):
    up, down = weight_of(1, 8, 64, 48, dtype=torch.bfloat16), weight_of(2, 8, 48, 32, dtype=torch.bfloat16)
    inputs = [
        (normal(seed, num_tokens, 48, dtype=torch.bfloat16), *picks(seed + 1, num_tokens, 8, 2)) for seed in (3, 5)
    ]
    expected = [experts.experts(*some, up, down, "silu", deterministic=strict) for some in inputs]
    places = [x.clone() for x in inputs[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = experts.experts(*places, up, down, "silu", deterministic=strict)
    for some, result in zip(inputs, expected, strict=True):
        for place, new in zip(places, some, strict=True):
            place.copy_(new)
        graph.replay()
        assert torch.equal(found, result)


def test_no_tokens_give_no_rows():
    x, none = torch.zeros(0, 64, device=DEVICE), torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    up, down = weight_of(1, 3, 40, 64, dtype=torch.float32), weight_of(2, 3, 64, 20, dtype=torch.float32)
    assert experts.experts(x, none, none.float(), up, down, "silu", deterministic=False).shape == (0, 64)
    assert routing.route(torch.zeros(0, 3, device=DEVICE), 2, Routing(normalise=True))[0].shape == (0, 2)
