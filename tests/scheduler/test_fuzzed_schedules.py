"""Random schedules end with the right tokens (tools/fuzz_schedules); schedules that once failed are kept here."""

import json
from pathlib import Path

import pytest

from quire.scheduler.sequence import Sequence
from tools import fuzz_schedules
from tools.fuzz_schedules import fault_of, main, minimized, random_schedule

EXAMPLES = sorted((Path(__file__).parent / "schedules").glob("*.json"))


def loaded(name):
    return json.loads((Path(__file__).parent / "schedules" / f"{name}.json").read_text())


@pytest.fixture
def forgotten_pending_samples(monkeypatch):
    """The fault that the schedules `beam_preempted_in_flight` found."""

    def discard(seq):
        seq.epoch += 1

    monkeypatch.setattr(Sequence, "discard_in_flight", discard)


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_a_schedule_that_once_failed_is_right(path):
    assert fault_of(json.loads(path.read_text())) is None


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_schedules_are_right(first):
    faults = {seed: fault_of(random_schedule(seed)) for seed in range(first, first + 20)}
    assert {seed: fault for seed, fault in faults.items() if fault} == {}


def test_a_schedule_is_a_function_of_its_seed():
    assert random_schedule(3) == random_schedule(3) != random_schedule(4)
    assert random_schedule(3) == json.loads(json.dumps(random_schedule(3)))


@pytest.mark.usefixtures("forgotten_pending_samples")
def test_a_fault_is_found_and_minimized():
    schedule = loaded("beam_preempted_in_flight_1")
    fault = fault_of(schedule)
    assert fault is not None and fault.kind == "accounting" and "0 chunks in flight" in fault.detail
    padded = schedule | {"events": [["pause", 0.5], *schedule["events"], ["flush"]]}
    smaller = minimized(padded, fault.kind)
    assert len(smaller["events"]) <= len(schedule["events"])
    assert fault_of(smaller).kind == fault.kind


@pytest.mark.usefixtures("forgotten_pending_samples")
def test_the_command_prints_what_fails_and_ends_with_1(capsys):
    path = next(path for path in EXAMPLES if path.stem == "beam_preempted_in_flight_1")
    with pytest.raises(SystemExit) as end:
        main(["--replay", str(path)])
    assert end.value.code == 1
    assert "accounting: sequence" in capsys.readouterr().out


def test_the_command_prints_its_first_seed(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--seeds", "3"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "again: python -m tools.fuzz_schedules --first " in said and "3 schedules, 0 failed" in said


def test_a_run_that_is_stopped_has_recorded_what_ran(tmp_path, monkeypatch):
    def stopped(*_):
        yield from ((seed, None) for seed in range(5))
        raise KeyboardInterrupt

    monkeypatch.setattr(fuzz_schedules, "_SEEDS_PER_BATCH", 2)
    monkeypatch.setattr(fuzz_schedules, "_faults", stopped)
    with pytest.raises(KeyboardInterrupt):
        main(["--first", "0", "--json", str(tmp_path / "counts.json")])
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert (counts["schedules"], counts["failed"]) == (4, 0)
