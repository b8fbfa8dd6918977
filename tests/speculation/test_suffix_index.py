"""Prompt lookup against a search of the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.speculation.suffix_index import MAX_INDEXED, SuffixIndex

LONGEST_MATCH = 32  # tokens that are compared
MOST_CANDIDATES = 8  # earlier occurrences that are compared
few = st.integers(0, 3)


def matching(tokens, stop, ending):
    """Tokens before `stop` that equal the end of `ending`."""
    count = 0
    while count < min(stop, len(ending), LONGEST_MATCH) and tokens[stop - 1 - count] == ending[-1 - count]:
        count += 1
    return count


@settings(max_examples=300, deadline=None)
@given(st.lists(few, min_size=2, max_size=60), st.integers(1, 9), st.booleans())
def test_the_longest_occurrence_is_found(tokens, step, latest):
    """Among the latest occurrences of the last pair. The index grows in any steps, and never holds the end itself."""
    index = SuffixIndex(tokens)
    while index.extend(len(tokens) - 1, step):
        pass
    found = index.find(tokens, len(tokens), prefer_latest=latest)
    stops = [stop for stop in range(len(tokens) - 1, 1, -1) if tokens[stop - 2 : stop] == tokens[-2:]]
    stops = stops[:MOST_CANDIDATES]
    if not stops:
        assert found is None
        return
    lengths = [matching(tokens, stop, tokens) for stop in stops]
    longest = [stop for stop, length in zip(stops, lengths, strict=True) if length == max(lengths)]
    assert found == (longest[0 if latest or max(lengths) == LONGEST_MATCH else -1], max(lengths))


@given(st.lists(few, min_size=1, max_size=40), st.lists(few, max_size=10))
def test_the_end_of_another_text_is_found(tokens, ending):
    index = SuffixIndex(tokens)
    index.extend(len(tokens), len(tokens))
    found = index.find(ending, len(ending), prefer_latest=True)
    expected = len(ending) >= 2 and any(tokens[i : i + 2] == ending[-2:] for i in range(len(tokens) - 1))
    assert (found is not None) == expected
    if found is not None:
        assert found.length == matching(tokens, found.stop, ending) >= 2


def test_a_text_of_equal_tokens_takes_bounded_work():
    tokens = [7] * 100_000
    index = SuffixIndex(tokens, len(tokens) - MAX_INDEXED // 2)
    assert index.extend(len(tokens) - 1, 10**9) == MAX_INDEXED // 2 - 2 == index.num_indexed
    assert index.find(tokens, len(tokens), prefer_latest=False) == (len(tokens) - 1, LONGEST_MATCH)


def test_the_number_of_indexed_tokens_is_bounded():
    tokens = list(range(2 * MAX_INDEXED))
    index = SuffixIndex(tokens)
    assert index.extend(len(tokens), 10**9) == MAX_INDEXED
    assert index.extend(len(tokens), 10**9) == 0
