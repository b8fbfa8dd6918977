"""The benchmark of parsed streams runs, and both streams have all tokens."""

import json
import sys

from benchmarks import chat_parsing


def test_a_small_run_writes_its_figures(monkeypatch, tmp_path):
    file = tmp_path / "parsing.json"
    monkeypatch.setattr(sys, "argv", ["chat_parsing", "--tokens", "60", "--pairs", "2", "--json", str(file)])
    chat_parsing.main()
    found = json.loads(file.read_text())
    assert found["tokens"] > 30
    assert 0 < found["least"] <= found["ratio"] <= found["most"]
    assert found["commit"] and found["machine"]
