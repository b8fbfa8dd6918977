"""Stop strings against a slow search."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from quire.tokenizer.stop_strings import StopStrings, compile_stops

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
TEXT = st.text("ab", max_size=30)


def slow(text, stops, allowed_from):
    """(the text before, the stop string) of the first stop string that is complete after `allowed_from` characters."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete and end > allowed_from:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def split(text, cuts):
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(bounds)]


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=10), allowed=st.integers(0, 10))
@example(text="aaab", stops=["aab"], cuts=[1, 2, 3], allowed=0)
@example(text="ababa", stops=["aba"], cuts=[3], allowed=3)
def test_every_split_ends_where_a_slow_search_does(text, stops, cuts, allowed):
    pieces = split(text, cuts)
    search = StopStrings(compile_stops(stops))
    came, position, passed = [], 0, 0
    for piece in pieces:
        may_stop = position >= allowed
        passed = passed if may_stop else position + len(piece)
        came.append(search.append_text(piece, may_stop=may_stop))
        position += len(piece)
    came.append(search.flush())
    assert ("".join(came), search.matched) == slow(text, stops, passed)


@given(text=TEXT, stops=STOPS)
def test_no_more_is_held_back_than_could_be_a_stop_string(text, stops):
    search = StopStrings(compile_stops(stops))
    came = ""
    for i, char in enumerate(text):
        came += search.append_text(char)
        if search.matched is not None:
            return
        prefix_lens = [n for stop in stops for n in range(len(stop)) if text[: i + 1].endswith(stop[:n])]
        assert len(came) == i + 1 - max(prefix_lens)


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=10))
def test_a_stop_string_that_is_included_holds_nothing_back(text, stops, cuts):
    search = StopStrings(compile_stops(stops), included=True)
    before, matched = slow(text, stops, 0)
    end = len(before) + len(matched or "")
    position = came = 0
    for piece in split(text, cuts):
        came += len(search.append_text(piece))
        position += len(piece)
        assert came == min(position, end)
    assert search.flush() == ""
    assert search.matched == matched


ANY = st.lists(
    st.sampled_from(["a", "b", "\n", "\0", "é", "e\u0301", "\u2028", "😀", "\ud83d", "\ude00"]) | st.characters()
)
PIECES = st.lists(st.tuples(ANY.map("".join), st.booleans()), max_size=8)


def first_end(pieces, stops):
    """The text's length at its stop, and the stop string, by a search of the whole text after every character."""
    text = ""
    for piece, may_stop in pieces:
        for char in piece:
            text += char
            complete = [stop for stop in stops if may_stop and text.endswith(stop)]
            if complete:
                return len(text), max(complete, key=len)
    return len(text), None


@given(pieces=PIECES, places=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 6))), included=st.booleans())
@example(pieces=[("aa", False), ("ab", True), ("aab", True)], places=[(0, 3), (1, 2)], included=False)
def test_any_text_in_pieces_of_which_any_may_stop(pieces, places, included):
    """Stop strings are mostly parts of the text, and pieces that may not stop can contain them."""
    text = "".join(piece for piece, _ in pieces)
    stops = [part for start, size in places if (part := text[start % (len(text) + 1) :][:size])] or ["never"]
    search = StopStrings(compile_stops(stops), included=included)
    came = "".join(search.append_text(piece, may_stop=may_stop) for piece, may_stop in pieces) + search.flush()
    end, matched = first_end(pieces, stops)
    assert search.matched == matched
    assert came == text[: end - (0 if included else len(matched or ""))]


def test_without_stop_strings_text_passes():
    search = StopStrings(())
    assert search.append_text("abc") == "abc"
    assert search.flush() == ""


def test_no_text_is_returned_after_a_stop_string_match():
    search = StopStrings(compile_stops(["END"]))
    assert [search.append_text(piece) for piece in ("aE", "ND b", "c")] == ["a", "", ""]
    assert search.matched == "END"


def test_long_overlapping_strings_stay_cheap():
    """64 strings of 1024 characters that nearly match everywhere: repeated searches from the start would take hours."""
    search = StopStrings(compile_stops(["a" * 1000 + chr(0x4E00 + i) * 24 for i in range(64)]))
    assert sum(len(search.append_text("a" * 10)) for _ in range(500)) == 4000
