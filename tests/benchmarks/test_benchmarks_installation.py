"""Helper functions of benchmarks/installation.py and benchmarks/deterministic.py."""

import hashlib
import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

from benchmarks import deterministic, installation


def test_an_interpreter_is_found_by_its_version(monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    version = ".".join(platform.python_version_tuple()[:2])
    assert installation.interpreter(version) is not None
    assert installation.interpreter("3.99") is None


def test_an_interpreter_that_does_not_run_is_not_taken(monkeypatch, tmp_path):
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    assert installation.interpreter("3.12") is None
    good = tmp_path / "pyenv" / "versions" / "3.12.9" / "bin" / "python"
    good.parent.mkdir(parents=True)
    good.write_text("#!/bin/sh\necho 3.12\n")
    good.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert installation.interpreter("3.12") == str(good)


PYTHONS = {"3.12": "/b/python3.12", "3.11": "/a/python3.11", "3.13": "/c/python3.13"}


def test_commits_take_the_pythons_in_turn_and_always_the_same():
    commits = [hashlib.sha1(f"{i}".encode()).hexdigest() for i in range(300)]
    chosen = [installation.of_commit(commit, PYTHONS, "python3", 99.0)[0] for commit in commits]
    assert chosen == [installation.of_commit(commit, PYTHONS, "python3", 99.0)[0] for commit in commits]
    assert all(70 < chosen.count(path) < 130 for path in PYTHONS.values())
    assert installation.of_commit("1", PYTHONS, "python3", 99.0) == (
        "/b/python3.12",
        "commit 1 takes 3.12 of 3.12, 3.11, 3.13",
    )


def test_without_another_python_or_without_room_the_default_is_taken():
    assert installation.of_commit("1", {}, "python3", 99.0)[0] == "python3"
    python, why = installation.of_commit("1", PYTHONS, "python3", 3.0)
    assert python == "python3"
    assert "3.12 is due, but needs 12 GB, and 3 GB are free" in why
    assert installation.of_commit("1", {"3.11": "/a/python3.11"}, "python3", 99.0)[0] == "/a/python3.11"


def test_ci_reads_one_interpreter_that_has_headers():
    root = Path(installation.__file__).parents[1]
    command = [sys.executable, "benchmarks/installation.py", "--of-commit", "0123456789abcdef0123456789abcdef01234567"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    (python,) = done.stdout.splitlines()
    assert done.stderr.startswith(f"python     {python}: ")
    assert python == "python3" or installation.has_headers(python)
    assert not installation.has_headers("/bin/true")
    assert 'make test PYTHON="$PYTHON"' in (root / ".ci" / "run").read_text()


def test_the_pythons_that_are_tried_are_those_of_the_package():
    about = tomllib.loads((Path(installation.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    classified = [one.rpartition(" ")[2] for one in about["classifiers"] if "Python :: 3." in one]
    assert list(installation.PYTHONS) == classified
    assert about["requires-python"] == f">={classified[0]}"


def test_sizes_are_those_of_the_files(tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(30_000_000))
    assert installation.gigabytes(tmp_path) == 0.03


def test_the_installation_trial_inherits_no_make_variables(monkeypatch):
    monkeypatch.setenv("MAKEFLAGS", " -- ARGS=--no-tests")
    monkeypatch.setenv("VENV", "elsewhere")
    assert not {"MAKEFLAGS", "VENV"} & installation.trial_environment().keys()


def test_cpu_seconds_are_measured_for_deterministic_and_ordinary_requests(monkeypatch):
    monkeypatch.setattr(deterministic, "EMBEDDED", {"two tokens": (2, 20, 2)})
    found = deterministic.measure("", "auto", "reference", 1)
    assert list(found) == ["two tokens", "two tokens, ordinary"]
    assert all(seconds > 0 for seconds in found.values())
