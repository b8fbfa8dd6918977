"""The lines that `quire serve` prints while it starts."""

import sys
import textwrap
from collections.abc import Callable
from shutil import get_terminal_size

# how lines begin that only --verbose shows; others are the model, the memory, the context, the address, and problems
_DETAILS = (
    *("policy ", "model      quire's own", "chat       tool", "chat       no", "kernels ", "weights ", "workspace "),
    *("prefixes ", "costs ", "tpot "),
)
_NOT_THE_FASTEST = "; not "  # in the line of kernels: why faster ones are not used
_INDENT = " " * 11  # of labels


class StartLines:
    """Reports the lines of the start. Without `verbose` it leaves out those that begin as in `_DETAILS`."""

    def __init__(self, report: Callable[[str], None], *, verbose: bool) -> None:
        self._report = report
        self._is_brief = not verbose

    def __call__(self, line: str) -> None:
        """Report a line, or leave it out."""
        if not (self._is_brief and _is_detail(line)):
            self._report(line)


def _is_detail(line: str) -> bool:
    if line.startswith("kernels ") and _NOT_THE_FASTEST in line:
        return False
    return line.startswith(_DETAILS) or line.partition(" ")[0].isdigit()  # the number of blocks


def wrapped(line: str) -> str:
    """The line, broken at words if it is longer than a line of the terminal. Without a terminal it stays whole."""
    if not sys.stdout.isatty():
        return line
    width = max(20, get_terminal_size().columns)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=_INDENT if width > 40 else "",
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )
