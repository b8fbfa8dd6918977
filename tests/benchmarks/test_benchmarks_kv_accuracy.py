"""benchmarks/kv_accuracy: a small run."""

import json

from benchmarks import kv_accuracy
from quire.hub import embedded


def test_a_small_run_has_a_row_for_each_type_and_text(tmp_path, capsys, monkeypatch):
    texts = []
    for name, text in (
        ("first", "Alice has 3 apples and buys 5 more. " * 8),
        ("second", "A list: 4, 8, 15, 16, 23, 42. " * 8),
    ):
        texts.append(tmp_path / name)
        texts[-1].write_text(text)
    arguments = [str(embedded.folder()), *map(str, texts), "--tokens", "60", "--json", str(tmp_path / "figures.json")]
    monkeypatch.setattr("sys.argv", ["kv_accuracy", *arguments])
    kv_accuracy.main()
    rows = json.loads((tmp_path / "figures.json").read_text())["types"]
    assert [(row["text"], row["kv"]) for row in rows] == [(t.name, kind) for t in texts for kind in kv_accuracy.KINDS]
    exact, fp8, int8, int4 = rows[4:]
    assert (exact["kl"], exact["ratio"], exact["tokens"]) == (0, 1, 60)
    assert 0 < int8["kl"] < int4["kl"] < 0.5 and fp8["kl"] > 0
    assert int4["bytes_per_token"] < int8["bytes_per_token"] == fp8["bytes_per_token"] < exact["bytes_per_token"] / 3
    assert capsys.readouterr().out.count("| int4 |") == 2
