"""`make trace` measures the path of a request, and docs/architecture.md names its files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPINE = re.compile(r"^\| `([\w/]+\.py)` \|", re.MULTILINE)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    command = [sys.executable, "-m", "tools.trace", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Scheduler.plan" in done.stdout
    return json.loads(file.read_text())


def test_the_files_of_the_story_are_on_the_path_of_a_request(report):
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = SPINE.findall(page[page.index("in ten files") : page.index("## The steps in detail")])
    assert len(files) == 10
    assert not set(files) - set(report["http"]["path"])


def test_a_traced_call_within_another_has_part_of_its_path(report):
    for name, first in {"admission": "KVCache.admit", "step": "Engine.step"}.items():
        inner, outer = report[name], report["offline"]
        assert first in next(iter(inner["path"].values()))
        assert set(inner["path"]) <= set(outer["path"])
        assert 0 < inner["calls"] < outer["calls"]


def test_a_call_that_does_not_happen_is_an_error():
    script = "from tools.trace import *\nwith Recorder().recorded(Function('errors.py', 'nearest'), 2): pass"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "LookupError" in done.stderr and "was not called 2 times" in done.stderr
