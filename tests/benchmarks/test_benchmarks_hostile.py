"""The hostile load: its bodies are refused as meant, and a phase measures the quiet tenant."""

import json
import subprocess
import sys

from benchmarks.hostile.__main__ import Figures, is_good, table


def test_two_phases_are_played_and_recorded(tmp_path):
    path = tmp_path / "hostile.json"
    command = [sys.executable, "-m", "benchmarks.hostile", "--only", "messages", "small", "--seconds", "1.5"]
    subprocess.run([*command, "--json", path], check=False, timeout=100, capture_output=True)
    phases = json.loads(path.read_text())["phases"]
    assert set(phases) == {"messages", "small"}
    for figures in phases.values():
        assert set(figures["statuses"]) == {"400"}
        assert not figures["problems"]
        assert figures["num_events"] > 10
        assert figures["longest_live"] > 0


def test_figures_beyond_their_floors_are_marked():
    good = Figures(0.2, 0.3, 0.05, None, 3.0, 100)
    slow = Figures(0.3, 0.3, 0.6, None, 3.0, 100)
    assert is_good("large", good)
    assert not is_good("large", slow)
    assert not is_good("unread", Figures(0.2, 0.3, 0.05, None, 101.0, 100))
    gap, live = (list(column.cells)[1] for column in table({"large": good, "deep": slow}).columns[1:3])
    assert (gap, live) == ("0.3 !", "0.6 !!")
