"""SECURITY.md names a test for each defence and for each bound, and these tests exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


HEADS = (
    "| threat | defence | tests |\n|---|---|---|\n",
    "| what grows | with what | its bound | its test |\n|---|---|---|---|\n",
)


@pytest.mark.parametrize(("head", "least"), [(HEADS[0], 12), (HEADS[1], 30)])
def test_every_defence_and_every_bound_names_tests_that_exist(head, least):
    found = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    _, after = PAGE.split(head)
    rows = [line.split(" | ") for line in after.partition("\n\n")[0].splitlines()]
    assert len(rows) >= least
    for what, *cells, tests in rows:
        assert len(cells) == head.count("---") - 2
        named = re.findall(r"`(test_\w+)`", tests)
        assert named, f"no test covers: {what}"
        assert set(named) <= found, f"not there: {sorted(set(named) - found)}"
