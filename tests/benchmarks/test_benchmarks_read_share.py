"""benchmarks/read_share.py: segments have all decode steps, and the share is that of the time for their bytes."""

import json

import pytest

from benchmarks.cpu.checkpoints import checkpoint
from benchmarks.cpu.machine import reader
from benchmarks.read_share import Segment, Stream, figures, main
from quire import LLM


def test_the_share_is_that_of_the_time_in_which_the_machine_reads_the_bytes():
    """100 bytes of KV a token. Two steps with 1,600 bytes each and two with 1,800."""
    segments = [Segment(1, 2, 2.0, 3200.0), Segment(3, 2, 3.0, 1800.0)]
    found = figures(segments, 4, weights=1000, kv=100)
    assert found["share"] == pytest.approx((3200 / 3200 + 3600 / 1800) / 5)
    assert found["decode_gb_per_second"] == pytest.approx(6800 / 5 / 1e9)
    assert found["decode_tokens_per_second"] == pytest.approx(4 / 5)
    assert found["read_gb_per_second"] == pytest.approx(2500 / 1e9)


def test_segments_have_all_decode_steps(tmp_path):
    llm = LLM(checkpoint("tiny", tmp_path), dtype="float32", memory="1GiB", speculation="off")
    segments = Stream(llm, 8, reader(2**20, 1)).run([20, 21, 22], 21)
    assert [(segment.first, segment.num_steps) for segment in segments] == [(1, 8), (9, 8), (17, 4)]
    assert all(segment.seconds > 0 and segment.rate > 0 for segment in segments)


def test_a_small_model_is_measured_in_each_quantization(tmp_path):
    file = tmp_path / "figures.json"
    main(["--shape", "tiny", "--rounds", "1", "--quantizations", "int8,none", "--json", str(file)])
    found = json.loads(file.read_text())
    assert set(found["figures"]) == {"int8", "none"} and found["commit"]
    for one in found["figures"].values():
        assert one["share"]["median"] > 0 and one["decode_tokens_per_second"]["median"] > 0
