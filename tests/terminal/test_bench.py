"""`quire bench`: a real server, an engine in this process, and the figures of known times."""

import json
from contextlib import closing
from io import StringIO

import numpy as np
import pytest
from embedded_model_server import run_app, service_of, small_engine
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from quire import LLM
from quire.cli import app
from quire.errors import ConfigError, QuireError
from quire.planner.results import RequestResult
from quire.planner.workloads import Part, Session, Turn
from quire.server.app import make_app
from quire.terminal.bench import (
    Measured,
    bench_latency,
    bench_throughput,
    chart,
    figures,
    find_model,
    measure_server,
    parse_goodput,
    parse_percentiles,
    server_workload,
    show_server,
)
from quire.terminal.bench_options import LatencyBench, ServerBench, ThroughputBench


@pytest.fixture(scope="module")
def url():
    with run_app(make_app(service_of(small_engine()))) as url:
        yield url


def bench(url, **options):
    return ServerBench(base_url=url, model=find_model(url, None), **options)


def test_requests_of_a_server_are_measured(url):
    options = bench(url, num_prompts=6, random_input_len=30, random_output_len=9)
    counted = []
    result = measure_server(options, server_workload(options), advance=lambda *both: counted.append(both))
    assert [(one.num_prompt, one.num_output) for one in result.complete] == [(30, 9)] * 6
    assert all(one.arrived < one.first_token < one.ended <= result.seconds for one in result.complete)
    assert len(result.gaps) > 6 and min(result.gaps) >= 0
    assert counted[-1] == (6, 6)


def test_turns_of_a_session_follow_each_other_and_reuse_their_prefix(url):
    first = Turn((Part(1, 40),), 5)
    workload = [Session(0.0, (first, Turn((Part(2, 10),), 5, parent=0), Turn((Part(3, 10),), 5, parent=1)))]
    result = measure_server(bench(url), workload)
    assert [one.num_prompt for one in result.complete] == [40, 55, 70]
    for before, after in zip(result.requests, result.requests[1:], strict=False):
        assert before.ended <= after.arrived
    assert result.hit_rate > 0


def test_concurrency_is_bounded(url):
    options = bench(url, num_prompts=6, random_input_len=10, random_output_len=20, max_concurrency=2)
    result = measure_server(options, server_workload(options))
    times = sorted([(one.arrived, 1) for one in result.requests] + [(one.ended, -1) for one in result.requests])
    assert np.cumsum([change for _, change in times]).max() <= 2


def test_requests_that_fail_are_counted_with_their_message(url):
    options = bench(url, num_prompts=2, random_input_len=5000, random_output_len=4)
    result = measure_server(options, server_workload(options))
    ((message, number),) = result.errors.items()
    assert number == 2 and "5000 tokens" in message
    assert not result.complete
    screen = StringIO()
    show_server(result, [50], {}, Console(file=screen, width=200))
    assert "0 complete of 2" in screen.getvalue() and message[:40] in screen.getvalue()
    assert figures(result, [50])["mean_ttft_ms"] is None


def test_the_command_writes_figures_and_a_chart(url, tmp_path):
    file, picture = tmp_path / "result.json", tmp_path / "chart.svg"
    options = ["--base-url", url, "--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "5"]
    options += ["--request-rate", "50", "--goodput", "ttft:60000", "--goodput", "e2el:60000"]
    result = CliRunner().invoke(
        app, ["bench", "serve", *options, "--result-filename", str(file), "--plot", str(picture)]
    )
    assert result.exit_code == 0, result.output
    assert "4 complete of 4" in result.output and "100.0% keep" in result.output
    found = json.loads(file.read_text())
    assert found["completed"] == 4 and found["p99_ttft_ms"] >= found["p50_ttft_ms"] > 0
    assert picture.read_text().startswith("<svg")


def test_a_server_without_models_is_named():
    with pytest.raises(QuireError, match="lists no models"):
        find_model("http://127.0.0.1:9", None)


def known(latencies):
    requests = [RequestResult("", 0.0, 10, at / 2, at, "length", 5) for at in latencies]
    return Measured(requests=requests, seconds=max(latencies))


@given(st.lists(st.floats(0.01, 9), min_size=1, max_size=40), st.sampled_from([1.0, 50.0, 90.0, 99.0, 100.0]))
def test_percentiles_are_those_of_numpy(latencies, percent):
    found = figures(known(latencies), [percent])[f"p{percent:g}_e2el_ms"]
    assert found == pytest.approx(1e3 * np.quantile(latencies, percent / 100, method="inverted_cdf"))


def test_goodput_counts_requests_that_keep_all_limits():
    result = known([1.0, 2.0, 3.0, 4.0])
    assert result.good_share({"ttft": 1.6, "latency": 2.5}) == 0.5
    assert result.good_share(parse_goodput(["e2el:3000"])) == 0.75
    assert parse_goodput(["ttft:500", "tpot:50"]) == {"ttft": 0.5, "tpot": 0.05}
    assert "<polyline" in chart(result)


@pytest.mark.parametrize(
    "call",
    [
        lambda: parse_goodput(["ttft=500"]),
        lambda: parse_goodput(["speed:5"]),
        lambda: parse_percentiles("50,x"),
        lambda: parse_percentiles("0"),
        lambda: server_workload(ServerBench(request_rate=0.0)),
        lambda: server_workload(ServerBench(dataset_name="sharegtp")),
        lambda: server_workload(ServerBench(dataset_path="/nowhere")),
    ],
)
def test_wrong_options_are_refused(call):
    with pytest.raises(ConfigError):
        call()


def test_an_engine_in_this_process_is_measured():
    screen = StringIO()
    console = Console(file=screen, width=120)
    with closing(LLM(memory="256MiB", max_model_len=256)) as llm:
        found = bench_throughput(llm, ThroughputBench(num_prompts=5, input_len=12, output_len=6), console)
        assert (found["requests"], round(found["output_tokens_per_second"] * found["elapsed_time"])) == (5, 30)
        options = LatencyBench(batch_size=2, output_len=4, num_iters_warmup=1, num_iters=3)
        found = bench_latency(llm, options, console)
    assert len(found["latencies"]) == 3 and found["percentiles"]["99"] == max(found["latencies"])
    assert "5 requests in" in screen.getvalue() and "p99" in screen.getvalue()
