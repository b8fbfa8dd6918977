"""Sampling without logit edits against a slow oracle in Python floats, masks, and independence from other rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_metadata_builders import draws, mask
from sampling_oracles import chi_square, kept_tokens, oracle

from quire.kernels import reference
from quire.kernels.reference import sampling

row = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "position": st.integers(0, 2**31 - 1),
        "index": st.integers(0, 127),
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_p": st.sampled_from([1.0, 0.93, 0.51, 0.07]),
        "top_k": st.sampled_from([-1, 0, 1, 3, 10, 1000]),
        "min_p": st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(row, min_size=1, max_size=5),
    vocab_size=st.integers(1, 40),
    coarse=st.booleans(),
    noise=st.integers(0, 2**32),
)
def test_tokens_equal_the_oracle(rows, vocab_size, coarse, noise):
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(noise)) * 2
    if coarse:
        logits = logits.round()  # many ties
    names = {"seed": "seeds", "position": "positions", "index": "sample_indices", "temperature": "temperatures"}
    names |= {"top_p": "top_ps", "top_k": "top_ks", "min_p": "min_ps"}
    columns = {plural: [r[name] for r in rows] for name, plural in names.items()}
    found = reference.sample(logits, draws(len(rows), **columns)).tolist()
    for values, token, params_of_rows in zip(logits.tolist(), found, rows, strict=True):
        expected, lead = oracle(values, **params_of_rows)
        assert token == expected or lead < 1e-4


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
    shares = torch.tensor([0.4, 0.3, 0.12, 0.12, 0.06])
    logits = shares.log().expand(600, -1)
    found = reference.sample(logits, draws(600, seeds=range(600), **options))
    assert set(found.tolist()) == kept


def test_a_tiny_temperature_is_greedy_and_finite():
    logits = torch.randn(4, 50) * 20
    for temperature in (1e-5, 1e-30, 1e-44):
        tokens = reference.sample(logits, draws(4, temperatures=temperature))
        assert torch.equal(tokens, logits.argmax(-1))


def test_greedy_takes_the_lowest_of_equals_and_ignores_filters():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert reference.sample(logits, draws(2, temperatures=0.0, top_ps=0.1, top_ks=1)).tolist() == [1, 0]


# The 99.99 % point of chi-square is about df + 3.9 sqrt(2 df) + 10; seeds are fixed, so this passes always or never.
@pytest.mark.parametrize("column", ["seeds", "positions", "sample_indices"])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"), [(1.0, 1.0, 0, 0.0), (0.7, 0.9, 0, 0.0), (1.5, 0.8, 12, 0.05)]
)
def test_samples_have_the_exact_distribution(column, temperature, top_p, top_k, min_p):
    logits = torch.randn(24, generator=torch.Generator().manual_seed(1)) * 0.8
    kept = kept_tokens(logits.tolist(), temperature, top_p, top_k, min_p)
    weights = np.array([math.exp(kept[t]) if t in kept else 0.0 for t in range(24)])
    options = {"temperatures": temperature, "top_ps": top_p, "top_ks": top_k, "min_ps": min_p}
    rows = draws(20_000, **{"seeds": 5, **options, column: range(20_000)})
    tokens = reference.sample(logits.expand(20_000, -1), rows).numpy()
    statistic, freedom = chi_square(tokens, weights / weights.sum())
    assert statistic < freedom + 3.9 * math.sqrt(2 * freedom) + 10


def test_a_token_does_not_depend_on_batch_mates():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(16, 301, generator=generator)
    columns = {
        "seeds": [2**63 + i for i in range(16)],
        "positions": list(range(100, 116)),
        "temperatures": [0.0 if i % 5 == 0 else 0.5 + i / 10 for i in range(16)],
        "top_ks": [0 if i % 3 else 20 for i in range(16)],
        "top_ps": [1.0 if i % 2 else 0.8 for i in range(16)],
    }
    together = reference.sample(logits, draws(16, **columns)).tolist()
    for i in range(16):
        alone = draws(1, **{name: values[i] for name, values in columns.items()})
        assert reference.sample(logits[i : i + 1], alone).tolist() == together[i : i + 1]
    shuffled = np.random.default_rng(0).permutation(16)
    moved = draws(16, **{name: np.array(values)[shuffled] for name, values in columns.items()})
    assert reference.sample(logits[shuffled], moved).tolist() == np.array(together)[shuffled].tolist()


def test_many_rows_are_drawn_in_parts(monkeypatch):
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(6))
    rows = draws(7, seeds=range(7), temperatures=[1, 0, 1, 1, 1, 0, 1])
    whole = reference.sample(logits, rows)
    for at_once in (1, 100, 149):
        monkeypatch.setattr(sampling, "LOGITS_AT_ONCE", at_once)
        assert torch.equal(reference.sample(logits, rows), whole)


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_behind_it():
    logits = torch.randn(200, 60, generator=torch.Generator().manual_seed(3))
    wider = torch.cat((logits, torch.full((200, 41), -torch.inf)), 1)
    rows = draws(200, seeds=9, positions=range(200))
    assert torch.equal(reference.sample(logits, rows), reference.sample(wider, rows))


def test_seed_position_and_sample_index_each_change_the_token():
    logits = torch.zeros(1, 5000)
    one = reference.sample(logits, draws(1, seeds=1)).item()
    others = [{"seeds": 2}, {"seeds": 1 + 2**32}, {"seeds": 1, "positions": 1}, {"seeds": 1, "sample_indices": 1}]
    assert len({one, *(reference.sample(logits, draws(1, **other)).item() for other in others)}) == 5


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 301])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_allow_only_their_tokens(vocab_size, temperature):
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(4))
    allowed = [{3, 30, vocab_size - 1}, {0}]
    rows = draws(4, temperatures=temperature, masked=[2, 0], masks=mask(allowed, vocab_size))
    tokens = reference.sample(logits, rows).tolist()
    free = reference.sample(logits, draws(4, temperatures=temperature)).tolist()
    limited = logits.clone()
    for row, tokens_allowed in zip((2, 0), allowed, strict=True):
        limited[row, [t for t in range(vocab_size) if t not in tokens_allowed]] = -torch.inf
    assert tokens == reference.sample(limited, draws(4, temperatures=temperature)).tolist()
    assert tokens[2] in allowed[0]
    assert tokens[0] == 0
    assert [tokens[1], tokens[3]] == [free[1], free[3]]


def test_masks_come_before_filters():
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0]]).expand(200, -1)
    masks = mask([{2, 3}] * 200, 4)
    rows = draws(200, seeds=range(200), top_ks=2, masked=range(200), masks=masks)
    assert set(reference.sample(logits, rows).tolist()) == {2, 3}


def test_a_mask_of_the_wrong_width_is_refused():
    with pytest.raises(ValueError, match=r"masks must have shape \(1, 2\)"):
        reference.sample(torch.zeros(1, 40), draws(1, masked=[0], masks=np.zeros((1, 1), np.uint32)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_yield_minus_one_and_change_no_other_row(temperature):
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(5))
    options = {"temperatures": temperature, "top_ps": 0.9, "top_ks": 30, "min_ps": 0.01}
    good = reference.sample(logits, draws(6, **options)).tolist()
    logits[0, 7] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    logits[3, 5] = -torch.inf  # one impossible token is allowed
    rows = draws(6, **options, masked=[4], masks=mask([set()], 40))
    tokens = reference.sample(logits, rows).tolist()
    assert tokens[:3] == [-1, -1, -1]
    assert tokens[3] not in (-1, 5)
    assert tokens[4] == -1  # no token is allowed
    assert tokens[5] == good[5]


def test_a_mask_does_not_hide_nan():
    logits = torch.zeros(1, 4)
    logits[0, 3] = torch.nan
    assert reference.sample(logits, draws(1, masked=[0], masks=mask([{0}], 4))).tolist() == [-1]
