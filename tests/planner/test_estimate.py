"""Estimates by means: step times, rates and pools, beside simulations."""

from dataclasses import replace
from math import inf

import pytest

from quire.planner.estimate import demand_of, kv_rows, pools_of, rate_bound, step_seconds
from quire.planner.simulation import Simulation
from quire.planner.workloads import make_workload
from tests.planner.test_simulation import setup_of, single

SETUP = setup_of(num_blocks=4096, max_num_seqs=64)


def test_the_mean_request_is_that_of_the_sessions():
    demand = demand_of([single(0, 100, 10), single(0, 300, 50)], SETUP, 0.25)
    assert (demand.prompt, demand.output) == (150.0, 30.0)
    contexts = [100 + i for i in range(10)] + [300 + i for i in range(50)]
    assert demand.context == pytest.approx(sum(contexts) / 60, rel=0.01)
    assert demand.longest == (300, 50)
    assert demand_of([single(0, 100, 10)], replace(SETUP, num_samples=4), 0.0).output == 40


def test_the_bound_is_near_the_rate_that_a_simulation_completes():
    sessions = make_workload("alpaca", 600, max_model_len=1024)
    bound = rate_bound(SETUP, demand_of(sessions, SETUP, 0.0))
    assert Simulation(SETUP).run(sessions).steady_rate == pytest.approx(bound, rel=0.25)


def test_limits_of_rows_kv_and_step_time_lower_the_bound():
    demand = demand_of(make_workload("alpaca", 200, max_model_len=1024), SETUP, 0.0)
    free = rate_bound(SETUP, demand)
    few_rows = replace(SETUP, scheduler=replace(SETUP.scheduler, max_num_seqs=4))
    assert rate_bound(few_rows, demand) < free
    assert kv_rows(setup_of(num_blocks=8), 64) == 2
    assert rate_bound(setup_of(num_blocks=8, max_num_seqs=64), demand) < free
    fastest = step_seconds(SETUP, demand, 1e-3)
    assert rate_bound(SETUP, demand, 1.05 * fastest) < free
    assert step_seconds(SETUP, demand, 100 * free) == inf


def test_pools_follow_the_lengths_of_prompts_and_outputs():
    long_prompts, long_outputs = (demand_of([single(0, *pair)], SETUP, 0.0) for pair in ((900, 10), (30, 500)))
    assert pools_of(SETUP, long_prompts).ratio < 1 < pools_of(SETUP, long_outputs).ratio
    hurried = pools_of(SETUP, long_outputs, SETUP.profile.decode_seconds(4, 280))
    assert hurried.rows < pools_of(SETUP, long_outputs).rows
    assert hurried.decode > pools_of(SETUP, long_outputs).decode
