"""Helper functions of benchmarks/installation.py and benchmarks/deterministic.py."""

import os
import platform
import sys
from pathlib import Path

from benchmarks import deterministic, installation


def test_an_interpreter_is_found_by_its_version(monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    version = ".".join(platform.python_version_tuple()[:2])
    assert installation.interpreter(version) is not None
    assert installation.interpreter("3.99") is None


def test_sizes_are_those_of_the_files(tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(30_000_000))
    assert installation.gigabytes(tmp_path) == 0.03


def test_what_runs_the_trial_hands_nothing_on_to_it(monkeypatch):
    monkeypatch.setenv("MAKEFLAGS", " -- ARGS=--no-tests")
    monkeypatch.setenv("VENV", "elsewhere")
    assert not {"MAKEFLAGS", "VENV"} & installation._environment().keys()


def test_cpu_seconds_are_measured_for_deterministic_and_ordinary_requests(monkeypatch):
    monkeypatch.setattr(deterministic, "EMBEDDED", {"two tokens": (2, 20, 2)})
    found = deterministic.measure("", "auto", "reference", 1)
    assert list(found) == ["two tokens", "two tokens, ordinary"]
    assert all(seconds > 0 for seconds in found.values())
