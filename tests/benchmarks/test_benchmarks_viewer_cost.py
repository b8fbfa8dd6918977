"""The cost of viewers is measured on a real server; here with sizes whose figures have no meaning."""

import json
import sys

import pytest

from benchmarks import viewer_cost


@pytest.mark.skipif(sys.platform != "linux", reason="it reads CPU times from /proc")
def test_windows_with_and_without_a_viewer_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(viewer_cost, "describe", dict)
    monkeypatch.setattr(viewer_cost, "SETTLE_SECONDS", 0.5)
    out = tmp_path / "cost.json"
    sizes = ["--sequences", "4", "--seconds", "1", "--pairs", "2", "--port", "8931"]
    monkeypatch.setattr(sys, "argv", ["viewer_cost", *sizes, "--json", str(out)])
    viewer_cost.main()
    found = json.loads(out.read_text())
    assert len(found["pairs"]) == 2 and found["goals"].keys() == found["medians"].keys()
    for pair in found["pairs"]:
        assert pair["updates_per_second"] > 0 and min(pair["tokens_per_second"]) > 0
        assert pair["engine_us_per_token"] > 0
