"""RestartPolicy: delays between starts, the deadline, and crash loops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.supervisor.restart_policy import FIRST_DELAY, MAX_CRASHES, MAX_DELAY, MIN_LIFETIME, RestartPolicy

SERVED = {"lifetime": 60.0, "num_committed": 9, "had_work": True}
CRASHED = {"lifetime": 0.1, "num_committed": 0, "had_work": True}
ENDED_AT_ONCE = {"lifetime": 0.1, "num_committed": 0, "had_work": False}


def test_the_delay_doubles_up_to_its_maximum_and_starts_over_when_an_engine_has_served():
    policy = RestartPolicy(600.0, now=0.0)
    policy.record_end(100.0, **SERVED)
    delays = []
    for _ in range(2000):
        delays.append(policy.delay)
        policy.record_failed_start()
    assert delays[:7] == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 5.0]
    assert set(delays[7:]) == {MAX_DELAY}
    assert policy.deadline == 700.0
    policy.record_end(200.0, **SERVED)
    assert (policy.delay, policy.deadline) == (0.0, 800.0)


@pytest.mark.parametrize(
    ("end", "delay", "deadline", "num_crashes"),
    [
        (SERVED, 0.0, 150.0, 0),
        (CRASHED, 0.0, 100.0, 1),
        (ENDED_AT_ONCE, FIRST_DELAY, 100.0, 0),
        (ENDED_AT_ONCE | {"num_committed": 1}, 0.0, 150.0, 0),
        (ENDED_AT_ONCE | {"lifetime": MIN_LIFETIME}, 0.0, 150.0, 0),
        (CRASHED | {"lifetime": 60.0}, 0.0, 150.0, 1),
    ],
)
def test_an_engine_that_served_resets_the_restart_delay_and_deadline(end, delay, deadline, num_crashes):
    policy = RestartPolicy(100.0, now=0.0)
    policy.record_end(0.0, **ENDED_AT_ONCE)
    policy.record_end(50.0, **end)
    if end in (ENDED_AT_ONCE, CRASHED):
        delay = 2 * FIRST_DELAY if end == ENDED_AT_ONCE else FIRST_DELAY
    assert (policy.delay, policy.deadline, policy.num_crashes) == (delay, deadline, num_crashes)


def test_crashes_with_requests_are_a_loop_after_more_than_bisection_needs():
    policy = RestartPolicy(100.0, now=0.0)
    for _ in range(MAX_CRASHES):
        policy.record_end(1.0, **CRASHED)
    assert not policy.is_crash_loop
    policy.record_end(1.0, **CRASHED)
    assert policy.is_crash_loop
    policy.record_end(1.0, **SERVED)
    assert not policy.is_crash_loop


@given(st.lists(st.sampled_from(["start", "crash", "at once"])))
def test_without_a_timeout_there_is_no_deadline(events):
    policy = RestartPolicy(0.0, now=0.0)
    for event in events:
        if event == "start":
            policy.record_failed_start()
        else:
            policy.record_end(1.0, **(CRASHED if event == "crash" else ENDED_AT_ONCE))
        assert policy.deadline is None
        assert 0 <= policy.delay <= MAX_DELAY


def test_the_outage_begins_when_the_first_engine_ends_that_has_not_served():
    policy = RestartPolicy(3.0, now=0.0)
    policy.record_end(4.0, **ENDED_AT_ONCE)
    assert policy.deadline == 7.0, "at least one start is tried"
    policy.record_end(5.0, **CRASHED)
    assert policy.deadline == 7.0


def test_idle_ends_between_crashes_evade_neither_the_deadline_nor_the_count():
    policy = RestartPolicy(600.0, now=0.0)
    for i in range(MAX_CRASHES + 1):
        policy.record_end(2.0 * i, **CRASHED)
        policy.record_end(2.0 * i + 1, **ENDED_AT_ONCE)
    assert policy.is_crash_loop
    assert policy.deadline == 600.0


def test_a_crash_whose_culprit_was_found_resets_the_count_of_crashes():
    policy = RestartPolicy(600.0, now=0.0)
    for _ in range(MAX_CRASHES):
        policy.record_end(1.0, **CRASHED)
    policy.record_end(1.0, **CRASHED, found_culprit=True)
    assert policy.num_crashes == 0


def test_a_restart_that_was_asked_for_begins_an_outage_of_its_own():
    policy = RestartPolicy(600.0, now=0.0)
    policy.record_failed_start()
    policy.record_request(5000.0)
    assert (policy.deadline, policy.delay, policy.is_crash_loop) == (5600.0, 0.0, False)
