"""The results of a suite: cases, and the known reasons of those that fail."""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Column, Table

ABOUT = Path(__file__).with_name("cases.toml")
UNEXPLAINED = "unexplained"


class SuiteError(Exception):
    """A suite could not be run. The message says why."""


class Case(NamedTuple):
    """The result of one case of a test file. message: of the failure, or an empty string."""

    file: str
    name: str
    passed: bool
    message: str = ""


class Reason(NamedTuple):
    """Why a case fails. kind: one of the classes of cases.toml, or UNEXPLAINED."""

    kind: str
    text: str


def about(suite: str) -> Mapping[str, Any]:
    """The table of a suite in cases.toml."""
    table: Mapping[str, Any] = tomllib.loads(ABOUT.read_text())[suite]
    return table


def reason_of(case: Case, reasons: Mapping[str, Sequence[str]]) -> Reason:
    """The reason that is known for a case that failed, under its name with or without its parameters."""
    for name in (case.name, case.name.partition("[")[0]):
        found = reasons.get(f"{case.file}::{name}") or reasons.get(name)
        if found is not None:
            return Reason(*found)
    return Reason(UNEXPLAINED, case.message.strip().split("\n")[0])


def report(cases: Sequence[Case], reasons: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Counts by file and by class of reason, and each case that failed with its reason."""
    failed = [(case, reason_of(case, reasons)) for case in cases if not case.passed]
    files = {
        file: {"passed": sum(case.passed for case in cases if case.file == file), "cases": count}
        for file, count in Counter(case.file for case in cases).items()
    }
    return {
        "passed": sum(case.passed for case in cases),
        "cases": len(cases),
        "files": files,
        "failed_by_class": dict(Counter(reason.kind for _, reason in failed).most_common()),
        "failed": [
            {"case": f"{case.file}::{case.name}", "class": reason.kind, "reason": reason.text}
            for case, reason in failed
        ],
    }


def table_of(suite: str, found: Mapping[str, Any]) -> Table:
    """A line for each file: cases that passed, all, and those that failed by class."""
    table = Table(
        Column("file", overflow="fold"),
        "passed",
        "of",
        "failed",
        title=f"{suite}: {found['passed']} of {found['cases']}",
    )
    for file, counts in found["files"].items():
        kinds = Counter(one["class"] for one in found["failed"] if one["case"].startswith(f"{file}::"))
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        table.add_row(file, str(counts["passed"]), str(counts["cases"]), shown)
    return table
