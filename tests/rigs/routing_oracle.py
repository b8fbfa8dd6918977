"""Routing of tokens to experts in plain Python loops, and random cases of it."""

import math
from itertools import pairwise

import torch
from hypothesis import strategies as st

from quire.kernels.contract import Routing

CLEAR = 1e-5  # the least difference of values that decide which experts are selected


def route_token(logits, k, routing, bias, scales):
    """The k experts of one token, their weights, and the least difference of the values that select them.

    logits, bias and scales: lists of numbers, the last two perhaps None.
    """
    if routing.score == "sparsemixer":
        return mix_token(logits, k, routing.jitter)
    if routing.score == "softmax":
        exponentials = [math.exp(x - max(logits)) for x in logits]
        scores = [x / sum(exponentials) for x in exponentials]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    values = scores if bias is None else [sum(pair) for pair in zip(scores, bias, strict=True)]
    size = len(logits) // routing.num_groups
    groups = [range(first, first + size) for first in range(0, len(logits), size)]
    differences = []
    if routing.num_groups > 1:
        worth = [sum(sorted(values[expert] for expert in group)[-2:]) for group in groups]
        order = sorted(range(len(groups)), key=worth.__getitem__, reverse=True)
        differences += differences_of([worth[group] for group in order[routing.top_groups - 1 :][:2]])
        groups = [groups[group] for group in order[: routing.top_groups]]
    experts = sorted((expert for group in groups for expert in group), key=values.__getitem__, reverse=True)
    differences += differences_of([values[expert] for expert in experts[: k + 1]])
    weights = [scores[expert] for expert in experts[:k]]
    total = sum(weights) if routing.normalise else 1.0
    weights = [weight / total * routing.scale for weight in weights]
    if scales is not None:
        weights = [weight * scales[expert] for weight, expert in zip(weights, experts, strict=False)]
    return experts[:k], weights, min(differences, default=1.0)


def mix_token(logits, k, jitter):
    """The same of a sparse mixer."""
    experts = sorted(range(len(logits)), key=logits.__getitem__, reverse=True)
    differences, weights = differences_of([logits[expert] for expert in experts[: k + 1]]), []
    for place, chosen in enumerate(experts[:k]):
        most = logits[chosen]
        distances = {e: (most - logits[e]) / max(abs(logits[e]), most) for e in experts[place:]}
        differences += [abs(distance - 2 * jitter) for distance in distances.values()]
        near = [logits[expert] for expert, distance in distances.items() if distance <= 2 * jitter]
        weights.append(1 / sum(math.exp(x - most) for x in near))
    return experts[:k], weights, min(differences, default=1.0)


def differences_of(values):
    return [high - low for high, low in pairwise(values)]


def clear_routes(logits, k, routing, bias=None, scales=None):
    """The tokens whose experts are no matter of rounding, and their ids and weights."""
    given = [None if one is None else one.tolist() for one in (bias, scales)]
    each = [route_token(row, k, routing, *given) for row in logits.double().tolist()]
    tokens = [token for token, (_, _, difference) in enumerate(each) if difference > CLEAR]
    ids, weights = ([each[token][part] for token in tokens] for part in (0, 1))
    return tokens, torch.tensor(ids).view(-1, k), torch.tensor(weights).view(-1, k)


@st.composite
def cases(draw, dtypes):
    """Logits, which are views of wider rows, k, the rules, and a bias and scales or None."""
    num_groups, size = draw(st.sampled_from([(1, 1), (1, 5), (1, 60), (1, 128), (2, 2), (4, 2), (4, 8), (3, 20)]))
    top_groups = draw(st.integers(1, num_groups))
    number = num_groups * size
    k = draw(st.integers(1, min(8, top_groups * size)))
    score, scale = draw(st.sampled_from(["softmax", "sigmoid"])), draw(st.sampled_from([1.0, 2.5]))
    routing = Routing(draw(st.booleans()), score, scale, num_groups, top_groups)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    logits = 2 * torch.randn(draw(st.integers(1, 30)), number + 3, generator=random)
    bias = torch.randn(number, generator=random) / 4 if draw(st.booleans()) else None
    scales = torch.randn(number, generator=random) if draw(st.booleans()) else None
    if num_groups == 1 and draw(st.booleans()):
        routing, bias, scales = (
            Routing(normalise=False, score="sparsemixer", jitter=draw(st.sampled_from([0.01, 0.1, 0.4]))),
            None,
            None,
        )
    return logits.to(draw(st.sampled_from(dtypes)))[:, 1 : number + 1], k, routing, bias, scales


def assert_routes(found, logits, k, routing, bias=None, scales=None):
    """Asserts that ids and weights are those of the loops, wherever rounding does not decide."""
    ids, weights = found
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert ids.shape == weights.shape == (len(logits), k)
    tokens, expected, expected_weights = clear_routes(logits, k, routing, bias, scales)
    assert torch.equal(ids[tokens], expected)
    torch.testing.assert_close(weights[tokens], expected_weights, rtol=1e-5, atol=1e-7)


MODES = [
    Routing(normalise=normalise, score=score, scale=1.5, num_groups=num_groups, top_groups=max(1, num_groups // 2))
    for normalise in (False, True)
    for score in ("softmax", "sigmoid")
    for num_groups in (1, 4)
]
