"""Metrics: names, types and labels that dashboards for vLLM need, and exact values."""

import time
from dataclasses import replace

import httpx
import pytest
from hybrid_shape import state_group
from kv_groups import kv_group
from msgspec import structs
from multi_tenant_server import run_site
from server_probes import Page
from waiting import wait_until

from quire.config import CacheConfig
from quire.core.explanation import Explanation, Preemption
from quire.engine.engine import STEP_SIZE_BUCKETS, EngineStats, StepSizes
from quire.engine.outputs import RequestMetrics
from quire.fleet.fleet import ReplicaStatus
from quire.params import SamplingParams
from quire.server.observability.metrics import FinishedRequestStats, Metrics
from quire.server.observability.request_record import RequestRecord
from quire.server.options import ServerOptions
from quire.supervisor.health import Health, State

CACHE = CacheConfig(16, (kv_group((0,), 1, 8, "float32", 10, 1024),))
PLAIN = {"model_name", "engine"}
# metrics that vLLM has, too: name without prefix and suffix -> type, labels in addition to PLAIN
LIKE_VLLM = {
    "num_requests_running": ("gauge", set()),
    "num_requests_waiting": ("gauge", set()),
    "num_requests_waiting_by_reason": ("gauge", {"reason"}),
    "kv_cache_usage_perc": ("gauge", set()),
    "prefix_cache_queries": ("counter", set()),
    "prefix_cache_hits": ("counter", set()),
    "num_preemptions": ("counter", set()),
    "prompt_tokens": ("counter", set()),
    "prompt_tokens_by_source": ("counter", {"source"}),
    "prompt_tokens_cached": ("counter", set()),
    "generation_tokens": ("counter", set()),
    "request_success": ("counter", {"finished_reason"}),
    "admission_rejections": ("counter", {"reason"}),
    "iteration_tokens_total": ("histogram", set()),
    "request_prompt_tokens": ("histogram", set()),
    "request_generation_tokens": ("histogram", set()),
    "request_max_num_generation_tokens": ("histogram", set()),
    "request_prefill_kv_computed_tokens": ("histogram", set()),
    "request_num_preemptions": ("histogram", set()),
    "request_params_n": ("histogram", set()),
    "request_params_max_tokens": ("histogram", set()),
    "time_to_first_token_seconds": ("histogram", set()),
    "inter_token_latency_seconds": ("histogram", set()),
    "request_time_per_output_token_seconds": ("histogram", set()),
    "e2e_request_latency_seconds": ("histogram", set()),
    "request_queue_time_seconds": ("histogram", set()),
    "request_prefill_time_seconds": ("histogram", set()),
    "request_decode_time_seconds": ("histogram", set()),
    "request_inference_time_seconds": ("histogram", set()),
    **dict.fromkeys(("spec_decode_num_drafts", "spec_decode_num_draft_tokens"), ("counter", set())),
    "spec_decode_num_accepted_tokens": ("counter", set()),
    "spec_decode_num_accepted_tokens_per_pos": ("counter", {"position"}),
    "cache_config_info": (
        "gauge",
        {
            *("block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks", "num_cpu_blocks"),
            *("kv_cache_size_tokens", "kv_cache_max_concurrency"),
        },
    ),
}
OUR_OWN = {
    "unknown_fields": ("counter", {"place"}),
    "ignored_fields": ("counter", {"field"}),
    **dict.fromkeys(("kv_blocks_cached", "cpu_cache_usage_perc", "last_step_seconds"), ("gauge", set())),
    **dict.fromkeys(("kv_blocks_evicted", "kv_tokens_copied", "kv_blocks_swapped_out"), ("counter", set())),
    **dict.fromkeys(("kv_blocks_swapped_in", "admissions_slowed", "iterations"), ("counter", set())),
    **dict.fromkeys(("iterations_failed", "engine_restarts", "access_log_lines_lost"), ("counter", set())),
    **dict.fromkeys(("engine_heartbeat_age_seconds", "engine_healthy"), ("gauge", set())),
    **dict.fromkeys(("prompts_running", "prompts_running_tokens", "prompts_running_tokens_done"), ("gauge", set())),
    **dict.fromkeys(("adapters_resident", "adapter_memory_bytes"), ("gauge", set())),
    "num_requests_waiting_for_adapters": ("gauge", set()),
    **dict.fromkeys(("adapter_loads", "adapter_load_seconds", "adapters_evicted"), ("counter", set())),
    **dict.fromkeys(("engine_requests", "engine_drained"), ("gauge", set())),
    "engine_state": ("gauge", {"state"}),
    "requests_refused": ("counter", {"reason"}),
    "forced_tokens": ("counter", set()),
    **dict.fromkeys(("spec_decode_draft_tokens_by_drafter",), ("counter", {"drafter"})),
    **dict.fromkeys(("spec_decode_accepted_tokens_by_drafter",), ("counter", {"drafter"})),
    "grammar_checks": ("counter", {"result"}),
    "grammar_check_seconds": ("histogram", set()),
}


@pytest.fixture
def page(keyless):
    return lambda: Page(httpx.get(f"{keyless.url}/metrics").text)


HEALTH = Health("the engine is stalled", State.STALLED, EngineStats.zero(), 2.5, 0.0, 3, "")


@pytest.fixture
def metrics():
    return Metrics("m", lambda: [ReplicaStatus(HEALTH, 0, is_drained=False)], caches=[CACHE], max_model_len=100)


@pytest.mark.parametrize("prefix", ["quire:", "vllm:"])
def test_names_types_and_labels(prefix):
    with run_site(options=ServerOptions(metrics_prefix=prefix)) as site:
        for path in ("/v1/completions", "/nowhere"):
            site.post(None, path, prompt="x", max_tokens=2)
        text = httpx.get(f"{site.url}/metrics").text
    expected = {prefix + name: kind_and_labels for name, kind_and_labels in {**LIKE_VLLM, **OUR_OWN}.items()}
    families = {name: family for name, family in Page(text).families.items() if not name.endswith("_created")}
    plain = {name for name in families if not name.startswith(prefix)}
    assert plain == {"http_requests", "http_request_duration_seconds"}
    assert set(families) - plain == set(expected)
    for name, (kind, more) in expected.items():
        family = families[name]
        assert family.type == kind, name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == PLAIN | more, name
    ends = Page(text).families[f"{prefix}request_success"].samples
    reasons = {sample.labels["finished_reason"] for sample in ends}
    all_reasons = {"stop", "length", "repetition", "abort", "error"}
    assert reasons == all_reasons, "from the start, or rates would lack the first of each"


def test_metrics_have_the_values_of_the_served_requests(keyless, page):
    wait_until(lambda: page().value("quire:num_requests_running") == 0)
    before = page()
    body = {"prompt": [[67, 68, 69], [70]], "max_tokens": 5, "n": 2, "ignore_eos": True}
    httpx.post(f"{keyless.url}/v1/completions", json=body, timeout=60).raise_for_status()
    httpx.post(f"{keyless.url}/v1/completions", json={**body, "prompt": [[71] * 40]}, timeout=60).raise_for_status()
    httpx.post(f"{keyless.url}/v1/completions", json={**body, "prompt": [[71] * 40]}, timeout=60).raise_for_status()
    httpx.post(f"{keyless.url}/v1/completions", json={"prompt": 5})
    httpx.get(f"{keyless.url}/nowhere")
    wait_until(
        lambda: (
            page().value("http_requests_total", handler="none") > before.value("http_requests_total", handler="none")
        )
    )
    after = page()

    def added(name, **labels):
        return after.value(name, **labels) - before.value(name, **labels)

    for name, count, total in (
        ("request_prompt_tokens", 4, 3 + 1 + 40 + 40),
        ("request_generation_tokens", 8, 8 * 5),
        ("request_max_num_generation_tokens", 4, 4 * 5),
        ("request_prefill_kv_computed_tokens", 4, 3 + 1 + 40 + 1),
        ("request_params_n", 4, 4 * 2),
        ("request_num_preemptions", 4, 0),
        ("request_params_max_tokens", 4, 4 * 5),
    ):
        assert (added(f"quire:{name}_count"), added(f"quire:{name}_sum")) == (count, total), name
    assert added("quire:prompt_tokens_total") == 3 + 1 + 40 + 40
    assert added("quire:prompt_tokens_by_source_total", source="local_compute") == 45
    assert added("quire:prompt_tokens_by_source_total", source="local_cache_hit") == 39
    assert added("quire:prompt_tokens_cached_total") == added("quire:prefix_cache_hits_total") == 39
    assert added("quire:request_success_total", finished_reason="length") == 8
    phases = ("queue", "prefill", "decode", "inference")
    counts = {phase: added(f"quire:request_{phase}_time_seconds_count") for phase in phases}
    assert counts == dict.fromkeys(phases, 4)
    sums = {phase: added(f"quire:request_{phase}_time_seconds_sum") for phase in phases}
    assert sums["inference"] == pytest.approx(sums["prefill"] + sums["decode"])
    assert sums["queue"] + sums["inference"] <= added("quire:e2e_request_latency_seconds_sum") + 1e-6
    assert added("quire:request_time_per_output_token_seconds_sum") == pytest.approx(sums["decode"] / 4)
    assert added("quire:iteration_tokens_total_count") == added("quire:iterations_total")
    # Tokens of the prompts, and all outputs except the last token of each, which is never computed. The second of two
    # sequences computes the last token of the prompt again.
    assert added("quire:iteration_tokens_total_sum") >= 45 + 8 * 4
    assert added("quire:requests_refused_total", reason="invalid_type") == 1
    assert added("quire:requests_refused_total", reason="http_404") == 0
    assert added("quire:requests_refused_total") == 2
    route = {"method": "POST", "handler": "/v1/completions"}
    assert added("http_requests_total", status="2xx", **route) == 3
    assert added("http_requests_total", status="4xx", **route) == 1
    assert added("http_requests_total", status="4xx", method="GET", handler="none") == 1
    assert added("http_request_duration_seconds_count", **route) == 4


def test_times_of_one_request_exactly(metrics):
    times = RequestMetrics(10.0, first_token_time=11.0, last_token_time=13.0, finished_time=13.5, queue_seconds=0.25)
    metrics.observe_finished_request(
        FinishedRequestStats(times, 30, 16, [5, 3], SamplingParams(n=2, max_tokens=None)), 99.0
    )
    page = Page(metrics.export("p_").decode())
    for name, value in (
        ("e2e_request_latency", 3.5),
        ("request_queue_time", 0.25),
        ("request_prefill_time", 0.75),
        ("request_decode_time", 2.0),
        ("request_inference_time", 2.75),
        ("request_time_per_output_token", 0.5),
    ):
        assert (page.value(f"p_{name}_seconds_count"), page.value(f"p_{name}_seconds_sum")) == (1, value), name
    assert page.value("p_request_prefill_kv_computed_tokens_sum") == 14
    assert page.value("p_request_params_max_tokens_count") == 0, "it was not given"


def test_histograms_skip_phases_without_times(metrics):
    metrics.observe_finished_request(FinishedRequestStats(RequestMetrics(10.0), 3, 0, [0], SamplingParams()), 12.0)
    metrics.observe_finished_request(
        FinishedRequestStats(RequestMetrics(10.0, finished_time=11.0), 7), 12.0
    )  # an embedding
    page = Page(metrics.export("").decode())
    assert page.value("e2e_request_latency_seconds_sum") == 3.0
    for phase in ("queue", "prefill", "decode", "inference"):
        assert page.value(f"request_{phase}_time_seconds_count") == 0
    assert page.value("request_params_n_count") == 1
    assert page.value("request_prompt_tokens_sum") == 10


def test_preemptions_of_one_request(metrics):
    preempted = [Preemption(11.0, index, "memory", 5) for index in (0, 1, 0)]
    for explanation in (None, Explanation("a", "t", 10.0, 3, preemptions=preempted)):
        times = RequestMetrics(10.0, finished_time=12.0, explanation=explanation)
        metrics.observe_finished_request(FinishedRequestStats(times, 3, 0, [1, 1], SamplingParams(n=2)), 12.0)
    page = Page(metrics.export("").decode())
    assert page.value("request_num_preemptions_count") == 2
    assert page.value("request_num_preemptions_sum") == 3


@pytest.mark.parametrize(
    ("longest", "size", "most"),
    [(40, "96", "2.40"), (64, "128", "2.00"), (160, "160", "1.00")],
    ids=["as short as the window", "the window is full", "all blocks for one"],
)
def test_cache_config_info_reports_max_concurrency(longest, size, most):
    groups = (kv_group((0,), 1, 8, "float32", 10, 1024), kv_group((1,), 1, 8, "float32", 6, 1024, window=32))
    metrics = Metrics(
        "m",
        lambda: [ReplicaStatus(HEALTH, 0, is_drained=False)],
        caches=[CacheConfig(16, groups)],
        max_model_len=longest,
    )
    (sample,) = Page(metrics.export("").decode()).families["cache_config_info"].samples
    assert (sample.labels["kv_cache_size_tokens"], sample.labels["kv_cache_max_concurrency"]) == (size, most)


def test_adapters_are_named_as_in_vllm():
    stats = structs.replace(
        EngineStats.zero(),
        num_adapters=2,
        adapter_bytes=4096,
        num_adapter_loads=5,
        adapter_load_seconds=1.5,
        num_evicted_adapters=3,
        num_waiting_for_adapters=7,
        adapter_requests={"b": (1, 2), "a": (3, 0), "c": (0, 4)},
    )
    statuses = [ReplicaStatus(HEALTH._replace(stats=stats), 0, is_drained=False)]
    before = time.time()
    page = Page(Metrics("m", lambda: statuses, caches=[CACHE], max_model_len=100, max_loras=8).export("").decode())
    (sample,) = page.families["lora_requests_info"].samples
    assert sample.labels == {
        **{"model_name": "m", "engine": "0", "max_lora": "8"},
        **{"running_lora_adapters": "a,b", "waiting_lora_adapters": "b,c"},
    }
    assert before <= sample.value <= time.time()
    names = ("adapters_resident", "adapter_memory_bytes", "num_requests_waiting_for_adapters")
    assert [page.value(name) for name in names] == [2, 4096, 7]
    counters = ("adapter_loads", "adapter_load_seconds", "adapters_evicted")
    assert [page.value(f"{name}_total") for name in counters] == [5, 1.5, 3]


def test_models_with_recurrent_states_have_metrics_of_snapshots_and_others_do_not(metrics):
    values = {
        **{"state_blocks": ("state_blocks_total", 40), "state_blocks_used": ("state_blocks_used", 3)},
        "state_snapshots": ("num_snapshots", 21),
        "state_snapshots_evicted_total": ("num_evicted_snapshots", 5),
        "state_snapshot_hits_total": ("num_snapshot_hits", 7),
        "prompt_tokens_without_state_total": ("num_stateless_tokens", 1500),
    }
    stats = structs.replace(EngineStats.zero(), **dict(values.values()))
    statuses = [ReplicaStatus(HEALTH._replace(stats=stats), 0, is_drained=False)]
    cache = replace(CACHE, states=state_group(40))
    page = Page(Metrics("m", lambda: statuses, caches=[cache], max_model_len=100).export("").decode())
    assert {name: page.value(name) for name in values} == {name: value for name, (_, value) in values.items()}
    assert not [name for name in Page(metrics.export("").decode()).families if "state_" in name or "snapshot" in name]


def test_without_adapters_none_are_named(metrics):
    assert "lora_requests_info" not in Page(metrics.export("").decode()).families


def test_the_state_of_the_engine(metrics):
    page = Page(metrics.export("").decode())
    states = {sample.labels["state"]: sample.value for sample in page.families["engine_state"].samples}
    assert states == {"starting": 0, "serving": 0, "stalled": 1, "restarting": 0, "failed": 0, "closed": 0}
    assert page.value("engine_restarts_total") == 3
    assert page.value("engine_heartbeat_age_seconds") == 2.5
    assert page.value("engine_healthy") == 0


@pytest.mark.parametrize(
    ("status", "error", "reason", "is_rejection"),
    [
        (429, "queue_full", "queue_full", True),
        (429, "rate_limit_exceeded", "rate_limit_exceeded", True),
        (429, "deadline_unreachable", "deadline_unreachable", True),
        (503, "service_unavailable", "service_unavailable", False),
        (500, "0" * 32, "internal_error", False),
        (404, None, "http_404", False),
        (400, "Any Thing {", "http_400", False),
        (499, None, None, False),
        (200, "server_error", None, False),
        (0, None, None, False),
    ],
)
def test_refusals_by_reason(metrics, status, error, reason, is_rejection):
    scope = {"type": "http", "method": "BREW", "state": {}}
    metrics.observe_http_request(RequestRecord(None, "0" * 32, scope, 0.0, 1.0, status=status, error=error, ended=3.0))
    page = Page(metrics.export("").decode())
    assert page.value("requests_refused_total") == (reason is not None)
    assert reason is None or page.value("requests_refused_total", reason=reason) == 1
    assert page.value("admission_rejections_total") == is_rejection
    assert page.value("http_requests_total", method="other", handler="none") == 1, "labels are not of any number"


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 8, 9, 16384, 16385])
def test_a_step_is_in_the_bucket_of_its_size(num_tokens):
    sizes = StepSizes()
    sizes.observe(num_tokens)
    place = sizes.counts.index(1)
    assert sum(sizes.counts) == 1 and sizes.num_tokens == num_tokens
    assert place == len(STEP_SIZE_BUCKETS) or num_tokens <= STEP_SIZE_BUCKETS[place]
    assert place == 0 or num_tokens > STEP_SIZE_BUCKETS[place - 1]


@pytest.mark.parametrize(
    ("cause", "reason"), [("memory", "capacity"), ("rows", "capacity"), ("step", "deferred"), ("failure", "deferred")]
)
def test_waiting_requests_are_counted_by_reason(keyless, cause, reason):
    keyless.engine.figures = {"num_waiting": 4, "waiting_because": cause}
    httpx.post(f"{keyless.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60)
    page = Page(httpx.get(f"{keyless.url}/metrics").text)
    keyless.engine.figures = {}
    waiting = {"capacity": 0, "deferred": 0, reason: 4}
    for one, count in waiting.items():
        assert page.value("quire:num_requests_waiting_by_reason", reason=one) == count


def test_the_queue_time_is_the_engine_s_own(keyless):
    before = Page(httpx.get(f"{keyless.url}/metrics").text).value("quire:request_queue_time_seconds_sum")
    answered = keyless.post(None, "/v1/completions", prompt="y", max_tokens=1)
    after = Page(httpx.get(f"{keyless.url}/metrics").text).value("quire:request_queue_time_seconds_sum")
    answer = keyless.ask(None, "GET", f"/v1/requests/{answered.json()['id']}/explain").json()
    fields = {name: answer["prompts"][0][name] for name in ("arrived", "admitted")}
    assert set(fields) <= set(Explanation.__struct_fields__)
    assert after - before == pytest.approx(fields["admitted"] - fields["arrived"], abs=1e-9)


def test_each_family_has_a_sample_of_each_engine():
    """Those of the front end's own have one, of engine 0."""
    stats = structs.replace(EngineStats.zero(), num_running=5, prompt_tokens=7, prefix_hit_tokens=2, num_step_tokens=9)
    starting = Health("the engine is starting", State.RESTARTING, stats, None, None, 0, "")
    statuses = [
        ReplicaStatus(HEALTH, num_requests=4, is_drained=False),
        ReplicaStatus(starting, num_requests=0, is_drained=True),
    ]
    caches = [CACHE, CacheConfig(16, (kv_group((0,), 1, 8, "float32", 30, 1024),))]
    text = Metrics("m", lambda: statuses, caches=caches, max_model_len=100, max_loras=8).export("").decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    families = Page(text).families
    engines = {name: {one.labels["engine"] for one in family.samples} for name, family in families.items()}
    for name in ("num_requests_running", "cache_config_info", "engine_state", "engine_requests", "engine_drained"):
        assert engines[name] == {"0", "1"}, name
    for name in ("request_success", "e2e_request_latency_seconds"):
        assert engines[name] <= {"0"}, name
    drained = {one.labels["engine"]: one.value for one in families["engine_drained"].samples}
    assert drained == {"0": 0, "1": 1}
