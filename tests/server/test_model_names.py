"""Names of the served model: exact ones, patterns, and the names that clients have built in."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.model_names import CLAUDE, ModelNames, is_placeholder


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*", ("a", "", "claude-opus"), ()),
        ("claude-*", ("claude-", "claude-opus-4-8[1m]"), ("claude", "a-claude-b")),
        ("*-mini", ("gpt-4o-mini", "-mini"), ("gpt-4o-minis",)),
        ("gpt-*-mini", ("gpt-4o-mini", "gpt--mini"), ("gpt-mini", "gpt-4o")),
        ("a*b*c", ("abc", "a-b-c", "abbc"), ("acb", "ab", "abcd")),
        ("a?[b]*", ("a?[b]c",), ("axb",)),
    ],
)
def test_a_star_stands_for_any_characters(pattern, yes, no):
    names = ModelNames([pattern], "own")
    assert all(map(names.matches, yes))
    assert not any(map(names.matches, no))


@given(st.text("ab*", max_size=6), st.text("ab", max_size=8))
def test_patterns_match_as_their_regular_expressions(pattern, name):
    expected = re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None
    assert ModelNames([pattern], "own").matches(name) == (expected and "*" in pattern)


def test_a_long_name_takes_linear_time():
    names, start = ModelNames(["*a" * 100 + "b*"], "own"), time.process_time()
    assert not names.matches("a" * 100_000)
    assert time.process_time() - start < 0.5


def test_the_first_name_that_is_no_pattern_is_reported():
    assert ModelNames(["claude-*", "small", "large"], "own").reported == "small"
    assert ModelNames(["claude-*"], "own").reported == "own"
    assert ModelNames([], "own").exact == ("own",)
    assert ModelNames(["small", "claude-*"], "own").shown == "'small' and 'claude-*'"


def test_clients_send_a_name_where_their_user_named_no_model():
    assert is_placeholder("tgi") and is_placeholder("dummy")
    assert not is_placeholder("claude-opus-4-8[1m]")
    assert is_placeholder("claude-opus-4-8[1m]", (CLAUDE,))
