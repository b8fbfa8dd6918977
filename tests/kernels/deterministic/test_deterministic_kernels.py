"""Deterministic kernels: close to the reference, and a row's bits do not depend on its place or on other rows."""

import math
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from changed_kernels import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_groups import kv_group

from quire.kernels.contract import ACTIVATIONS, Batch, Routing
from quire.kernels.deterministic import DETERMINISTIC, tiled
from quire.kernels.deterministic import rowwise as deterministic_rows
from quire.kernels.exact import (
    LEFT_BITS,
    RIGHT_BITS,
    TERMS,
    apply_to_whole_vectors,
    exact_sum,
    fixed_point,
    product,
    row_power,
)
from quire.kernels.reference import REFERENCE, paged
from quire.kernels.reference import rowwise as reference_rows

deterministic, reference = (
    changed(kernels, gate=rows.gate, rotary=rows.rotary, write_kv=write_kv)
    for kernels, rows, write_kv in (
        (DETERMINISTIC, deterministic_rows, tiled.write_kv),
        (REFERENCE, reference_rows, paged.write_kv),
    )
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 0.06, torch.float16: 8e-3}
ODD = (*range(1, 41), 255, 256, 257, 258, 1410)
SIZES = ((64, 96), (301, 301), (1024, 40), (1000, 1), (1, 7), (600, 2051))  # (in, out) of products


@pytest.fixture
def threads():
    """A function that sets the number of threads, which is restored afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def alone(function, rows):
    """Apply a function to one row at a time."""
    return torch.cat([function(row) for row in rows.split(1)])


def rowwise(width, dtype):
    """All rowwise functions (num_rows, width) of the module, by name."""
    weight, bias = randn(width, seed=1, dtype=dtype), randn(width, seed=2, dtype=dtype)
    heads = randn(3, width // 3, seed=3, dtype=dtype)
    square = randn(width + 5, width, seed=4, dtype=dtype) / math.sqrt(width)
    up, down = randn(4, 14, width, seed=5, dtype=dtype), randn(4, width, 7, seed=6, dtype=dtype)
    angles = torch.arange(width // 6, dtype=torch.float32)

    def routed(kernels, x):
        ids = x[:, :4].float().argsort(-1)[:, :2]
        return kernels.experts(x, ids, x[:, 4:6].float(), up / math.sqrt(width), down, "silu")

    def without_gates(kernels, x):
        ids = x[:, :4].float().argsort(-1)[:, :2]
        return kernels.experts(x, ids, x[:, 4:6].float(), up[:, :7] / math.sqrt(width), down, "relu2", gated=False)

    def rotated(kernels, x):
        q = x.view(len(x), 3, -1)
        return torch.cat(
            kernels.rotary(q, q[:, :1], *(f(x[:, :1].float() * angles) for f in (torch.cos, torch.sin))), 1
        )

    def turned(kernels, x):
        both = x[:, :1].float() * angles
        return kernels.rotate(x.view(len(x), 3, -1), (both.cos(), both.sin()))

    def selected(kernels, x):
        grouped = Routing(normalise=True, score="sigmoid", scale=2.5, num_groups=3, top_groups=2)
        return torch.cat(kernels.route(x[:, :6].float(), 3, grouped, bias[:6].float()), 1)

    functions = {
        "linear": lambda kernels, x: kernels.linear(x, square),
        "linear with bias": lambda kernels, x: kernels.linear(x, square, randn(width + 5, seed=7, dtype=dtype)),
        "experts": routed,
        "experts without gates": without_gates,
        "rotary": rotated,
        "rotate": turned,
        "route": selected,
        "xielu": lambda kernels, x: kernels.xielu(x, torch.tensor([0.8, 0.8, 0.5, -1e-6])),
        "multiply_add": lambda kernels, x: kernels.multiply_add(x, x[:, :3], x.flip(-1)),
        "rms_norm": lambda kernels, x: kernels.rms_norm(x, weight, 1e-6),
        "rms_norm in float32": lambda kernels, x: kernels.rms_norm(x, weight.float() + 1, 1e-6),
        "add_rms_norm": lambda kernels, x: torch.cat(kernels.add_rms_norm(x, x.flip(-1), weight, 1e-6), 1),
        "layer_norm": lambda kernels, x: kernels.layer_norm(x, weight, bias, 1e-5),
        "layer_norm of heads": lambda kernels, x: kernels.layer_norm(x.view(len(x), 3, -1), heads, None, 1e-5),
    }
    for name in ACTIVATIONS:
        functions[name] = lambda kernels, x, name=name: kernels.activate(x, name)
        functions[f"{name} gate"] = lambda kernels, x, name=name: kernels.gate(x, name)
    return functions


NAMES = list(rowwise(6, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_equal_the_reference(name, dtype):
    x = randn(21, 366, dtype=dtype)
    function = rowwise(366, dtype)[name]
    found, expected = function(deterministic, x), function(reference, x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_same_bits_alone_in_any_order_and_by_any_number_of_threads(name, dtype, threads):
    for width in (6, 366, 1410):
        x = randn(39 if width < 1000 else 11, width, dtype=dtype)
        function = rowwise(width, dtype)[name]
        expected = alone(lambda row, function=function: function(deterministic, row), x)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(8))
        for number in (1, 2, 3):
            threads(number)
            assert torch.equal(function(deterministic, x), expected)
            assert torch.equal(function(deterministic, x[order]), expected[order])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_products_have_the_same_bits_beside_any_neighbours(size, dtype, threads):
    inputs, outputs = size
    weight = randn(outputs, inputs, seed=1, dtype=dtype) / math.sqrt(inputs)
    x = randn(16, inputs, dtype=dtype)
    expected = deterministic.linear(x, weight)
    for first, number in enumerate((1, 2, 4, 8)):
        threads(number)
        for place in range(first, 16, 2):
            neighbours = torch.full((16, inputs), 4e3 * place, dtype=dtype)
            neighbours[15 - place] = x[place]
            assert torch.equal(deterministic.linear(neighbours, weight)[15 - place], expected[place])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_products_of_odd_sizes_have_the_same_bits_in_any_order_and_in_a_padded_tile(number, threads):
    """Libraries do not guarantee this; one of them differs from 5 terms and 4 columns on.

    Each number of threads has a third of the pairs of sizes.
    """
    threads(number)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(9))
    for place, inputs in enumerate(ODD):
        x = randn(16, inputs, seed=inputs)
        padded = torch.zeros(48, inputs)
        padded[3:48:3] = x[:15]
        for outputs in ODD[(place + number) % 3 :: 3]:
            weight = randn(outputs, inputs, seed=outputs)
            expected = deterministic.linear(x, weight)
            assert torch.equal(deterministic.linear(x[order], weight), expected[order]), (inputs, outputs)
            assert torch.equal(deterministic.linear(padded, weight)[3:48:3], expected[:15]), (inputs, outputs)
            assert torch.equal(deterministic.linear(x[7:8], weight), expected[7:8]), (inputs, outputs)


@pytest.mark.parametrize("columns", [255, 512])
def test_products_take_parts_of_larger_tensors(columns):
    x, weight = randn(5, columns + 3)[:, 2:-1], randn(9, 2 * columns, seed=1)[:, ::2]
    assert torch.equal(deterministic.linear(x, weight), deterministic.linear(x.contiguous(), weight.contiguous()))


def by_fractions(x, weight):
    """The product of the rounded inputs in rational numbers."""
    left, right = fixed_point(x, row_power(x), LEFT_BITS), fixed_point(weight, row_power(weight), RIGHT_BITS)
    return [
        [float(sum(Fraction(a) * Fraction(b) for a, b in zip(row, other, strict=True))) for other in right.tolist()]
        for row in left.tolist()
    ]


@pytest.mark.parametrize("columns", [1, 7, 100, TERMS])
@pytest.mark.parametrize("exponents", [0, 30])
def test_sums_of_products_are_exact(columns, exponents):
    random = np.random.default_rng(columns)
    scales = torch.from_numpy(2.0 ** random.integers(-exponents, exponents + 1, (2, 5, columns))).float()
    x, weight = randn(5, columns) * scales[0], randn(5, columns, seed=1) * scales[1]
    assert product(x, weight).tolist() == by_fractions(x, weight)


def test_the_largest_sums_are_exact():
    largest = torch.full((3, TERMS), 2.0 - 2.0**-23)  # rounds up to a power of 2
    assert torch.equal(product(largest, largest), torch.full((3, 3), 4.0 * TERMS, dtype=torch.float64))


def test_sums_that_need_every_bit_are_exact():
    """With two more bits the sums would overflow, and with one more the last addition would round."""
    random = torch.Generator().manual_seed(0)
    x, weight = (2 - torch.randint(8, (16, TERMS), generator=random) * 2.0**-23 for _ in range(2))
    assert product(x, weight).tolist() == by_fractions(x, weight)
    assert LEFT_BITS + RIGHT_BITS + math.log2(TERMS) <= 53


def test_outliers_of_one_row_of_a_weight_do_not_coarsen_the_others():
    x, weight = randn(5, 300), randn(8, 300, seed=1) / 50
    weight[3, 7] = 1e4
    weight[5, 100] = torch.nan
    found, exact = deterministic.linear(x, weight).double(), x.double() @ weight.double().T
    others = [0, 1, 2, 4, 6, 7]
    torch.testing.assert_close(found[:, others], exact[:, others], rtol=1e-5, atol=1e-6)
    assert found[:, 5].isnan().all()


@pytest.mark.parametrize("rows", [300, 3000])
def test_products_in_portions_of_rows_are_those_of_one_row(rows, monkeypatch):
    x, weight, bias = randn(rows, 520), randn(33, 520, seed=1), randn(33, seed=2)
    expected = deterministic.linear(x, weight, bias)
    monkeypatch.setattr("quire.kernels.exact._OUTPUT_CHUNK_NUMBERS", 1)
    monkeypatch.setattr("quire.kernels.exact._WEIGHT_CHUNK_NUMBERS", 1)
    assert torch.equal(deterministic.linear(x, weight, bias), expected)


def test_norms_of_large_numbers_are_finite():
    x = torch.tensor([[1e20, -3e19, 5.0], [1e-30, 2e-30, 0.0]])
    found = deterministic.rms_norm(x, torch.ones(3), 1e-6)
    torch.testing.assert_close(found, reference.rms_norm(x, torch.ones(3), 1e-6))


@pytest.mark.parametrize("power", [-126, -149, 0, 126])
def test_numbers_of_any_size_are_rounded_near_their_own(power):
    x = randn(4, 50).clamp(-1.9, 1.9) * 2.0**power
    found = fixed_point(x, row_power(x), LEFT_BITS)
    largest = x.double().abs().amax(-1, keepdim=True)
    assert ((found - x.double()).abs() <= largest * 2.0**-LEFT_BITS).all()


def test_one_row_of_nan_stays_alone():
    x = randn(20, 300)
    x[3] = torch.nan
    out = deterministic.linear(x, randn(5, 300, seed=1))
    assert out[3].isnan().all()
    assert out[torch.arange(20) != 3].isfinite().all()


@pytest.mark.parametrize("size", [1, 2, 3, 31, 64, 301, 5000])
def test_exact_sums_are_near_and_do_not_depend_on_the_rest(size):
    x = randn(7, size)
    found = exact_sum(x)
    torch.testing.assert_close(found, x.double().sum(-1, keepdim=True), rtol=1e-9, atol=1e-9)
    assert torch.equal(exact_sum(x[2:3]), found[2:3])


ELEMENTWISE = {name: getattr(torch, name) for name in ("exp", "log", "log1p", "cos", "sin")} | {
    name: partial(reference.activate, activation=name) for name in ACTIVATIONS
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions_do_not_depend_on_the_place_of_a_number(name, dtype, threads):
    """The result depends neither on tails, threads and neighbours nor on the alignment of memory."""
    function = ELEMENTWISE[name]
    x = randn(70001, dtype=dtype).abs()
    whole = apply_to_whole_vectors(function, x)
    near = TOLERANCES[dtype] / 20
    torch.testing.assert_close(whole, function(x), rtol=near, atol=near)
    for number in (1, 3):
        threads(number)
        for size in (1, 63, 64, 16384, 16385, 70001):
            assert torch.equal(apply_to_whole_vectors(function, x[-size:]), whole[-size:])
            assert torch.equal(apply_to_whole_vectors(function, x[:size].view(-1, 1)), whole[:size].view(-1, 1))
        for first in (1, 3, 7, 31, 33):
            assert torch.equal(apply_to_whole_vectors(function, x[first : first + 1024]), whole[first : first + 1024])


class Sequences:
    """Sequences with given queries, keys and values, in storage full of NaN. Tables omit blocks behind a window."""

    def __init__(self, seed, stops, *, kv_heads=2, shared=2, dim=8, block_size=4, window=0, dtype=torch.float32):
        random = np.random.default_rng(seed)
        needed = [-(-stop // block_size) for stop in stops]
        name = str(dtype).removeprefix("torch.")
        self.group = kv_group((0,), kv_heads, dim, name, sum(needed) + 3, 1, window=window)
        self.storage = reference.allocate(self.group, block_size, torch.device("cpu"))
        self.storage.data.fill_(torch.nan)
        ids = random.permutation(self.group.num_blocks)
        self.tables = np.full((len(stops), max(needed) + 2), 10**6)
        for row, n in enumerate(needed):
            self.tables[row, :n] = ids[sum(needed[:row]) :][:n]
        self.q = [randn(stop, kv_heads * shared, dim, seed=seed + i, dtype=dtype) for i, stop in enumerate(stops)]
        self.kv = [randn(2, stop, kv_heads, dim, seed=seed + 100 + i, dtype=dtype) for i, stop in enumerate(stops)]

    def attend(self, spans, softcap=0.0, kernels=deterministic):
        """The outputs of one step, by its (sequence, start, stop) spans."""
        rows, starts, stops = (np.array(column, np.int64) for column in zip(*spans, strict=True))
        tables = self.tables[rows].copy()
        if self.group.kind.span:
            gone = np.maximum(starts - self.group.kind.span + 1, 0) // self.storage.block_size
            tables[np.arange(tables.shape[1]) < gone[:, None]] = -1
        plan = kernels.plan(Batch(starts, stops, tables), self.storage)
        k, v = (torch.cat([self.kv[row][x, start:stop] for row, start, stop in spans]) for x in range(2))
        kernels.write_kv(self.storage, 0, k, v, plan)
        q = torch.cat([self.q[row][start:stop] for row, start, stop in spans])
        out = kernels.attention(self.storage, 0, q, plan, 0.3, softcap)
        return dict(zip(spans, out.split([stop - start for _, start, stop in spans]), strict=True))

    def naive(self, row, start, stop, softcap):
        """Attention of one query and one head at a time, in float64."""
        q, (k, v) = self.q[row].double(), self.kv[row].double()
        out = torch.zeros(stop - start, *q.shape[1:], dtype=torch.float64)
        shared = q.shape[1] // k.shape[1]
        for position in range(start, stop):
            first = max(0, position - self.group.kind.span + 1) if self.group.kind.span else 0
            for head in range(q.shape[1]):
                scores = k[first : position + 1, head // shared] @ q[position, head] * 0.3
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                out[position - start, head] = scores.softmax(0) @ v[first : position + 1, head // shared]
        return out.flatten(1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spans=st.lists(st.tuples(st.integers(0, 24), st.integers(1, 20)), min_size=1, max_size=4),
    kv_heads=st.sampled_from([1, 3]),
    shared=st.sampled_from([1, 2, 4]),
    block_size=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([0, 1, 5, 30]),
    softcap=st.sampled_from([0.0, 2.0]),
    keys=st.sampled_from([4, 8, 256]),
    scratch=st.sampled_from([1, 2**27]),
)
def test_attention_equals_loops(seed, spans, kv_heads, shared, block_size, window, softcap, keys, scratch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "KEYS", keys)
        patch.setattr(tiled, "SCRATCH_BYTES", scratch)
        stops = [start + length for start, length in spans]
        sequences = Sequences(seed, stops, kv_heads=kv_heads, shared=shared, block_size=block_size, window=window)
        begun = [(row, 0, start) for row, (start, _) in enumerate(spans) if start]
        if begun:
            sequences.attend(begun, softcap)
        found = sequences.attend([(row, stop - spans[row][1], stop) for row, stop in enumerate(stops)], softcap)
        for span, out in found.items():
            np.testing.assert_allclose(out, sequences.naive(*span, softcap), atol=2e-5)


@pytest.mark.parametrize(("dim", "window"), [(300, 0), (512, 0), (512, 5)])
def test_attention_of_the_largest_heads(dim, window):
    """Heads of more than TERMS numbers, which one exact sum does not hold."""
    assert dim > TERMS
    whole, cut = (Sequences(3, [20], kv_heads=1, dim=dim, window=window) for _ in range(2))
    found = whole.attend([(0, 0, 20)])[0, 0, 20]
    np.testing.assert_allclose(found, whole.naive(0, 0, 20, 0.0), atol=2e-5)
    parts = [cut.attend([(0, start, start + 5)])[0, start, start + 5] for start in range(0, 20, 5)]
    assert torch.equal(torch.cat(parts), found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap", "dim"), [(0, 0.0, 64), (0, 0.0, 7), (300, 0.0, 24), (7, 5.0, 8)])
def test_attention_has_the_same_bits_in_any_chunks_and_company(dtype, window, softcap, dim, threads):
    options = {"window": window, "dim": dim, "block_size": 16, "dtype": dtype}
    stop = 600
    whole = Sequences(1, [stop], **options).attend([(0, 0, stop)], softcap)[0, 0, stop]
    assert whole.dtype == dtype
    random = np.random.default_rng(2)
    for number in (1, 3):
        threads(number)
        company = Sequences(1, [stop, 530, 77], **options)
        cuts = [
            0,
            *sorted(random.choice(np.arange(1, stop - 3), 6, replace=False).tolist()),
            *range(stop - 3, stop + 1),
        ]
        parts = []
        for start, end in pairwise(cuts):
            others = [(1, start, end)] if end <= 530 else [(2, max(start - 530, 0), end - 530)]
            parts.append(company.attend([*others, (0, start, end)], softcap)[0, start, end])
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("place", [0, 40, 299])
def test_a_value_that_is_not_finite_spoils_only_queries_that_see_it(place):
    clean, spoiled = Sequences(4, [300], block_size=16), Sequences(4, [300], block_size=16)
    spoiled.kv[0][1, place, 0, 3] = torch.inf  # of the first KV head
    expected, found = (sequences.attend([(0, 0, 300)])[0, 0, 300].view(300, 4, 8) for sequences in (clean, spoiled))
    assert torch.equal(found[:place], expected[:place])
    assert found[place:, :2].isnan().all()
    assert torch.equal(found[place:, 2:], expected[place:, 2:])


@pytest.mark.parametrize("shared", [1, 4, 64])
def test_scratch_is_bounded(shared):
    sequences = Sequences(3, [9000], kv_heads=4, shared=1, dim=128, block_size=16)
    plan = deterministic.plan(Batch(np.array([0]), np.array([9000]), sequences.tables), sequences.storage)
    (tiles,) = plan.tiles
    some = [len(part.chunks) for part in tiled.portions(tiles, sequences.group, shared)]
    # Keys and values, scores and their exponentials: in float32 and float64, and in fixed point.
    one = 4 * tiled.KEYS * (2 * 12 * 128 + 2 * 12 * tiled.QUERIES * shared)
    assert sum(some) == len(tiles.chunks)
    assert len(some) > 1
    assert max(some) == 1 or max(some) * one <= tiled.SCRATCH_BYTES


def test_blocks_are_the_reference_s():
    group = kv_group((0, 1), 2, 8, "float32", 5, 1)
    assert deterministic.allocate is reference.allocate
    storage = deterministic.allocate(group, 4, torch.device("cpu"))
    storage.data.copy_(randn(*storage.data.shape))
    blocks = torch.tensor([4, 1])
    assert torch.equal(deterministic.pack(storage, blocks), reference.pack(storage, blocks))
