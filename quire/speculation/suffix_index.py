"""Prompt lookup: where the ending of a text occurred before (Saxena, "Prompt Lookup Decoding", 2023)."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

MAX_INDEXED = 32_768  # tokens of one index, about 100 bytes each
_MOST_CANDIDATES = 8  # earlier occurrences of the last pair of tokens that are compared
_LONGEST_MATCH = 32  # tokens; a longer match says no more about what follows
_NOWHERE = -1


class Occurrence(NamedTuple):
    """An earlier occurrence of an ending."""

    stop: int  # position behind it
    length: int  # tokens that match, at least 2 and at most _LONGEST_MATCH


class SuffixIndex:
    """The pairs of neighbouring tokens in a list of tokens, which may grow, and where each occurs."""

    __slots__ = ("_begin", "_earlier", "_latest", "_stop", "_tokens")

    def __init__(self, tokens: Sequence[int], begin: int = 0) -> None:
        """begin: pairs before this position are not indexed."""
        self._tokens = tokens
        self._begin = begin
        self._stop = begin + 1  # pairs that end before this position are indexed
        self._latest: dict[int, int] = {}  # pair -> position of the second token of its latest occurrence
        self._earlier = array("q")  # for each indexed position: the same of the occurrence before, or _NOWHERE

    @property
    def num_indexed(self) -> int:
        """Number of indexed pairs."""
        return len(self._earlier)

    def extend(self, stop: int, most: int) -> int:
        """Index up to `most` pairs that end before position `stop`. Returns their number."""
        stop = min(stop, self._stop + most, self._begin + 1 + MAX_INDEXED)
        tokens, latest = self._tokens, self._latest
        before, append = latest.get, self._earlier.append
        number = stop - self._stop
        if number <= 0:
            return 0
        first = tokens[self._stop - 1]
        for position, second in enumerate(tokens[self._stop : stop], self._stop):
            pair = first << 32 | second
            append(before(pair, _NOWHERE))
            latest[pair] = position
            first = second
        self._stop = stop
        return number

    def find(self, ending: Sequence[int], length: int, *, prefer_latest: bool) -> Occurrence | None:
        """The longest of the latest indexed occurrences of the end of `ending`, which has `length` tokens.

        prefer_latest: whether it is the last or the first of several.
        """
        if length < 2:
            return None
        tokens, begin = self._tokens, self._begin
        position = self._latest.get(ending[length - 2] << 32 | ending[length - 1], _NOWHERE)
        best, longest, left = _NOWHERE, 1 if prefer_latest else 2, _MOST_CANDIDATES
        while position != _NOWHERE and left:
            matched, most = 2, min(_LONGEST_MATCH, position - begin + 1, length)
            while matched < most and tokens[position - matched] == ending[length - 1 - matched]:
                matched += 1
            if matched > longest or (matched == longest and not prefer_latest):
                best, longest = position, matched
                if matched == _LONGEST_MATCH:
                    break
            position = self._earlier[position - begin - 1]
            left -= 1
        return None if best == _NOWHERE else Occurrence(best + 1, longest)
