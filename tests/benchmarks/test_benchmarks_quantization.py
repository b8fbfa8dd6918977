"""benchmarks/quantization: a small run, and the arithmetic of paired differences."""

import json

import pytest

from benchmarks import quantization
from benchmarks.quantization import Row


def test_a_small_run_has_a_row_for_each_case(tmp_path, capsys, monkeypatch):
    arguments = ["--chats", "1", "--texts", "12", "--only", "int4:auto", "--json", str(tmp_path / "figures.json")]
    monkeypatch.setattr("sys.argv", ["quantization", *arguments])
    quantization.main()
    assert "| int4:auto | cpu |" in capsys.readouterr().out
    exact, four = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert (exact["case"], exact["lost"], exact["won"], exact["kl"]) == ("float32:auto", 0, 0, 0)
    assert exact["answers"] == four["answers"] > 20
    assert four["weight_bytes"] < exact["weight_bytes"] / 6
    assert 0 < four["kl"] < 0.1


def test_the_paired_difference_counts_changed_answers():
    row = Row("int8:auto", "cpu", 1, 1, answers=100, right=90, lost=6, won=2, perplexity=1.0, kl=0.0, kl_error=0.0)
    assert row.difference == (-4.0, pytest.approx(2.8, abs=0.01))
    with pytest.raises(SystemExit, match="no case 'int3:auto'"):
        quantization.options_of("int3:auto")
