"""Patterns that end a text: SGLang's stop_regex."""

from collections.abc import Sequence

from quire.structured_outputs.fsm.search import PatternSearch


class StopPatterns:
    """Ends a text where the first match of a pattern ends. `matched` is the pattern, or None."""

    def __init__(self, searches: Sequence[PatternSearch]) -> None:
        self.matched: str | None = None
        self._searches = searches
        self.restart()

    def restart(self) -> None:
        """Begin the search anew, behind a text that is not searched."""
        self._states = [search.start for search in self._searches]

    def find_end(self, text: str, *, may_stop: bool) -> int | None:
        """Add text. Returns the number of its characters up to the end of the first match; None without one.

        may_stop: False ignores matches that end in this text.
        """
        ends = []
        for index, search in enumerate(self._searches):
            state, end = search.find_end(self._states[index], text)
            start = 0
            while end is not None:
                start += end
                if may_stop:
                    ends.append((start, search.pattern))
                    break
                state, end = search.find_end(state, text[start:])
            self._states[index] = state
        if not ends:
            return None
        end, self.matched = min(ends)
        return end
