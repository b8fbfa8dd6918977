"""A pattern that is being read, and the errors that name a place in it."""

import re

from quire.errors import RequestError


class Reader:
    """Characters of a pattern, one by one. name: of the field that it is in."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self.name = name
        self.at = 0

    def peek(self, offset: int = 0) -> str:
        """The next character, or the one so many behind it; "" at the end."""
        return self._text[self.at + offset : self.at + offset + 1]

    def take(self) -> str:
        """The next character, which is read then; "" at the end."""
        char = self.peek()
        self.at += len(char)
        return char

    def skip(self, text: str) -> bool:
        """Whether this comes next; if so, it is read."""
        found = self._text.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def match(self, pattern: re.Pattern[str], offset: int) -> re.Match[str] | None:
        """What comes so many characters behind the next one, if it matches; all of it is read then."""
        found = pattern.match(self._text, self.at + offset)
        if found is not None:
            self.at = found.end()
        return found

    def until(self, end: str) -> str | None:
        """The text up to `end`, both are read; None where it does not come."""
        stop = self._text.find(end, self.at)
        if stop < 0:
            return None
        found = self._text[self.at : stop]
        self.at = stop + len(end)
        return found

    def error(self, what: str, at: int) -> RequestError:
        """The pattern is none."""
        return RequestError(f"the {self.name} {what}, at position {at}", self.name)

    def unsupported(self, what: str, at: int) -> RequestError:
        """The pattern has something that is not regular, or not understood."""
        return RequestError(
            f"the {self.name} has {what} at position {at}, which the fsm backend does not have", self.name
        )
