"""Which tests catch a fault, in stages, and the file that has the results."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.changed_tests import selection
from tools.mutations.checkout import Checkout
from tools.mutations.faults import Fault, mirrored_tests

MIRRORED, WHOLE = "mirrored", "whole"  # stages: the tests that mirror the file; the others of the suite


class Catch(NamedTuple):
    """The result of one fault. tests: node ids that fail with it and pass without it; empty if none does."""

    tests: list[str]
    stage: str  # of these tests; of the last one that ran if there are none
    seconds: float
    is_near: bool  # whether `make test-changed` runs one of the tests after a change of the file


def catch(fault: Fault, checkout: Checkout, *, whole: bool) -> Catch:
    """Run the tests with a fault: those that mirror its file, and with `whole` then all others, until some catch it."""
    began = time.monotonic()
    tests, stage = list[str](), MIRRORED
    for stage, arguments in _stages(fault, checkout.folder, whole=whole):  # noqa: B007 (the last one is returned)
        tests = _catching(fault, checkout, arguments)
        if tests:
            break
    near = selection([fault.file], checkout.folder).files if tests else []
    is_near = any(test.partition("::")[0] in near for test in tests)
    return Catch(tests, stage, time.monotonic() - began, is_near)


def _stages(fault: Fault, repository: Path, *, whole: bool) -> Iterator[tuple[str, list[str]]]:
    mirrored = mirrored_tests(fault, repository)
    yield MIRRORED, mirrored
    if whole:
        yield WHOLE, ["tests", *(f"--ignore={folder}" for folder in mirrored)]


def _catching(fault: Fault, checkout: Checkout, tests: list[str]) -> list[str]:
    """The first tests that fail twice with the fault, and pass without it.

    Where those fail without it as well, or only once, the tests that have not run follow.
    """
    words = [word for file in (fault.file, *fault.tests) for word in Path(file).stem.split("_")]
    left_out: list[str] = []
    while True:
        with checkout.with_fault(fault):
            first = checkout.run(tests, words=words, without=left_out)
            if not set(first.failed).difference(left_out):  # a file that cannot be imported would fail forever
                return []
            again = checkout.run(first.failed)
        without = checkout.run(again.failed).failed
        found = [test for test in again.failed if test not in without]
        if found:
            return [*found[:-1], f"{found[-1]} (timeout)"] if again.is_late else found
        left_out += [*first.ran, *first.failed]


class Results:
    """The results of a run in a JSON file, which has each as soon as it is there."""

    def __init__(self, file: Path, about: dict[str, Any], commit: str, sources: str) -> None:
        """about: what the file says beside the results. sources: a hash of what is tested, and of the tests.

        A file of an earlier run is continued.
        """
        self._file = file
        self._about = about
        self._commit = commit
        self._sources = sources
        self._by_id: dict[str, dict[str, Any]] = {}
        if file.exists():
            self._by_id = {one["id"]: one for one in json.loads(file.read_text(encoding="utf-8"))["faults"]}

    def find(self, fault: Fault) -> dict[str, Any] | None:
        """The result of a fault for these sources and this patch; None without one."""
        found = self._by_id.get(fault.id)
        is_same = found is not None and (found["sources"], found["patch"]) == (self._sources, fault.digest)
        return found if is_same else None

    def add(self, fault: Fault, result: Catch) -> None:
        """Add a result, and write the file."""
        self._by_id[fault.id] = {
            "id": fault.id,
            "area": fault.area,
            "file": fault.file,
            "patch": fault.digest,
            "commit": self._commit,
            "sources": self._sources,
            "caught": bool(result.tests),
            "tests": result.tests,
            "stage": result.stage,
            "test_changed": result.is_near,
            "seconds": round(result.seconds),
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_suffix(".tmp")
        content = {**self._about, "faults": list(self._by_id.values())}
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self._file)
