"""Reported log probabilities against log-softmax in float64, a row at a time."""

import math

import numpy as np
import torch

from quire.sample.logprobs import report


def exact(row):
    total = math.log(sum(math.exp(value) for value in row))
    return [value - total for value in row]


def test_reports_equal_a_slow_softmax():
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0)) * 3
    tokens = torch.tensor([4, 0, 19, 7, -1])
    wanted = np.array([3, 0, -1, 5, 2])
    found = report(logits, tokens, wanted)
    assert found.ids.shape == found.values.shape == (5, 6)
    assert (found.ids.dtype, found.values.dtype, found.ranks.dtype) == (np.int32, np.float32, np.int32)
    for i, (row, token, k) in enumerate(zip(logits.tolist(), tokens.tolist(), wanted.tolist(), strict=True)):
        expected = exact(row)
        best = sorted(range(20), key=lambda t: -expected[t])
        ids = [token, *best[:k]] if k >= 0 and token >= 0 else []
        assert found.ids[i].tolist() == ids + [-1] * (6 - len(ids))
        np.testing.assert_allclose(found.values[i, : len(ids)], [expected[t] for t in ids], atol=1e-5)
        assert (found.values[i, len(ids) :] == -np.inf).all()
        assert found.ranks[i] == (best.index(token) + 1 if ids else 0)


def test_ranks_of_equals_are_equal():
    found = report(torch.tensor([[1.0, 2.0, 1.0, 1.0]]), torch.tensor([3]), np.array([0]))
    assert found.ranks.tolist() == [2]


def test_nobody_asks_nothing_is_computed():
    assert report(torch.zeros(2, 3), torch.tensor([0, 1]), np.array([-1, -1])) is None


def test_no_more_alternatives_than_tokens_exist():
    found = report(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1]), np.array([20]))
    assert found.ids.tolist() == [[1, 2, 1, 0]]


def test_short_types_are_reported_in_full_precision():
    logits = torch.randn(1, 50).bfloat16()
    found = report(logits, torch.tensor([9]), np.array([0]))
    assert math.isclose(found.values[0, 0], exact(logits[0].tolist())[9], abs_tol=1e-5)
