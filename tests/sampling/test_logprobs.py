"""Reported log probabilities against log-softmax in float64, a row at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import reference
from quire.sampling import logprobs
from quire.sampling.logprobs import compute_logprobs


def exact(row):
    total = math.log(sum(math.exp(value) for value in row))
    return [value - total for value in row]


def report_of(logits, tokens, num_logprobs, listed=None):
    """The report for given logits."""
    lists = {index: np.array(ids, np.int64) for index, ids in (listed or {}).items()}
    return compute_logprobs(
        reference, lambda some: logits[torch.from_numpy(some)], logits.shape[1], np.array(tokens), num_logprobs, lists
    )


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(-1, 19), st.integers(-1, 6), st.none() | st.lists(st.integers(0, 19), max_size=4)),
        min_size=1,
        max_size=6,
    ),
    coarse=st.booleans(),
    at_once=st.sampled_from([1, 45, 2**22]),
    seed=st.integers(0, 2**32),
)
def test_reports_equal_a_slow_softmax(rows, coarse, at_once, seed):
    logits = torch.randn(len(rows), 20, generator=torch.Generator().manual_seed(seed)) * 3
    if coarse:
        logits = logits.round()  # many ties, and -0.0
    tokens, wanted, lists = zip(*rows, strict=True)
    listed = {index: ids for index, ids in enumerate(lists) if ids}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "MAX_LOGITS_PER_CALL", at_once)
        found = report_of(logits, tokens, np.array(wanted), listed)
    if max(wanted) < 0:
        assert found is None
        return
    width = max(1, *(1 + k + len(listed.get(index, ())) for index, k in enumerate(wanted) if k >= 0))
    assert found.ids.shape == found.values.shape == (len(rows), width)
    assert (found.ids.dtype, found.values.dtype, found.ranks.dtype) == (np.int32, np.float32, np.int32)
    for i, (row, token, k) in enumerate(zip(logits.tolist(), tokens, wanted, strict=True)):
        expected = exact(row)
        best = sorted(range(20), key=lambda t: -row[t])
        ids = [token, *best[:k], *listed.get(i, ())] if k >= 0 and token >= 0 else []
        assert found.ids[i].tolist() == ids + [-1] * (width - len(ids))
        np.testing.assert_allclose(found.values[i, : len(ids)], [expected[t] for t in ids], atol=1e-5)
        assert (found.values[i, len(ids) :] == -np.inf).all()
        assert found.ranks[i] == (1 + sum(value > row[token] for value in row) if ids else 0)


def test_ranks_of_equals_are_equal():
    found = report_of(torch.tensor([[1.0, 2.0, 1.0, 1.0]]), [3], np.array([0]))
    assert found.ranks.tolist() == [2]


def test_top_logprobs_of_tied_tokens_do_not_depend_on_other_rows():
    logits = torch.zeros(2, 500)
    logits[:, 77] = 1
    alone = report_of(logits[:1], [3], np.array([2]))
    beside = report_of(logits, [3, 3], np.array([2, 9]))
    assert alone.ids[0].tolist() == beside.ids[0, :3].tolist() == [3, 77, 0]


def test_no_logits_are_computed_when_no_row_asks_for_logprobs():
    def never(some):
        raise AssertionError

    assert compute_logprobs(reference, never, 3, np.array([0, 1]), np.array([-1, -1])) is None


def test_few_logits_are_alive_at_once(monkeypatch):
    monkeypatch.setattr(logprobs, "MAX_LOGITS_PER_CALL", 100)
    sizes = []

    def logits_of(some):
        sizes.append(len(some))
        return torch.zeros(len(some), 30)

    found = compute_logprobs(reference, logits_of, 30, np.arange(10), np.array([0, -1] * 5))
    assert sizes == [3, 2]
    assert found.ids[:, 0].tolist() == [0, -1, 2, -1, 4, -1, 6, -1, 8, -1]


def test_no_more_alternatives_than_tokens_exist():
    found = report_of(torch.tensor([[0.0, 1.0, 2.0]]), [1], np.array([20]), {0: [0]})
    assert found.ids.tolist() == [[1, 2, 1, 0, 0]]


def test_impossible_tokens_are_reported_as_such():
    found = report_of(torch.tensor([[0.0, -torch.inf, -torch.inf]]), [1], np.array([3]))
    assert found.ids.tolist() == [[1, 0, 1, 2]]
    assert found.values.tolist() == [[-np.inf, 0, -np.inf, -np.inf]]
    assert found.ranks.tolist() == [2]


def test_short_types_are_reported_in_full_precision():
    logits = torch.randn(1, 50).bfloat16()
    found = report_of(logits, [9], np.array([0]))
    assert math.isclose(found.values[0, 0], exact(logits[0].tolist())[9], abs_tol=1e-5)
