"""Engine health: when an engine counts as stalled, and metrics over several successive engines."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.engine import EngineStats
from quire.supervisor.engine_loop import HEARTBEAT_SECONDS, IDLE_SECONDS
from quire.supervisor.health import STALL_SECONDS, CumulativeStats, StallDetector

WATCHED = 0.25  # seconds between two checks


def turns_red(detector, *, pulses_until, turned=None, until=60.0):
    """When the watchdog first finds a stall of an engine that sends heartbeats for some time; None if never.

    turned(now): start of the engine's last loop iteration. There are no other events after 0.
    """
    now, next_pulse = 0.0, 0.0
    while now < until:
        while next_pulse <= min(now, pulses_until):
            detector.record_heartbeat(0.0 if turned is None else turned(next_pulse), next_pulse)
            next_pulse += HEARTBEAT_SECONDS
        if detector.stalled_seconds(now):
            return now
        now += WATCHED
    return None


def test_a_busy_engine_without_heartbeats_is_stalled_within_two_seconds():
    detector = StallDetector(0.0)
    detector.record_launch(30.0, 0.0)  # with any duration
    assert turns_red(detector, pulses_until=0.0) < 2


def test_an_idle_engine_without_heartbeats_is_stalled_within_two_seconds():
    detector = StallDetector(0.0)
    detector.record_idle(0.0)
    assert turns_red(detector, pulses_until=0.0) < 2


def test_an_engine_without_a_first_message_is_stalled_within_two_seconds():
    assert turns_red(StallDetector(0.0), pulses_until=-1) < 2


def test_a_hanging_step_is_stalled_within_two_seconds_in_spite_of_heartbeats():
    detector = StallDetector(0.0)
    detector.record_launch(0.02, 0.0)
    assert turns_red(detector, pulses_until=60) < 2


def test_a_loop_that_hangs_between_steps_is_stalled_within_two_seconds():
    detector = StallDetector(-5.0)
    detector.record_launch(20.0, -5.0)
    detector.record_idle(0.0)
    assert turns_red(detector, pulses_until=60) < 2


def test_a_step_that_was_said_to_take_long_has_three_times_as_long():
    detector = StallDetector(0.0)
    detector.record_launch(4.0, 0.0)
    assert 12 < turns_red(detector, pulses_until=60) < 12.5


def test_a_step_of_which_nothing_is_predicted_has_longer():
    detector = StallDetector(0.0)
    detector.record_launch(0.0, 0.0)
    assert 10 < turns_red(detector, pulses_until=60) < 10.5


def test_a_short_step_behind_a_long_one_waits_for_it():
    detector = StallDetector(-0.1)
    detector.record_launch(4.0, -0.1)
    detector.record_launch(0.02, 0.0, is_queued=True)
    assert turns_red(detector, pulses_until=60) > 12
    detector.record_launch(0.02, 60.0, is_queued=True)
    for now in (62.9, 63.1):  # the long step is over
        detector.record_heartbeat(60.0, now)
        assert detector.stalled_seconds(now) == pytest.approx(0.0 if now < 63 else 3.1)


def test_a_short_step_after_a_long_one_does_not_inherit_its_time():
    detector = StallDetector(-9.0)
    detector.record_launch(4.0, -9.0)
    detector.record_launch(0.02, 0.0)
    assert turns_red(detector, pulses_until=60) < 2


def test_an_idle_engine_is_never_red():
    detector = StallDetector(0.0)
    assert turns_red(detector, pulses_until=60, turned=lambda now: now - now % IDLE_SECONDS) is None


def test_a_stall_ends_with_the_first_sign_of_life():
    detector = StallDetector(0.0)
    detector.record_launch(0.02, 0.0)
    assert detector.stalled_seconds(3.0) == 3.0
    detector.record_heartbeat(0.0, 3.0)  # the process is alive, the step is not
    assert detector.stalled_seconds(3.0) == 3.0
    detector.record_launch(0.02, 3.0)
    assert detector.stalled_seconds(3.0) == 0.0


def test_a_heartbeat_sent_before_a_step_does_not_reset_its_stall_time():
    detector = StallDetector(0.0)
    detector.record_launch(0.02, 5.0)
    detector.record_heartbeat(4.0, 5.0)
    assert detector.stalled_seconds(5.0 + STALL_SECONDS) == 0.0


@given(steps=st.lists(st.tuples(st.floats(0.001, 20), st.floats(0.1, 2.9)), min_size=1, max_size=20))
def test_steps_below_three_times_their_prediction_never_count_as_stalled(steps):
    """Steps of less than 1.5 s never count as stalled either."""
    detector, now = StallDetector(0.0), 0.0
    for predicted, factor in steps:
        detector.record_launch(predicted, now)
        ends, began = now + predicted * factor, now
        while now < ends:
            detector.record_heartbeat(began, now)
            now = min(ends, now + HEARTBEAT_SECONDS)
            assert detector.stalled_seconds(now) == 0.0


def stats(**values):
    return msgspec.structs.replace(EngineStats.zero(), **values)


COUNTERS = sorted(set(EngineStats.__struct_fields__) - EngineStats.GAUGES)


def test_every_figure_is_a_number_that_counts_or_a_gauge():
    assert set(EngineStats.__struct_fields__) >= EngineStats.GAUGES
    assert all(isinstance(getattr(EngineStats.zero(), name), int | float) for name in COUNTERS)


@given(
    engines=st.lists(
        st.lists(st.lists(st.integers(0, 50), min_size=len(COUNTERS), max_size=len(COUNTERS)), max_size=4), max_size=5
    )
)
def test_counters_go_on_over_several_engines(engines):
    """Each engine counts from 0. The reported value is the sum over all engines, and never falls."""
    tally = CumulativeStats(EngineStats.zero())
    total = [0] * len(COUNTERS)
    for place, increments in enumerate(engines):
        if place:
            tally.engine_ended()
            assert [getattr(tally.stats, name) for name in COUNTERS] == total
        count = [0] * len(COUNTERS)
        for more in increments:
            count = [a + b for a, b in zip(count, more, strict=True)]
            total = [a + b for a, b in zip(total, more, strict=True)]
            tally.update(stats(**dict(zip(COUNTERS, count, strict=True)), num_running=7))
            assert [getattr(tally.stats, name) for name in COUNTERS] == total
            assert tally.stats.num_running == 7


def test_gauges_are_those_of_the_current_engine_and_zero_while_there_is_none():
    tally = CumulativeStats(EngineStats.zero())
    tally.update(stats(num_running=5, num_waiting=2, kv_blocks_used=9, kv_blocks_total=50, failed_in_a_row=4))
    tally.engine_ended()
    assert {name: getattr(tally.stats, name) for name in EngineStats.GAUGES} == {
        name: getattr(EngineStats.zero(), name) for name in EngineStats.GAUGES
    }
    tally.update(stats(num_running=1, kv_blocks_total=40, last_step_seconds=0.5, waiting_because="tokens"))
    assert (tally.stats.num_running, tally.stats.num_waiting, tally.stats.kv_blocks_total) == (1, 0, 40)
    assert tally.stats.last_step_seconds == 0.5
    assert tally.stats.waiting_because == "tokens"


def test_an_engine_that_ends_before_its_first_message_keeps_the_cumulative_stats():
    tally = CumulativeStats(EngineStats.zero())
    tally.update(stats(num_steps=5, prompt_tokens=70))
    for _ in range(3):
        tally.engine_ended()
    tally.update(stats(num_steps=1, prompt_tokens=10))
    assert (tally.stats.num_steps, tally.stats.prompt_tokens) == (6, 80)
