"""The recorded corpus replays unchanged: schedules, greedy outputs and HTTP responses (see tools/corpus)."""

import json

import pytest
from example_budget import part_of

from tools.corpus import greedy, http, schedules
from tools.corpus.__main__ import FOLDER

NUM_GROUPS = 4  # of schedules, a case each


def recorded(name):
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_schedules_are_the_recorded_ones(pytestconfig, group):
    expected = part_of(recorded("schedules"), pytestconfig)[group::NUM_GROUPS]
    assert len(expected) >= schedules.NUM_SCHEDULES // 4 // NUM_GROUPS
    assert [
        entry["seed"]
        for entry in expected
        if {"seed": entry["seed"], **schedules.Schedule(entry["seed"]).run()} != entry
    ] == []


def test_greedy_outputs_are_the_recorded_ones():
    found = list(greedy.record())
    expected = [entry for entry in recorded("greedy") if entry["kernels"] in {one["kernels"] for one in found}]
    assert found == expected


def test_http_responses_are_the_recorded_ones():
    expected = recorded("http")
    found = [json.loads(json.dumps(entry)) for entry in http.record()]
    assert [entry["request"] for entry in found] == [entry["request"] for entry in expected]
    different = [(entry, other) for entry, other in zip(expected, found, strict=True) if not http.same(entry, other)]
    assert different == []


def test_the_recorded_schedules_are_many_and_long():
    """A small corpus would compare little."""
    steps = [entry["steps"] for entry in recorded("schedules")]
    assert len(steps) == 500
    assert sorted(steps)[len(steps) // 10] > 20


def test_a_difference_would_be_seen():
    answer = {"status": 200, "answer": {"n": [1, 0.5], "text": "a"}}
    assert http.same(answer, {"status": 200, "answer": {"n": [1, 0.5004], "text": "a"}})
    for other in ({"n": [1, 0.6], "text": "a"}, {"n": [1], "text": "a"}, {"n": [1, 0.5]}, {"n": [1, 0.5], "text": "b"}):
        assert not http.same(answer, {"status": 200, "answer": other})
    assert schedules.Schedule(1).run() != schedules.Schedule(2).run()
