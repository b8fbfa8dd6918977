"""Paged attention of the CPU kernels against float64 loops, over scattered blocks in storage full of NaN."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from attention_oracle import naive
from cpu_kernel_builds import EVERY, in_use
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_groups import kv_group
from torch.nn.functional import pad

from quire.kernels.contract import DTYPES, Batch, Storage
from quire.kernels.reference.codes import quantize_activations
from quire.kernels.reference.quantized import from_stored, hadamard, stored_dtype_and_size, to_stored

_C = pytest.importorskip("quire.kernels.cpu._C")
paged = pytest.importorskip("quire.kernels.cpu.paged")

NOWHERE = 2**40  # a block that does not exist
TOLERANCES = {"float32": 3e-5, "bfloat16": 0.03}
QUANTIZED = ["int8", "fp8_e4m3", "int4"]
TYPES = ["float32", "bfloat16", *QUANTIZED]  # of keys and values


@pytest.fixture(params=EVERY)
def build(request):
    with in_use(f"{request.param}-1"):
        yield request.param


def laid_out(x, dtype):
    """Keys or values (blocks, heads, block_size, head_dim) float32 -> both in the kernels' layout, padded with zeros.

    The first result is x as keys, the second is x as values. Numbers of a part of 16 tokens: (blocks, heads, parts, n).
    """
    dim = x.shape[-1]
    padded = -(-dim // 16) * 16
    if dtype not in QUANTIZED:
        parts = np.zeros((*x.shape[:2], x.shape[2] // 16, 16, padded), np.float32)
        parts[..., :dim] = x.reshape(*parts.shape[:-1], dim)
        if dtype == "float32":
            return parts.swapaxes(-1, -2), parts
        keys = parts.reshape(*parts.shape[:-1], padded // 2, 2).swapaxes(-2, -3)
        return keys, parts.reshape(*parts.shape[:3], 8, 2, padded).swapaxes(-1, -2)
    rows = to_stored(torch.from_numpy(x), dtype).numpy()
    rows = rows.reshape(*x.shape[:2], x.shape[2] // 16, 16, rows.shape[-1])
    if dtype == "int4":
        return rows.reshape(*rows.shape[:-1], -1, 4).swapaxes(-2, -3), int4_values(rows)
    codes = np.zeros((*rows.shape[:-1], padded), np.uint8)
    codes[..., :dim] = rows[..., :-4]
    keys = codes.reshape(*codes.shape[:-1], padded // 4, 4).swapaxes(-2, -3)
    keys = keys ^ 0x80 if dtype == "int8" else keys[..., [0, 2, 1, 3]]
    values = codes.reshape(*codes.shape[:3], 4, 4, padded)[..., [0, 2, 1, 3], :].swapaxes(-1, -2)
    scales = rows[..., -4:].reshape(*rows.shape[:3], -1)
    return tuple(np.concatenate((some.reshape(*rows.shape[:3], -1), scales), -1) for some in (keys, values))


def int4_values(rows):
    """Canonical rows (..., 16, width) of 16 tokens -> the kernels' layout of their values, bit by bit."""
    num_units = rows.shape[-1] // 20
    lower = np.zeros((*rows.shape[:-2], num_units, 4, 16, 4), np.uint8)
    upper = np.zeros((*rows.shape[:-2], num_units, 16, 4), np.uint8)
    for token in range(16):
        row = rows[..., token, :]
        four, place = token // 4, [0, 2, 1, 3][token % 4]
        bits = row[..., 16 * num_units : -4].reshape(*row.shape[:-1], num_units, 4)
        lower[..., four, :, place] = row[..., : 16 * num_units].reshape(*row.shape[:-1], num_units, 16)
        for n in range(32):
            bit = bits[..., n % 4] >> n // 4 & 1
            upper[..., n % 16, place] |= bit << 2 * four + n // 16
    every = (lower, upper, rows[..., -4:])
    return np.concatenate([some.reshape(*rows.shape[:-2], -1) for some in every], -1)


class Case:
    """Sequences with given keys and values in blocks, NaN everywhere else, and queries of some positions."""

    def __init__(
        self,
        seed,
        spans,
        *,
        kv_heads=2,
        shared=2,
        dim=64,
        block_size=16,
        dtype="bfloat16",
        window=0,
        strict=False,
        compute="bfloat16",
    ):
        """compute: type of queries for keys and values of 8 bits."""
        random = np.random.default_rng(seed)
        self.random, self.spans, self.window, self.dtype, self.block_size = random, spans, window, dtype, block_size
        self.strict, self.shared = strict, shared
        self.compute = compute if dtype in QUANTIZED else dtype
        needed = [-(-stop // block_size) for _, stop in spans]
        group = kv_group((0, 1), kv_heads, dim, dtype, sum(needed) + 3, 1, window=window)
        padded = -(-dim // 16) * 16
        stored, width = stored_dtype_and_size(dtype, padded)
        shape = (2, 2, group.num_blocks, kv_heads, block_size // 16, 16 * width)
        data = torch.full((*shape[:-1], shape[-1] * stored.itemsize), 0xFF, dtype=torch.uint8)  # NaN in all types
        self.storage = Storage(group, block_size, data.view(stored))
        ids = random.permutation(group.num_blocks)
        self.tables = np.full((len(spans), max(needed) + 2), NOWHERE)
        self.kv, self.q = [], []
        before = 0
        for i, (start, stop) in enumerate(spans):
            self.tables[i, : needed[i]] = ids[before:][: needed[i]]
            before += needed[i]
            self.kv.append(self.draw(2, stop, kv_heads, dim))
            self.q.append(self.draw(stop - start, kv_heads * shared, dim))
            self.store(i)
            lost = max(0, start - window + 1) // block_size if window else 0
            self.tables[i, :lost] = -1

    def draw(self, *shape):
        return torch.from_numpy(self.random.standard_normal(shape)).to(DTYPES[self.compute])

    def store(self, i):
        """Write the KV of sequence i from its window on into layer 1, and numbers behind its last token."""
        start, stop = self.spans[i]
        size, lost = self.block_size, max(0, start - self.window + 1) if self.window else 0
        first, end = lost // size, -(-stop // size)
        known = self.kv[i][:, first * size :].float().numpy()
        blocks = np.full((2, (end - first) * size, *known.shape[2:]), 1e30, np.float32)
        blocks[:, : known.shape[1]] = known
        blocks = blocks.reshape(2, end - first, size, *known.shape[2:]).swapaxes(2, 3)
        keys, values = laid_out(blocks[0], self.dtype)[0], laid_out(blocks[1], self.dtype)[1]
        for place, both in enumerate(zip(keys, values, strict=True)):
            target = self.storage.data[1, :, self.tables[i, first + place]]
            for part, numbers in zip(target, both, strict=True):
                part[:] = torch.from_numpy(np.ascontiguousarray(numbers)).reshape(part.shape).to(part.dtype)

    def batch(self):
        starts, stops = (np.array(column, np.int64) for column in zip(*self.spans, strict=True))
        return Batch(starts, stops, self.tables)

    def run(self, plan=None, softcap=0.0, scale=0.2):
        """The output of all chunks. Queries are views into a wider product."""
        plan = paged.plan(self.batch(), self.storage, deterministic=self.strict) if plan is None else plan
        q = torch.cat(self.q)
        product = torch.full((len(q), q.shape[1] * q.shape[2] + 7), torch.nan, dtype=q.dtype)
        product[:, 3:-4] = q.flatten(1)
        return paged.attention(self.storage, 1, product[:, 3:-4].view_as(q), plan, scale, softcap)

    @cache  # noqa: B019 (cases live as long as the module)
    def expected(self, softcap=0.0, scale=0.2):
        """The output by loops, computed at the first call."""
        return np.concatenate(
            [
                naive(self.rounded(q), *self.stored(kv).double().numpy(), start, scale, self.window, softcap)
                for q, kv, (start, _) in zip(self.q, self.kv, self.spans, strict=True)
            ]
        )

    def rounded(self, q):
        """Queries as they are multiplied: for keys of int8 and int4 with 8 bits, for int4 after their rotation."""
        if self.dtype not in ("int8", "int4"):
            return q.double().numpy()
        rows = q.flatten(0, 1).float()
        if self.dtype == "int4":
            rows = hadamard(pad(rows, (0, -q.shape[-1] % 32)))
        codes, scales = quantize_activations(rows, rows.shape[-1])
        rows = codes.double() * scales.double()
        if self.dtype == "int4":
            rows = hadamard(rows)[:, : q.shape[-1]]
        return rows.view(q.shape).numpy()

    def stored(self, kv):
        return from_stored(to_stored(kv, self.dtype), self.dtype, kv.shape[-1])

    def check(self, plan=None, softcap=0.0):
        out = self.run(plan, softcap)
        assert out.dtype == DTYPES[self.compute]
        out, expected, atol = out.float().numpy(), self.expected(softcap), TOLERANCES[self.compute]
        if self.compute == "float32" and self.dtype in QUANTIZED:
            atol = 3e-4 * max(1.0, self.q[0].shape[-1] / 128)  # errors of scores grow with the size of the head
        np.testing.assert_allclose(out, expected, atol=atol, rtol=0.01)
        if self.compute != "bfloat16" and out.size >= 1024:  # a mean of few numbers is one of them
            assert np.sqrt(np.mean((out - expected) ** 2)) < atol / 2


@cache
def case_of(seed, *spans, growth=None, **options):
    """The same unchanged case for all builds, so that its expected output is computed once. growth: of its scores."""
    case = Case(seed, spans, **options)
    if growth:
        for i, kv in enumerate(case.kv):
            kv[0] *= 0.2 * growth ** torch.linspace(-0.5, 0.5, kv.shape[1])[:, None, None]
            case.store(i)
    return case


span = st.tuples(
    st.one_of(st.integers(0, 40), st.integers(0, 700)), st.one_of(st.integers(1, 3), st.integers(1, 90))
).map(lambda pair: (pair[0], sum(pair)))
shapes = st.fixed_dictionaries(
    {
        "kv_heads": st.sampled_from([1, 2, 3]),
        "shared": st.sampled_from([1, 2, 5, 7]),
        "dim": st.sampled_from([8, 32, 64, 80, 96, 128, 256, 320, 512]),
        "block_size": st.sampled_from([16, 32, 64]),
        "dtype": st.sampled_from(TYPES),
        "compute": st.sampled_from(["float32", "bfloat16"]),
        "window": st.sampled_from([0, 0, 1, 7, 40, 300]),
        "strict": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    spans=st.lists(span, min_size=1, max_size=4),
    shape=shapes,
    softcap=st.sampled_from([0.0, 0.0, 0.7]),
    threads=st.sampled_from([1, 2, 3]),
    name=st.sampled_from(_C.builds()),
)
def test_mixed_chunks_equal_loops_over_positions(seed, spans, shape, softcap, threads, name):
    _C.use(name)
    _C.set_threads(threads)
    try:
        Case(seed, spans, **shape).check(softcap=softcap)
    finally:
        _C.use(_C.builds()[0])
        _C.set_threads(1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [0, 100, 1500])
def test_long_chunks_beside_decode_rows(build, dtype, window):
    _C.set_threads(2)
    spans = [(0, 300), (1299, 1300), (40, 340), (0, 1), (3071, 3072), (1000, 1100)]
    case_of(1, *spans, dtype=dtype, window=window, shared=7, kv_heads=1, dim=32).check()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("dim", "window"), [(328, 0), (384, 20), (512, 0), (512, 60)])
def test_the_largest_heads(build, dim, window, dtype, strict):
    """A prompt, a decoding sequence, and a chunk behind a cached prefix."""
    spans = [(0, 40), (170, 171), (100, 110)]
    case_of(20, *spans, dtype=dtype, dim=dim, window=window, strict=strict, shared=4, kv_heads=1).check()


def test_layers_of_different_heads_take_turns(build):
    _C.set_threads(2)
    for dim in (256, 512, 256):
        case_of(21, (1200, 1201), (0, 33), dim=dim, kv_heads=512 // dim, shared=2).check()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("growth", [0.01, 100])
def test_scores_that_grow_or_shrink_along_the_sequence(build, dtype, growth):
    case_of(13, (900, 960), (999, 1000), dtype=dtype, shared=5, growth=growth).check()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", TYPES)
def test_long_contexts_are_split_among_threads(build, dtype, threads):
    _C.set_threads(threads)
    case_of(2, (4999, 5000), dtype=dtype, kv_heads=1, dim=16).check()
    case_of(3, (4000, 4003), (7, 8), dtype=dtype, kv_heads=1, shared=7, window=3333).check()


def test_splitting_stops_where_the_scratch_ends(build):
    _C.set_threads(3)
    case = case_of(4, *[(2999, 3000)] * 3, kv_heads=2)
    plan = paged.plan(case.batch(), case.storage)
    for rows in (0, 3, 9, 17):
        short = paged.CpuPlan(
            plan.starts,
            plan.stops,
            plan.tables,
            plan.slots,
            plan.scratch[:rows].clone(),
            plan.block_size,
            deterministic=False,
        )
        case.check(short)


def test_a_plan_is_refilled_in_place_and_played_again(build):
    _C.set_threads(2)
    first, second = (Case(seed, spans) for seed, spans in [(5, [(0, 40), (30, 31)]), (6, [(1200, 1201), (700, 740)])])
    blocks = first.storage.group.num_blocks + second.storage.group.num_blocks
    group = kv_group((0, 1), 2, 64, "bfloat16", blocks, 1)
    both = Storage(group, 16, torch.cat([first.storage.data, second.storage.data], 2).clone())
    second.tables[second.tables != NOWHERE] += first.storage.group.num_blocks
    plan = paged.plan(first.batch(), both, width=200)
    addresses = [x.data_ptr() for x in (plan.starts, plan.stops, plan.tables, plan.slots, plan.scratch)]
    q, out = torch.cat(first.q), torch.empty(41, 256, dtype=torch.bfloat16)
    _C.record()
    try:
        _C.attention(*paged.kernel_arguments(both, 1, q, out, plan, 0.2, 0.0))
    finally:
        tape = _C.stop()
    np.testing.assert_allclose(out.float(), first.expected(), atol=0.03)
    paged.refill(plan, second.batch())
    assert addresses == [x.data_ptr() for x in (plan.starts, plan.stops, plan.tables, plan.slots, plan.scratch)]
    q.copy_(torch.cat(second.q))
    out.fill_(torch.nan)
    _C.play(tape)
    np.testing.assert_allclose(out.float(), second.expected(), atol=0.03)


def test_a_plan_refuses_another_shape():
    case = Case(7, [(0, 4), (0, 2)])
    plan = paged.plan(case.batch(), case.storage)
    for batch in (Case(8, [(0, 6)]).batch(), Case(8, [(0, 4), (0, 3)]).batch(), Case(8, [(0, 4), (98, 100)]).batch()):
        with pytest.raises(ValueError, match="a plan for 2 chunks of 6 tokens"):
            paged.refill(plan, batch)


def test_slots_are_where_the_tables_say(build):
    case = Case(9, [(14, 70), (33, 34), (0, 16)], block_size=32)
    plan = paged.plan(case.batch(), case.storage)
    expected = [
        case.tables[i, p // 32] * 32 + p % 32 for i, (start, stop) in enumerate(case.spans) for p in range(start, stop)
    ]
    assert plan.slots.tolist() == expected


def strict_rows(cuts, threads, *, company, window, dtype):
    """Outputs of one sequence's positions, cut into chunks at `cuts`, beside other sequences."""
    options = {"window": window, "dtype": dtype, "shared": 3, "strict": True, "dim": 32}
    case, beside = case_of(10, (0, cuts[-1]), **options), case_of(11, (5, 9), (600, 601), (0, 77), **options)
    others = beside.spans if company else ()
    blocks = case.storage.group.num_blocks
    data = torch.cat([case.storage.data, beside.storage.data], 2)
    group = kv_group((0, 1), 2, 32, dtype, data.shape[2], 1, window=window)
    storage = Storage(group, 16, data)
    _C.set_threads(threads)
    outputs = []
    for start, stop in pairwise(cuts):
        tables = np.full((1 + len(others), max(case.tables.shape[1], beside.tables.shape[1])), NOWHERE)
        tables[0, : case.tables.shape[1]] = case.tables[0]
        tables[0, : max(0, start - window + 1) // 16 if window else 0] = -1
        tables[1:, : beside.tables.shape[1]] = beside.tables[: len(others)] + blocks
        spans = np.array([(start, stop), *others])
        q = torch.cat([case.q[0][start:stop], *beside.q[: len(others)]])
        plan = paged.plan(Batch(spans[:, 0].copy(), spans[:, 1].copy(), tables), storage, deterministic=True)
        outputs.append(paged.attention(storage, 1, q, plan, 0.2)[: stop - start])
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [0, 90])
def test_strict_rows_depend_on_their_own_sequence_only(build, dtype, window):
    options = {"window": window, "dtype": dtype}
    whole = strict_rows([0, 700], 1, company=False, **options)
    one_by_one = [0, 100, *range(101, 112), 299, 300, 555, 699, 700]
    assert torch.equal(whole, strict_rows(one_by_one, 2, company=True, **options))
    assert torch.equal(whole, strict_rows([0, 128, 401, 700], 3, company=True, **options))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [0, 6])
def test_nan_of_one_sequence_stays_there_and_is_seen(build, dtype, window):
    case = Case(11, [(7, 8), (7, 8), (2, 11)], dtype=dtype, window=window)
    case.kv[1][:, 3] = torch.nan
    case.store(1)
    out = case.run()
    assert out[1].isnan().all()
    assert out[[0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("strict", [False, True])
def test_many_small_weights_count_beside_a_large_one_in_each_step(build, strict):
    """In each step of 128 tokens one weight is 511 times the others, which have a fifth of the sum."""
    case = one_large_weight_per_step()
    plan = paged.plan(case.batch(), case.storage, deterministic=strict)
    np.testing.assert_allclose(case.run(plan).float().numpy(), case.expected(), atol=0.004)


@cache
def one_large_weight_per_step():
    case = Case(14, [(8191, 8192)], dtype="int8", kv_heads=1, shared=7, dim=16)
    case.q[0][:] = 1
    keys, values = case.kv[0]
    keys[:] = 0
    keys[5::128] = np.log(511) / (16 * 0.2)
    values[:] = 1 + 0.1 * values
    values[5::128] = -1
    case.store(0)
    return case


def test_contiguous_blocks_give_the_same(build):
    case = Case(12, [(700, 800)], block_size=32)
    table = case.tables[0]
    needed = -(-800 // 32)
    order = torch.from_numpy(table[:needed].astype(np.int64))
    case.storage.data[:, :, :needed] = case.storage.data[:, :, order].clone()
    table[:needed] = np.arange(needed)
    paged_out = case.run()
    plan = paged.plan(case.batch(), case.storage)
    plan.tables[:, 1:] = NOWHERE
    out = torch.full_like(paged_out, torch.nan)
    _C.attention_contiguous(*paged.kernel_arguments(case.storage, 1, torch.cat(case.q), out, plan, 0.2, 0.0))
    assert torch.equal(out, paged_out)
