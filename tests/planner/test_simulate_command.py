"""`quire simulate`, from options to figures."""

import json

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.planner.options import WorkloadOptions
from quire.planner.simulate import simulate
from quire.scheduler.journal import replay_journal


def run(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def test_a_simulation_is_reported_and_its_journal_replays(tmp_path):
    figures, journal = tmp_path / "figures.json", tmp_path / "journal"
    result = run(
        *("opt-13b", "--device", "a100-40gb", "--max-model-len", "2048", "--rate", "2", "--num-requests", "40"),
        *("--aborted", "0.1", "--json", str(figures), "--journal", str(journal)),
    )
    assert result.exit_code == 0, result.output
    assert "opt-13b on A100-40GB" in result.output
    assert "ms a step + " in result.output
    found = json.loads(figures.read_text())
    assert found["requests"] == 40
    assert 0 < found["ttft_p50"] < found["ttft_p99"]
    report = replay_journal(journal)
    assert (report.difference, report.num_steps) == ("", found["steps"])


def test_options_of_the_engine_change_the_simulation():
    def seconds(**changed):
        options = EngineOptions(model="llama-3.1-8b", device="H100", max_model_len=2048, **changed)
        return simulate(options, WorkloadOptions(num_requests=16, workload="alpaca"), report=lambda _: None)[0].seconds

    assert seconds(quantization="int4") < 0.8 * seconds()
    assert seconds(max_num_seqs=2) > 2 * seconds()


def test_requests_may_have_several_samples_or_beams():
    def result(**sequences):
        options = EngineOptions(model="llama-3.1-8b", device="H100", max_model_len=2048, max_num_seqs=32)
        wanted = WorkloadOptions(num_requests=8, workload="alpaca", **sequences)
        return simulate(options, wanted, report=lambda _: None)[0]

    alone, samples, beams = (result(**one) for one in ({}, {"num_samples": 4}, {"beam_width": 4}))
    for several in (samples, beams):
        assert sum(one.num_output for one in several.requests) == 4 * sum(one.num_output for one in alone.requests)
        assert alone.seconds < several.seconds < 4 * alone.seconds


def test_a_trace_keeps_its_times_unless_a_rate_is_given(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000.0 * i, "input_length": 40, "output_length": 4} for i in range(20)]
    trace.write_text("\n".join(map(json.dumps, lines)))

    def last(**more):
        options = EngineOptions(model="llama-2-7b", device="H100")
        result, _ = simulate(options, WorkloadOptions(trace=str(trace), **more), report=lambda _: None)
        return max(one.arrived for one in result.requests)

    assert last() == pytest.approx(19.0, abs=0.1)
    assert last(num_requests=5) == pytest.approx(4.0, abs=0.1)
    assert last(rate=10.0) == pytest.approx(1.9, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "name a device; known: A100-40GB"),
        (["--device", "H100", "--workload", "sharegtp"], "did you mean 'sharegpt'"),
        (["--device", "H100", "--rate", "0"], "rate must be above 0"),
        (["--device", "H100", "--burstiness", "0.5"], "burstiness needs a rate"),
        (["--device", "H100", "--trace", "/none"], "cannot be read"),
    ],
)
def test_wrong_options_are_explained(arguments, error):
    result = run("llama-2-7b", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert error in str(result.exception)
