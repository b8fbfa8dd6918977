"""Every output that the masks allow is valid under its JSON schema."""

import random

import pytest
from example_budget import examples
from grammar_mask_walks import text_of, vocabulary, walk
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schema_cases import at_random, by_keyword, conditional_at_random
from json_schema_oracle import faults

from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.backends import compile
from quire.structured_outputs.json_schema.bounds import ENFORCED

SCHEMAS = list(by_keyword())
NUM_AT_RANDOM = 200


def completed(schema: object, rng: random.Random, num_walks: int, limit: int) -> int:
    """Number of walks that ended; each output is validated. Raises RequestError for a rejected schema."""
    asked = StructuredOutputsParams(json=schema, disable_any_whitespace=rng.random() < 0.5)
    grammar = compile(asked, vocabulary())
    num = 0
    for turn in range(4 * num_walks):
        if turn >= num_walks and num:
            break
        tokens, is_complete = walk(grammar, vocabulary(), rng, limit=limit, fast_forward=turn % 2 == 0)
        if is_complete:
            data = text_of(tokens, vocabulary())
            assert not list(faults(schema, data)), (schema, data)
            num += 1
    return num


def keywords(schema: object) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(keywords, schema))
    return set(schema).union(*map(keywords, schema.values())) if isinstance(schema, dict) else set()


@pytest.mark.parametrize("keyword", sorted(ENFORCED))
def test_every_output_fits_a_schema_with(keyword):
    rng = random.Random(keyword)
    schemas = [schema for about, schema in SCHEMAS if about == keyword]
    assert schemas
    assert all(keyword in keywords(schema) for schema in schemas)
    ended = [completed(schema, rng, 3, 90) > 0 for schema in schemas]
    assert sum(ended) >= 0.8 * len(schemas)  # a random walk may miss the only end


def test_every_output_fits_schemas_at_random():
    rng = random.Random(20)
    num_refused = num_complete = 0
    for _ in range(NUM_AT_RANDOM):
        schema = at_random(rng)
        try:
            num_complete += completed(schema, rng, 2, 80)
        except RequestError:
            num_refused += 1
    assert num_refused < NUM_AT_RANDOM // 10
    assert num_complete > NUM_AT_RANDOM


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 10**9))
def test_every_output_fits_schemas_with_conditions_at_random(seed):
    rng = random.Random(seed)
    schema = conditional_at_random(rng)
    try:
        completed(schema, rng, 2, 40)
    except RequestError as error:
        assert str(error).startswith("schema at #")


def test_the_schema_cases_are_at_least_300_and_cover_each_enforced_keyword():
    assert len(SCHEMAS) + NUM_AT_RANDOM >= 300
    assert {about for about, _ in SCHEMAS} == ENFORCED
