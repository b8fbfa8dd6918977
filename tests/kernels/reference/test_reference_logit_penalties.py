"""Masks, biases, bans and penalties against Python floats, one logit at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_metadata_builders import draws, mask
from sampling_oracles import VOCAB, chi_square, draws_of, kept_tokens, oracle, row_params

from quire.kernels import reference


def edited(logits, row_params):
    """Edited logits by the contract's rules, in its order."""
    out = []
    prompt = [token for token, is_output in row_params["history"] if not is_output]
    output = [token for token, is_output in row_params["history"] if is_output]
    for token, value in enumerate(logits):
        if row_params["allowed"] is not None and token not in row_params["allowed"]:
            value = -math.inf
        value += sum(added for edited_token, added in row_params["edits"] if edited_token == token)
        if token in prompt or token in output:
            value = value / row_params["repetition"] if value > 0 else value * row_params["repetition"]
        value -= row_params["frequency"] * output.count(token)
        value -= row_params["presence"] * (token in output)
        out.append(value)
    return out


@settings(max_examples=300, deadline=None)
@given(params_of_rows=st.lists(row_params, min_size=1, max_size=4), noise=st.integers(0, 2**32))
def test_tokens_equal_the_oracle(params_of_rows, noise):
    logits = torch.randn(len(params_of_rows), VOCAB, generator=torch.Generator().manual_seed(noise)) * 2
    before = logits.clone()
    found = reference.sample(
        logits, draws_of(params_of_rows, seeds=noise, positions=range(len(params_of_rows)))
    ).tolist()
    assert torch.equal(logits, before)  # logprobs are reported from raw logits
    for row, (values, one, w) in enumerate(zip(logits.tolist(), found, params_of_rows, strict=True)):
        scores = edited(values, w)
        if max(scores) == -math.inf:
            assert one == -1
            continue
        best, lead = oracle(scores, noise, row, 0, w["temperature"], 1.0, 0, 0.0)
        lead = min(lead, *(scores[best] - s for t, s in enumerate(scores) if t != best)) if lead == math.inf else lead
        assert one == best or lead < 1e-4


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
        ({"edits": [(0, 1, 1.1)]}, 1),
        ({"edits": [(0, 0, -math.inf)]}, 1),
        ({"edits": [(0, 0, 50.0), (0, 0, -math.inf)]}, 1),  # a bias does not undo a ban
        ({"edits": [(0, 1, 2.0)], "repetition": 1.3}, 1),
        ({"edits": [(0, 3, 2.5)], "repetition": 4.0}, 1),  # -2 + 2.5 is above 0 before the penalty, so it is divided
        ({"masked": [0], "masks": mask([{2, 3}], 4), "edits": [(0, 1, 100.0)]}, 2),  # a bias does not undo a mask
    ],
)
def test_greedy_rows_are_edited_in_order(options, expected):
    logits = torch.tensor([[4.0, 3.0, 1.0, -2.0]])
    history = [(0, 0, True), (0, 0, True), (0, 2, False), (0, 3, False)]
    assert reference.sample(logits, draws(1, temperatures=0.0, history=history, **options)).tolist() == [expected]


def test_repetition_counts_the_prompt_and_the_others_do_not():
    logits = torch.tensor([[4.0, 3.0]] * 3)
    history = [(row, 0, False) for row in range(3)]
    rows = draws(3, temperatures=0.0, history=history, repetition=[2, 1, 1], frequency=[0, 2, 0], presence=[0, 0, 2])
    assert reference.sample(logits, rows).tolist() == [1, 0, 0]


def test_a_negative_logit_is_multiplied():
    logits = torch.tensor([[-1.0, -1.5]])
    assert reference.sample(logits, draws(1, temperatures=0.0, repetition=2, history=[(0, 0, True)])).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_overflows_still_leaves_a_choice(temperature):
    logits = torch.tensor([[5.0, 3.0, 0.0, -1.0]])
    options = {"repetition": np.finfo(np.float32).tiny, "edits": [(0, 0, -math.inf)]}
    history = [(0, t, False) for t in range(4)]
    assert reference.sample(logits, draws(1, temperatures=temperature, history=history, **options)).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_allowed_tokens_yields_minus_one_and_changes_no_other_row(temperature):
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    free = reference.sample(logits, draws(4, temperatures=temperature)).tolist()
    bans = [(1, t, -math.inf) for t in range(5)]
    half = [(3, t, -math.inf) for t in (1, 3)]  # tokens that its mask allows
    rows = draws(4, temperatures=temperature, edits=bans + half, masked=[3], masks=mask([{1, 3}], 5))
    assert reference.sample(logits, rows).tolist() == [free[0], -1, free[2], -1]


def test_edits_do_not_hide_nan():
    logits = torch.zeros(2, 4)
    logits[0, 3], logits[1, 3] = torch.nan, torch.inf
    edits = [(row, 3, -math.inf) for row in range(2)]
    assert reference.sample(logits, draws(2, edits=edits)).tolist() == [-1, -1]


def test_short_types_are_edited_in_float32():
    logits = torch.tensor([[8.0, 8.0]]).bfloat16()
    rows = draws(1, temperatures=0.0, edits=[(0, 1, 0.001)])  # bfloat16 would round this away
    assert reference.sample(logits, rows).tolist() == [1]


def test_edited_samples_have_the_exact_distribution():
    logits = torch.randn(24, generator=torch.Generator().manual_seed(1)) * 0.8
    row_params = {
        "allowed": set(range(20)),
        "edits": [(3, 1.5), (4, -0.7), (5, -math.inf)],
        "history": [(1, False), (2, True), (2, True), (6, True), (7, False), (7, True)],
        **{"repetition": 1.4, "frequency": 0.3, "presence": -0.5},
    }
    kept = kept_tokens(edited(logits.tolist(), row_params), 0.8, 0.95, 0, 0.0)
    weights = np.array([math.exp(kept[t]) if t in kept else 0.0 for t in range(24)])
    size = 20_000
    rows = draws(
        size,
        positions=range(size),
        temperatures=0.8,
        top_ps=0.95,
        masked=range(size),
        masks=np.tile(mask([row_params["allowed"]], 24), (size, 1)),
        edits=[(row, *edit) for row in range(size) for edit in row_params["edits"]],
        history=[(row, *entry) for row in range(size) for entry in row_params["history"]],
        **{name: row_params[name] for name in ("repetition", "frequency", "presence")},
    )
    statistic, freedom = chi_square(reference.sample(logits.expand(size, -1), rows).numpy(), weights / weights.sum())
    assert statistic < freedom + 3.9 * math.sqrt(2 * freedom) + 10
