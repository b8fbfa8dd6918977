"""Rows that are kept as numbers beside rows that are made at once."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.core.step import Logprobs
from quire.engine.logprob_rows import LogprobRows, forced_logprob_row, logprob_rows

TOKENIZER = SimpleNamespace(token_text=chr)


@st.composite
def pieces(draw):
    """The logprobs of one output, and the places of forced tokens among its rows."""
    size, width = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    ids = draw(st.lists(st.lists(st.integers(0, 9), min_size=width, max_size=width), min_size=size, max_size=size))
    padding = draw(st.integers(0, width - 1))
    values = np.random.default_rng(draw(st.integers(0, 99))).normal(size=(size, width)).astype(np.float32)
    found = np.array(ids, np.int32).reshape(size, width)
    if padding:
        found[:, width - padding :] = -1
        values[:, width - padding :] = -np.inf
    forced = sorted(draw(st.sets(st.integers(0, size), max_size=2)))
    return Logprobs(found, values, np.arange(1, size + 1, dtype=np.int32)), forced


@given(st.lists(pieces(), max_size=5), st.integers(0, 4))
def test_kept_rows_equal_rows_that_are_made_at_once(outputs, num_most_likely):
    kept, expected = LogprobRows(num_most_likely, TOKENIZER), []
    kept.append_unreported(2)
    expected += [None, None]
    for logprobs, forced in outputs:
        rows = logprob_rows(logprobs, num_most_likely, TOKENIZER)
        for place in forced:
            rows.insert(place, forced_logprob_row(65 + place, TOKENIZER))
        added = LogprobRows(num_most_likely, TOKENIZER)
        added.append(logprobs, [(place, 65 + place) for place in forced])
        assert added == rows
        kept.extend(added)
        expected += rows
    assert len(kept) == len(expected)
    assert list(kept) == expected
    assert kept[:] == expected
    assert kept[1:-1] == expected[1:-1]
    assert [kept[place] for place in range(-len(kept), 0)] == expected
    first = [None if row is None else dict([next(iter(row.items()))]) for row in expected]
    assert list(kept.chosen()) == first
    assert kept != [*expected, None]


def test_a_forced_token_has_a_row_without_logprobs_of_others():
    kept = LogprobRows(3, TOKENIZER)
    kept.append(None, [(0, 66), (1, 67)])
    assert kept == [forced_logprob_row(66, TOKENIZER), forced_logprob_row(67, TOKENIZER)]


def test_a_value_takes_eight_bytes_and_padding_takes_none():
    kept = LogprobRows(20, TOKENIZER)
    ids = np.full((100, 129), -1, np.int32)
    ids[:, :21] = np.arange(21)
    kept.append(Logprobs(ids, np.zeros((100, 129), np.float32), np.ones(100, np.int32)))
    assert kept.num_values == 100 * 21
    assert kept.num_bytes == 8 * (100 * 21 + 100)
