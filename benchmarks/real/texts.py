"""Texts that the distribution and Python ship: licences, Python's documentation and its sources.

/usr/share/common-licenses is of Debian and its relatives (package base-files). pydoc_data.topics is the part of
Python's language reference that `help()` shows.
"""

import inspect
import sys
import textwrap
from pathlib import Path
from pydoc_data.topics import topics

_LICENSES = Path("/usr/share/common-licenses")


def gpl() -> str:
    """The GNU General Public License, version 3, unwrapped: one line a paragraph."""
    try:
        text = (_LICENSES / "GPL-3").read_text(encoding="utf-8")
    except OSError as error:
        sys.exit(f"the benchmarks read {_LICENSES}/GPL-3, which Debian's package base-files has: {error}")
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def python_reference(*names: str) -> str:
    """Topics of Python's language reference as `help()` shows them, of all topics without names."""
    return "\n".join(topics[name].strip() for name in names or sorted(topics))


def source(function: object) -> str:
    """The Python source of a function of the standard library."""
    return textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]  # a function
