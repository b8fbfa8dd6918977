"""Predicted against measured latencies: the same requests run live and simulated, and what the errors mean."""

import pytest

from benchmarks.prediction import compare, live, short_pauses
from quire.config import EngineOptions
from quire.planner.results import RequestResult
from quire.planner.simulation import Simulation
from quire.planner.workloads import make_workload, with_arrivals
from quire.startup.build import build
from tests.planner.test_simulation import setup_of


def test_live_and_simulated_requests_are_the_same():
    workload = with_arrivals(short_pauses(make_workload("agents", 6, max_model_len=512, seed=3)), 100.0)
    options = EngineOptions(max_num_seqs=16, memory="64MiB", max_model_len=512, dtype="float32", threads=1)
    engine = build(options, report=lambda _line: None, progress=lambda _done, _total: None).engine
    measured, predicted = live(engine, workload), Simulation(setup_of()).run(workload).requests
    assert len(measured) == len(predicted) == 6
    sizes = [sorted((one.num_prompt, one.num_output) for one in some) for some in (measured, predicted)]
    assert sizes[0] == sizes[1]
    assert all(one.is_complete and one.latency > one.ttft > 0 for one in measured)
    row = compare(predicted, measured)
    assert row["requests"] == 6
    assert row["latency_measured_ms"] > row["ttft_measured_ms"] > 0


def test_errors_are_relative_to_what_was_measured():
    def result(first, end):
        return RequestResult("", 0.0, 1, first_token=first, ended=end, reason="length", num_output=2)

    row = compare([result(1.0, 2.0), result(3.0, 6.0)], [result(2.0, 4.0), result(2.0, 4.0)])
    assert row["ttft_error_of_mean"] == 0
    assert row["ttft_error_of_requests"] == pytest.approx(0.5)
    assert row["latency_error_of_mean"] == 0
