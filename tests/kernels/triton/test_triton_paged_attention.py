"""Paged attention in Triton against dense float64 products, over scattered blocks in storage full of NaN."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_groups import kv_group

from quire.kernels.contract import Batch, Storage
from quire.kernels.reference import paged as reference

pytest.importorskip("triton")
from triton_attention_cases import NOWHERE, Case
from triton_device import DEVICE

from quire.kernels.triton import attention as module
from quire.kernels.triton.plan import plan as make_plan
from quire.kernels.triton.plan import refill


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty gives NaN, so that values which a kernel does not write are found."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture
def short_splits(monkeypatch):
    """Splits and tiles of 16 keys, and more splits than tiles."""
    for name, value in {"MIN_SPLIT_KEYS": 8, "KEY_BYTES": 1, "WAVES": 1000}.items():
        monkeypatch.setattr(module, name, value)


def num_splits(case, plan=None, used=2):
    plan = make_plan(case.batch(), case.storage) if plan is None else plan
    return module._splits(case.storage, plan, len(plan.starts), used, small=True)


span = st.tuples(st.integers(0, 90), st.one_of(st.integers(1, 3), st.integers(1, 40))).map(lambda x: (x[0], sum(x)))
types = st.sampled_from(
    [("float32", None), ("float16", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "fp8_e4m3")]
)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    spans=st.lists(span, min_size=1, max_size=3),
    types=types,
    shape=st.fixed_dictionaries(
        {
            "kv_heads": st.sampled_from([1, 2]),
            "shared": st.sampled_from([1, 3, 4, 7, 8]),
            "dim": st.sampled_from([20, 64, 80]),
            "size": st.sampled_from([16, 32, 48]),
            "window": st.sampled_from([0, 0, 1, 7, 40]),
        }
    ),
    softcap=st.sampled_from([0.0, 0.7]),
    strict=st.booleans(),
)
def test_mixed_chunks_equal_dense_products(seed, spans, types, shape, softcap, strict):
    Case(seed, spans, dtype=types[0], stored=types[1], **shape).check(softcap=softcap, strict=strict)


@pytest.mark.parametrize("stored", [None, "int8", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_type_of_keys_and_values(dtype, stored):
    Case(1, [(60, 61), (0, 33), (17, 20)], kv_heads=1, shared=4, dtype=dtype, stored=stored).check()


@pytest.mark.parametrize("dim", [20, 64, 80, 128, 256, 320, 512])
@pytest.mark.parametrize("stored", [None, "fp8_e4m3"])
def test_every_size_of_heads(dim, stored):
    Case(2, [(40, 41), (20, 39)], kv_heads=2, shared=1, dim=dim, stored=stored).check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [None, "int8"])
@pytest.mark.parametrize("window", [0, 30])
def test_the_largest_heads(window, stored, dtype):
    """A decoding sequence, and a prompt that is cut into large tiles."""
    case = Case(15, [(60, 61), (0, 40)], kv_heads=1, shared=4, dim=512, window=window, stored=stored, dtype=dtype)
    case.check()
    case.check(strict=True)


def test_layers_of_different_heads_take_turns():
    for dim in (256, 512, 256):
        Case(16, [(40, 41), (20, 34)], kv_heads=512 // dim, shared=2, dim=dim, dtype="bfloat16").check()


@pytest.mark.parametrize("shared", [1, 3, 4, 7, 8, 20])
def test_every_number_of_heads_that_share_keys(shared):
    Case(3, [(40, 41), (20, 34), (0, 1), (70, 72)], kv_heads=1, shared=shared, dim=20, dtype="float16").check()


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", None), ("float16", "fp8_e4m3")])
def test_sizes_of_a_real_model(dtype, stored):
    Case(4, [(99, 100), (30, 75)], kv_heads=8, shared=4, dim=128, dtype=dtype, stored=stored).check()


@pytest.mark.parametrize("window", [1, 16, 17, 50])
def test_keys_before_a_window_are_not_attended_to(window):
    Case(5, [(100, 101), (60, 99), (3, 30)], kv_heads=1, shared=4, window=window).check()


@pytest.mark.parametrize("softcap", [0.1, 30.0])
def test_capped_scores(softcap):
    case = Case(6, [(50, 51), (0, 40)], kv_heads=1)
    case.q = [10 * q for q in case.q]  # scores of 30 and more
    case.check(softcap=softcap)


@pytest.mark.parametrize("growth", [0.01, 100])
def test_scores_that_grow_or_shrink_along_the_sequence(growth):
    case = Case(7, [(110, 130), (129, 130)], kv_heads=1)
    for i, kv in enumerate(case.kv):
        kv[0] *= 0.2 * growth ** torch.linspace(-0.5, 0.5, kv.shape[1])[:, None, None]
        case.store(i)
    case.check()


def test_sequences_share_blocks():
    Case(8, [(60, 61), (40, 52), (33, 34)], common=2, kv_heads=1).check()


@pytest.mark.parametrize("window", [0, 20])
def test_equal_to_the_reference(window):
    case = Case(9, [(50, 51), (20, 60), (0, 5)], window=window, dim=16)
    group = case.storage.group
    canonical = case.storage.data.cpu().nan_to_num().transpose(3, 4).contiguous()
    storage = Storage(group, case.storage.block_size, canonical)
    expected = reference.attention(storage, 1, torch.cat(case.q), reference.plan(case.batch(), storage), 0.2, 0.9)
    torch.testing.assert_close(case.run(softcap=0.9), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("stored", [None, "int8"])
def test_contexts_are_split_and_merged(short_splits, window, stored):
    spans = [(275, 276), (0, 1), (90, 98), (16, 17)]
    case = Case(10, spans, kv_heads=1, dim=20, window=window, stored=stored)
    assert num_splits(case) > (6 if window else 2 * module.SPLITS_PER_STEP)
    for i, kv in enumerate(case.kv):  # the largest scores are last
        kv[0] *= torch.logspace(-5, 0.8, kv.shape[1])[:, None, None]
        case.store(i)
    first = case.check(softcap=5.0)
    assert window or torch.equal(first, case.run(softcap=5.0))


def test_large_tiles_are_split_as_well(short_splits):
    case = Case(11, [(80, 110), (5, 6)], kv_heads=1, shared=4, dim=20)
    assert num_splits(case, used=64) > 1
    case.check()


@settings(max_examples=50, deadline=None)
@given(
    programs=st.integers(1, 600),
    kv_heads=st.sampled_from([1, 8]),
    context=st.integers(1, 200_000),
    used=st.sampled_from([1, 16, 128]),
    small=st.booleans(),
)
def test_numbers_of_splits(programs, kv_heads, context, used, small):
    group = kv_group((0,), kv_heads, 128, "bfloat16", 1, 1)
    storage = Storage(group, 16, torch.empty(0))
    plan = make_plan(Batch(np.array([0]), np.array([1]), np.zeros((1, 1), np.int64)), storage)
    plan.max_context = context
    splits = module._splits(storage, plan, programs, used, small=small)
    programs *= kv_heads
    assert splits >= 1
    assert splits == 1 or context // splits >= module.MIN_SPLIT_KEYS
    assert splits == 1 or 4 * programs * splits * used * (128 + 2) <= module.SCRATCH_BYTES
    if context < module.MAX_SPLIT_KEYS or not small:
        assert splits == 1 or programs * (splits - 1) < module.WAVES * module.DEFAULT_NUM_SMS
    if context >= 256 * 300 and programs <= module.DEFAULT_NUM_SMS and used < 128:
        assert programs * splits >= module.WAVES * module.DEFAULT_NUM_SMS


@pytest.mark.parametrize("split", [False, True])
def test_a_plan_is_refilled_in_place(split, request):
    if split:
        request.getfixturevalue("short_splits")
    first, second = (
        Case(seed, spans, kv_heads=1) for seed, spans in [(13, [(40, 41), (3, 4)]), (14, [(0, 1), (95, 96)])]
    )
    width = 12
    plan = make_plan(first.batch(), first.storage, width=width)
    assert plan.max_context == 12 * 16
    assert (num_splits(first, plan) == 24) == split
    first.check(plan)
    tensors = (
        plan.chunks,
        plan.positions,
        plan.query_start_loc,
        plan.starts,
        plan.stops,
        plan.tables,
        *plan.tiles.values(),
    )
    addresses = [x.data_ptr() for x in tensors]
    assert not any(address % 16 for address in addresses)
    refill(plan, second.batch())
    second.check(plan)
    now = (
        plan.chunks,
        plan.positions,
        plan.query_start_loc,
        plan.starts,
        plan.stops,
        plan.tables,
        *plan.tiles.values(),
    )
    assert addresses == [x.data_ptr() for x in now]
    assert num_splits(second, plan) == num_splits(first, plan)


def test_a_plan_is_refilled_with_chunks_of_other_lengths():
    first, second = (
        Case(seed, spans, kv_heads=1) for seed, spans in [(15, [(0, 30), (9, 10)]), (16, [(70, 71), (9, 39)])]
    )
    plan = make_plan(first.batch(), first.storage, width=8)
    first.check(plan)
    refill(plan, second.batch())
    second.check(plan)


def test_a_plan_refuses_another_shape():
    case = Case(17, [(0, 4), (0, 2)])
    plan = make_plan(case.batch(), case.storage)
    for spans in ([(0, 6)], [(0, 4), (0, 3)], [(0, 4), (98, 100)]):
        with pytest.raises(ValueError, match="a plan for 2 chunks of 6 tokens and 3 blocks"):
            refill(plan, Case(18, spans).batch())


def test_a_plan_says_where_tokens_are():
    case = Case(19, [(14, 70), (33, 34), (0, 16)], kv_heads=1, dim=16)
    plan = make_plan(case.batch(), case.storage)
    tokens = [(i, p) for i, (start, stop) in enumerate(case.spans) for p in range(start, stop)]
    assert list(zip(plan.chunks.tolist(), plan.positions.tolist(), strict=True)) == tokens
    assert plan.query_start_loc.tolist() == [0, 56, 57, 73]
    assert plan.tiles_of(20).tolist() == [[0, 0], [0, 20], [0, 40], [1, 0], [2, 0]]
    assert plan.tiles_of(20, range(2, 17)).tolist() == [[2, 0]]
    assert plan.tiles_of(20, range(1, 2)).tolist() == [[1, 0]]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("stored", [None, "fp8_e4m3"])
def test_chunks_that_only_fill_up_a_step_do_no_harm(split, stored, request):
    if split:
        request.getfixturevalue("short_splits")
    case = Case(20, [(50, 51)], kv_heads=1, stored=stored)
    starts, stops, tables = np.array([50, 0, 0]), np.array([51, 1, 1]), np.full((3, 4), -1)
    tables[0] = case.tables[0, :4]
    plan = make_plan(Batch(starts, stops, tables), case.storage, width=8)
    expected = case.expected()
    case.q.append(case.draw(2, 2, 64))
    out = case.run(plan)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:1].double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("split", [False, True])
def test_nan_of_one_sequence_stays_there_and_is_seen(split, request):
    if split:
        request.getfixturevalue("short_splits")
    case = Case(21, [(37, 38), (37, 38), (2, 40)], kv_heads=1)
    case.kv[1][:, 16:32] = torch.nan  # all keys of one split
    case.store(1)
    out = case.run()
    assert out[1].isnan().all()
    assert out[[0, *range(2, 40)]].isfinite().all()


def strict_rows(cuts, *, company, window, dtype, stored):
    """Outputs of one sequence's positions, cut into chunks at `cuts`, beside other sequences."""
    whole = Case(22, [(0, cuts[-1])], shared=3, dtype=dtype, stored=stored, kv_heads=1)
    others = Case(23, [(5, 9), (60, 61), (0, 11)], shared=3, dtype=dtype, stored=stored, kv_heads=1)
    data = torch.cat([whole.storage.data, others.storage.data], 2)
    group = kv_group((0, 1), 1, 64, stored or dtype, data.shape[2], 1, window=window)
    both = Storage(group, 16, data)
    outputs = []
    for start, stop in pairwise(cuts):
        spans = np.array([*others.spans[:2], (start, stop), others.spans[2]] if company else [(start, stop)])
        tables = np.full((len(spans), 14), NOWHERE)
        q = [whole.q[0][start:stop]]
        if company:
            tables[[0, 1, 3], : others.tables.shape[1]] = others.tables + whole.storage.group.num_blocks
            q = [*others.q[:2], *q, others.q[2]]
        mine = tables[2 if company else 0]
        mine[: whole.tables.shape[1]] = whole.tables[0]
        mine[: max(0, start - window + 1) // 16 if window else 0] = -1
        plan = make_plan(Batch(spans[:, 0].copy(), spans[:, 1].copy(), tables), both)
        out = module.attention(both, 1, torch.cat(q).to(DEVICE), plan, 0.2, deterministic=True)
        first = 5 if company else 0
        outputs.append(out[first : first + stop - start].cpu())
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("dtype", "stored", "window"),
    [("float32", None, 0), ("float32", None, 25), ("bfloat16", None, 0), ("float16", "int8", 25)],
)
def test_strict_rows_depend_on_their_own_sequence_only(short_splits, dtype, stored, window):
    options = {"window": window, "dtype": dtype, "stored": stored}
    whole = strict_rows([0, 60], company=False, **options)
    assert whole.isfinite().all()
    assert torch.equal(whole, strict_rows([0, 31, 32, 33, 37, 59, 60], company=True, **options))
    assert torch.equal(whole, strict_rows([0, 7, 60], company=False, **options))


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", None), ("bfloat16", "fp8_e4m3"), ("float16", "int8")])
def test_strict_rows_do_not_depend_on_which_tiles_of_keys_have_masks(dtype, stored):
    """With tiles of usual size: all rows of a tile attend to its first keys in some cuts, and not in others."""
    options = {"window": 0, "dtype": dtype, "stored": stored}
    whole = strict_rows([0, 180], company=False, **options)
    assert whole.isfinite().all()
    assert torch.equal(whole, strict_rows([0, 127, 128, 130, 150, 179, 180], company=True, **options))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strict_steps_are_always_launched_alike(short_splits, monkeypatch, dtype):
    launches = []

    class Launches:
        def __getitem__(self, grid):
            return lambda *arguments, **sizes: launches.append((grid[2], tuple(sizes.items())))

    monkeypatch.setattr(module, "attend", Launches())
    steps = ([(99, 100)], [(0, 90)], [(95, 100), (3, 4)], [(0, 20), (50, 51), (7, 70)])
    for spans in steps:
        case = Case(24, spans, kv_heads=1, shared=3, dim=16, dtype=dtype)
        plan = make_plan(case.batch(), case.storage)
        module.attention(case.storage, 1, torch.cat(case.q).to(DEVICE), plan, 0.2, deterministic=True)
    assert len(launches) == len(steps)
    assert len(set(launches)) == 1
    assert launches[0][0] == 1
