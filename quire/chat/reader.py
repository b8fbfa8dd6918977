"""Reads text that arrives in pieces: each method is a coroutine that yields where it needs more text.

A reader keeps the text that is not consumed, or all text since `hold`. It consumes the rest of a piece before it waits,
but for the beginning of a literal text, so that the work is linear in the length of the text.
"""

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

MAX_HELD = 16_384  # characters that may be held back until it is known what they are
_SPACE = re.compile(r"[ \n\r\t]*")


class Markers:
    """Literal texts to search for. Of several at one place, the longest is found."""

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        firsts = "".join({re.escape(text[0]) for text in ordered})
        self._firsts = re.compile(f"[{firsts}]" if firsts else "(?!)")
        self._prefixes = frozenset(text[:end] for text in ordered for end in range(1, len(text)))
        self._endings = tuple(self._prefixes)
        self._longest = max(map(len, ordered), default=0)

    def find(self, text: str, at: int, stop: int, *, is_last: bool) -> tuple[int, str]:
        """The end of the text from `at` that belongs to no marker, and the marker behind it, or "".

        is_last: whether no text follows. If some may, an incomplete marker before `stop` is left out.
        """
        if not self._firsts.search(text, at, stop):
            return stop, ""
        found = self._pattern.search(text, at, stop)
        end = found.start() if found else stop
        if not is_last and (found is None or found.start() + self._longest > stop):
            incomplete = self._incomplete(text, max(at, stop - self._longest + 1), stop)
            if incomplete < end or (found and incomplete == end):
                return incomplete, ""
        return end, found[0] if found else ""

    def _incomplete(self, text: str, first: int, stop: int) -> int:
        """The place, from `first`, of the longest beginning of a marker that ends at `stop`; `stop` if none does."""
        if not text.endswith(self._endings, first, stop):
            return stop
        return next(place for place in range(first, stop + 1) if text[place:stop] in self._prefixes)


class Reader:
    """See the module. text: not yet consumed from `at` on; readable up to `stop`."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.stop = 0
        self.ended = False  # no further text will come
        self.num_fed = 0  # characters so far
        self._mark: int | None = None

    def feed(self, text: str) -> None:
        """Append text."""
        self.num_fed += len(text)
        first = self.at if self._mark is None else self._mark
        self.text = self.text[first:] + text
        self.at -= first
        self._mark = None if self._mark is None else 0
        self._set_stop()

    def hold(self, num_before: int = 0) -> None:
        """Keep the text from here on, less `num_before` characters, until `release`. At most MAX_HELD are readable."""
        self._mark = self.at - num_before
        self._set_stop()

    def release(self) -> None:
        """End `hold`: the text up to here is consumed."""
        self._mark = None
        self._set_stop()

    @property
    def num_read(self) -> int:
        """Number of consumed characters since the beginning."""
        return self.num_fed - len(self.text) + self.at

    @property
    def num_held(self) -> int:
        """Number of characters since `hold`."""
        assert self._mark is not None, "text is held"
        return self.at - self._mark

    def rewind(self, num_held: int = 0) -> None:
        """Go back, so that `num_held` characters since `hold` are consumed."""
        assert self._mark is not None, "text is held"
        self.at = self._mark + num_held

    def take_held(self, num_held: int) -> str:
        """The first `num_held` characters since `hold`. They are consumed, and `hold` ends."""
        self.rewind(num_held)
        text = self.text[self.at - num_held : self.at]
        self.release()
        return text

    def more(self) -> Reading[bool]:
        """Wait for more text. Returns False if none will be readable."""
        if self._is_last:
            return False
        yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, which is not consumed; "" at the end."""
        while self.at == self.stop:
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def space(self) -> Reading[None]:
        """Consume white space."""
        while True:
            self.at = self._end_of(_SPACE, self.stop)
            if self.at < self.stop or not (yield from self.more()):
                return

    def literal(self, text: str) -> Reading[bool]:
        """Consume this text, if it is next."""
        while self.stop - self.at < len(text):
            if not text.startswith(self.text[self.at : self.stop]) or not (yield from self.more()):
                return False
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def is_cut_within(self, text: str) -> bool:
        """Whether the rest of the text is a beginning of this one."""
        return self.ended and text.startswith(self.text[self.at : self.stop])

    def run(self, characters: re.Pattern[str], most: int) -> Reading[str]:
        """Consume what the pattern matches, at most `most` characters. It matches a repeated set of characters."""
        pieces: list[str] = []
        while True:
            end = self._end_of(characters, min(self.stop, self.at + most))
            pieces.append(self.text[self.at : end])
            most -= end - self.at
            self.at = end
            if end < self.stop or most == 0 or not (yield from self.more()):
                return "".join(pieces)

    def available(self, characters: re.Pattern[str]) -> str:
        """Consume what the pattern matches of the text that has arrived. It matches a repeated set of characters."""
        first, self.at = self.at, self._end_of(characters, self.stop)
        return self.text[first : self.at]

    def until(self, markers: Markers) -> Reading[tuple[str, str]]:
        """Consume text before a marker, as far as it has arrived, and the marker behind it: (text, marker or "").

        Both are "" at the end of the text only.
        """
        while True:
            end, marker = markers.find(self.text, self.at, self.stop, is_last=self._is_last)
            if end > self.at or marker:
                text = self.text[self.at : end]
                self.at = end + len(marker)
                return text, marker
            if not (yield from self.more()):
                return "", ""

    @property
    def _is_last(self) -> bool:
        """Whether no text will be readable behind `stop`."""
        return self.ended or (self._mark is not None and self.stop - self._mark == MAX_HELD)

    def _end_of(self, characters: re.Pattern[str], stop: int) -> int:
        found = characters.match(self.text, self.at, stop)
        return found.end() if found else self.at

    def _set_stop(self) -> None:
        self.stop = len(self.text) if self._mark is None else min(len(self.text), self._mark + MAX_HELD)
