"""The plugin that measures the CPU seconds of tests: a run with a case or a file above its budget fails."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import case_times
import pytest

CONFTEST = """
import case_times
pytest_plugins = ["case_times"]
case_times.CASE_SECONDS, case_times.FILE_SECONDS = 0.2, 0.5
"""
TESTS = """
import subprocess, sys, time
import pytest

def work(seconds, *, in_child=False):
    if in_child:
        subprocess.run([sys.executable, "-c", f"import test_it; test_it.work({seconds})"], check=True)
        return
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_one():
    pass
"""


def run(folder: Path, tests: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a run whose budgets are 0.2 s for a case and 0.5 s for a file."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS + tests)
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    env = {"PYTHONPATH": str(Path(case_times.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": ""}
    done = subprocess.run([*command, *arguments, "."], cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("tests", "over"),
    [
        ("", None),
        ("def test_two(): time.sleep(0.3)", None),
        ("def test_two(): work(0.3)", "test_it.py::test_two: 0.3 CPU seconds, at most 0"),
        ("def test_two(): work(0.6, in_child=True)", "test_it.py: 0."),
        ("@pytest.mark.cpu_seconds(2, reason='slow')\ndef test_two(): work(0.6)", None),
        ("@pytest.mark.cpu_seconds(2, reason='slow')\ndef test_two(): work(0.6, in_child=True)", None),
        ("@pytest.mark.cpu_seconds(0.4, reason='slow')\ndef test_two(): work(0.5, in_child=True)", "::test_two: 0."),
    ],
    ids=["within", "asleep", "case", "programs of a file", "allowed", "programs allowed", "above what is allowed"],
)
def test_a_run_with_budgets_fails_if_a_case_or_file_takes_more(tmp_path, tests, over):
    code, output = run(tmp_path, tests, "--test-budgets")
    assert code == (0 if over is None else 1), output
    assert ("CPU seconds, at most" in output) == (over is not None)
    assert over is None or over in output


def test_bounds_are_those_of_the_machine_of_the_recorded_run():
    recorded = {f"test_{i}.py": {"cpu": 2.0 + i, "children": 1.0} for i in range(case_times.LEAST_FILES)}

    def here(times):
        return {name: {key: times * value for key, value in one.items()} for name, one in recorded.items()}

    assert case_times.slowness(here(0.5), recorded) == 1
    assert case_times.slowness(here(1.5) | {"test_new.py": {"cpu": 99.0, "children": 0.0}}, recorded) == 1.5
    one_slow = here(1.5) | {"test_3.py": {"cpu": 99.0, "children": 0.0}}
    assert case_times.slowness(one_slow, recorded) == 1.5
    del one_slow["test_0.py"]
    assert case_times.slowness(one_slow, recorded) == 1  # too few


def test_without_budgets_a_long_case_is_named_and_the_run_passes(tmp_path):
    code, output = run(tmp_path, "def test_two(): work(0.3)", f"--test-times={tmp_path / 'times.json'}")
    assert code == 0
    assert "test_it.py::test_two: 0.3 CPU seconds, at most 0" in output
    times = json.loads((tmp_path / "times.json").read_text())
    assert times["cases"]["test_it.py::test_two"] >= 0.3
    assert times["files"]["test_it.py"]["cases"] == 2


def test_marked_cases_are_those_that_contributing_counts():
    marked = Counter(
        path.name
        for path in Path(__file__).parents[1].rglob("test_*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("@pytest.mark.cpu_seconds(")
    )
    assert marked == {
        "test_cpu_emulated_tiles.py": 1,
        "test_triton_compilation.py": 1,
        "test_reproduce.py": 1,
        "test_plan.py": 2,
        "test_cpu_extension_build.py": 1,
        "test_openapi_fuzz.py": 1,
    }
