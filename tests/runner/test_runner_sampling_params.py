"""Each sampling parameter in whole requests through the runner, against an oracle on transformers' logits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runner_driver import Driver, RowParams, load_model
from sampling_metadata_builders import mask

from quire.core.step import SamplingMasks
from quire.params import SamplingParams

PROMPTS = [[5, 9, 9, 40, 5], [7, 7, 7], [17, 21, 18, 5, 9, 40]]
NUM_TOKENS = 10
VOCAB = 301


@pytest.fixture(scope="module")
def theirs(saved):
    return saved("qwen3-gqa")[1]


@pytest.fixture(scope="module")
def model(saved):
    return load_model(saved("qwen3-gqa")[0])


def slow_greedy(theirs, prompt, row_params, num_tokens=NUM_TOKENS):
    """Tokens, and the margin of the closest choice."""
    params, output, lead = row_params.params, [], math.inf
    for _ in range(num_tokens):
        tokens = prompt + output
        with torch.no_grad():
            scores = theirs(torch.tensor([tokens])).logits[0, -1].tolist()
        for token in range(VOCAB):
            if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
                scores[token] = -math.inf
            if token in row_params.eos and len(output) < params.min_tokens:
                scores[token] = -math.inf
            for word in row_params.bad_words:
                if word[-1] == token and tuple(tokens)[len(tokens) - len(word) + 1 :] == word[:-1]:
                    scores[token] = -math.inf
            scores[token] += params.logit_bias.get(token, 0)
            if token in tokens:
                r = params.repetition_penalty
                scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
            scores[token] -= params.frequency_penalty * output.count(token)
            scores[token] -= params.presence_penalty * (token in output)
        ranked = sorted(range(VOCAB), key=lambda token: -scores[token])
        lead = min(lead, scores[ranked[0]] - scores[ranked[1]])
        output.append(ranked[0])
    return output, lead


def params_of(**options):
    return SamplingParams(temperature=0.0, **options)


@pytest.mark.parametrize(
    "params",
    [
        params_of(repetition_penalty=1.6),
        params_of(repetition_penalty=0.7),
        params_of(frequency_penalty=1.3),
        params_of(presence_penalty=2.0),
        params_of(presence_penalty=-2.0, frequency_penalty=-0.7),
        params_of(logit_bias={3: 100.0, 4: 99.0}),
        params_of(logit_bias={3: 6.0, 5: -100.0}, repetition_penalty=1.9, frequency_penalty=0.5),
        params_of(allowed_token_ids=(3, 4, 5, 200, 300)),
        params_of(allowed_token_ids=tuple(range(8)), frequency_penalty=2.0, presence_penalty=1.0),
    ],
)
def test_parameters_equal_the_oracle_alone_and_together(theirs, model, params):
    params_of_rows = [RowParams(params, len(prompt)) for prompt in PROMPTS]
    expected = [
        slow_greedy(theirs, prompt, row_params) for prompt, row_params in zip(PROMPTS, params_of_rows, strict=True)
    ]
    assert min(lead for _, lead in expected) > 1e-3
    tokens = [tokens for tokens, _ in expected]
    plain = Driver(model).generate(PROMPTS, NUM_TOKENS)
    assert tokens != plain  # otherwise nothing is tested
    assert Driver(model).generate(PROMPTS, NUM_TOKENS, params_of_rows) == tokens
    mixed = Driver(model).generate(PROMPTS, NUM_TOKENS, [params_of_rows[0], params_of(), params_of_rows[2]], cut=2)
    assert mixed == [tokens[0], plain[1], tokens[2]]


def test_bad_words_are_not_generated_but_their_prefixes_are(theirs, model):
    plain = Driver(model).generate(PROMPTS, NUM_TOKENS)
    words = [((tokens[0],), tuple(tokens[3:5]), (prompt[-1], tokens[1]), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, tokens[2]))
             for prompt, tokens in zip(PROMPTS, plain, strict=True)]  # fmt: skip
    params_of_rows = [
        RowParams(params_of(), len(prompt), bad_words=some) for prompt, some in zip(PROMPTS, words, strict=True)
    ]
    found = Driver(model).generate(PROMPTS, NUM_TOKENS, params_of_rows)
    expected = [
        slow_greedy(theirs, prompt, row_params) for prompt, row_params in zip(PROMPTS, params_of_rows, strict=True)
    ]
    assert found == [tokens for tokens, _ in expected]
    assert found != plain


def test_no_end_before_min_tokens(theirs, model):
    plain = Driver(model).generate(PROMPTS, NUM_TOKENS)
    params_of_rows = [
        RowParams(params_of(min_tokens=3), len(prompt), eos=(tokens[0], tokens[3]))
        for prompt, tokens in zip(PROMPTS, plain, strict=True)
    ]
    found = Driver(model).generate(PROMPTS, NUM_TOKENS, params_of_rows)
    expected = [
        slow_greedy(theirs, prompt, row_params) for prompt, row_params in zip(PROMPTS, params_of_rows, strict=True)
    ]
    assert found == [tokens for tokens, _ in expected]
    assert all(
        not set(tokens[:3]) & set(row_params.eos) for tokens, row_params in zip(found, params_of_rows, strict=True)
    )


@settings(max_examples=15, deadline=None)
@given(
    prompt=st.lists(st.integers(3, 12), min_size=1, max_size=9),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    frequency=st.sampled_from([0.0, 0.9, -0.4]),
    presence=st.sampled_from([0.0, 1.1]),
    bias=st.dictionaries(st.integers(0, 12), st.sampled_from([-100.0, 3.0, 8.0]), max_size=4),
    min_tokens=st.integers(0, 3),
    bad_words=st.lists(st.lists(st.integers(3, 12), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)
def test_combinations_equal_the_oracle(
    theirs, model, prompt, repetition, frequency, presence, bias, min_tokens, bad_words
):
    params = params_of(
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=bias,
        allowed_token_ids=tuple(range(16)),  # so that tokens repeat
        min_tokens=min_tokens,
    )
    row_params = RowParams(params, len(prompt), eos=(3, 4), bad_words=bad_words)
    expected, lead = slow_greedy(theirs, prompt, row_params, 6)
    assert lead < 1e-3 or Driver(model).generate([prompt], 6, row_params)[0] == expected


def test_tokens_that_only_the_runner_knows_are_penalised(theirs, model):
    """With two steps in flight, no Step contains the sampled tokens."""
    row_params = RowParams(
        params_of(frequency_penalty=2.0, presence_penalty=1.0, allowed_token_ids=tuple(range(9))),
        len(PROMPTS[0]),
        bad_words=((3, 4), (5, 6), (7, 7)),
    )
    expected, _ = slow_greedy(theirs, PROMPTS[0], row_params)
    driver = Driver(model)
    step = driver.step([(0, 0, 5)], opens=[(0, row_params)], tokens=[(0, 0, PROMPTS[0])])
    driver.runner.launch(step)
    driver.runner.sample(step.id, SamplingMasks.empty())
    found = []
    for position in range(5, 4 + NUM_TOKENS):
        step = driver.step([(0, position, position + 1)])
        driver.runner.launch(step)
        found += driver.runner.collect().tokens.tolist()
        driver.runner.sample(step.id, SamplingMasks.empty())
    assert found + driver.runner.collect().tokens.tolist() == expected


def test_a_grammar_and_a_list_both_bind(model):
    opening = {"opens": [(0, params_of(allowed_token_ids=(5, 6)))], "tokens": [(0, 0, PROMPTS[1])]}
    for grammar, expected in (({3, 4, 5}, 5), ({6, 300}, 6), ({7}, -1)):
        late = SamplingMasks(np.array([0], np.int32), np.array([3], np.int32), mask([grammar], VOCAB))
        assert Driver(model).run([(0, 0, 3)], late=late, **opening).tokens.tolist() == [expected]


def test_a_dead_end_is_the_row_s_own(model):
    plain = Driver(model).generate(PROMPTS, 2)
    row_params = RowParams(params_of(allowed_token_ids=(5,)), len(PROMPTS[1]), bad_words=((5, 5),))
    driver = Driver(model)
    opens = [(0, params_of()), (1, row_params), (2, params_of())]
    spans = [(row, 0, len(prompt)) for row, prompt in enumerate(PROMPTS)]
    first = driver.run(spans, opens=opens, tokens=[(row, 0, prompt) for row, prompt in enumerate(PROMPTS)])
    assert first.tokens.tolist() == [plain[0][0], 5, plain[2][0]]
    second = driver.run([(row, stop, stop + 1) for row, _, stop in spans])
    assert second.tokens.tolist() == [plain[0][1], -1, plain[2][1]]
