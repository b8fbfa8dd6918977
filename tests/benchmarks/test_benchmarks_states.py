"""benchmarks.states runs at a small size and writes its figures."""

import json

import pytest

pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
states = pytest.importorskip("benchmarks.states")


def test_prompts_and_decode_steps_are_measured_beside_transformers(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(states, "STATE_BYTES", 2**16)
    monkeypatch.setattr(states, "ROUNDS", 1)
    file = tmp_path / "states.json"
    states.main(
        ["--tokens", "70", "--rows", "1,3", "--heads", "2", "--head-dim", "16", "--threads", "1", "--json", str(file)]
    )
    figures = json.loads(file.read_text())
    assert {"commit", "machine", "command", "code"} <= figures.keys()
    assert [step["rows"] for step in figures["decode"]] == [1, 3]
    for step in (figures["prompt"], *figures["decode"]):
        assert all(value > 0 for value in step.values())
    assert "prompt of 70" in capsys.readouterr().out
