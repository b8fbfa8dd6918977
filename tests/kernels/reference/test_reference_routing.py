"""Selection of experts by the reference, against plain Python loops."""

import pytest
import torch
from hypothesis import given, settings
from routing_oracle import MODES, assert_routes, cases, clear_routes

from quire.kernels import reference
from quire.kernels.contract import Routing

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=60, deadline=None)
@given(cases(DTYPES))
def test_routes_are_those_of_loops(case):
    assert_routes(reference.route(*case), *case)


def test_most_random_tokens_have_clear_routes():
    logits = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    for routing in MODES:
        assert len(clear_routes(logits, 4, routing, None)[0]) > 45


def test_only_experts_of_the_best_groups_are_selected():
    """A group's value is the sum of its two largest. The best group is not that of the largest expert."""
    logits = torch.tensor([[4.0, -9, -9, 1, 2, -9, 1.5, 1]])
    rules = {"normalise": False, "score": "sigmoid", "num_groups": 4, "top_groups": 2}
    assert reference.route(logits, 3, Routing(**rules))[0].tolist() == [[0, 6, 7]]
    assert reference.route(logits, 2, Routing(**{**rules, "top_groups": 1}))[0].tolist() == [[6, 7]]
    assert reference.route(logits, 2, Routing(normalise=False, score="sigmoid"))[0].tolist() == [[0, 4]]


def test_a_bias_selects_and_does_not_weigh():
    logits, bias = torch.tensor([[0.0, 1, 2, 3]]), torch.tensor([9.0, 8, 0, 0])
    ids, weights = reference.route(logits, 2, Routing(normalise=False, score="sigmoid", scale=2.0), bias)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, 2 * torch.tensor([[0.0, 1]]).sigmoid())


def test_scores_that_are_all_zero_are_normalised_to_zero():
    ids, weights = reference.route(torch.full((1, 4), -1e4), 2, Routing(normalise=True, score="sigmoid"))
    assert len(set(ids[0].tolist())) == 2
    assert weights.tolist() == [[0, 0]]


@pytest.mark.parametrize("routing", MODES, ids=str)
def test_a_token_has_the_same_bits_alone_and_in_company(routing):
    random = torch.Generator().manual_seed(1)
    logits, bias = torch.randn(20, 24, generator=random), torch.randn(24, generator=random)
    ids, weights = reference.route(logits, 3, routing, bias)
    for token in (0, 7, 19):
        alone = reference.route(logits[token : token + 1].clone(), 3, routing, bias)
        assert torch.equal(alone[0], ids[token : token + 1])
        assert torch.equal(alone[1], weights[token : token + 1])
