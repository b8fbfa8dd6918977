"""Result files: figures with the commit, date, machine and command of their measurement.

tests/repository/test_result_files.py fails for a file of benchmarks/results without these, and for a figure of the
README whose file rests on code that has changed since: `code` of a file names that code. `recovered` names fields that
an old file did not have, and that were taken from the log, the pages and the history; commands then are the usual ones.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.commit import commit_of
from quire.startup.hardware import cpu_description


def header(code: Sequence[str] = ()) -> dict[str, Any]:
    """What each result file begins with. code: files and folders whose change makes the figures stale."""
    about: dict[str, Any] = {
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": cpu_description(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }
    return about | ({"code": list(code)} if code else {})


def _commit() -> str:
    try:
        return commit_of()
    except (OSError, subprocess.CalledProcessError):  # a copy of the files alone
        return "unknown"


def write_result(file: Path, figures: Mapping[str, Any], code: Sequence[str] = ()) -> None:
    """Write figures behind a header; a `machine` or `commit` among them replaces that of the header."""
    file.write_text(json.dumps(header(code) | dict(figures), indent=1) + "\n")
