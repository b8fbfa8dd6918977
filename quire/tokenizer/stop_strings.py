"""Stop strings: where a text ends that comes in pieces. Knows characters only.

Each string is followed with the failure function of Knuth, Morris and Pratt (1977): after every
character it is known how many of its first characters the text ends with. The longest of these ends
is held back, because it may become a stop string.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Pattern(NamedTuple):
    """A stop string and, for each number of characters matched, how many still match when the next does not."""

    text: str
    fallback: list[int]


def compile_stops(stops: Sequence[str]) -> tuple[Pattern, ...]:
    """Patterns that any number of `StopStrings` can share."""
    return tuple(Pattern(text, _fallback(text)) for text in stops)


class StopStrings:
    """Text in, text out, until a stop string is complete.

    The text ends before the stop string that is complete first; of several complete at the same
    character, before the longest. `matched` is that string, None while there is none.
    included: the text ends behind it; then nothing needs to be held back.
    """

    def __init__(self, patterns: Sequence[Pattern], *, included: bool = False) -> None:
        self.matched: str | None = None
        self._patterns = patterns
        self._included = included
        self._lengths = [0] * len(patterns)  # of the beginning of each pattern that the text ends with
        self._held = ""

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """What is certain not to belong to a stop string. Nothing comes after a match.

        may_stop: False lets a string pass that becomes complete in this text.
        """
        if self.matched is not None:
            return ""
        if not self._patterns:
            return text
        for i, char in enumerate(text):
            complete = self._advance(char)
            if complete and may_stop:
                self.matched = max(complete, key=len)
                text = self._held + text[: i + 1]
                self._held = ""
                return text if self._included else text[: len(text) - len(self.matched)]
        text = self._held + text
        kept = len(text) - (0 if self._included else max(self._lengths))
        self._held = text[kept:]
        return text[:kept]

    def close(self) -> str:
        """What was held back, once no text follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> list[str]:
        complete = []
        for i, (pattern, fallback) in enumerate(self._patterns):
            length = self._lengths[i]
            while length and pattern[length] != char:
                length = fallback[length]
            if pattern[length] == char:
                length += 1
            if length == len(pattern):
                complete.append(pattern)
                length = fallback[length]
            self._lengths[i] = length
        return complete


def _fallback(text: str) -> list[int]:
    """For i matched characters: the length of the longest proper end of text[:i] that text begins with."""
    table = [0, 0]
    length = 0
    for char in text[1:]:
        while length and text[length] != char:
            length = table[length]
        if text[length] == char:
            length += 1
        table.append(length)
    return table
