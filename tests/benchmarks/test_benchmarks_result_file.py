"""The header of result files."""

import json
import sys
from datetime import date

from benchmarks.result_file import write_result
from quire.startup.hardware import cpu_description


def test_a_result_file_begins_with_commit_date_machine_and_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python3", "-m", "benchmarks.some", "--shapes", "0.5b 1b"])
    file = tmp_path / "some.json"
    write_result(file, {"rows": [1]}, ["quire/runner"])
    found = json.loads(file.read_text())
    assert list(found) == ["commit", "date", "machine", "command", "code", "rows"]
    assert found["commit"] and date.fromisoformat(found["date"])
    assert found["machine"] == cpu_description()
    assert found["command"] == "python -m benchmarks.some --shapes '0.5b 1b'"


def test_a_description_of_the_machine_replaces_its_name(tmp_path):
    write_result(tmp_path / "some.json", {"machine": {"cpu": "one"}, "seconds": 2.0})
    found = json.loads((tmp_path / "some.json").read_text())
    assert found["machine"] == {"cpu": "one"} and "code" not in found
