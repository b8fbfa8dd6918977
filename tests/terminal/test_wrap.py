"""Wrapping of streamed text, with textwrap as the oracle."""

import textwrap

from hypothesis import given
from hypothesis import strategies as st

from quire.terminal.wrap import WordWrap


def wrapped(pieces, width):
    written = []
    wrap = WordWrap(width, written.append)
    for piece in pieces:
        wrap.push(piece)
    wrap.end_line()
    return "".join(written)


@given(st.lists(st.text("ab", min_size=1, max_size=12), max_size=30), st.integers(12, 30), st.data())
def test_words_are_wrapped_as_a_whole_text_is_however_they_come(words, width, data):
    text = " ".join(words)
    cut = data.draw(st.integers(0, len(text)))
    lines = [line.rstrip(" ") for line in wrapped([text[:cut], text[cut:]], width).splitlines()]
    assert lines == textwrap.wrap(text, width)


def test_a_word_that_is_longer_than_a_line_is_broken():
    assert wrapped(["a" * 15, "a" * 10], 10) == "a" * 10 + "\n" + "a" * 10 + "\n" + "a" * 5 + "\n"


def test_line_ends_stay():
    assert wrapped(["one\n\n", "two"], 20) == "one\n\ntwo\n"
    assert wrapped(["one\n"], 20) == "one\n"


def test_a_word_is_written_when_it_has_ended():
    written = []
    wrap = WordWrap(20, written.append)
    wrap.push("one tw")
    assert "".join(written) == "one "
    wrap.push("o three")
    assert "".join(written) == "one two "
