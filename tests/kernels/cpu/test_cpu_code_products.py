"""Products with low-bit weights by the CPU kernels, against plain torch, for every build and number of threads.

Most tests have a pairwise table: each scheme meets each build, number of threads, type, number of rows and size of a
weight, and so do all others of these among each other. The sizes are those at which the kernels change their path. One
test draws anything from all combinations.
"""

import pytest
import torch
from cpu_kernel_builds import EVERY, each_with, in_use, with_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import reference
from quire.kernels.contract import INT4, INT8, MXFP4, NVFP4, QuantizedRows, Scheme
from quire.kernels.reference.codes import dequantize, quantize_activations, quantize_rows

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
cpu = pytest.importorskip("quire.kernels.cpu.products")
rowwise = pytest.importorskip("quire.kernels.cpu.rowwise")

ROUNDED = [
    *(INT8, INT4, Scheme(4), Scheme(4, 8), Scheme(4, 128, torch.float16)),
    *(Scheme(8, 0, torch.float16), Scheme(8, 32, torch.float16)),
    *(Scheme(4, 32, torch.float16, has_offsets=True), Scheme(8, 16, torch.bfloat16, has_offsets=True)),
    *(Scheme(8, 64, torch.float16, has_offsets=True), Scheme(4, 64)),  # groups that fill tile registers
    *(Scheme(6), Scheme(6, 32, torch.float16), Scheme(6, 16, torch.bfloat16, has_offsets=True)),
    *(MXFP4, NVFP4, Scheme(4, grid="e2m1")),
    *(Scheme(8, grid="e4m3"), Scheme(8, 32, torch.bfloat16, grid="e4m3")),
]
FACTORED = [
    *(Scheme(4, size, torch.float16, has_offsets=offsets, has_factors=True)
      for size, offsets in ((16, False), (16, True), (32, True), (256, False))),
    *(Scheme(6, size, torch.float16, has_offsets=offsets, has_factors=True)
      for size, offsets in ((16, False), (16, True), (32, True))),
    *(Scheme(4, 32, torch.float16, has_offsets=offsets, grid="iq4_nl", has_factors=True) for offsets in (False, True)),
]  # fmt: skip
WRITTEN = [*ROUNDED, *FACTORED]
STORED = [  # also those to which nothing is rounded
    *WRITTEN,
    *(Scheme(4, size, dtype, grid="iq4_nl") for size, dtype in ((32, torch.float16), (0, torch.float32))),
]
DTYPES = (torch.float32, torch.bfloat16)
THREADS = (1, 2, 3)
ROWS = (*range(1, 10), 16, 17, 33, 64, 300)  # for the paths of few rows, registers, tiles and blocks
FEW_ROWS = (1, 2, 3, 8, 9, 17, 40)
WIDTHS = (1, 2, 15, 16, 17, 32, 33, 47, 64, 100, 130, 530)  # of tiles of 16 columns, and several of them
SIZES = (1, 3, 15, 16, 17, 31, 32, 33, 64, 65, 100, 130, 256, 530)  # of steps of 4 and 8 terms, groups and registers


@pytest.fixture(scope="module", params=each_with(2))
def build(request):
    with in_use(request.param) as threads:
        yield threads


each_build = pytest.mark.usefixtures("build")


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(weight, scheme, dtype):
    """The weight in the layout of the reference."""
    room = reference.allocate_weight(weight.shape, dtype, scheme=scheme)
    reference.write_rows(room, weight, 0)
    return room


def packed_weight(seed, shape, scheme, dtype, parts=1):
    """A random weight (rows, columns), or stack of them. It has random codes if nothing is rounded to the scheme."""
    if not scheme.has_factors:
        return cpu.pack_weight(normal(seed, *shape, dtype=dtype) / shape[-1] ** 0.5, parts, scheme)
    room = cpu.allocate_weight(shape, dtype, parts, scheme)
    for index in range(shape[0] if len(shape) == 3 else 1):
        cpu.write_rows(room, drawn_rows(seed + index, *shape[-2:], scheme), 0, index)
    return room


def assert_near(found, expected, error):
    """Asserts that `found` differs from `expected` by at most `error` and the rounding of both."""
    assert found.dtype == expected.dtype
    unit = 2**-7 if found.dtype == torch.bfloat16 else 2**-23
    distance = (found.double() - expected.double()).abs()
    assert (distance <= error + unit * expected.double().abs()).all(), distance.max()


def bound(x, weight, scheme):
    """A bound for the error of float32 sums over groups."""
    values = dequantize(quantize_rows(weight, scheme), scheme)
    terms = multiplied(x, scheme).double().abs() @ values.double().abs().T
    return (num_sums(scheme, x.shape[1]) + 4) * 2**-23 * terms


def multiplied(x, scheme):
    """x as it is multiplied: rounded to 8 bits, unless weights are float8."""
    if scheme.grid == "e4m3":
        return x
    codes, scales = quantize_activations(x, scheme.x_group_size)
    return codes * scales.repeat_interleave(scheme.x_group_size, 1)[:, : x.shape[1]]


def num_sums(scheme, k):
    """Additions in float32 for one result."""
    return scheme.num_groups(k) + (k if scheme.grid == "e4m3" else -(-k // scheme.x_group_size))


@with_pairs(
    *THREADS, scheme=ROUNDED, dtype=DTYPES, rows=ROWS, n=WIDTHS, k=SIZES, biased=(False, True), halved=(False, True)
)
def test_products_are_those_of_plain_torch(seed, rows, n, k, scheme, dtype, biased, halved):
    check_product(seed, scheme, dtype, rows, (n * (1 + halved), k), biased, 1 + halved)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    scheme=st.sampled_from(ROUNDED),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 70),
    shape=st.tuples(st.integers(1, 200), st.integers(1, 600)),
    biased=st.booleans(),
    build=st.sampled_from(EVERY),
    threads=st.sampled_from(THREADS),
)
def test_products_of_any_size_are_those_of_plain_torch(build, threads, **options):
    with in_use(f"{build}-{threads}"):
        check_product(**options)


def check_product(seed, scheme, dtype, rows, shape, biased, parts=1):
    x, weight = normal(seed, rows, shape[1], dtype=dtype), normal(seed + 1, *shape, dtype=dtype) / shape[1] ** 0.5
    bias = normal(seed + 2, shape[0], dtype=dtype) if biased else None
    packed = cpu.pack_weight(weight, parts, scheme)
    expected = reference.linear(x, plain(weight, scheme, dtype), bias)
    assert_near(cpu.linear(x, packed, bias), expected, bound(x, weight, scheme))


@with_pairs(*THREADS, scheme=WRITTEN, dtype=DTYPES, rows=ROWS, n=WIDTHS, k=SIZES, biased=(False, True))
def test_gated_products_are_those_of_two_products(seed, rows, n, k, scheme, dtype, biased):
    x, packed = normal(seed, rows, k, dtype=dtype), packed_weight(seed + 1, (2 * n, k), scheme, dtype, 2)
    bias = normal(seed + 2, 2 * n, dtype=dtype) if biased else None
    gate, up = cpu.linear(x, packed, bias).chunk(2, 1)
    expected = (reference.activate(gate.float(), "silu") * up.float()).to(dtype)
    assert_near(cpu.gated_linear(x, packed, bias, "silu"), expected, 1e-5 * up.double().abs() + 1e-6)


@each_build
@pytest.mark.parametrize("scheme", [None, INT8, INT4, NVFP4, Scheme(8, grid="e4m3")])
def test_experts_are_played_again_with_all_their_arguments(scheme, monkeypatch):
    kept = []  # a call's memory must stay as long as its tape

    def keep(shape, dtype):
        kept.append(torch.empty(shape, dtype=dtype))
        return kept[-1]

    monkeypatch.setattr(cpu, "empty", keep)
    up = cpu.pack_weight(normal(0, 4, 64, 32), 2, scheme)
    down = cpu.pack_weight(normal(1, 4, 32, 32), 1, scheme)
    x, ids, weights = normal(2, 3, 32), torch.tensor([[0, 1], [2, 3], [1, 3]]), normal(3, 3, 2)
    expected = cpu.experts(x, ids, weights, up, down, "silu").clone()
    _C.record()
    try:
        out = cpu.experts(x, ids, weights, up, down, "silu")
        cpu.linear(x, down[0])
    finally:
        tape = _C.stop()
    assert torch.equal(out, expected)
    out.zero_()
    _C.play(tape)
    assert torch.equal(out, expected)


def drawn_rows(seed, n, k, scheme):
    """Random codes with scales and offsets, as a checkpoint has them."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << scheme.bits, (n, k), dtype=torch.uint8, generator=draw)
    shape = n, scheme.num_groups(k)
    if scheme.has_factors:
        integers = torch.randint(-128, 128, (2, *shape), dtype=torch.int8, generator=draw)
        factors = normal(seed + 1, n, scheme.num_factors(k), 1 + scheme.has_offsets, dtype=scheme.scale_dtype) / 1024
        return QuantizedRows(codes, integers[0], integers[1] if scheme.has_offsets else None, factors)
    scales, offsets = (normal(seed + i, *shape, dtype=scheme.scale_dtype) / 8 for i in (1, 2))
    if scheme.grid == "e4m3":
        codes[codes & 127 == 127] = 0  # NaN
    return QuantizedRows(codes, scales, offsets if scheme.has_offsets else None)


@with_pairs(*THREADS, scheme=STORED, dtype=DTYPES, rows=FEW_ROWS, n=WIDTHS, k=SIZES)
def test_codes_of_a_checkpoint_are_multiplied_as_they_are(seed, rows, n, k, scheme, dtype):
    x, quantized = normal(seed, rows, k, dtype=dtype), drawn_rows(seed, n, k, scheme)
    packed, room = (some.allocate_weight((n, k), dtype, scheme=scheme) for some in (cpu, reference))
    cpu.write_rows(packed, quantized, 0)
    reference.write_rows(room, quantized, 0)
    values = dequantize(quantized, scheme).double().abs()
    if scheme.has_offsets:  # terms that cancel
        values += 2 * dequantize(quantized._replace(offsets=torch.zeros_like(quantized.scales)), scheme).double().abs()
    terms = multiplied(x, scheme).double().abs() @ values.T
    assert_near(cpu.linear(x, packed), reference.linear(x, room), (2 * num_sums(scheme, k) + 4) * 2**-22 * terms)
    assert_near(cpu.embed(torch.arange(n), packed), dequantize(quantized, scheme).to(dtype), 1e-6)
    assert torch.equal(cpu.embed(torch.arange(n), packed), reference.embed(torch.arange(n), room)) or scheme.has_offsets


@with_pairs(
    *THREADS,
    scheme=WRITTEN,
    dtype=DTYPES,
    num_tokens=(1, 3, 17, 40),
    hidden=(1, 16, 33, 130),
    inner=(1, 17, 65),
    gated=(True, False),
)
def test_experts_are_the_products_of_their_weights(seed, num_tokens, hidden, inner, scheme, dtype, gated):
    x = normal(seed, num_tokens, hidden, dtype=dtype)
    parts = 2 if gated else 1
    up = packed_weight(seed + 1, (5, parts * inner, hidden), scheme, dtype, parts)
    down = packed_weight(seed + 2, (5, hidden, inner), scheme, dtype)
    ids = torch.rand(num_tokens, 4, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :3]
    weights = normal(seed + 3, num_tokens, 3).softmax(1)
    found = cpu.experts(x, ids, weights, up, down, "silu", gated=gated)

    def inner_of(one, weight):
        if gated:
            return cpu.gated_linear(one, weight, None, "silu")
        return rowwise.activate(cpu.linear(one, weight), "silu")

    _C.set_threads(1)  # many small products
    for token in range(num_tokens):
        one, expected = x[token : token + 1], torch.zeros(1, hidden)
        for place in ids[token].argsort().tolist():
            expert = int(ids[token, place])
            result = cpu.linear(inner_of(one, up[expert]), down[expert])
            expected += result.float() * weights[token, place]
        assert_near(found[token : token + 1], expected.to(dtype), 1e-6 * (1 + expected.abs().max()))


INTEGERS = [scheme for scheme in STORED if scheme.grid != "e4m3"]


@with_pairs(*THREADS, scheme=INTEGERS, dtype=DTYPES, rows=ROWS, n=WIDTHS, k=SIZES)
def test_products_of_integers_are_exact(seed, rows, n, k, scheme, dtype):
    """Codes with scale 1, and integer offsets, times integers with scale 1. Results are rounded once."""
    draw, quantized = torch.Generator().manual_seed(seed), drawn_rows(seed, n, k, scheme)
    if quantized.factors is not None:
        small = [None if some is None else some // 16 for some in (quantized.scales, quantized.offsets)]
        quantized = quantized._replace(scales=small[0], offsets=small[1], factors=torch.ones_like(quantized.factors))
    else:
        quantized = quantized._replace(scales=torch.ones_like(quantized.scales))
        if scheme.has_offsets:
            quantized = quantized._replace(offsets=(quantized.offsets * 40).round())
    x = torch.randint(-127, 128, (rows, k), generator=draw).float()
    x[:, :: scheme.x_group_size] = 127
    packed = cpu.allocate_weight((n, k), dtype, scheme=scheme)
    cpu.write_rows(packed, quantized, 0)
    assert torch.equal(
        cpu.linear(x.to(dtype), packed), (x.double() @ dequantize(quantized, scheme).double().T).to(dtype)
    )


@with_pairs(2, scheme=[scheme for scheme in WRITTEN if scheme.grid != "e4m3"])
def test_the_largest_products_do_not_overflow(seed, scheme):
    """All codes and all x at their extremes, and integer scales at theirs."""
    del seed
    columns, rows = 530, 5
    codes = torch.full((17, columns), (1 << scheme.bits) - 1, dtype=torch.uint8)
    if scheme.grid == "e2m1":
        codes.fill_(7)
    shape = 17, scheme.num_groups(columns)
    scales, factors = torch.ones(shape, dtype=scheme.scale_dtype), None
    if scheme.has_factors:
        scales = torch.full(shape, -128, dtype=torch.int8)
        factors = torch.full((17, scheme.num_factors(columns), 1 + scheme.has_offsets), 2.0**-8, dtype=torch.float16)
    quantized = QuantizedRows(codes, scales, scales if scheme.has_offsets else None, factors)
    packed, room = (some.allocate_weight((17, columns), torch.float32, scheme=scheme) for some in (cpu, reference))
    cpu.write_rows(packed, quantized, 0)
    reference.write_rows(room, quantized, 0)
    for sign in (1, -1):
        x = torch.full((rows, columns), sign * 127.0)
        expected = reference.linear(x, room)
        assert expected.abs().min() > 1000
        assert torch.allclose(cpu.linear(x, packed), expected, rtol=1e-5, atol=0)


@with_pairs(*THREADS, scheme=WRITTEN, dtype=DTYPES, rows=(2, 5, 9, 17, 33, 70), n=WIDTHS, k=SIZES, gated=(False, True))
def test_a_row_does_not_depend_on_the_others(seed, rows, n, k, scheme, dtype, gated):
    product = product_of(seed, n, k, scheme, dtype, gated)
    x, draw = normal(seed, rows, k, dtype=dtype), torch.Generator().manual_seed(seed)
    chosen = torch.randint(rows, (int(torch.randint(1, rows + 1, (), generator=draw)),), generator=draw)
    assert torch.equal(product(x[chosen]), product(x)[chosen])


def product_of(seed, n, k, scheme, dtype, gated):
    """A function of x: its product with a random weight (n, k), or (2n, k) if it is gated, plus a bias."""
    n *= 1 + gated
    packed = packed_weight(seed, (n, k), scheme, dtype, 1 + gated)
    bias = normal(seed + 1, n, dtype=dtype)
    return lambda x: cpu.gated_linear(x, packed, bias, "silu") if gated else cpu.linear(x, packed, bias)


SEVERAL = [
    *(INT8, INT4, Scheme(8, 64), Scheme(4, 64, has_offsets=True), Scheme(4), Scheme(6, 32, torch.float16)),
    *(MXFP4, *FACTORED),
]


@with_pairs(2, scheme=SEVERAL)
def test_each_number_of_rows_has_the_bits_of_each_row_alone(seed, scheme):
    x = normal(seed + 1, 65, 130)
    for gated in (False, True):
        product = product_of(seed, 40, 130, scheme, torch.float32, gated)
        every = product(x)
        for rows in (*range(2, 10), 16, 17, 31, 32, 33, 48, 49):
            assert torch.equal(product(x[:rows]), every[:rows])
            assert torch.equal(product(x[rows - 1 : rows]), every[rows - 1 : rows])


@with_pairs(2, scheme=(INT8, Scheme(8, 64), Scheme(4, 128, has_offsets=True)))
def test_many_long_rows_have_the_bits_of_each_row_alone(seed, scheme):
    """So many that a block of x has a part of k at a time with tile registers."""
    x = normal(seed, 301, 8300, dtype=torch.bfloat16)
    for gated in (False, True):
        product = product_of(seed, 17, 8300, scheme, torch.bfloat16, gated)
        found = product(x)
        for row in (0, 15, 16, 31, 32, 127, 160, 255, 256, 300):
            assert torch.equal(product(x[row : row + 1])[0], found[row])


@with_pairs(
    *THREADS, scheme=ROUNDED, dtype=DTYPES, n=WIDTHS, k=SIZES, special=(None, 0.0, torch.nan, torch.inf, 2.0**-120)
)
def test_weights_are_rounded_as_in_plain_torch(seed, n, k, scheme, dtype, special):
    weight = normal(seed, n, k, dtype=dtype)
    if special is not None:
        weight[n // 2, k // 2 :] = special
    found, expected = cpu.quantize_rows(weight, scheme), quantize_rows(weight, scheme)
    finite = expected.scales.isfinite()
    assert torch.equal(found.scales.isnan(), ~finite)
    compared = finite.repeat_interleave(scheme.group_size or k, 1)[:, :k]
    if scheme.grid == "e2m1":
        assert torch.equal(found.codes, expected.codes)
    ours, theirs = ((dequantize(some, scheme) - weight)[compared].double().square() for some in (found, expected))
    assert abs(ours.sum() - theirs.sum()) <= 1e-3 * theirs.sum() + 1e-10  # equal scales but for ties


@with_pairs(2, scheme=(INT8, INT4, MXFP4, NVFP4))
def test_codes_of_a_row_do_not_depend_on_the_others(seed, scheme):
    weight = normal(seed, 20, 100) * torch.logspace(-6, 2, 20)[:, None]
    whole, one = cpu.quantize_rows(weight, scheme), cpu.quantize_rows(weight[3:4], scheme)
    assert torch.equal(whole.codes[3:4], one.codes) and torch.equal(whole.scales[3:4], one.scales)


@with_pairs(*THREADS, scheme=ROUNDED, dtype=DTYPES, n=WIDTHS, k=SIZES)
def test_rows_are_looked_up_as_they_are_multiplied(seed, n, k, scheme, dtype):
    weight = normal(seed, n, k, dtype=dtype)
    packed = cpu.pack_weight(weight, scheme=scheme)
    values = dequantize(quantize_rows(weight, scheme), scheme)
    ids = torch.tensor([n - 1, 0, -1, n])
    found = cpu.embed(ids, packed, 3.0)
    assert_near(found[:2], (3 * values[ids[:2]]).to(dtype), 0)
    assert not found[2:].any()


@with_pairs(*THREADS, scheme=(INT8, INT4, MXFP4, NVFP4), dtype=DTYPES, bad=(torch.nan, torch.inf, -torch.inf))
def test_a_row_that_is_not_finite_gives_nan_and_the_others_stay(seed, scheme, dtype, bad):
    x, weight = normal(seed, 20, 100, dtype=dtype), normal(seed + 1, 40, 100, dtype=dtype)
    packed = cpu.pack_weight(weight, scheme=scheme)
    expected = cpu.linear(x, packed)
    x[3, 99] = bad
    found = cpu.linear(x, packed)
    assert found[3].isnan().all()
    others = [row for row in range(20) if row != 3]
    assert torch.equal(found[others], expected[others])


@each_build
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_and_huge_rows(dtype):
    """Below 2^-96 a row counts as zeros; the largest finite numbers do not overflow before the scale."""
    weight = normal(1, 40, 64, dtype=dtype)
    x = torch.stack([torch.full((64,), 2.0**-97), torch.full((64,), 2.0**-96), torch.full((64,), 2.0**100)]).to(dtype)
    found = cpu.linear(x, cpu.pack_weight(weight, scheme=INT8))
    expected = reference.linear(x, plain(weight, INT8, dtype))
    assert not found[0].any()
    assert_near(found, expected, bound(x, weight, INT8))


@pytest.mark.parametrize(
    "scheme",
    [
        *(Scheme(8, 12), Scheme(4, 4), Scheme(2), Scheme(8, 0, torch.float64), INT8),
        *(Scheme(8, 32, has_offsets=True, grid="e4m3"), Scheme(8, 32, grid="e2m1")),
        *(Scheme(6, 24), Scheme(4, 0, torch.float16, has_factors=True), Scheme(4, 48, torch.float16, has_factors=True)),
        *(Scheme(4, 32, has_factors=True), Scheme(8, 32, torch.float16, has_factors=True)),
    ],
)
def test_schemes_that_the_kernels_do_not_have_are_refused(scheme):
    why = "at most 65536 columns" if scheme == INT8 else "CPU kernels have"
    with pytest.raises(ValueError, match=why):
        cpu.allocate_weight((16, 2**16 + 1), torch.bfloat16, scheme=scheme)


@each_build
def test_stacks_are_indexed_with_their_scales():
    stack = normal(0, 3, 20, 50)
    packed = cpu.pack_weight(stack, scheme=INT4)
    for index in range(3):
        one = cpu.pack_weight(stack[index], scheme=INT4)
        assert torch.equal(packed[index].data, one.data)
        assert torch.equal(packed[index].scales, one.scales)


@pytest.mark.parametrize("scheme", [Scheme(4, 32, grid="iq4_nl"), *FACTORED[:1]])
def test_schemes_that_only_gguf_files_have(scheme):
    with pytest.raises(ValueError, match=r"not rounded to .*; only GGUF files have"):
        cpu.quantize_rows(normal(0, 1, 32), scheme)
