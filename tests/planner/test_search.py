"""The search for the sustainable rate: brackets, processes, and the requests that it takes."""

import json
from concurrent.futures.process import BrokenProcessPool

import pytest

from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.planner.options import WorkloadOptions
from quire.planner.search import TOLERANCE, Requests, Runs, Search, Sustained
from quire.planner.setup import find_model, plan_engine
from quire.planner.slo import parse_slo
from quire.planner.steady import SteadyRun
from quire.planner.workloads import num_requests

OPTIONS = EngineOptions(model="llama-3.1-8b", device="H100", max_model_len=1024, max_num_seqs=8)
ENGINE = plan_engine(OPTIONS, "H100")
WANTED = WorkloadOptions(workload="alpaca", num_requests=60)


def found(slo="ttft=300ms,tpot=20ms", start=20.0, workers=1, wanted=WANTED):
    messages = []
    with Runs(workers, messages.append, lambda _done, _total: None) as runs:
        search = Search(wanted, parse_slo(slo), Requests(wanted, find_model(OPTIONS), 0), runs)
        return search.roughly(ENGINE, start, "rate", quick=True), messages


@pytest.mark.parametrize("start", [2.0, 20.0, 300.0])
def test_the_rate_found_holds_and_one_a_little_above_does_not_wherever_the_search_begins(start):
    sustained, messages = found(start=start)
    assert sustained.best.holds(surely=False)
    assert not sustained.above.holds(surely=False)
    assert sustained.rate < sustained.above.rate <= sustained.rate * (1 + TOLERANCE)
    assert any(f"{sustained.rate:.2f}" in line for line in messages)


def test_an_slo_that_no_rate_meets_has_no_rate():
    sustained, _ = found("tpot=1ms")
    assert sustained.rate == 0
    assert "tpot" in sustained.above.slo.violations(sustained.above.result)


def test_two_processes_find_what_one_finds():
    alone, beside = (found(workers=workers)[0] for workers in (1, 2))
    assert (alone.rate, alone.above.rate) == (beside.rate, beside.above.rate)
    assert alone.best.result == beside.best.result


def test_a_process_that_was_killed_between_runs_is_replaced_by_this_one(monkeypatch):
    class Broken:
        def submit(self, *_):
            raise BrokenProcessPool

        def shutdown(self, **_):
            pass

    monkeypatch.setattr("quire.planner.search.ProcessPoolExecutor", lambda *_, **__: Broken())
    assert found(workers=2)[0].rate == found()[0].rate


def trace(tmp_path, count):
    file = tmp_path / "trace.jsonl"
    lines = [json.dumps({"timestamp": 1000 * i, "input_length": 40, "output_length": 4}) for i in range(count)]
    file.write_text("\n".join(lines))
    return str(file)


def test_a_trace_is_read_as_far_as_it_is_needed_and_repeated_where_it_is_shorter(tmp_path):
    model = find_model(OPTIONS)
    long = Requests(WorkloadOptions(trace=trace(tmp_path, 1000)), model, 0)
    assert num_requests(long.take(200, 1024)) == 200
    assert long.num_in_trace is None
    short = Requests(WorkloadOptions(trace=trace(tmp_path, 30)), model, 0)
    assert num_requests(short.take(200, 1024)) == 200
    assert short.num_in_trace == 30
    given = Requests(WorkloadOptions(trace=trace(tmp_path, 30), num_requests=20), model, 0)
    assert num_requests(given.take(200, 1024)) == 20


def test_a_trace_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Requests(WorkloadOptions(trace=str(tmp_path / "none")), find_model(OPTIONS), 0).take(5, 1024)


def test_a_trace_of_which_no_request_fits_has_no_rate(tmp_path):
    file = tmp_path / "trace.jsonl"
    line = json.dumps({"timestamp": 0, "input_length": 4000, "output_length": 4})
    file.write_text("\n".join([line] * 30))
    wanted = WorkloadOptions(trace=str(file))
    with Runs(1, lambda _: None, lambda _done, _total: None) as runs:
        search = Search(wanted, parse_slo("ttft=300ms"), Requests(wanted, find_model(OPTIONS), 0), runs)
        sustained = search.sustainable(ENGINE, search.estimate(ENGINE, search.at_once(ENGINE)), "rate")
    assert sustained.best is None
    assert {one.reason for one in sustained.above.result.requests} == {"rejected"}


def test_a_rate_that_never_surely_holds_is_no_rate(monkeypatch):
    monkeypatch.setattr(SteadyRun, "holds", lambda one, *, surely=True: not one.task.rate < 10 and not surely)
    with Runs(1, lambda _: None, lambda _done, _total: None) as runs:
        search = Search(WANTED, parse_slo("ttft=300ms"), Requests(WANTED, find_model(OPTIONS), 0), runs)
        best = search.roughly(ENGINE, 20.0, "rate", quick=True).best
        monkeypatch.setattr(search, "_bracket", lambda *_, **__: Sustained(best, None))
        sustained = search.sustainable(ENGINE, 20.0, "rate")
    assert sustained.best is None
    assert sustained.above is not None
