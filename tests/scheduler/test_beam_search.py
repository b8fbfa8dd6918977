"""Beam search against exhaustive search on toy vocabularies, a slow search, and transformers."""

import math
import random
from itertools import product

import numpy as np
import pytest
import torch
from example_budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from quire.core.request import Beams, Request
from quire.errors import RequestError
from quire.params import BeamSearchParams
from quire.scheduler.beam_search import Rules, Search, plan_beams, select

PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
STOPPING = (True, False, "never")


class Toy:
    """A model of a few tokens: a fixed table of logprobs for each prefix."""

    def __init__(self, vocab, seed, sharpness=2.0):
        self.vocab, self.seed, self.sharpness = vocab, seed, sharpness

    def logprobs(self, prefix):
        draw = random.Random(f"{self.seed} {prefix}")
        logits = [draw.gauss(0, self.sharpness) for _ in range(self.vocab)]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]


def drive(logprobs_of, rules, num_candidates):
    """Run a search to its end. Returns its hypotheses and the number of steps."""
    search, outputs, steps = Search(rules), [()], 0
    while not search.is_over:
        rows = [np.asarray(logprobs_of(output)) for output in outputs]
        ids = np.stack([np.argsort(-row, kind="stable")[:num_candidates] for row in rows])
        values = np.stack([row[one] for row, one in zip(rows, ids, strict=True)])
        selection = search.advance(outputs, ids, values)
        outputs = [(*outputs[beam.parent], beam.token) for beam in selection.live]
        steps += 1
        assert steps <= rules.max_tokens
    return search.hypotheses, steps


def beams_of(hypotheses):
    return [(tuple(one.token_ids), one.finish_reason, pytest.approx(one.score)) for one in hypotheses]


def all_sequences(toy, rules):
    """Every possible sequence, with its reason and cumulative logprob."""
    for length in range(1, rules.max_tokens + 1):
        for tokens in product(range(toy.vocab), repeat=length):
            stops = [i for i, token in enumerate(tokens) if token in rules.stop_ids]
            if stops and (stops[0] < length - 1 or stops[0] < rules.min_tokens):
                continue
            if stops or length == rules.max_tokens:
                total = sum(toy.logprobs(tokens[:i])[token] for i, token in enumerate(tokens))
                yield tokens, "stop" if stops else "length", total


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.integers(3, 5),
    seed=st.integers(0, 10**6),
    max_tokens=st.integers(1, 4),
    penalty=st.sampled_from(PENALTIES),
    stopping=st.sampled_from(STOPPING),
    num_stops=st.integers(0, 2),
    min_tokens=st.integers(0, 3),
)
def test_a_search_wide_enough_for_everything_is_exhaustive(
    vocab, seed, max_tokens, penalty, stopping, num_stops, min_tokens
):
    toy = Toy(vocab, seed)
    stops = frozenset(range(num_stops))
    rules = Rules(vocab**max_tokens, max_tokens, penalty, stopping, stops, min(min_tokens, max_tokens))
    everything = [
        (tokens, reason, total / len(tokens) ** penalty) for tokens, reason, total in all_sequences(toy, rules)
    ]
    everything.sort(key=lambda one: -one[2])
    found, _ = drive(toy.logprobs, rules, vocab)
    assert everything == beams_of(found)


def slow_search(toy, rules, *, stops_early=True):
    """The same rules, implemented with whole sequences and the whole vocabulary."""
    live, done = [((), 0.0)], []
    for length in range(1, rules.max_tokens + 1):
        grown = [
            ((*tokens, token), total + logprob)
            for tokens, total in live
            for token, logprob in enumerate(toy.logprobs(tokens))
            if token not in rules.stop_ids or len(tokens) >= rules.min_tokens
        ]
        grown.sort(key=lambda one: -one[1])
        ended = [one for one in grown[: rules.width] if one[0][-1] in rules.stop_ids or length == rules.max_tokens]
        done += [(tokens, total / length**rules.length_penalty) for tokens, total in ended]
        done.sort(key=lambda one: -one[1])
        done = done[: rules.width]
        live = [one for one in grown if one[0][-1] not in rules.stop_ids][: rules.width]
        if length == rules.max_tokens or (len(done) == rules.width and stops_early and hopeless(rules, live, done)):
            return done, length
    raise AssertionError


def hopeless(rules, live, done):
    if rules.early_stopping is True:
        return True
    lengths = [len(live[0][0])] if rules.early_stopping is False else range(len(live[0][0]), rules.max_tokens + 1)
    return all(live[0][1] / length**rules.length_penalty <= done[-1][1] for length in lengths)


CASES = {
    "vocab": st.integers(5, 8),
    "seed": st.integers(0, 10**6),
    "width": st.integers(1, 4),
    "max_tokens": st.integers(1, 5),
    "penalty": st.sampled_from(PENALTIES),
    "num_stops": st.integers(0, 3),
    "min_tokens": st.integers(0, 2),
}


@settings(max_examples=examples(150), deadline=None)
@given(**CASES, stopping=st.sampled_from(STOPPING))
def test_any_width_is_as_the_slow_search(vocab, seed, width, max_tokens, penalty, num_stops, min_tokens, stopping):
    toy = Toy(vocab, seed)
    stops = frozenset(range(num_stops))
    rules = Rules(width, max_tokens, penalty, stopping, stops, min(min_tokens, max_tokens))
    expected, steps = slow_search(toy, rules)
    found, taken = drive(toy.logprobs, rules, min(vocab, width + num_stops))
    assert taken == steps
    assert [(tokens, pytest.approx(score)) for tokens, score in expected] == [
        (tuple(one.token_ids), one.score) for one in found
    ]
    for one in found:
        assert one.cumulative_logprob == pytest.approx(one.score * len(one.token_ids) ** penalty)


@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_a_search_that_never_stops_early_loses_nothing(vocab, seed, width, max_tokens, penalty, num_stops, min_tokens):
    toy = Toy(vocab, seed)
    stops = frozenset(range(num_stops))
    rules = Rules(width, max_tokens, penalty, "never", stops, min(min_tokens, max_tokens))
    found, _ = drive(toy.logprobs, rules, vocab)
    assert [tuple(one.token_ids) for one in found] == [t for t, _ in slow_search(toy, rules, stops_early=False)[0]]


def test_the_ways_to_stop_differ():
    """Cases in which one stopping rule stops earlier than another, to find rules that are mixed up."""
    steps = {stopping: [] for stopping in STOPPING}
    for seed in range(40):
        for stopping in STOPPING:
            rules = Rules(2, 6, 1.0, stopping, frozenset({0}))
            steps[stopping].append(drive(Toy(6, seed).logprobs, rules, 4)[1])
    assert all(a <= b <= c for a, b, c in zip(*(steps[one] for one in STOPPING), strict=True))
    assert sum(steps[True]) < sum(steps[False]) < sum(steps["never"])


def one_step(live, rows, **rules):
    rows = np.asarray(rows, np.float64)
    ids = np.argsort(-rows, axis=1, kind="stable")
    return select(
        live, ids, np.take_along_axis(rows, ids, 1), (), Rules(**{"width": 2, "max_tokens": 9, **rules}), 1
    )  # fmt: skip


def test_beams_with_equal_scores_are_selected_in_order():
    selection = one_step([-1.0, -1.0], [[-2.0, -2.0, -2.0]] * 2)
    assert [(beam.parent, beam.token) for beam in selection.live] == [(0, 0), (0, 1)]
    assert one_step([-1.0, -0.5], [[-2.0, -2.0, -2.0]] * 2).live[0][:2] == (1, 0)
    rows = np.random.default_rng(4).integers(-3, 0, (40, 50))
    many = one_step([-1.0] * 40, rows, width=1900)
    expected = sorted((-rows[i, token], i, token) for i in range(40) for token in range(50))
    assert [(beam.parent, beam.token) for beam in many.live] == [(i, token) for _, i, token in expected[:1900]]


@pytest.mark.parametrize(
    ("penalty", "stopping", "worst", "over"),
    [
        (1.0, False, -1.1, True),  # the live beam has -4 with 2 tokens: at most -2 now, and -0.5 with 8
        (1.0, "never", -1.1, False),
        (1.0, "never", -0.5, True),
        (1.0, False, -2.0, True),
        (1.0, False, -2.1, False),
        (-1.0, "never", -8.1, False),  # longer is worse: -8 now, -32 with 8
        (-1.0, "never", -8.0, True),
        (0.0, "never", -4.1, False),
        (0.0, "never", -4.0, True),
        (1.0, True, -9.0, True),
    ],
)
def test_beam_search_ends_when_no_live_beam_can_improve_the_worst_ended_one(penalty, stopping, worst, over):
    rules = Rules(2, 8, penalty, stopping)
    ids, logprobs = np.array([[3, 4]]), np.array([[-1.0, -2.0]])
    assert select([-3.0], ids, logprobs, [worst, -0.1], rules, 2).over == over
    assert not select([-3.0], ids, logprobs, [worst], rules, 2).over, "fewer than the width"


def test_an_end_token_below_the_beam_width_ends_no_beam():
    selection = one_step([0.0], [[-3.0, -1.0, -2.0]], stop_ids=frozenset({0}))
    assert [beam.token for beam in selection.live] == [1, 2]
    assert selection.ended == []
    (ending,) = one_step([0.0], [[-1.5, -1.0, -2.0]], stop_ids=frozenset({0})).ended
    assert (ending.token, ending.reason, ending.score) == (0, "stop", -1.5)


def test_padding_and_impossible_tokens_are_no_beam_candidates():
    ids = np.array([[4, 2, -1], [3, -1, -1]], np.int32)
    values = np.array([[-1.0, -math.inf, -0.5], [math.nan, -math.inf, -math.inf]], np.float32)
    selection = select([0.0, 0.0], ids, values, (), Rules(2, 9), 1)
    assert [beam[:2] for beam in selection.live] == [(0, 4)]
    nothing = select([0.0], ids[1:], values[1:], (), Rules(2, 9), 1)
    assert nothing.live == nothing.ended == []
    assert nothing.over


def test_an_end_token_at_the_limit_is_a_stop():
    selection = one_step([0.0], [[-1.0, -2.0, -3.0]], max_tokens=1, stop_ids=frozenset({0}))
    assert [one.reason for one in selection.ended] == ["stop", "length"]
    assert selection.over
    assert selection.live == []


def test_the_best_of_many_candidates_are_found():
    draw = np.random.default_rng(3)
    rows = np.log(draw.dirichlet(np.ones(300), size=128))
    live = np.sort(draw.normal(-20, 0.5, 128))[::-1].tolist()
    selection = one_step(live, rows, width=128, stop_ids=frozenset({5, 9}))
    totals = sorted(
        (-(live[i] + rows[i, token]), i, token) for i in range(128) for token in range(300) if token not in (5, 9)
    )
    assert [beam[:2] for beam in selection.live] == [(i, token) for _, i, token in totals[:128]]


class Model:
    """A random Llama in which any token is likely at times, also end tokens."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        shape = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = LlamaConfig(**shape, num_attention_heads=2, initializer_range=0.4, max_position_embeddings=64)
        self.model = LlamaForCausalLM(config).eval()
        self.prompt = [3, 7, 11]

    def logprobs(self, output):
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*self.prompt, *output]])).logits[0, -1]
        return logits.log_softmax(-1).double().numpy()

    def search(self, rules):
        """Generated tokens and scores of transformers' beam search."""
        ends = sorted(rules.stop_ids)
        with torch.inference_mode():
            found = self.model.generate(
                torch.tensor([self.prompt]),
                num_beams=rules.width,
                num_return_sequences=rules.width,
                max_new_tokens=rules.max_tokens,
                min_new_tokens=rules.min_tokens,
                length_penalty=rules.length_penalty,
                early_stopping=rules.early_stopping,
                eos_token_id=ends,
                pad_token_id=ends[0],
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        tokens = []
        for row in found.sequences[:, len(self.prompt) :].tolist():
            end = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
            tokens.append(tuple(row[: end + 1]))
        return tokens, found.sequences_scores.tolist()


@pytest.fixture(scope="module")
def models():
    return [Model(seed) for seed in range(2)]


@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("penalty", [0.5, 1.0, 2.0, -0.5])
def test_as_transformers(models, stopping, penalty):
    lengths = set()
    for i, model in enumerate(models):
        for width, ends, min_tokens in ((2, {0}, 0), (3, {0, 5}, 0), (4, {1, 2, 3}, 2)):
            rules = Rules(width, 9, penalty, stopping, frozenset(ends), min_tokens)
            found, _ = drive(model.logprobs, rules, width + max(width, len(ends)))
            tokens, scores = model.search(rules)
            assert [tuple(one.token_ids) for one in found] == tokens, (i, width)
            assert [one.score for one in found] == pytest.approx(scores, abs=1e-3)
            lengths |= set(map(len, tokens))
    assert len(lengths) > 1 or penalty == 2.0, "no search met an end token"


def test_rules_of_a_request():
    params = BeamSearchParams(beam_width=3, max_tokens=7, min_tokens=1, length_penalty=0.5, early_stopping="never")
    beams = plan_beams(params, vocab_size=400, num_end_tokens=5)
    assert beams == Beams(width=3, num_candidates=8, length_penalty=0.5, early_stopping="never")
    request = Request(id="a", prompt=[1], params=params.sampling_params(), eos_token_ids=(5,), beams=beams)
    assert Rules.of(request) == Rules(3, 7, 0.5, "never", frozenset({5}), 1)


def test_a_vocabulary_must_feed_the_width():
    params = BeamSearchParams(beam_width=40, max_tokens=7)
    assert plan_beams(params, vocab_size=60, num_end_tokens=8).num_candidates == 60
    assert plan_beams(params, vocab_size=100, num_end_tokens=8).num_candidates == 80
    with pytest.raises(RequestError, match=r"beam_width \(40\) is too large for a vocabulary of 47 tokens"):
        plan_beams(params, vocab_size=47, num_end_tokens=8)
