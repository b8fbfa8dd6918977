"""Control characters in text of others, shown instead of sent to a terminal.

A terminal obeys them: it clears the screen, moves the cursor, changes its title, or writes the clipboard. Characters
that reverse the direction of text let a line look like another one.
"""

import logging
import re
from collections.abc import Callable

# C0 without tab and line feed, DEL, C1, line and paragraph separators, directions, and halves of surrogate pairs
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_UNSAFE_IN_LINE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_UNSAFE_JSON = re.compile(b"\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa6-\xa9]")  # JSON escapes the others


def visible(text: str) -> str:
    r"""The text with each control character as `\x1b` or `\u202e`. Tabs and line feeds stay."""
    return _UNSAFE.sub(_escaped, text)


def visible_line(text: str) -> str:
    r"""The text as one line: also with tabs and line feeds as `\x09` and `\x0a`."""
    return _UNSAFE_IN_LINE.sub(_escaped, text)


def visible_json(data: bytes) -> bytes:
    r"""JSON with the same value, in which all control characters are written as `\u009b`."""
    if data.isascii() and b"\x7f" not in data:
        return data
    return _UNSAFE_JSON.sub(lambda match: f"\\u{ord(match[0].decode()):04x}".encode(), data)


def visibly(write: Callable[[str], None]) -> Callable[[str], None]:
    """A function that writes the visible form of a text."""
    return lambda text: write(visible(text))


class VisibleFormatter(logging.Formatter):
    """Formatter of log records. A message is one line; the lines of a traceback stay."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The message as one line."""
        return visible_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """The message and its traceback."""
        return visible(super().format(record))


def show_in_logs() -> None:
    """Use the formatter for records of a program that configures no logging."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())


def _escaped(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
