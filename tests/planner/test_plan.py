"""`quire plan`: the sustainable rate, the search over options, reports, and models that do not fit."""

import json
import re
import shlex
import xml.etree.ElementTree as ET
from dataclasses import fields, replace
from html.parser import HTMLParser
from math import inf

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import quire.planner.plan as planning
from quire.cli import app
from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.planner.charts import line_chart, stacked_bars
from quire.planner.options import WorkloadOptions
from quire.planner.plan import make_plan, serve_command
from quire.planner.reasons import reasons_of
from quire.planner.report import figures, headline, html_page, terminal_tables
from quire.planner.search import Sustained
from quire.planner.slo import parse_slo
from quire.planner.steady import SteadyRun


def options_of(**changed):
    return EngineOptions(**{"model": "llama-3.1-8b", "device": "H100", "max_model_len": 2048, **changed})


ALPACA = WorkloadOptions(workload="alpaca", num_requests=40)


@pytest.fixture(scope="module")
def plan():
    return make_plan(options_of(max_num_seqs=16), ALPACA, parse_slo("ttft=200ms,tpot=20ms"), search=False)


def test_the_sustainable_rate_meets_the_slo_and_a_higher_one_does_not(plan):
    assert plan.rate > 0
    verdicts = {point.rate: point.verdict for point in plan.curve}
    assert verdicts[plan.rate] == "met"
    assert plan.sustained.above.rate > plan.rate
    assert plan.sustained.above.verdict in ("missed", "queue grows", "not surely")
    assert list(verdicts) == sorted(verdicts)
    assert plan.at_rate in plan.curve


def test_reasons_name_memory_rate_and_what_breaks_above_it(plan):
    text = "\n".join(reasons_of(plan))
    assert "Memory: weights take 14.96 GiB" in text
    assert f"At {plan.rate:.2f} requests/s" in text
    assert re.search(r"exceeds? (its limit|their limits)|queue grows|not sure to keep", text)


def test_a_report_is_one_page_with_charts_and_no_other_file(plan):
    page = html_page(plan)
    HTMLParser().feed(page)
    assert page.count("<svg") == 2
    assert "quire serve llama-3.1-8b --max-model-len 2048 --max-num-seqs 16" in page
    assert not re.search(r"<script|<link|src=|href=|url\(", page)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)
    assert json.loads(json.dumps(figures(plan), allow_nan=False))["requests_per_second"] == plan.rate
    assert len(terminal_tables(plan)) == 2
    assert "sustains" in headline(plan)


@pytest.mark.cpu_seconds(12, reason="a plan in runs of thousands of requests")
def test_a_search_recommends_what_helps_and_lists_what_lossy_options_would_give(monkeypatch):
    monkeypatch.setattr(planning, "KNOBS", {"max_num_seqs": (8, 2), "quantization": (None, "int4")})
    slo, workload = parse_slo("latency=3s,share=90%"), WorkloadOptions(workload="alpaca", num_requests=20)
    options = options_of(max_num_seqs=2, max_model_len=1024)
    found = make_plan(options, workload, slo)
    choices = {(one.option, one.value): one for one in found.choices}
    assert choices["max_num_seqs", 8].is_chosen
    assert not choices["quantization", "int4"].is_chosen
    assert choices["quantization", "int4"].gain > 0.1
    empty = [row.empty_share for row in found.block_sizes]
    assert empty == sorted(empty)
    assert html_page(found).count("<svg") == 3
    assert found.rate > make_plan(options, workload, slo, search=False).rate
    assert "--max-num-seqs 8" in found.command


def test_an_slo_that_no_rate_meets_says_what_is_nearest():
    found = make_plan(options_of(device="L4"), ALPACA, parse_slo("tpot=1ms"), search=False)
    assert found.rate == 0
    (reason,) = (line for line in reasons_of(found) if "No rate meets" in line)
    nearest = float(re.search(r"tpot=([\d.]+)ms", reason)[1])
    assert 50 < nearest < 100  # 15 GiB of weights at 270 GB/s
    assert "meets the SLO at no rate" in headline(found)


def test_each_limit_that_no_rate_meets_has_a_nearest_one():
    """Of the requests of the warm-up so many are late that a run could be stopped before any counts."""
    found = make_plan(options_of(device="H100"), ALPACA, parse_slo("ttft=1ms,tpot=1ms"), search=False)
    nearest = re.findall(r"limit that is met is (\w+)=([\d.]+)ms", " ".join(reasons_of(found)))
    assert [name for name, _ in nearest] == ["ttft", "tpot"]
    assert all(1 < float(value) < 100 for _, value in nearest)


def test_a_model_that_does_not_fit_says_what_would_make_it_fit():
    with pytest.raises(ConfigError) as error:
        make_plan(options_of(model="llama-2-70b", device="A100-80GB"), ALPACA, parse_slo("tpot=1s"))
    text = str(error.value)
    assert "What would make it fit:" in text
    assert "--quantization fp8" in text or "--quantization int8" in text
    assert "B200 or MI300X" in text
    assert "need 2 such devices" in text


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ttft=500", "needs a unit"),
        ("tttf=5ms", "did you mean 'ttft'"),
        ("ttft=0ms", "above 0"),
        ("fast", "write it as ttft=500ms"),
        ("share=95%", "at least one limit"),
        ("ttft=1s,share=200%", "between 0 and 100"),
    ],
)
def test_a_wrong_slo_is_explained(text, error):
    with pytest.raises(ConfigError, match=error):
        parse_slo(text)


def test_a_plan_with_a_rate_is_refused():
    with pytest.raises(ConfigError, match="leave out rate"):
        make_plan(options_of(), WorkloadOptions(rate=3.0), parse_slo("tpot=1s"))


def test_an_slo_is_parsed():
    slo = parse_slo("ttft=0.5s, TPOT<=50ms,share=95%")
    assert dict(slo.limits) == {"ttft": 0.5, "tpot": 0.05}
    assert slo.share == 0.95


def test_a_command_has_the_options_that_differ_from_their_defaults():
    options = options_of(enable_prefix_caching=False, kv_cache_dtype="fp8", prefix_index="radix")
    assert serve_command(options) == (
        "quire serve llama-3.1-8b --kv-cache-dtype fp8 --no-enable-prefix-caching --max-model-len 2048"
    )


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"max_num_batched_tokens": 512, "max_num_seqs": 32, "policy": "lpm", "eviction": "cost"},
        {"block_size": 32, "kv_cache_dtype": "int8", "quantization": "int4", "speculation": "off"},
        {"model": "/models/with blanks", "speculative_config": '{"method": "ngram"}', "memory": "0.5"},
        {"enable_prefix_caching": False, "offline": True, "watermark": 0.02, "max_model_len": None},
    ],
)
def test_the_recommended_command_is_one_that_quire_serve_accepts(changed):
    options = options_of(**changed)
    name, command, *arguments = shlex.split(serve_command(options))
    assert (name, command) == ("quire", "serve")
    parsed = get_command(app).commands["serve"].make_context("serve", arguments).params
    assert parsed["model"] == options.model
    found = {one.name: parsed[one.name] for one in fields(options) if one.name not in ("model", "device")}
    assert found == {name: getattr(options, name) for name in found}


def test_every_value_that_a_plan_tries_is_one_that_quire_serve_accepts():
    serve = get_command(app).commands["serve"]
    for option, values in planning.KNOBS.items():
        for value in values:
            if value is not None:
                serve.make_context("serve", [f"--{option.replace('_', '-')}", str(value)])
        assert values[0] in (getattr(EngineOptions(), option), planning.DEFAULT_POLICY)


def test_a_plan_of_a_bare_config_says_that_serve_needs_the_checkpoint(plan, tmp_path):
    assert any("in place of llama-3.1-8b" in note for note in plan.notes)
    assert any("40 requests are too few" in note and "enough are" in note for note in plan.notes)
    assert "in place of llama-3.1-8b" in html_page(plan)


def test_a_type_of_kv_that_the_device_lacks_is_not_recommended():
    workload, slo = WorkloadOptions(workload="alpaca", num_requests=20), parse_slo("latency=30s,share=90%")
    with pytest.raises(ConfigError, match="A100-40GB has no fp8; use int8"):
        make_plan(options_of(device="A100-40GB", kv_cache_dtype="fp8"), workload, slo)
    with pytest.raises(ConfigError, match="int4; use int8"):
        make_plan(options_of(kv_cache_dtype="int4"), workload, slo)


def test_requests_that_are_too_long_are_named_instead_of_an_infinite_latency(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"input_length": 40, "output_length": 4}\n' * 6 + '{"input_length": 5000, "output_length": 4}\n' * 2
    )
    options = options_of(max_model_len=1024, max_num_seqs=8)
    found = make_plan(options, WorkloadOptions(trace=str(trace)), parse_slo("ttft=9s"), search=False)
    (reason,) = (line for line in reasons_of(found) if "No rate meets" in line)
    assert "8 of 31 requests are not completed" in reason
    assert "more than 1024 tokens are rejected" in reason
    assert "inf" not in reason


def test_a_block_size_that_serves_more_requests_is_part_of_the_command(monkeypatch, plan):
    monkeypatch.setattr(planning, "KNOBS", {"block_size": (16, 256)})
    run = plan.at_rate

    def found_rate(_self, engine, *_args, **_options):
        task = replace(run.task, rate=float(engine.memory.profile.block_size))
        return Sustained(SteadyRun(task, run.result, run.slo), None)

    monkeypatch.setattr(planning, "_no_gain", lambda *_: "")  # few KV blocks are in use
    monkeypatch.setattr(planning.Search, "hold", lambda _self, engines, *_: [True] * len(engines))
    for search in ("roughly", "sustainable"):
        monkeypatch.setattr(planning.Search, search, found_rate)
    found = make_plan(options_of(max_num_seqs=8), ALPACA, parse_slo("latency=9s"))
    assert "--block-size 256" in found.command
    assert any(line.startswith("block_size 256: +1500%, because it decides") for line in reasons_of(found))


def test_the_command_prints_tables_and_writes_files(tmp_path):
    html, data = tmp_path / "plan.html", tmp_path / "plan.json"
    arguments = ["llama-3.1-8b", "--device", "h100", "--max-model-len", "1024", "--workload", "alpaca", "--no-search"]
    arguments += ["--num-requests", "20", "--explain", "--html", str(html), "--json", str(data), "--max-num-seqs", "8"]
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "160", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    assert "quire serve llama-3.1-8b" in result.output
    assert html.read_text().startswith("<!doctype html>")
    assert json.loads(data.read_text())["device"] == "H100"


def test_charts_are_well_formed_and_leave_out_what_is_not_finite():
    chart = line_chart("a < b", "x", "y", {"one & two": [(1, 2.0), (2, inf), (3, 8.0)], "none": []}, log_y=True)
    root = ET.fromstring(chart)
    assert chart.count("<circle") == 2
    assert root.tag.endswith("svg")
    bars = ET.fromstring(stacked_bars("t", "GiB", {"A": {"x": 1.0, "y": 2.0}, "B": {"x": 3.0}}))
    heights = [
        float(one.get("height"))
        for one in bars.iter()
        if one.tag.endswith("rect") and one.get("fill", "").startswith("#1f")
    ]
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.2)


@pytest.mark.cpu_seconds(12, reason="a plan in runs of thousands of requests")
def test_a_steady_state_of_more_requests_than_a_run_may_have_asks_for_shorter_outputs(monkeypatch):
    monkeypatch.setattr("quire.planner.search.MOST_REQUESTS", 300)
    monkeypatch.setattr(planning, "MOST_REQUESTS", 300)
    workload = WorkloadOptions(workload="alpaca")
    found = make_plan(options_of(max_num_seqs=16), workload, parse_slo("ttft=200ms,tpot=20ms"), search=False)
    assert any("a run has at most 300 requests" in line and "shorter outputs" in line for line in found.warnings)
