"""The benchmark of the simulator's speed runs, and states commit and machine."""

import json
import sys

from benchmarks import simulation_speed


def test_a_small_run_writes_its_figures(monkeypatch, tmp_path):
    file = tmp_path / "speed.json"
    monkeypatch.setattr(sys, "argv", ["simulation_speed", "--requests", "40", "--json", str(file)])
    simulation_speed.main()
    found = json.loads(file.read_text())
    assert found["complete"] == 40 and found["simulation_seconds"] > 0
    assert found["commit"] and found["machine"]
