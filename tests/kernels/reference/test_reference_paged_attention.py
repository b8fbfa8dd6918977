"""Paged attention against float64 loops, over scattered blocks in storage full of NaN."""

import numpy as np
import pytest
import torch
from attention_oracle import naive
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_groups import kv_group

from quire.kernels import reference
from quire.kernels.contract import Batch
from quire.kernels.reference import paged
from quire.kernels.reference.paged import write_kv
from quire.layers.attend import PagedAttend, ScoreScaling

NOWHERE = 10**6  # a block that does not exist: entries behind a sequence's end are undefined


class Setup:
    """Sequences with given keys and values, and a storage of NaN for them."""

    def __init__(
        self,
        seed,
        spans,
        *,
        kv_heads=2,
        shared=2,
        dim=8,
        block_size=4,
        dtype="float32",
        layers=1,
        window=0,
        softcap=0.0,
    ):
        self.window, self.softcap = window, softcap
        random = np.random.default_rng(seed)
        self.spans, self.block_size, self.kv_heads, self.shared, self.dim = spans, block_size, kv_heads, shared, dim
        needed = [-(-stop // block_size) for _, stop in spans]
        group = kv_group(tuple(range(layers)), kv_heads, dim, dtype, sum(needed) + 3, 1, window=window)
        self.storage = reference.allocate(group, block_size, torch.device("cpu"))
        self.storage.data.fill_(torch.nan)
        ids = random.permutation(group.num_blocks)
        self.tables = np.full((len(spans), max(needed) + 2), NOWHERE)
        for row, (table, n) in enumerate(zip(self.tables, needed, strict=True)):
            table[:n] = ids[sum(needed[:row]) :][:n]
        self.kv = [random.standard_normal((2, stop, kv_heads, dim)).astype(np.float32) for _, stop in spans]
        self.q = [random.standard_normal((b - a, kv_heads * shared, dim)).astype(np.float32) for a, b in spans]

    def attend(self, starts, stops, layer=0):
        """The outputs of one step over [starts[i], stops[i]) of each sequence with a nonempty range."""
        some = np.flatnonzero(stops > starts)
        first = np.maximum(starts - self.window + 1, 0) // self.block_size if self.window else 0 * starts
        lost = np.arange(self.tables.shape[1]) < first[:, None]  # blocks behind the window
        tables = np.where(lost, -1, self.tables)
        plan = reference.plan(Batch(starts[some], stops[some], tables[some]), self.storage)
        k, v = (torch.from_numpy(np.concatenate([self.kv[i][x, starts[i] : stops[i]] for i in some])) for x in range(2))
        write_kv(self.storage, layer, k, v, plan)
        first = [start for start, _ in self.spans]
        parts = [
            self.q[i][starts[i] - first[i] : stops[i] - first[i]]
            if starts[i] >= first[i]
            else np.zeros((stops[i] - starts[i], self.kv_heads * self.shared, self.dim), np.float32)
            for i in some
        ]
        q = torch.from_numpy(np.concatenate(parts))
        return reference.attention(self.storage, layer, q, plan, 0.3, self.softcap)

    def check(self, tolerance=2e-5):
        """Compute all cached prefixes in one step, then all chunks in another one, and compare."""
        starts, stops = (np.array(column, np.int64) for column in zip(*self.spans, strict=True))
        if starts.any():
            self.attend(np.zeros_like(starts), starts)
        out = self.attend(starts, stops).numpy()
        expected = [
            naive(q, kv[0], kv[1], a, 0.3, self.window, self.softcap)
            for q, kv, (a, _) in zip(self.q, self.kv, self.spans, strict=True)
        ]
        np.testing.assert_allclose(out, np.concatenate(expected), atol=tolerance)


span = st.tuples(st.integers(0, 20), st.integers(1, 9)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    spans=st.lists(span, min_size=1, max_size=6),
    kv_heads=st.sampled_from([1, 2, 3]),
    shared=st.sampled_from([1, 2, 4]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    limits=st.sampled_from([(256, 256, 2**28), (3, 1, 2**28), (1, 8, 600), (4, 4, 1)]),
    window=st.sampled_from([0, 0, 1, 2, 5, 8, 100]),
    softcap=st.sampled_from([0.0, 0.0, 0.4]),
)
def test_mixed_chunks_equal_loops_over_positions(seed, spans, kv_heads, shared, block_size, limits, window, softcap):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("MAX_QUERIES", "MIN_CONTEXT", "GATHERED_BYTES"), limits, strict=True):
            patch.setattr(paged, name, value)
        options = {"kv_heads": kv_heads, "shared": shared, "block_size": block_size}
        Setup(seed, spans, **options, window=window, softcap=softcap).check()


def test_long_chunks_beside_decode_rows():
    Setup(1, [(0, 600), (299, 300), (40, 340), (0, 1), (511, 512)], block_size=16).check()


@pytest.mark.parametrize("window", [1, 16, 100, 300])
def test_windows_over_long_chunks_beside_decode_rows(window):
    spans = [(0, 600), (299, 300), (40, 340), (0, 1), (511, 512)]
    Setup(1, spans, block_size=16, window=window, softcap=0.5).check()


def test_only_the_blocks_of_a_window_are_gathered():
    setup = Setup(8, [(3999, 4000), (3500, 4000)], block_size=16, window=100)
    plan = reference.plan(Batch(np.array([3999, 3500]), np.array([4000, 4000]), setup.tables), setup.storage)
    assert max(bucket.mask.shape[-1] for bucket in plan.buckets) <= 256 + 100 + 16


def test_document_000_entry_1_blockwise_attention_with_a_partial_last_block_is_plain_attention():
    whole = Setup(2, [(0, 13)], block_size=5)
    expected = naive(whole.q[0], *whole.kv[0], 0, 0.3)
    steps = [whole.attend(np.array([p]), np.array([p + 1])).numpy() for p in range(13)]
    np.testing.assert_allclose(np.concatenate(steps), expected, atol=2e-5)


def test_layers_of_a_group_do_not_touch_each_other():
    setup = Setup(3, [(0, 6)], layers=2)
    setup.attend(np.array([0]), np.array([6]), layer=1)
    assert setup.storage.data[0].isnan().all()
    assert not setup.storage.data[1].isnan().all()


def test_a_finished_block_is_not_cleared_by_later_writes():
    setup = Setup(4, [(0, 9)])
    setup.attend(np.array([0]), np.array([6]))
    before = reference.pack(setup.storage, torch.from_numpy(setup.tables[0, :1]))
    setup.attend(np.array([6]), np.array([9]))
    assert torch.equal(before, reference.pack(setup.storage, torch.from_numpy(setup.tables[0, :1])))


@pytest.mark.parametrize("storage_dtype", ["float16", "bfloat16"])
def test_keys_may_be_kept_in_fewer_digits_than_queries(storage_dtype):
    Setup(5, [(0, 9), (20, 21), (3, 17)], dtype=storage_dtype).check(tolerance=0.03)


def test_one_prompt_of_nan_stays_alone():
    setup = Setup(6, [(7, 8), (7, 8), (2, 11)])
    setup.kv[1][:] = np.nan
    starts, stops = (np.array(column, np.int64) for column in zip(*setup.spans, strict=True))
    setup.attend(np.zeros_like(starts), starts)
    out = setup.attend(starts, stops)
    assert out[1].isnan().all()
    assert out[[0, 2, 3, 4]].isfinite().all()


def test_a_block_whose_former_user_left_nan_is_clean_for_the_next():
    setup = Setup(7, [(0, 6)])
    good = setup.kv[0].copy()
    setup.kv[0][:] = np.nan
    setup.attend(np.array([0]), np.array([6]))
    setup.kv[0][:] = good
    setup.check()


def test_masks_take_memory_linear_in_the_context():
    setup = Setup(8, [(3000, 4000)], block_size=16)
    plan = reference.plan(Batch(np.array([3000]), np.array([4000]), setup.tables), setup.storage)
    held = sum(bucket.mask.untyped_storage().nbytes() for bucket in plan.buckets)
    assert held < 8 * 4 * (4000 + 1000)


def test_padding_is_bounded():
    random = np.random.default_rng(9)
    starts = random.integers(0, 3000, 40)
    stops = starts + np.where(random.random(40) < 0.5, 1, random.integers(1, 500, 40))
    setup = Setup(9, list(zip(starts.tolist(), stops.tolist(), strict=True)), kv_heads=1, shared=1, dim=2)
    plan = reference.plan(Batch(starts, stops, setup.tables), setup.storage)
    padded = sum(len(bucket.queries) for bucket in plan.buckets)
    assert padded <= 2 * (stops - starts).sum()
    assert len(plan.buckets) < 40
    decodes = [bucket for bucket in plan.buckets if bucket.mask.shape[2] == 1]
    assert len(decodes) <= 5  # contexts from 256 to 4096, by powers of two


def test_each_group_writes_by_its_own_table():
    groups = [kv_group((layer,), 1, 4, "float32", 5, 1) for layer in (1, 0)]
    storages = [reference.allocate(group, 2, torch.device("cpu")) for group in groups]
    attend = PagedAttend(reference, storages, [ScoreScaling(0.5)] * 2)
    attend.plan([Batch(np.array([0]), np.array([3]), np.array([table])) for table in ([4, 1], [0, 3])])
    for layer in range(2):
        attend(layer, *torch.ones(3, 3, 1, 4))
    written = [storage.data.any(-1).any(-1).any(-1)[0, 0].nonzero().flatten().tolist() for storage in storages]
    assert written == [[1, 4], [0, 3]]


def test_each_layer_has_its_scores():
    storage = reference.allocate(kv_group((0, 1, 2), 1, 4, "float32", 2, 1), 4, torch.device("cpu"))
    attend = PagedAttend(reference, [storage], [ScoreScaling(0.5), ScoreScaling(2.0), ScoreScaling(0.5, 0.1)])
    attend.plan([Batch(np.array([0]), np.array([5]), np.array([[1, 0]]))])
    q, k, v = torch.randn(3, 5, 1, 4)
    for layer, (scale, softcap) in enumerate([(0.5, 0.0), (2.0, 0.0), (0.5, 0.1)]):
        expected = naive(q.numpy(), k.numpy(), v.numpy(), 0, scale, 0, softcap)
        np.testing.assert_allclose(attend(layer, q, k, v).numpy(), expected, atol=1e-5)
