"""tools/mutations: the table of faults fits the sources, and the tool runs on a small repository."""

import ast
import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tools.mutations.__main__ import main
from tools.mutations.faults import Fault, mirrored_tests, read_faults

ROOT = Path(__file__).resolve().parents[2]
FAULTS = read_faults(ROOT)
LEAST = {
    **{"cache": 8, "scheduler": 8, "speculation": 5, "kernels in C++": 7, "kernels in Python and Triton": 5},
    **{"sampling": 4, "server": 7, "store": 3, "chat": 5, "structured outputs": 4, "weights": 4, "planner and cost": 3},
}


def test_each_fault_fits_one_place_of_its_file_and_leaves_valid_python():
    for fault in FAULTS:
        source = (ROOT / fault.file).read_text(encoding="utf-8")
        patched = fault.patched(source)
        assert patched != source, fault.id
        if not fault.is_compiled:
            assert ast.dump(ast.parse(patched)) != ast.dump(ast.parse(source)), f"{fault.id} changes no code"


def test_faults_have_ids_of_their_own_and_tests_that_could_catch_them():
    assert max(Counter(fault.id for fault in FAULTS).values()) == 1
    for fault in FAULTS:
        folders = mirrored_tests(fault, ROOT)
        assert folders and all((ROOT / folder).exists() for folder in folders), fault.id
        assert fault.harm.endswith("."), fault.id


def test_faults_are_spread_over_all_areas_and_many_were_real():
    counts = Counter(fault.area for fault in FAULTS)
    assert len(FAULTS) >= 60
    assert {area: counts[area] for area in LEAST if counts[area] < LEAST[area]} == {}
    assert 2 * sum(bool(fault.was_real) for fault in FAULTS) >= len(FAULTS)


def test_text_that_is_missing_or_occurs_twice_is_refused():
    fault = Fault("cache", "twice", "quire/a.py", "x", "y", "It fails.")
    assert fault.patched("1 x 2") == "1 y 2"
    for source in ("1", "x x"):
        with pytest.raises(ValueError, match="twice: `old` occurs"):
            fault.patched(source)


@pytest.mark.parametrize(
    ("file", "folders"),
    [
        ("quire/cache/prefix/radix_tree.py", ["tests/cache/prefix"]),
        ("quire/kernels/cpu/csrc/blocks.cpp", ["tests/kernels/cpu"]),
        ("quire/tenant_memory.py", ["tests/test_tenant_memory.py"]),
        ("quire/config.py", []),
    ],
)
def test_the_tests_of_a_file_are_those_of_the_nearest_folder(file, folders):
    assert mirrored_tests(Fault("", "", file, "", "", ""), ROOT) == folders
    assert mirrored_tests(Fault("", "", file, "", "", "", tests=("tests/x",)), ROOT) == [*folders, "tests/x"]


SUM = "def total(numbers):\n    result = 0\n    for one in numbers:\n        result += one\n    return result\n"
TESTS = """
from pathlib import Path

RUNS = Path({runs!r})

def test_total():
    from quire.numbers.sums import total
    with RUNS.open("a") as file:
        file.write("run\\n")
    assert total([1, 2]) == 3

def test_that_always_fails():
    assert False

def test_that_fails_once():
    if not (mark := RUNS.with_name("mark")).exists():
        mark.touch()
        assert False
"""
NOTHING = """
from importlib import import_module

def test_nothing():
    assert import_module(".sums", "quire.numbers").total([]) == 0
"""
TABLE = """
[[numbers]]
id = "sum-keeps-the-last-number"
file = "quire/numbers/sums.py"
old = "result += one"
new = "result = one"
harm = "Totals are wrong."

[[numbers]]
id = "sum-of-nothing-is-one"
file = "quire/numbers/sums.py"
old = "    return result"
new = "    return result if numbers else 1"
harm = "Totals of nothing are wrong."
"""


def git(folder, *arguments):
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def mutations(tmp_path, monkeypatch, capsys):
    """Runs the tool on the repository in tmp_path / "small". Returns its exit code and the lines that it prints."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of the tests of that repository: they start sooner
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")

    def run(*arguments):
        code = main(["--repository", str(tmp_path / "small"), "--jobs", "1", *arguments])
        return code, capsys.readouterr().out.splitlines()

    return run


def test_faults_of_a_small_repository_are_caught_or_not_and_run_once(tmp_path, mutations):
    repository, runs = tmp_path / "small", tmp_path / "runs"
    for name, content in {
        ".gitignore": "build/\n",
        "quire/numbers/sums.py": SUM,
        "tests/numbers/test_sums.py": TESTS.format(runs=str(runs)),
        "tests/test_nothing.py": NOTHING,
        "pytest.ini": "[pytest]\npythonpath = .\n",
        "tools/mutations/faults.toml": TABLE,
    }.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(content)
    git(repository, "init", "--quiet")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "begin")

    code, printed = mutations()
    assert code == 1
    assert printed[-1] == "1 of 2 faults are caught, 1 by tests that `make test-changed` runs"
    assert printed[0].endswith("mirrored  tests/numbers/test_sums.py::test_total")
    assert printed[1].endswith("mirrored  NOT CAUGHT")
    first, second = json.loads((repository / "build/mutations/results.json").read_text())["faults"]
    assert first["tests"] == ["tests/numbers/test_sums.py::test_total"]  # the others fail without the fault, or once
    assert (first["caught"], second["caught"]) == (True, False)
    assert (repository / "quire/numbers/sums.py").read_text() == SUM

    num_runs = len(runs.read_text().splitlines())
    assert mutations() == (code, printed)
    assert len(runs.read_text().splitlines()) == num_runs, "a fault with a result for these sources does not run again"

    (repository / "tools/mutations/faults.toml").write_text(TABLE.replace("else 1", "else 2"))
    code, printed = mutations("--whole", "--only", "sum-of-nothing-is-one")
    assert code == 0
    assert printed[0].endswith("whole     tests/test_nothing.py::test_nothing")
    assert printed[1] == "1 of 1 faults are caught, 0 by tests that `make test-changed` runs"
    assert len(runs.read_text().splitlines()) > num_runs, "another patch is another fault"


def test_faults_are_selected_by_id_and_folder(capsys):
    assert main(["--list", "--folder", "quire/scheduler"]) == 0
    listed = capsys.readouterr().out
    assert "planned-moves-are-no-work  (scheduler, quire/scheduler/scheduler.py)" in listed
    assert "    Was real: commit b15ebb4: moves that are planned keep the engine at work." in listed
    assert "quire/server" not in listed
    with pytest.raises(SystemExit):
        main(["--only", "no-such-fault"])
    assert "no such fault: no-such-fault; --list prints all" in capsys.readouterr().err
