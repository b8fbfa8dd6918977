"""`quire plan`: the sustainable rate, the search over options, reports, and models that do not fit."""

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from math import inf

import pytest
from typer.testing import CliRunner

import quire.planner.plan as planning
from quire.cli import app
from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.planner.charts import line_chart, stacked_bars
from quire.planner.options import WorkloadOptions
from quire.planner.plan import figures, make_plan, serve_command
from quire.planner.report import headline, html_page, terminal_tables
from quire.planner.slo import parse_slo


def options_of(**changed):
    return EngineOptions(**{"model": "llama-3.1-8b", "device": "H100", "max_model_len": 2048, **changed})


ALPACA = WorkloadOptions(workload="alpaca", num_requests=40)


@pytest.fixture(scope="module")
def plan():
    return make_plan(options_of(max_num_seqs=16), ALPACA, parse_slo("ttft=200ms,tpot=20ms"), search=False)


def test_the_sustainable_rate_meets_the_slo_and_a_higher_one_does_not(plan):
    assert plan.rate > 0
    verdicts = [planning.verdict(plan, point) for point in plan.curve]
    assert verdicts[:5] == ["met"] * 5
    assert set(verdicts[5:]) & {"missed", "queue grows"}
    assert [point.rate for point in plan.curve] == sorted(point.rate for point in plan.curve)
    assert plan.at_rate is plan.curve[4].result


def test_reasons_name_memory_rate_and_what_breaks_above_it(plan):
    text = "\n".join(plan.reasons)
    assert "Memory: weights take 14.96 GiB" in text
    assert f"At {plan.rate:.2f} requests/s" in text
    assert re.search(r"exceeds the limit|queue grows", text)


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
    assert found.rate > found.base_rate
    assert "--max-num-seqs 8" in found.command


def test_an_slo_that_no_rate_meets_says_what_is_nearest():
    found = make_plan(options_of(device="L4"), ALPACA, parse_slo("tpot=1ms"), search=False)
    assert found.rate == 0
    (reason,) = (line for line in found.reasons if "No rate meets" in line)
    nearest = float(re.search(r"tpot=([\d.]+)ms", reason)[1])
    assert 50 < nearest < 100  # 15 GiB of weights at 270 GB/s
    assert "meets the SLO at no rate" in headline(found)


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
