"""Incremental matching of stop strings.

Each string is matched with the failure function of Knuth, Morris and Pratt (1977), which yields after each character
the longest prefix of the string that the text ends with. The longest of these prefixes is held back.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Pattern(NamedTuple):
    """A stop string. fallback: for each number of matched characters, how many match if the next character does not."""

    text: str
    fallback: list[int]


def compile_stops(stops: Sequence[str]) -> tuple[Pattern, ...]:
    """The patterns of stop strings. Any number of `StopStrings` can share them."""
    return tuple(Pattern(text, _fallback(text)) for text in stops)


class StopStrings:
    """Ends a text at its first complete stop string.

    The text ends before the stop string that is complete first; if several are complete at the same character, before
    the longest. `matched` is that string, or None. included: the text ends after it, and no text is held back.
    """

    def __init__(self, patterns: Sequence[Pattern], *, included: bool = False) -> None:
        self.matched: str | None = None
        self._patterns = patterns
        self._included = included
        self._lengths = [0] * len(patterns)  # by pattern: length of its longest prefix that the text ends with
        self._held = ""

    def append_text(self, text: str, *, may_stop: bool = True) -> str:
        """Add text. Returns the text that is certain to be output; "" after a match.

        may_stop: False ignores stop strings that become complete in this text.
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

    def restart(self) -> str:
        """Begin the search anew behind a text that is not searched. Returns the text that was held back."""
        self._lengths = [0] * len(self._patterns)
        return self.flush()

    def flush(self) -> str:
        """The text that was held back. Call it after the last text."""
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
    """By number i of matched characters: length of the longest proper suffix of text[:i] that is a prefix of text."""
    table = [0, 0]
    length = 0
    for char in text[1:]:
        while length and text[length] != char:
            length = table[length]
        if text[length] == char:
            length += 1
        table.append(length)
    return table
