"""Sampling on CPUs against plain torch and slow oracles, for every build that runs here, with one and two threads.

An expected result is computed once. All builds are compared with it, and the message of a failure names the build.
"""

import math

import numpy as np
import pytest
import torch
from cpu_kernel_builds import each_with, in_use
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_metadata_builders import draws, mask, normal, random_draws
from sampling_oracles import chi_square, draws_of, in_python, kept_tokens, row_params

from quire.kernels import reference
from quire.kernels.contract import Purpose

_C = pytest.importorskip("quire.kernels.cpu._C")
sampling = pytest.importorskip("quire.kernels.cpu.sampling")


def by_each_build(logits, rows):
    """(build and its number of threads, their tokens) of each."""
    found = []
    for name in each_with(1, 2):
        with in_use(name):
            found.append((name, sampling.sample(logits, rows)))
    return found


def sampled(logits, rows):
    """The tokens of every build and number of threads, which are the same."""
    first, *others = by_each_build(logits, rows)
    for name, tokens in others:
        assert tokens.tolist() == first[1].tolist(), f"{name} and {first[0]} differ"
    return first[1].tolist()


def check(logits, rows):
    """Asserts the tokens of the reference, which are returned."""
    found = sampled(logits, rows)
    assert found == reference.sample(logits, rows).tolist()
    return found


@settings(max_examples=40)
@given(
    num_rows=st.integers(1, 9),
    vocab_size=st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 1000, 1025, 5000]),
    deviation=st.sampled_from([0.0, 0.01, 1.0, 4.0, 20.0]),
    coarse=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**32),
)
def test_tokens_equal_the_reference(num_rows, vocab_size, deviation, coarse, dtype, seed):
    logits = normal(num_rows, vocab_size, seed, deviation)
    if coarse:
        logits = logits.round()  # many ties
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.1] = -torch.inf
    logits = logits.to(dtype)
    check(logits, random_draws(num_rows, seed))


@pytest.mark.parametrize("deviation", [0.5, 4.0])
def test_tokens_of_a_large_vocabulary_equal_the_reference(deviation):
    logits = normal(12, 152064, 1, deviation)
    options = [(0, 1, 0), (1, 1, 0), (1, 0.95, 0), (1, 1, 50), (1, 1, 4000), (0.7, 0.8, 20)]
    temperatures, top_ps, top_ks = zip(*options * 2, strict=True)
    rows = draws(12, seeds=range(12), temperatures=temperatures, top_ps=top_ps, top_ks=top_ks)
    check(logits, rows)


def test_many_rows_equal_the_reference_but_for_ties_in_rounding():
    logits = normal(1, 300, 2, 1.0).expand(5000, -1)
    rows = draws(5000, seeds=range(5000), top_ps=np.where(np.arange(5000) % 2, 0.9, 1.0))
    expected = reference.sample(logits, rows)
    for name, found in by_each_build(logits, rows):
        assert (found != expected).sum() <= 2, name


def test_a_flat_vocabulary_has_the_reference_s_noise_everywhere():
    logits = torch.zeros(200, 1111)
    rows = draws(200, seeds=2**63, positions=range(200), sample_indices=np.arange(200) % 7)
    check(logits, rows)


def exact_noise(word):
    """Gumbel noise in float64."""
    from_one = (2**32 - 1 - word + 0.5) / 2**32
    return -math.log(-math.log1p(-from_one) if from_one < 0.5 else -math.log((word + 0.5) / 2**32))


def test_noise_is_exact_where_it_is_largest_and_elsewhere():
    """The difference of two logits nearly cancels that of their noise."""
    extremes = [279354704, 281247292, 363256242]  # positions where seed 0 has one of the three largest words
    positions = extremes + list(range(300))
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


def test_a_long_tail_counts():
    logits = torch.zeros(60, 50000)
    logits[:, 7] = 10.0  # three tenths of the probability
    rows = draws(60, seeds=range(60), top_ps=[0.25, 0.31, 0.9] * 20)
    found = check(logits, rows)
    assert set(found[::3]) == {7}
    assert sum(token != 7 for token in found[1::3]) > 5


@settings(max_examples=60)
@given(params_of_rows=st.lists(row_params, min_size=1, max_size=4), seed=st.integers(0, 2**32), backwards=st.booleans())
def test_edited_tokens_equal_the_reference(params_of_rows, seed, backwards):
    logits = normal(len(params_of_rows), 23, seed)
    rows = draws_of(params_of_rows, seeds=seed, positions=range(len(params_of_rows)), top_ps=0.9)
    if backwards:  # entries may have any order of rows
        for entries in (rows.masks, rows.edits, rows.history):
            for name in entries.__slots__:
                object.__setattr__(entries, name, getattr(entries, name)[::-1].copy())
    before = logits.clone()
    check(logits, rows)
    assert torch.equal(logits, before)


def test_edits_of_many_rows_and_tokens_equal_the_reference():
    dice = np.random.default_rng(3)
    size, vocab_size = 150, 77

    def entries(*columns):
        return list(zip(*columns, strict=True))

    some = dice.integers(0, size, 3000), dice.integers(0, vocab_size, 3000)
    more = {
        "masked": (masked := dice.permutation(size)[:50]),
        "masks": mask([set(dice.integers(0, vocab_size, 60).tolist()) for _ in masked], vocab_size),
        "edits": entries(*some, dice.choice([-math.inf, 1.5, -0.3, 4.1], 3000)),
        "history": entries(dice.integers(0, size, 9000), dice.integers(0, vocab_size, 9000), dice.random(9000) < 0.5),
        "repetition": dice.choice([1, 1.3, 0.7], size),
        "frequency": dice.choice([0, 0.5, -0.4], size),
        "presence": dice.choice([0, 0.7, -0.4], size),
    }
    logits, rows = normal(size, vocab_size, 4, 1.0), random_draws(size, 5, **more)
    check(logits, rows)
    short = logits.bfloat16()
    check(short, rows)


def test_a_penalty_that_overflows_still_leaves_a_choice():
    logits = torch.tensor([[5.0, 3.0, 0.0, -1.0]] * 2)
    history = [(row, token, False) for row in range(2) for token in range(4)]
    edits = [(row, 0, -math.inf) for row in range(2)]
    tiny = np.finfo(np.float32).tiny
    rows = draws(2, temperatures=[0.0, 1.0], repetition=tiny, history=history, edits=edits)
    assert sampled(logits, rows) == [1, 1]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        (1.0, 1.0, 0, 0.0),
        (0.7, 1.0, 0, 0.0),
        (1.0, 1.0, 9, 0.0),
        (1.0, 0.8, 0, 0.0),
        (1.0, 1.0, 0, 0.1),
        (1.5, 0.8, 12, 0.05),
    ],
)
def test_samples_have_the_exact_distribution(temperature, top_p, top_k, min_p):
    logits = normal(1, 24, 1, 0.8)
    kept = kept_tokens(logits[0].tolist(), temperature, top_p, top_k, min_p)
    weights = np.array([math.exp(kept[t]) if t in kept else 0.0 for t in range(24)])
    options = {"temperatures": temperature, "top_ps": top_p, "top_ks": top_k, "min_ps": min_p}
    rows = draws(20_000, seeds=5, positions=range(20_000), **options)
    for name, tokens in by_each_build(logits.expand(20_000, -1), rows):
        statistic, freedom = chi_square(tokens.numpy(), weights / weights.sum())
        assert statistic < freedom + 3.9 * math.sqrt(2 * freedom) + 10, name


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_ks": 2}, {0, 1}),
        ({"top_ks": 3}, {0, 1, 2, 3}),  # ties are kept together
        ({"top_ps": 0.4}, {0}),
        ({"top_ps": 0.41}, {0, 1}),
        ({"top_ps": 0.75}, {0, 1, 2, 3}),
        ({"min_ps": 0.7}, {0, 1}),
        ({"min_ps": 1.0}, {0}),
        ({"top_ks": 2, "top_ps": 0.56}, {0}),  # 0.4 / 0.7 is enough after top_k
        ({"min_ps": 0.4, "top_ps": 0.56}, {0}),  # and after min_p
    ],
)
def test_filters_keep_what_they_say(options, kept):
    logits = torch.tensor([0.4, 0.3, 0.12, 0.12, 0.06]).log().expand(600, -1)
    assert set(sampled(logits, draws(600, seeds=range(600), **options))) == kept


@pytest.mark.parametrize("vocab_size", [5, 1000, 40000])
def test_all_ties_stay_at_a_border(vocab_size):
    logits = torch.zeros(1, vocab_size).expand(300, -1)
    free = sampled(logits, draws(300, seeds=range(300)))
    for options in ({"top_ks": 1}, {"top_ps": 1e-3}, {"min_ps": 1.0}, {"top_ks": 2, "top_ps": 0.5, "min_ps": 1.0}):
        assert sampled(logits, draws(300, seeds=range(300), **options)) == free


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 1000, 152064])
def test_greedy_takes_the_lowest_of_equals_wherever_it_stands(vocab_size):
    places = sorted({0, vocab_size // 3, vocab_size // 2, vocab_size - 1})
    logits = torch.full((len(places), vocab_size), -torch.inf)
    for row, place in enumerate(places):
        logits[row, place:] = 7.0
    filters = {"top_ps": 0.1, "top_ks": 1, "min_ps": 1.0}  # ignored by greedy rows
    assert sampled(logits, draws(len(places), temperatures=0.0, **filters)) == places
    assert sampled(logits.bfloat16(), draws(len(places), temperatures=0.0)) == places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [15, 16, 64, 1000])
def test_rows_that_are_not_finite_yield_minus_one_and_change_no_other_row(vocab_size, dtype):
    bads = [torch.nan, -torch.nan, torch.inf]
    places = [0, vocab_size // 2, vocab_size - 1]
    logits = normal(2 * len(bads) * len(places) + 2, vocab_size, 6)
    for row, (bad, place) in enumerate((bad, place) for bad in bads for place in places):
        logits[2 * row, place] = bad
    logits[-2] = -torch.inf
    logits = logits.to(dtype)
    for options in ({"temperatures": 0.0}, {"temperatures": 1.0, "top_ps": 0.9, "top_ks": 30, "min_ps": 0.01}):
        bans = [(row, 0, -math.inf) for row in range(0, len(logits), 4)]  # they do not hide invalid logits
        rows = draws(len(logits), seeds=range(len(logits)), edits=bans, **options)
        found = check(logits, rows)
        assert set(found[::2]) == {-1}
        assert -1 not in found[1::2]


def test_the_largest_and_lowest_floats_can_be_sampled():
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[largest, -largest, -torch.inf], [-largest, -torch.inf, -torch.inf]])
    for temperature in (0.0, 1e-44, 1.0):
        assert sampled(logits, draws(2, temperatures=temperature, top_ps=0.9)) == [0, 0]


def test_a_row_with_nothing_left_yields_minus_one():
    logits = normal(3, 40, 7)
    rows = draws(3, masked=[1], masks=mask([set()], 40), edits=[(2, token, -math.inf) for token in range(40)])
    assert sampled(logits, rows)[1:] == [-1, -1]


def test_a_token_does_not_depend_on_batch_mates():
    logits = normal(16, 301, 8)
    rows = random_draws(16, 9)
    together = sampled(logits, rows)
    for i in range(16):
        columns = {name: getattr(rows, name)[i : i + 1] for name in rows.__struct_fields__[:10]}
        alone = type(rows)(**columns, masks=rows.masks, edits=rows.edits, history=rows.history)
        assert sampled(logits[i : i + 1], alone) == together[i : i + 1]


def test_rows_may_lie_apart_and_columns_too():
    wide = normal(6, 700, 10)
    rows = draws(6, seeds=range(6))
    for logits in (wide[:, 100:400], wide[:3].repeat_interleave(2, 0)[::2].T.contiguous().T):
        some = draws(len(logits), seeds=range(len(logits)))
        assert sampled(logits, some) == reference.sample(logits.contiguous(), some).tolist()
    assert sampled(wide[0].expand(6, -1), rows) == reference.sample(wide[:1].repeat(6, 1), rows).tolist()


def test_no_rows_yield_no_tokens():
    assert sampled(torch.empty(0, 10), draws(0)) == []


def test_columns_that_may_not_be_written_are_read():
    rows = draws(2, min_ps=0.5, masked=[0], masks=mask([{3}], 40))
    for column in (rows.min_ps, rows.masks.words):
        column.flags.writeable = False
    assert sampled(normal(2, 40), rows)[0] == 3


def test_masks_of_the_wrong_width_and_tokens_outside_are_refused():
    with pytest.raises(ValueError, match=r"masks must have shape \(1, 2\)"):
        sampling.sample(torch.zeros(1, 40), draws(1, masked=[0], masks=np.zeros((1, 1), np.uint32)))
    for token in (-1, 40):
        with pytest.raises(IndexError, match=r"tokens must be in \[0, 40\)"):
            sampling.sample(torch.zeros(1, 40), draws(1, edits=[(0, token, 1.0)]))
        with pytest.raises(IndexError, match=r"tokens must be in \[0, 40\)"):
            sampling.sample(torch.zeros(1, 40), draws(1, history=[(0, token, True)]))
