"""Runs pytest and records which tests begin and fail: python -P recorder.py RECORD WITHOUT WORDS [ARGUMENT]...

RECORD gets a JSON line per event. WITHOUT has a node id per line, of tests that do not run. WORDS are joined by "_":
tests in files whose names have most of them run first. The other arguments are pytest's. The program imports nothing of
quire, as it also runs for other repositories.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import pytest


class Recorder:
    """Plugin of pytest."""

    def __init__(self, record: TextIO, without: Iterable[str], words: Iterable[str]) -> None:
        self._record = record
        self._without = frozenset(without)
        self._words = frozenset(words)
        self._has_failed = False

    def pytest_sessionstart(self) -> None:
        """Do not shrink examples of properties that fail, which takes minutes."""
        if (hypothesis := sys.modules.get("hypothesis")) is not None:  # imported before its plugin, it would warn
            phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
            hypothesis.settings.register_profile("mutations", hypothesis.settings(), phases=phases)
            hypothesis.settings.load_profile("mutations")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave tests out, and run the likely ones first. The order within a file stays."""
        items[:] = sorted(
            (item for item in items if item.nodeid not in self._without),
            key=lambda item: -len(self._words.intersection(item.path.stem.split("_"))),
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be imported."""
        if report.failed:
            self._write("failed", report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the test that runs now, which a crash of the process would leave without a report."""
        self._write("began", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failure of a test, or of its fixtures."""
        if report.failed:
            self._has_failed = True
            self._write("failed", report.nodeid)

    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """End the run with the file in which a test has failed."""
        if self._has_failed and (nextitem is None or nextitem.path != item.path):
            item.session.shouldstop = "a test of this file has failed"

    def _write(self, event: str, test: str) -> None:
        self._record.write(json.dumps({event: test}) + "\n")
        self._record.flush()


if __name__ == "__main__":
    path, without_path, joined, *arguments = sys.argv[1:]
    ids = Path(without_path).read_text(encoding="utf-8").splitlines()
    with Path(path).open("w", encoding="utf-8") as opened:
        sys.exit(pytest.main(arguments, [Recorder(opened, ids, joined.split("_"))]))
