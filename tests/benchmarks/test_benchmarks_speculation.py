"""benchmarks.speculation and benchmarks.speculation_peers with few requests: which figures they report."""

import json

from benchmarks import speculation, speculation_peers


def test_right_drafts_are_accepted_and_no_token_changes(monkeypatch, tmp_path):
    run = speculation.Bench.run  # without the governor, whose choice depends on the speed of the machine
    monkeypatch.setattr(speculation.Bench, "run", lambda *args, **options: run(*args, governed=False, **options))
    monkeypatch.setattr(speculation, "BATCHES", (2,))
    monkeypatch.setattr(speculation, "ACCEPTANCES", (0.0, 1.0))
    wrong, right = speculation.controlled(tmp_path, "tiny", rounds=1)
    assert wrong["same tokens"] and right["same tokens"]
    assert right["accepted per run"] > wrong["accepted per run"]
    speculation.draw_map([wrong, right], tmp_path / "map.png", "two cells")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_task_gets_more_than_one_token_a_step(monkeypatch):
    monkeypatch.setattr(speculation.world, "WEIGHTS", {"copy": 8.0})
    (row,) = speculation.earned(rounds=1, num_chats=2, num_before=3)
    assert row["same tokens"]
    assert row["tokens per step"] > 2


def test_drawn_sets_depend_on_the_seed_alone(monkeypatch):
    monkeypatch.setattr(speculation, "_NUM_DRAWN", 1)
    first, again, other = (speculation.drawn(1, 1, 1, seed)[0] for seed in (4, 4, 5))
    drawn = ("tasks", "temperature", "chats before", "requests", "tokens", "tokens per step")
    assert [first[name] for name in drawn] == [again[name] for name in drawn] != [other[name] for name in drawn]
    assert first["same tokens"]


def test_the_interval_of_fifteen_ratios_leaves_out_three_on_each_side():
    assert speculation.interval([value / 10 for value in range(15, 0, -1)]) == (0.4, 1.2)


def test_requests_again_take_few_steps(monkeypatch):
    monkeypatch.setattr(speculation, "TASKS", ("recall", "facts"))
    row = speculation.repeated(1)
    assert row["same tokens"]
    assert row["steps again"] < row["steps"] / 3


def test_records_with_drafts_take_fewer_steps():
    by_way = {row["way"]: row for row in speculation.records(rounds=1, count=4)}
    assert by_way["with drafts"]["same tokens as fast-forward"]
    assert by_way["with drafts"]["steps"] <= by_way["fast-forward"]["steps"] < by_way["token by token"]["steps"]


def test_peers_report_each_task_of_each_engine(tmp_path):
    few = ["--rounds", "1", "--chats", "1", "--before", "1", "--tasks", "copy", "--json", str(tmp_path / "found.json")]
    speculation_peers.main(few)
    (row,) = json.loads((tmp_path / "found.json").read_text())["tasks"]
    assert row["task"] == "copy"
    assert row["quire:auto, tokens per step"] >= 1
    assert row["quire:off, tokens/s"] > 0
