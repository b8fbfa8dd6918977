"""What compiles can be finished: constraints with bounded texts, walked to an end by the tokens that they allow."""

import random

import pytest
from bounded_constraints import constraint_at_random, is_valid
from example_budget import examples, is_thorough
from grammar_mask_walks import allowed, text_of, vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.constraint import Grammar
from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.backends import compile

_NUM_SEEDS = examples(2000) if is_thorough() else 16
# Unicode's white space in up to 40 words, of which a mask had more to compute than its limit allowed
WORDS = {"type": "string", "pattern": r"^(?:\S+\s+){0,39}\S+$", "maxLength": 400}


def finished(grammar: Grammar, rng: random.Random, *, is_longest: bool = False) -> bytes:
    """The text of a walk to an end. is_longest: it ends, and closes a string, only where nothing else is allowed.

    Raises AssertionError if the constraint allows nothing before the end.
    """
    known = vocabulary()
    matcher = grammar.new_matcher(fast_forward=True)
    verdict = matcher.advance([])
    tokens = list(verdict.forced)
    while not verdict.is_over:
        options = allowed(matcher, known)
        assert options, f"{matcher.advance([]).error} behind {text_of(tokens, known)!r}"
        if is_longest:
            options = [token for token in options if known.tokens[token] and b'"' not in known.tokens[token]] or options
        token = rng.choice(options)
        if token in known.end_ids:
            break
        verdict = matcher.advance([token])
        assert not verdict.error, f"{verdict.error} behind {text_of(tokens, known)!r}"
        tokens += [token, *verdict.forced]
    return text_of(tokens, known)


@settings(max_examples=_NUM_SEEDS, deadline=None)
@given(st.integers(0, 10**9))
def test_constraints_with_bounded_texts_are_refused_or_can_be_finished(seed):
    rng = random.Random(seed)
    asked = constraint_at_random(rng)
    try:
        grammar = compile(asked, vocabulary())
    except RequestError as error:
        assert "no value satisfies" in str(error) or "no output satisfies" in str(error) or "too complex" in str(error)
        return
    for is_longest in (False, True):
        text = finished(grammar, rng, is_longest=is_longest)
        assert is_valid(asked, text), (asked.text, text)


def test_a_text_whose_lexer_cannot_be_computed_is_too_complex():
    """Of the seeds of the test above, one whose error named limits of the library."""
    with pytest.raises(RequestError, match="too complex"):
        compile(constraint_at_random(random.Random(13106)), vocabulary())


def test_most_constraints_with_bounded_texts_are_accepted():
    num_refused = 0
    for seed in range(60):
        try:
            compile(constraint_at_random(random.Random(seed)), vocabulary())
        except RequestError as error:
            num_refused += "too complex" in str(error)
    assert num_refused <= 6


def test_many_words_within_a_length_can_be_finished_at_any_length():
    asked = StructuredOutputsParams(json=WORDS)
    grammar = compile(asked, vocabulary())
    texts = [finished(grammar, random.Random(seed), is_longest=seed > 2) for seed in range(4)]
    assert all(is_valid(asked, text) for text in texts)
    assert max(map(len, texts)) > 380
