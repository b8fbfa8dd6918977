"""`quire top`: figures between two samples of metrics, and a real server."""

from io import StringIO

import httpx
import numpy as np
import pytest
from embedded_model_server import run_app, service_of, small_engine
from hypothesis import given
from hypothesis import strategies as st
from multi_tenant_server import run_site
from rich.console import Console

from quire.errors import QuireError
from quire.server.app import make_app
from quire.terminal.top import LATENCIES, Sample, compare, fetch, read_sample, render, top

TTFT = "time_to_first_token_seconds"
BOUNDS = (0.1, 0.2, 0.4, 0.8, 1.6, float("inf"))


def sample(at, buckets=None, **values):
    return Sample(at, values, buckets or {})


def histogram(values):
    return tuple((bound, float(np.count_nonzero(np.array(values) <= bound))) for bound in BOUNDS)


def test_rates_are_per_second_and_shares_of_what_was_added():
    before = sample(10.0, prompt_tokens_total=100, generation_tokens_total=50, prefix_cache_queries_total=100)
    after = sample(
        12.0,
        **{"prompt_tokens_total": 300, "generation_tokens_total": 90, "prefix_cache_queries_total": 300},
        **{"prefix_cache_hits_total": 150, "num_requests_running": 4, "kv_cache_usage_perc": 0.25},
    )
    found = compare(before, after)
    assert (found.prompt_rate, found.output_rate, found.cached_share) == (100, 20, 0.75), "an older vLLM"
    after.values["prompt_tokens_cached_total"] = 150
    assert compare(before, after).prompt_rate == 25, "tokens of the prefix cache are not computed"
    assert (found.running, found.waiting, found.kv_use) == (4, 0, 0.25)
    assert found.latencies == dict.fromkeys(LATENCIES)


def test_a_server_that_was_restarted_counts_from_zero():
    found = compare(sample(0.0, generation_tokens_total=500), sample(1.0, generation_tokens_total=20))
    assert found.output_rate == 20


@given(st.lists(st.floats(0.001, 1.5), min_size=1, max_size=50), st.lists(st.floats(0.001, 1.5), max_size=20))
def test_percentiles_lie_in_the_bucket_of_the_added_values(added, earlier):
    before, after = histogram(earlier), histogram(earlier + added)
    median, high = compare(sample(0.0, {TTFT: before}), sample(1.0, {TTFT: after})).latencies[TTFT]
    for found, share in ((median, 0.5), (high, 0.99)):
        exact = np.quantile(added, share, method="inverted_cdf")
        place = np.searchsorted(BOUNDS, exact)
        assert (0, *BOUNDS)[place] <= found <= BOUNDS[place]


def test_names_are_read_without_their_prefix_and_summed():
    text = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2
vllm:num_requests_running{engine="1"} 3
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.25
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.1"} 1
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 4
vllm:time_to_first_token_seconds_count 4
vllm:time_to_first_token_seconds_sum 9
"""
    found = read_sample(text, 1.0)
    assert found.values["num_requests_running"] == 5
    assert found.values["kv_cache_usage_perc"] == 0.375, "the mean of a share"
    assert found.buckets[TTFT] == ((0.1, 1.0), (float("inf"), 4.0))


def test_the_screen_has_all_figures():
    screen = StringIO()
    after = sample(1.0, {TTFT: histogram([0.15] * 10)}, generation_tokens_total=1234, num_requests_waiting=7)
    Console(file=screen, width=100).print(render(compare(sample(0.0), after), [0, 5, 10], "http://x"))
    text = screen.getvalue()
    assert all(part in text for part in ("7 waiting", "1,234 tokens/s", "150 ms median, 199 ms p99", " ▄█"))
    assert "prompt 18" not in text


def test_running_prompts_show_how_far_they_are():
    screen = StringIO()
    after = sample(1.0, prompts_running=1, prompts_running_tokens=61_178, prompts_running_tokens_done=18_400)
    Console(file=screen, width=100).print(render(compare(sample(0.0), after), [], "http://x"))
    assert "prompt 18,400 of 61,178" in screen.getvalue()


def test_a_running_server_is_shown():
    with run_app(make_app(service_of(small_engine()))) as url:
        _check_screen(url)
    with run_site("ann", "root") as site:
        with pytest.raises(QuireError, match="role admin"):
            fetch(site.url, site.keys["ann"])
        assert "num_requests_running" in fetch(site.url, site.keys["root"])


def _check_screen(url):
    httpx.post(f"{url}/v1/completions", json={"prompt": "One Tuesday", "max_tokens": 4}, timeout=60)
    screen = StringIO()
    top(url, None, 0.1, Console(file=screen, width=100), num_updates=2)
    assert "0 running, 0 waiting" in screen.getvalue()


def test_a_server_that_does_not_answer_is_named():
    with pytest.raises(QuireError, match="does not answer"):
        top("http://127.0.0.1:9", None, 0.1, Console(file=StringIO()))
