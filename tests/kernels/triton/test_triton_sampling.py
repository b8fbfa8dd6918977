"""Sampling in Triton against the reference and slow oracles, compiled on a GPU or interpreted on a CPU.

Tokens must equal the reference's. Because of rounding a token may differ if two scores are within about 1e-6 of each
other, or if a chosen token's cumulative share is as close to its row's top_p. There are few enough cases for that not
to happen. Tests of the limits themselves use fixed seeds and well separated values.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_metadata_builders import draws, mask, normal, random_draws
from sampling_oracles import draws_of, in_python, kept_tokens, row_params
from triton_device import DEVICE

from quire.kernels import reference
from quire.kernels.contract import Purpose
from quire.kernels.reference import philox
from quire.kernels.reference import sampling as slow

triton = pytest.importorskip("triton")
noise = pytest.importorskip("quire.kernels.triton.noise")
rows_ = pytest.importorskip("quire.kernels.triton.rows")
sampling = pytest.importorskip("quire.kernels.triton.sampling")
thresholds = pytest.importorskip("quire.kernels.triton.thresholds")
uploads = pytest.importorskip("quire.kernels.triton.upload")
tl = triton.language

# The interpreter computes with numpy, which warns of inf - inf and the like. Rows with such logits are intended.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def poison():
    """torch.empty gives NaN and large integers."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


def sampled(logits, rows):
    return sampling.sample(logits.to(DEVICE), rows).tolist()


def check(logits, rows):
    found = sampled(logits, rows)
    assert found == reference.sample(logits, rows).tolist()
    return found


# ---- noise ----


@triton.jit
def _noise_of(key_ptr, out_ptr, first, NUMBER: tl.constexpr):
    values = noise.gumbel(
        tl.load(key_ptr),
        tl.load(key_ptr + 1),
        tl.load(key_ptr + 2),
        tl.load(key_ptr + 3),
        tl.load(key_ptr + 4),
        first,
        NUMBER,
    )
    tl.store(out_ptr + tl.arange(0, NUMBER), values)


@triton.jit
def _exponential_of(words_ptr, out_ptr, NUMBER: tl.constexpr):
    lanes = tl.arange(0, NUMBER)
    tl.store(out_ptr + lanes, noise.exponential(tl.load(words_ptr + lanes).to(tl.uint32, bitcast=True)))


@pytest.mark.parametrize("seed", [0, 2**64 - 1, 0x9E3779B97F4A7C15])
@pytest.mark.parametrize(("position", "index", "purpose"), [(0, 0, 0), (2**31 - 1, 127, 2), (5, 1, 1)])
def test_noise_comes_from_the_words_of_philox(seed, position, index, purpose):
    key = torch.from_numpy(np.array([seed % 2**32, seed >> 32, position, index, purpose], np.uint32).view(np.int32))
    first, number = 4 * 1000, 64
    out = torch.empty(number, device=DEVICE)
    _noise_of[(1,)](key.to(DEVICE), out, first, NUMBER=number)
    words = [
        in_python((position, index, purpose, t // 4), (seed % 2**32, seed >> 32))[t % 4] for t in range(4000, 4064)
    ]
    expected = -philox.exponential(torch.tensor(words)).double().log()
    torch.testing.assert_close(out.cpu().double(), expected, atol=1e-6, rtol=1e-6)


def test_exponentials_keep_their_digits_at_both_ends():
    ends = [0, 1, 2, 1000, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2**20, 2**32 - 1000, 2**32 - 2, 2**32 - 1]
    words = np.array(ends + np.random.default_rng(0).integers(0, 2**32, 500).tolist(), np.uint32)
    out = torch.empty(512, device=DEVICE)
    _exponential_of[(1,)](torch.from_numpy(words.view(np.int32)).to(DEVICE), out, NUMBER=512)
    for word, found in zip(words.tolist(), out.tolist(), strict=True):
        exact = -math.log1p(-(2**32 - 1 - word + 0.5) / 2**32) if word > 2**30 else -math.log((word + 0.5) / 2**32)
        assert math.isclose(found, exact, rel_tol=5e-7)


def test_a_flat_vocabulary_has_the_reference_s_noise_everywhere():
    logits = torch.zeros(15, 2311)
    check(logits, draws(15, seeds=2**63, positions=range(15), sample_indices=np.arange(15) % 7))


# ---- filters ----


def test_kernels_and_the_host_agree_on_what_a_row_asks_for():
    names = [name.upper() for name in rows_.ROW_METADATA.names[:-1]]  # the last one is unused
    assert [getattr(rows_, name).value for name in names] == list(range(len(names)))
    assert rows_.WORDS.value * 4 == rows_.ROW_METADATA.itemsize == 64


def kept(logits, rows):
    """Tokens kept by the filters, if all rows are sampled: bool (num_rows, vocab_size), and the scores."""
    vocab_size = logits.shape[1]
    table = sampling.pack_metadata(rows, vocab_size)
    packed = sampling.pack_edits(rows, table, vocab_size)
    params_of_rows, some, *packed = uploads.upload([table, np.arange(len(logits), dtype=np.int32), *packed], DEVICE)
    logits = logits.to(DEVICE)
    changed, peaks, _ = sampling.edit_and_find_peaks(logits, params_of_rows, packed, table)
    thresholds.apply_top_k_top_p(logits, changed, params_of_rows, peaks, some)
    least = (
        params_of_rows.view(len(logits), -1)[:, rows_.MIN_SCORE.value]
        .contiguous()
        .view(torch.float32)
        .cpu()
        .unsqueeze(1)
    )
    scores = scores_of(logits.cpu(), rows)
    return scores >= least


def scores_of(logits, rows):
    logits = logits.float()
    return (logits - logits.amax(-1, keepdim=True)) / torch.from_numpy(rows.temperatures).unsqueeze(1)


def kept_by_the_reference(logits, rows):
    scores = scores_of(logits, rows)
    scores = scores.masked_fill(scores < torch.from_numpy(rows.min_ps).log().unsqueeze(1), -torch.inf)
    scores = slow._apply_top_k(scores, np.minimum(rows.top_ks, logits.shape[1]))
    return slow._apply_top_p(scores, torch.from_numpy(rows.top_ps)) > -torch.inf


@pytest.mark.parametrize(
    ("deviation", "coarse", "copied"),
    [(0.0, False, 32), (0.01, False, 8192), (1.0, True, 32), (2.0, False, 8192), (30.0, False, 32)],
)
def test_kept_tokens_equal_the_reference(monkeypatch, deviation, coarse, copied):
    monkeypatch.setattr(thresholds, "MAX_COPIED", copied)  # with few of them every pass reads the row itself
    logits = normal(6, 1500, 11, deviation)
    if coarse:
        logits = logits.round()  # many ties
    options = [(0, 0.9, 0), (50, 1, 0), (0, 0.3, 0.01), (1, 1, 0), (700, 0.97, 0), (3, 1e-6, 0.4)]
    top_ks, top_ps, min_ps = zip(*options, strict=True)
    rows = draws(6, temperatures=[1, 0.5, 2, 1, 3, 1], top_ks=top_ks, top_ps=top_ps, min_ps=min_ps)
    assert torch.equal(kept(logits, rows), kept_by_the_reference(logits, rows))


def test_filters_keep_what_they_say():
    cases = [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_ks": 2}, [0, 1]),
        ({"top_ks": 3}, [0, 1, 2, 3]),  # ties are kept together
        ({"top_ks": 5}, [0, 1, 2, 3, 4]),
        ({"top_ps": 0.39}, [0]),
        ({"top_ps": 0.41}, [0, 1]),
        ({"top_ps": 0.75}, [0, 1, 2, 3]),
        ({"min_ps": 0.7}, [0, 1]),
        ({"min_ps": 1.0}, [0]),
        ({"top_ks": 2, "top_ps": 0.56}, [0]),  # 0.4 / 0.7 is enough after top_k
        ({"min_ps": 0.4, "top_ps": 0.56}, [0]),  # and after min_p
        ({"min_ps": 0.4, "top_ks": 3}, [0, 1]),
    ]
    names = {"top_ks": 0, "top_ps": 1.0, "min_ps": 0.0}
    columns = {name: [options.get(name, nothing) for options, _ in cases] for name, nothing in names.items()}
    logits = torch.tensor([[0.4, 0.3, 0.12, 0.12, 0.06]]).log().expand(len(cases), -1)
    rows = draws(len(cases), seeds=range(len(cases)), **columns)
    found, tokens = kept(logits, rows), sampled(logits, rows)
    for row, token, (_, expected) in zip(found, tokens, cases, strict=True):
        assert row.nonzero()[:, 0].tolist() == expected
        assert token in expected


@settings(max_examples=12, deadline=None)
@given(
    vocab_size=st.integers(1, 40),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.93, 0.51, 0.07]),
    top_k=st.sampled_from([-1, 1, 3, 10, 1000]),
    min_p=st.sampled_from([0.0, 0.03, 0.4]),
    seed=st.integers(0, 200),
)
def test_kept_tokens_equal_a_slow_oracle(vocab_size, temperature, top_p, top_k, min_p, seed):
    """Logits are halves: scores are exact, ties are ties, and no share is close to a limit."""
    logits = (normal(1, vocab_size, seed) * 2).round() / 2
    rows = draws(1, temperatures=temperature, top_ps=top_p, top_ks=top_k, min_ps=min_p)
    expected = kept_tokens(logits[0].tolist(), temperature, top_p, top_k, min_p)
    assert set(kept(logits, rows)[0].nonzero()[:, 0].tolist()) == set(expected)


@pytest.mark.parametrize("vocab_size", [5, 2500])
def test_all_ties_stay_at_a_border(vocab_size):
    logits = torch.zeros(1, vocab_size)
    for options in ({"top_ks": 1}, {"top_ps": 1e-3}, {"min_ps": 1.0}, {"top_ks": 2, "top_ps": 0.5, "min_ps": 1.0}):
        assert kept(logits, draws(1, **options)).all()


def test_a_long_tail_counts():
    logits = torch.zeros(3, 20000)
    logits[:, 7] = 9.0  # three tenths of the probability
    found = kept(logits, draws(3, top_ps=[0.25, 0.31, 0.9]))
    assert found.sum(1).tolist() == [1, 20000, 20000]


# ---- tokens ----


@settings(max_examples=20, deadline=None)
@given(
    num_rows=st.integers(1, 4),
    vocab_size=st.sampled_from([1, 2, 15, 33, 1000, 2047, 2048, 2049]),
    deviation=st.sampled_from([0.0, 0.01, 1.0, 4.0, 20.0]),
    coarse=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**32),
)
def test_tokens_equal_the_reference(num_rows, vocab_size, deviation, coarse, dtype, seed):
    logits = normal(num_rows, vocab_size, seed, deviation)
    if coarse:
        logits = logits.round()
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.1] = -torch.inf
    check(logits.to(dtype), random_draws(num_rows, seed))


def test_tokens_of_a_large_vocabulary_equal_the_reference():
    options = [(0, 1, 0), (1, 0.9, 0), (0.7, 0.8, 50)]
    temperatures, top_ps, top_ks = zip(*options, strict=True)
    rows = draws(3, seeds=range(3), temperatures=temperatures, top_ps=top_ps, top_ks=top_ks)
    check(normal(3, 152064, 1, 4.0), rows)


def test_two_tokens_whose_logits_make_up_for_their_noise():
    """The difference of two logits nearly cancels that of their noise, for words of all sizes and the largest."""
    extremes = [279354704, 281247292, 363256242]
    positions = extremes + list(range(40))
    little = [1e-4 if i % 2 else -1e-4 for i in range(len(positions))]
    logits = torch.full((len(positions), 100), -torch.inf)
    expected = []
    for row, position in enumerate(positions):
        words = in_python((position, 0, Purpose.SAMPLE, 0), (0, 0))
        first, second = words.index(max(words)), words.index(min(words))
        logits[row, first] = 0
        logits[row, second] = exact_noise(words[first]) - exact_noise(words[second]) + little[row]
        expected.append(second if little[row] > 0 else first)
    assert max(in_python((extremes[0], 0, Purpose.SAMPLE, 0), (0, 0))) == 2**32 - 2
    assert sampled(logits, draws(len(positions), positions=positions)) == expected


def exact_noise(word):
    """Gumbel noise in float64."""
    from_one = (2**32 - 1 - word + 0.5) / 2**32
    return -math.log(-math.log1p(-from_one) if from_one < 0.5 else -math.log((word + 0.5) / 2**32))


@pytest.mark.parametrize("vocab_size", [1, 2, 33, 2049, 5000])
def test_greedy_takes_the_lowest_of_equals_wherever_it_stands(vocab_size):
    places = sorted({0, vocab_size // 3, vocab_size // 2, vocab_size - 1})
    logits = torch.full((len(places), vocab_size), -torch.inf)
    for row, place in enumerate(places):
        logits[row, place:] = 7.0
    filters = {"top_ps": 0.1, "top_ks": 1, "min_ps": 1.0}  # ignored by greedy rows
    assert sampled(logits, draws(len(places), temperatures=0.0, **filters)) == places
    assert sampled(logits.bfloat16(), draws(len(places), temperatures=0.0)) == places


@pytest.mark.parametrize("options", [{"temperatures": 0.0}, {"top_ps": 0.9, "top_ks": 30, "min_ps": 0.01}])
@pytest.mark.parametrize("vocab_size", [16, 2100])
def test_rows_that_are_not_finite_yield_minus_one_and_change_no_other_row(vocab_size, options):
    bads = [torch.nan, -torch.nan, torch.inf]
    logits = normal(2 * len(bads) + 4, vocab_size, 6)
    for row, bad in enumerate(bads):
        logits[2 * row, (0, vocab_size // 2, vocab_size - 1)[row]] = bad
    logits[-4], logits[-2, 0] = -torch.inf, torch.nan
    bans = [(row, 0, -math.inf) for row in (0, len(logits) - 2)]  # they do not hide invalid logits
    masked = {"masked": [2], "masks": mask([{1, 2, 3}], vocab_size)}
    found = check(logits, draws(len(logits), seeds=range(len(logits)), edits=bans, **masked, **options))
    assert [token == -1 for token in found] == [True, False] * (len(logits) // 2)


def test_temperatures_without_measure():
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[largest, -largest, -torch.inf], [-largest, -torch.inf, -torch.inf], [1, 3, 2]])
    for temperature in (0.0, 1e-44, 1e-5, 1.0):
        assert sampled(logits[:2], draws(2, temperatures=temperature, top_ps=0.9)) == [0, 0]
    assert sampled(logits, draws(3, temperatures=1e-44)) == [0, 0, 1]
    check(normal(6, 50), draws(6, seeds=range(6), temperatures=3e38))


def test_a_token_does_not_depend_on_batch_mates():
    logits, rows = normal(8, 301, 8), random_draws(8, 9)
    together = sampled(logits, rows)
    for i in range(8):
        columns = {name: getattr(rows, name)[i : i + 1] for name in rows.__struct_fields__[:10]}
        alone = type(rows)(**columns, masks=rows.masks, edits=rows.edits, history=rows.history)
        assert sampled(logits[i : i + 1], alone) == together[i : i + 1]


def test_rows_may_lie_apart_and_columns_too():
    wide = normal(4, 700, 10).to(DEVICE)
    rows = draws(4, seeds=range(4), top_ps=0.9)
    for logits in (wide[:, 100:400], wide.T.contiguous().T, wide[0].expand(4, -1)):
        assert sampling.sample(logits, rows).tolist() == reference.sample(logits.cpu(), rows).tolist()


def test_no_rows_yield_no_tokens():
    assert sampled(torch.empty(0, 10), draws(0)) == []


def test_columns_that_may_not_be_written_are_read():
    rows = draws(2, min_ps=0.5, masked=[0], masks=mask([{3}], 40))
    for column in (rows.min_ps, rows.masks.words):
        column.flags.writeable = False
    assert sampled(normal(2, 40), rows)[0] == 3


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU is always in step with itself")
def test_sampling_does_not_synchronize_with_the_device():
    logits = normal(4, 3000).to(DEVICE)
    more = {"edits": [(0, 3, 1.0)], "history": [(1, 5, True)], "masked": [2], "masks": mask([{1, 2000}], 3000)}
    rows = draws(4, temperatures=[0, 1, 1, 1], top_ks=20, top_ps=0.9, frequency=1.0, **more)
    sampling.sample(logits, rows)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampling.sample(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- edits ----


@settings(max_examples=25, deadline=None)
@given(params_of_rows=st.lists(row_params, min_size=1, max_size=3), seed=st.integers(0, 2**32), backwards=st.booleans())
def test_edited_tokens_equal_the_reference(params_of_rows, seed, backwards):
    logits = normal(len(params_of_rows), 23, seed)
    rows = draws_of(params_of_rows, seeds=seed, positions=range(len(params_of_rows)), top_ps=0.9)
    if backwards:  # entries may have any order of rows
        for entries in (rows.masks, rows.edits, rows.history):
            for name in entries.__slots__:
                object.__setattr__(entries, name, getattr(entries, name)[::-1].copy())
    before = logits.clone()
    check(logits, rows)
    assert torch.equal(logits, before)  # logprobs are reported from raw logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_of_many_rows_and_tokens_equal_the_reference(dtype):
    dice = np.random.default_rng(3)
    size, vocab_size = 12, 2500

    def entries(*columns):
        return list(zip(*columns, strict=True))

    more = {
        "masked": (masked := dice.permutation(size)[:4]),
        "masks": mask([set(dice.integers(0, vocab_size, 900).tolist()) for _ in masked], vocab_size),
        "edits": entries(dice.integers(0, 6, 60), dice.choice([5, 2047, 2048, 2499, 900], 60), dice.normal(0, 3, 60)),
        "history": entries(dice.integers(3, 10, 3000), dice.integers(0, vocab_size, 3000), dice.random(3000) < 0.5),
        "repetition": dice.choice([1, 1.3, 0.7], size),
        "frequency": dice.choice([0, 0.5, -0.4], size),
        "presence": dice.choice([0, 0.7, -0.4], size),
    }
    check(normal(size, vocab_size, 4, 1.0).to(dtype), random_draws(size, 5, **more))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0),
        ({"repetition": 2.0}, 1),  # 4 / 2 is below 3
        ({"repetition": 1.2}, 0),
        ({"frequency": 0.6}, 1),  # twice 0.6 off 4
        ({"frequency": 0.4}, 0),
        ({"presence": 1.1}, 1),  # once, for any count
        ({"presence": 0.9}, 0),
        ({"repetition": 1.1, "frequency": 0.2, "presence": 0.2}, 0),  # 4 / 1.1 - 0.4 - 0.2 = 3.04
        ({"repetition": 1.1, "frequency": 0.2, "presence": 0.3}, 1),
        ({"edits": [(0, 0, 50.0), (0, 0, -math.inf)]}, 1),  # a bias does not undo a ban
        ({"edits": [(0, 1, 2.0)], "repetition": 1.3}, 1),
        ({"edits": [(0, 3, 2.5)], "repetition": 4.0}, 1),  # -2 + 2.5 is above 0 before the penalty, so it is divided
        ({"masked": [0], "masks": mask([{2, 3}], 4), "edits": [(0, 1, 100.0)]}, 2),  # a bias does not undo a mask
    ],
)
def test_greedy_rows_are_edited_in_order(options, expected):
    logits = torch.tensor([[4.0, 3.0, 1.0, -2.0]])
    history = [(0, 0, True), (0, 0, True), (0, 2, False), (0, 3, False)]
    assert sampled(logits, draws(1, temperatures=0.0, history=history, **options)) == [expected]


def test_a_token_of_a_long_history_is_counted_each_time():
    logits = torch.tensor([[4.0, 3.0, 0.0]] * 2)
    history = [(row, 0, True) for row in range(2) for _ in range(1500)] + [(1, 2, False)] * 40
    rows = draws(2, temperatures=0.0, history=history, frequency=[1 / 1498, 1 / 1502])
    assert sampled(logits, rows) == [1, 0]


def test_a_penalty_that_overflows_still_leaves_a_choice():
    logits = torch.tensor([[5.0, 3.0, 0.0, -1.0]] * 2)
    history = [(row, token, False) for row in range(2) for token in range(4)]
    edits = [(row, 0, -math.inf) for row in range(2)]
    tiny = np.finfo(np.float32).tiny
    rows = draws(2, temperatures=[0.0, 1.0], repetition=tiny, history=history, edits=edits)
    assert sampled(logits, rows) == [1, 1]


def test_a_row_with_nothing_left_yields_minus_one():
    rows = draws(3, masked=[1], masks=mask([set()], 40), edits=[(2, token, -math.inf) for token in range(40)])
    found = check(normal(3, 40, 7), rows)
    assert [token == -1 for token in found] == [False, True, True]


def test_masks_of_the_wrong_width_and_tokens_outside_are_refused():
    with pytest.raises(ValueError, match=r"masks must have shape \(1, 2\)"):
        sampled(torch.zeros(1, 40), draws(1, masked=[0], masks=np.zeros((1, 1), np.uint32)))
    for token in (-1, 40):
        with pytest.raises(IndexError, match=r"tokens must be in \[0, 40\)"):
            sampled(torch.zeros(1, 40), draws(1, edits=[(0, token, 1.0)]))
        with pytest.raises(IndexError, match=r"tokens must be in \[0, 40\)"):
            sampled(torch.zeros(1, 40), draws(1, history=[(0, token, True)]))
