"""SECURITY.md names a test for each defence, and these tests exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def test_every_defence_names_tests_that_exist():
    found = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    _, rows = PAGE.split("| threat | defence | tests |\n|---|---|---|\n")
    rows = [line.split(" | ") for line in rows.splitlines() if line.startswith("|")]
    assert len(rows) >= 12
    for threat, _defence, tests in rows:
        named = re.findall(r"`(test_\w+)`", tests)
        assert named, f"no test covers: {threat}"
        assert set(named) <= found, f"not there: {sorted(set(named) - found)}"
