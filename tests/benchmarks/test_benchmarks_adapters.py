"""Small runs of the benchmark of adapters."""

import json

import pytest

from benchmarks import adapters


@pytest.mark.parametrize("case", ["one, rank 16, all", "32, rank 16, q and v", "int8", "unused"])
def test_steps_are_compared_with_those_of_an_engine_without_adapters(case, tmp_path):
    file = tmp_path / "figures.json"
    adapters.main(["--only", "steps", "--case", case, "--shape", "tiny", "--rounds", "2", "--json", str(file)])
    (row,) = json.loads(file.read_text())["steps"]
    assert case in row["case"]
    assert row["ratio"] > 0
    assert 0 < row["bound"] <= 1
    assert (row["bound"] == 1) == (case == "unused")


def test_many_registered_adapters_are_served_with_few_in_memory(tmp_path):
    file = tmp_path / "figures.json"
    small = ["--shape", "tiny", "--rounds", "2", "--registered", "24", "--seconds", "0.3", "--json", str(file)]
    adapters.main(["--only", "registered", *small])
    found = json.loads(file.read_text())["registered"]
    assert found["16"]["tokens_per_second"] > 0
    assert found["24"]["gap_ms_p99"] >= found["24"]["gap_ms_median"] > 0
    assert found["first_token_ms_read"] > 0


def test_activated_adapters_compute_little_of_the_conversation_again(tmp_path):
    file = tmp_path / "figures.json"
    adapters.main(["--only", "activated", "--shape", "tiny", "--json", str(file)])
    assert 0 <= json.loads(file.read_text())["activated"]["largest_share_computed_again"] < 0.03


def test_an_unknown_part_is_refused():
    with pytest.raises(SystemExit, match="steps, registered"):
        adapters.main(["--only", "stairs"])
