"""Search for patterns in a stream: the first end of a match against `re`, in linear time."""

import re

import pytest
from example_budget import examples
from fsm_oracles import patterns
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from python_steps import python_steps

from quire.engine.stop_regex import StopPatterns
from quire.errors import RequestError
from quire.structured_outputs.fsm.search import MAX_STATES, PatternSearch, compile_searches

TEXT = st.text(st.sampled_from("ab\n é€\U0001f600-9_"), max_size=12)


def ends(pattern, text, *, anchored=False):
    """The ends of all matches."""
    compiled = re.compile(pattern, re.ASCII)
    starts = [0] if anchored else range(len(text) + 1)
    return {end for end in range(len(text) + 1) for start in starts if compiled.fullmatch(text, start, end)}


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(patterns(), min_size=1, max_size=2), TEXT, st.lists(st.tuples(st.integers(0, 5), st.booleans())))
def test_a_text_ends_at_the_first_match_that_may_end_it(asked, text, pieces):
    try:
        searches = compile_searches(asked)
    except RequestError as error:
        assert any(re.fullmatch(one, "", re.ASCII) for one in asked) or "complex" in str(error)
        return
    stops, done = StopPatterns(searches), 0
    for length, may_stop in [*pieces, (len(text), True)]:
        piece = text[done : done + length]
        expected = min(
            (end for one in asked for end in ends(one, text) if done < end <= done + len(piece)), default=None
        )
        found = stops.find_end(piece, may_stop=may_stop)
        if may_stop and expected is not None:
            assert found == expected - done
            assert stops.matched == min(one for one in asked if expected in ends(one, text))
            return
        assert found is None and stops.matched is None
        done += len(piece)


@given(patterns(), TEXT)
@settings(max_examples=60, deadline=None)
def test_an_anchor_at_the_begin_stands_for_the_begin_of_the_text(pattern, text):
    try:
        search = PatternSearch(f"^(?:{pattern})$")
    except RequestError:
        assume(condition=False)
    expected = min(ends(pattern, text, anchored=True), default=None)
    assert search.find_end(search.start, text)[1] == expected


def test_no_pattern_takes_longer_than_its_states_per_byte():
    """Each is exponential for `re` or for a deterministic automaton that is built beforehand."""
    for pattern in ("(a|a)*b", "(a*)*b", "(a|b)*a(a|b){200}c", "(?:a?){200}a{200}b"):
        search = PatternSearch(pattern)
        text = "aab" * 700 if "c" in pattern else "a" * 2000
        steps, (_, end) = python_steps(search.find_end, search.start, text)
        assert end is None
        assert steps < 200_000_000


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["a*"], r"the stop_regex 'a\*' matches the empty text"),
        (["a("], "has a \\( that is not closed"),
        ([r"\ba"], r"word boundary \(\\b\) at position 0, which stop_regex does not support"),
        (["(?=a)"], "look-ahead at position 0, which stop_regex does not support"),
        (["a{2000}"], f"too complex: more than {MAX_STATES:,} states"),
        (["a{600}", "b{600}"], "too complex"),
        (["(a^)"], "not at its start"),
        ([r"(a)\1"], "backreference"),
    ],
)
def test_other_patterns_are_refused(asked, message):
    with pytest.raises(RequestError, match=message) as caught:
        compile_searches(asked)
    assert caught.value.param == "stop_regex"
