"""Runs in a steady state: the trend of a backlog, shares with confidence, giving up, and sessions without beginning."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from quire.planner.results import NUM_BATCHES, RequestResult, SimulationResult, Window
from quire.planner.slo import parse_slo
from quire.planner.steady import MOST_GROWTH, RunTask, SteadyRun, growth_of, kept, run, run_length
from quire.planner.workloads import (
    NO_PARENT,
    Part,
    Session,
    Turn,
    make_workload,
    num_requests,
    repeated,
    stationary,
    tokens_of,
)
from tests.planner.test_simulation import setup_of

SLO = parse_slo("ttft=500ms,tpot=50ms")


def task_of(rate, count=400, must_keep=SLO, **changed):
    sessions = make_workload("alpaca", count, max_model_len=1024)
    fields = {"num_fill": 0, "warm_up": 2.0, "token_seconds": 0.0, "burstiness": None, "seed": 0, **changed}
    return RunTask(setup=setup_of(num_blocks=2048), sessions=sessions, rate=rate, must_keep=must_keep, **fields)


def open_requests(rng, seconds, rate, overload):
    """Means of a backlog: a Poisson number that forgets half of itself in each part, and that grows by `overload`."""
    level, means = rate * 1.0, []
    noise = 0.0
    for part in range(NUM_BATCHES):
        noise = 0.3 * noise + rng.normal(0, (0.2 * level) ** 0.5)
        means.append(level + noise + overload * rate * (part + 0.5) * seconds / NUM_BATCHES)
    return means


def test_a_steady_backlog_has_no_trend_and_one_that_grows_has_with_the_stated_power():
    rng, seconds, rate = np.random.default_rng(1), 60.0, 40.0
    steady = [growth_of(open_requests(rng, seconds, rate, 0.0), seconds, 2400) for _ in range(2000)]
    assert np.mean([one.is_trend for one in steady]) < 0.02
    detectable = float(np.median([one.detectable for one in steady]))
    assert MOST_GROWTH < detectable < 0.05
    growing = [growth_of(open_requests(rng, seconds, rate, detectable), seconds, 2400) for _ in range(2000)]
    assert np.mean([one.is_trend for one in growing]) > 0.9  # the error of each is estimated from 8 parts
    assert np.mean([one.share for one in growing]) == pytest.approx(detectable, rel=0.02)


def test_a_backlog_that_wanders_has_no_trend():
    """The parts of a busy engine's backlog depend on each other: it is far from its mean for a long time."""
    rng = np.random.default_rng(2)
    walks = [growth_of(np.cumsum(rng.normal(0, 30, NUM_BATCHES)).tolist(), 60.0, 2400) for _ in range(2000)]
    assert np.mean([one.share > MOST_GROWTH for one in walks]) > 0.3
    assert np.mean([one.is_trend for one in walks]) < 0.02


def test_a_growth_below_what_matters_is_no_trend():
    means = [100 + 0.004 * 40 * part * 7.5 for part in range(NUM_BATCHES)]
    growth = growth_of(means, 60.0, 2400)
    assert growth.share == pytest.approx(0.004)
    assert not growth.is_trend
    assert growth_of([100 + 4 * (mean - 100) for mean in means], 60.0, 2400).is_trend


def test_late_requests_that_come_together_say_less_about_their_share():
    window = Window(10.0, 90.0)

    def least(late):
        requests = [RequestResult("", 10 + 0.1 * i, 1) for i in range(800)]
        found = kept(SimulationResult(requests=requests), window, lambda one: requests.index(one) in late)
        assert found.share == pytest.approx(1 - len(late) / 800)
        return found.least

    spread, together = least(set(range(50, 800, 100))), least(set(range(400, 408)))
    assert together < spread <= 0.99
    assert least(set()) == 1.0


def test_a_run_is_as_long_as_four_longest_requests_and_has_enough_late_ones():
    fast = run_length(100.0, 20.0, [], 0.99)
    assert (fast.warm_up, fast.window, fast.num_requests) == (20.0, 80.0, 10_000)
    slow = run_length(1.0, 20.0, [5.0] * 9 + [100.0], 0.99, num_fill=50)
    assert slow.window == pytest.approx(1000)
    assert slow.num_requests == pytest.approx(1000 + slow.warm_up + 50, abs=2)


def test_a_low_rate_holds_and_one_beyond_the_capacity_is_stopped_early():
    calm, overloaded = (SteadyRun(task, run(task), SLO) for task in (task_of(20.0), task_of(400.0)))
    assert calm.holds() and calm.verdict == "met"
    assert not overloaded.holds() and overloaded.verdict == "missed"
    assert overloaded.result.stopped_early
    assert overloaded.result.num_steps < calm.result.num_steps / 2
    whole = SteadyRun(overloaded.task, run(replace(overloaded.task, must_keep=None)), SLO)
    assert whole.verdict == "missed"


def test_without_a_limit_that_breaks_a_backlog_that_grows_is_found():
    endless = parse_slo("tpot=10s")
    task = task_of(400.0, 1200, endless, warm_up=0.5)
    found = SteadyRun(task, run(task), endless)
    assert not endless.violations(found.result)
    assert found.verdict == "queue grows"
    assert found.growth.share > 0.3


def test_the_requests_that_fill_the_cache_arrive_at_the_same_rate_and_do_not_count():
    task = task_of(40.0, num_fill=100, must_keep=None)
    result, window = run(task), task.window()
    assert window.stop == pytest.approx(400 / 40)
    assert window.start == pytest.approx(100 / 40 + 2.0)
    assert len(result.requests) / (window.stop - window.start) == pytest.approx(40, rel=0.2)


def chat(at, pauses, tenant=""):
    turns = [Turn((Part(7, 30),), 10)]
    turns += [Turn((Part(100 + place, 5),), 10, place, pause) for place, pause in enumerate(pauses)]
    return Session(at, tuple(turns), tenant)


def test_sessions_that_go_on_for_ever_have_as_many_requests_in_each_part():
    sessions = [chat(at / 10, [3.0] * 40) for at in range(300)]
    found = stationary(sessions, 30.0)
    assert num_requests(found) == num_requests(sessions)
    sent = np.concatenate([np.cumsum([one.at, *(turn.pause for turn in one.turns[1:])]) for one in found])
    assert sent.max() < 30.0
    counts, _ = np.histogram(sent, 6, (0, 30))
    assert counts.min() > 0.9 * counts.max()


def test_a_turn_of_a_session_that_began_before_has_the_context_of_the_turns_before_it():
    session = chat(8.0, [5.0, 5.0, 1.0])
    first, second = sorted(stationary([session], 10.0), key=lambda one: len(one.turns))
    assert (first.at, len(first.turns)) == (8.0, 1)
    assert (second.at, len(second.turns)) == (3.0, 3)
    opening = second.turns[0]
    assert opening.parent == NO_PARENT
    lengths = [len(tokens_of(part, 1000)) for part in opening.new]
    assert lengths == [30, 10, 5]
    assert [turn.parent for turn in second.turns[1:]] == [0, 1]


def test_a_repeated_trace_shares_no_prefix_with_its_repetitions():
    sessions = [Session(0.0, (Turn((Part(1, 64),), 2),)), Session(3.0, (Turn((Part(1, 64),), 2),), "a")]
    found = repeated(sessions, 5)
    assert [one.at for one in found] == [0.0, 3.0, 4.5, 7.5, 9.0, 12.0]
    assert len({one.tenant for one in found}) == 6
    assert found[:2] == sessions
    assert inf not in [one.at for one in found]
