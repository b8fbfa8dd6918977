"""Sampling parameters of rows across steps: sampling metadata against slow loops over random histories."""

import math
from collections import Counter

import numpy as np
import pytest
from example_budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runner_driver import GREEDY, RowParams, open_rows
from sampling_metadata_builders import mask

from quire.core.step import SamplingMasks
from quire.params import SamplingParams
from quire.sampling.metadata import BadWords, SamplingColumns

VOCAB = 40
ROWS = 6
MAX_LEN = 30

token = st.integers(0, VOCAB - 1)
few = st.integers(0, 3)  # tokens that repeat
row_params_strategy = st.builds(
    RowParams,
    st.builds(
        SamplingParams,
        temperature=st.just(0.0),
        logit_bias=st.dictionaries(token, st.floats(-100, 100, width=32), max_size=4),
        allowed_token_ids=st.none() | st.lists(token, min_size=1, max_size=8).map(tuple),
        min_tokens=st.integers(0, 8),
        presence_penalty=st.sampled_from([0.0, 1.0]),
        frequency_penalty=st.sampled_from([0.0, -1.5]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
        no_repeat_ngram_size=st.sampled_from([0, 0, 1, 2, 3, 12]),
        logprobs=st.just(0),
        logprob_token_ids=st.lists(token, max_size=3).map(tuple),
    ),
    prompt_len=st.integers(1, 12),
    eos=st.lists(token, max_size=2).map(tuple),
    bad_words=st.lists(st.lists(few, min_size=1, max_size=4).map(tuple), max_size=5).map(tuple),
    slot=st.just(0),
    adapter_start=st.just(0),
)


def banned_tokens(row_params, tokens):
    """Banned tokens of a row that ends with `tokens`."""
    ends = row_params.eos if len(tokens) < row_params.prompt_len + row_params.params.min_tokens else ()
    words = [word[-1] for word in row_params.bad_words if tuple(tokens[len(tokens) + 1 - len(word) :]) == word[:-1]]
    size = row_params.params.no_repeat_ngram_size
    ngrams = [tokens[start : start + size] for start in range(len(tokens) - size + 1) if size]
    repeats = {ngram[-1] for ngram in ngrams if ngram[:-1] == tokens[len(tokens) - size + 1 :]}
    return set(ends) | {word for word in words} | repeats - set(row_params.eos)


def check(columns, opened, rows, positions, tokens, late_masks):
    place_of = dict(zip(rows.tolist(), positions.tolist(), strict=True))
    places = np.array([place_of.get(row, 0) for row in late_masks], np.int32)
    late = SamplingMasks(np.array(list(late_masks), np.int32), places, mask(late_masks.values(), VOCAB))
    draws = columns.metadata(rows, positions, tokens, late if late_masks else SamplingMasks.empty())
    found = dict(zip(draws.masks.rows.tolist(), draws.masks.words.tolist(), strict=True))
    reported = columns.token_lists.logprob_tokens(rows)
    for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        row_params, known = opened[row], tokens[row, :position].tolist()
        params = row_params.params
        limits = [set(params.allowed_token_ids)] if params.allowed_token_ids is not None else []
        limits += [late_masks[row]] if row in late_masks else []
        assert found.get(index) == (mask([set.intersection(*limits)], VOCAB)[0].tolist() if limits else None)

        edits = [
            (t, value)
            for i, t, value in zip(draws.edits.rows, draws.edits.tokens, draws.edits.values, strict=True)
            if i == index
        ]
        assert {t for t, value in edits if value == -math.inf} == banned_tokens(row_params, known)
        assert {t: value for t, value in edits if value > -math.inf} == dict(params.logit_bias)

        came = [
            (t, is_output)
            for i, t, is_output in zip(draws.history.rows, draws.history.tokens, draws.history.are_output, strict=True)
            if i == index
        ]
        counted = [(t, place >= row_params.prompt_len) for place, t in enumerate(known)]
        if params.repetition_penalty == 1:
            counted = [entry for entry in counted if entry[1]]
            if params.presence_penalty == params.frequency_penalty == 0:
                counted = []
        assert Counter(came) == Counter(counted)
        assert draws.presence_penalties[index] == params.presence_penalty
        assert draws.frequency_penalties[index] == params.frequency_penalty
        assert draws.repetition_penalties[index] == params.repetition_penalty
        assert reported.get(index, np.array(())).tolist() == list(params.logprob_token_ids)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_metadata_equals_a_loop_over_rows_that_come_and_go(data):
    columns = SamplingColumns(ROWS, VOCAB)
    opened = {}
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tokens = random.integers(0, 4, (ROWS, MAX_LEN), np.int32)
    for _ in range(3):
        fresh = data.draw(st.dictionaries(st.integers(0, ROWS - 1), row_params_strategy, min_size=0 if opened else 1))
        columns.set_rows(open_rows(list(fresh.items())))
        opened |= fresh
        rows = np.array(data.draw(st.lists(st.sampled_from(sorted(opened)), unique=True)), np.int32)
        lengths = [data.draw(st.integers(opened[row].prompt_len, MAX_LEN - 1)) for row in rows.tolist()]
        late = data.draw(st.dictionaries(st.integers(0, ROWS - 1), st.sets(token), max_size=3))
        check(columns, opened, rows, np.array(lengths, np.int32), tokens, late)


def test_a_bad_word_may_be_longer_than_what_came_before():
    words = BadWords.of([np.array(word, np.int32) for word in ([7, 7, 7, 1], [7, 2], [3])])
    assert words.banned(np.array([8], np.int32)).tolist() == [3]
    assert words.banned(np.array([7], np.int32)).tolist() == [3, 2]
    assert words.banned(np.array([7, 7, 7], np.int32)).tolist() == [3, 1, 2]


def test_rows_without_options_add_nothing_to_the_metadata():
    columns = SamplingColumns(4, VOCAB)
    asking = RowParams(
        SamplingParams(repetition_penalty=2.0, logit_bias={1: 1.0}, allowed_token_ids=(2,)), 1, (1,), ((4,),)
    )
    columns.set_rows(open_rows([(row, asking) for row in range(4)]))
    columns.set_rows(open_rows([(row, GREEDY) for row in range(4)]))  # resets the previous parameters
    draws = columns.metadata(np.arange(4), np.full(4, 9), np.zeros((4, 10), np.int32), SamplingMasks.empty())
    assert [len(part) for part in (draws.masks.rows, draws.edits.rows, draws.history.rows)] == [0, 0, 0]
    assert columns.token_lists.logprob_tokens(np.arange(4)) == {}


def test_a_repetition_penalty_that_float32_cannot_hold_is_the_smallest_that_it_can():
    columns = SamplingColumns(1, VOCAB)
    columns.set_rows(open_rows([(0, SamplingParams(repetition_penalty=1e-60))]))
    draws = columns.metadata(np.array([0]), np.array([1]), np.zeros((1, 2), np.int32), SamplingMasks.empty())
    assert draws.repetition_penalties[0] == np.finfo(np.float32).tiny


def test_late_masks_of_another_width_are_refused_also_where_they_would_spread():
    columns = SamplingColumns(1, VOCAB)
    columns.set_rows(open_rows([(0, SamplingParams(allowed_token_ids=(2,)))]))
    late = SamplingMasks(np.array([0], np.int32), np.array([1], np.int32), np.ones((1, 1), np.uint32))
    with pytest.raises(ValueError, match="masks must have 2 words for a row, not 1"):
        columns.metadata(np.array([0]), np.array([1]), np.zeros((1, 2), np.int32), late)
