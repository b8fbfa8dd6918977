"""Explanations and cache figures over HTTP, and who may read them."""

import asyncio
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import httpx
import msgspec
import pytest
from embedded_model_server import run_app, service_of, small_engine
from hybrid_shape import state_group
from multi_tenant_server import GENERATING, refused

import quire
from quire.config import EngineOptions
from quire.core.explanation import Explanation, Miss, Placement, Preemption, RoutingCandidate
from quire.server.api_keys import Keys, new_key
from quire.server.app import make_app


def explanation(id, tenant, **more):
    return Explanation(request_id=id, tenant=tenant, arrived=1.0, num_prompt_tokens=5, **more)


def test_an_explanation(site):
    first = explanation(
        *("r-0", "ann"),
        state="finished",
        miss=Miss(position=3, token=9, reason="evicted", evicted_at=2.0),
        waited={"memory": 0.5},
        preemptions=[Preemption(at=3.0, index=0, reason="memory", num_lost_tokens=4)],
        num_blocks_unshared=8,
        num_blocks_own=2,
    )
    site.engine.explanations |= {"r-0": first, "r-1": explanation("r-1", "ann"), "r-3": explanation("r-3", "ann")}
    answer = site.ask("ann", "GET", "/v1/requests/r/explain").json()
    assert (answer["id"], answer["object"]) == ("r", "request.explanation")
    one, two, _ = answer["prompts"]
    assert one == {**json.loads(msgspec.json.encode(first)), "saved_by_sharing": 0.75}
    assert one["miss"]["reason"] == "evicted"
    assert one["preemptions"][0]["num_lost_tokens"] == 4
    assert two["saved_by_sharing"] == 0
    assert site.ask("root", "GET", "/v1/requests/r/explain").json() == answer


def test_predicted_seconds_of_replicas_are_shown_to_admins_alone(site):
    candidates = [RoutingCandidate(0, 16, 0.5, 0.25), RoutingCandidate(1, 0, 0.75, 0.0)]
    placed = Placement(0, "predicted", candidates, 0.5, 0.625)
    site.engine.explanations["placed"] = explanation("placed", "ann", placement=placed)
    (seen,) = site.ask("root", "GET", "/v1/requests/placed/explain").json()["prompts"]
    assert seen["placement"] == json.loads(msgspec.json.encode(placed))
    (seen,) = site.ask("ann", "GET", "/v1/requests/placed/explain").json()["prompts"]
    assert seen["placement"] == {
        **{"replica": 0, "routing": "predicted", "actual_seconds": 0.625},
        "candidates": [{"replica": 0, "num_cached_tokens": 16}, {"replica": 1, "num_cached_tokens": 0}],
    }


def test_explain_answers_another_tenants_request_as_an_unknown_one(site):
    site.engine.explanations |= {"x-0": explanation("x-0", "ann"), "y-0": explanation("y-0", "")}
    site.engine.explanations |= {"z-0": explanation("z-0", "bob"), "z-1": explanation("z-1", "ann")}
    unknown = site.ask("bob", "GET", "/v1/requests/w/explain")
    assert refused(unknown, 404, "request_not_found")["param"] == "id"
    for other in "xyz":
        answer = site.ask("bob", "GET", f"/v1/requests/{other}/explain")
        assert answer.status_code == unknown.status_code
        assert answer.text == unknown.text.replace("'w'", f"'{other}'")
        assert {k: v for k, v in answer.headers.items() if k not in ("date", "x-request-id")} == {
            k: v for k, v in unknown.headers.items() if k not in ("date", "x-request-id")
        }
        assert site.ask("root", "GET", f"/v1/requests/{other}/explain").status_code == 200
    refused(site.ask(None, "GET", "/v1/requests/x/explain"), 401, "invalid_api_key")


@pytest.mark.parametrize("id", ["a" * 4000, "%00", "%C3%A9", "r-0-0", "%F0%9F", "{7*7}"])
def test_ids_of_no_request(site, id):
    answer = site.ask("ann", "GET", f"/v1/requests/{id}/explain")
    refused(answer, 404, "request_not_found")
    assert len(answer.text) < 1000


def test_an_explanation_is_a_copy_of_what_the_engine_goes_on_with(keyless):
    """Threads share no objects: later changes by the engine do not affect an answer."""
    id = keyless.post(None, "/v1/completions", **GENERATING["/v1/completions"]).json()["id"]
    first, second = keyless.engine.explain(f"{id}-0"), keyless.engine.explain(f"{id}-0")
    assert first == second
    assert first is not second
    assert first.waited is not second.waited
    assert first.preemptions is not second.preemptions


def test_explain_of_a_batch_omits_prompts_without_an_explanation(site):
    names = ["g-3", "g-4", "g-900", "g-2047"]
    site.engine.explanations |= {name: explanation(name, "ann") for name in [*names, "g-2048"]}
    prompts = site.ask("ann", "GET", "/v1/requests/g/explain").json()["prompts"]
    assert [one["request_id"] for one in prompts] == names
    site.engine.explanations["g-1500"] = explanation("g-1500", "bob")
    refused(site.ask("ann", "GET", "/v1/requests/g/explain"), 404, "request_not_found")
    assert len(site.ask("root", "GET", "/v1/requests/g/explain").json()["prompts"]) == 5


def test_explain_accepts_the_engines_id_of_a_single_prompt(site):
    id = site.post("ann", "/v1/completions", prompt=["a", "b c"], max_tokens=1).headers["x-request-id"]
    both = site.ask("ann", "GET", f"/v1/requests/{id}/explain").json()["prompts"]
    assert [one["request_id"] for one in both] == [f"{id}-0", f"{id}-1"]
    for one in both:
        assert site.ask("ann", "GET", f"/v1/requests/{one['request_id']}/explain").json()["prompts"] == [one]
        refused(site.ask("bob", "GET", f"/v1/requests/{one['request_id']}/explain"), 404, "request_not_found")


def test_explain_of_an_unknown_id_names_the_header_with_the_id(site):
    error = refused(site.ask("ann", "GET", "/v1/requests/w/explain"), 404, "request_not_found")
    assert "header x-request-id" in error["message"]


def test_explanations_count_as_requests_and_come_one_by_one(no_refills):
    key, entry = new_key("ann", "user", requests_per_minute=6)
    service, running = service_of(small_engine()), Counter()

    async def explain(_ids):
        running["now"] += 1
        running["most"] = max(running["most"], running["now"])
        await asyncio.sleep(0.01)
        running["now"] -= 1
        return []

    service.engine.explain = explain
    with run_app(make_app(service, Keys([entry]))) as url, ThreadPoolExecutor() as pool:
        headers = {"authorization": f"Bearer {key}"}
        asked = [pool.submit(httpx.get, f"{url}/v1/requests/x/explain", headers=headers) for _ in range(8)]
        assert sorted(one.result().status_code for one in asked) == [404] * 6 + [429] * 2
    assert running["most"] == 1


FROM_ELSEWHERE = [
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"referer": "http://127.0.0.1:1/page"},
]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_page_from_elsewhere_cannot_flush(keyless, method):
    keyless.engine.freed = 7
    try:
        for headers in FROM_ELSEWHERE:
            answer = httpx.request(method, f"{keyless.url}/flush_cache", headers=headers)
            refused(answer, 403, "cross_site_request")
        for headers in (
            {"sec-fetch-site": "none"},
            {"sec-fetch-site": "same-origin", "origin": "https://name.of.a.proxy"},
            {"origin": keyless.url},
            {"referer": f"{keyless.url}/docs"},
        ):
            answer = httpx.request(method, f"{keyless.url}/flush_cache", headers=headers)
            assert answer.json() == {"freed_blocks": 7}
    finally:
        keyless.engine.freed = None


def test_flushing(keyless):
    keyless.engine.freed = 7
    for method in ("GET", "POST"):
        assert keyless.ask(None, method, "/flush_cache").json() == {"freed_blocks": 7}
    keyless.engine.freed = RuntimeError("secret of the cache")
    try:
        answer = keyless.ask(None, "POST", "/flush_cache")
        assert answer.status_code == 500
        assert "secret" not in answer.text
    finally:
        keyless.engine.freed = None
    assert keyless.post(None, "/v1/completions", **GENERATING["/v1/completions"]).status_code == 200


def cached(answer):
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_cached_tokens_stay_with_their_tenant_and_salt(site):
    body = {"prompt": list(range(100, 180)), "max_tokens": 1}

    def ask(who, **more):
        return site.post(who, "/v1/completions", **body, **more)

    first = ask("ann")
    assert [cached(first), cached(ask("ann"))] == [0, 79]
    assert [cached(ask("bob")), cached(ask("bob", cache_salt="s")), cached(ask("bob", cache_salt="s"))] == [0, 0, 79]
    assert [cached(ask("ann", cache_salt="s")), cached(ask("root"))] == [0, 0]
    (about,) = site.ask("ann", "GET", f"/v1/requests/{first.json()['id']}/explain").json()["prompts"]
    assert (about["tenant"], about["num_prompt_tokens"], about["num_cached_tokens"]) == ("ann", 80, 0)
    assert about["miss"]["reason"] == "never_seen"
    refused(site.ask("bob", "GET", f"/v1/requests/{first.json()['id']}/explain"), 404, "request_not_found")
    info = site.ask("root", "GET", "/get_server_info").json()["cache"]
    assert info["prefix_hit_tokens"] >= 2 * 79
    assert info["kv_blocks_cached"] >= 5 * 5
    assert site.ask("root", "POST", "/flush_cache").json()["freed_blocks"] >= 5 * 5
    assert [cached(ask("ann")), cached(ask("ann"))] == [0, 79]


FIGURES = {
    **{"kv_blocks_cached": 11, "kv_blocks_evicted": 12, "prefix_query_tokens": 200, "prefix_hit_tokens": 50},
    "kv_tokens_copied": 14,
}
SWAPPING = {
    **{"host_blocks_used": 3, "host_blocks_total": 4, "num_swapped_out_blocks": 21, "num_swapped_in_blocks": 22},
    "num_admissions_slowed": 23,
}


@pytest.fixture
def figures(keyless):
    """Set the engine's metrics and run a request, so that the front end has received them."""
    keyless.engine.figures = FIGURES
    keyless.post(None, "/v1/completions", **GENERATING["/v1/completions"])
    yield FIGURES
    keyless.engine.figures = {}


def test_server_info_has_version_options_kv_groups_and_cache_figures(keyless, figures):
    info = keyless.ask(None, "GET", "/get_server_info").json()
    assert (info["version"], info["model"], info["max_model_len"]) == (quire.__version__, "quire-demo", 512)
    assert set(info["options"]) == {field.name for field in fields(EngineOptions)}
    assert (info["options"]["dtype"], info["options"]["kernels"]) == ("float32", "cpu")
    assert info["block_size"] == 16
    (group,) = info["kv_groups"]
    assert (group["kind"], group["window"]) == ("full", 0)
    assert group["num_blocks"] == info["cache"]["kv_blocks_total"] > 0
    assert info["prefix_index"] == "radix"
    assert info["public_prefixes"] == {"count": 0, "blocks": 0}
    assert (info["requests_running"], info["requests_waiting"]) == (0, 0)
    cache = info["cache"]
    assert {name: cache[name] for name in figures} == figures
    assert cache["prefix_hit_rate"] == 0.25
    assert set(cache) - set(figures) == {"kv_blocks_used", "kv_blocks_total", "prefix_hit_rate"}


def test_server_info_and_metrics_report_swapped_blocks(keyless, figures):
    keyless.engine.figures = {**figures, **SWAPPING}
    keyless.post(None, "/v1/completions", **GENERATING["/v1/completions"])
    info = keyless.ask(None, "GET", "/get_server_info").json()
    assert info["swap"] == {
        **{"host_blocks_used": 3, "host_blocks_total": 4, "blocks_swapped_out": 21, "blocks_swapped_in": 22}
    }
    assert info["eviction"] == "lru"
    assert [group["num_host_blocks"] for group in info["kv_groups"]] == [0]
    page = keyless.ask(None, "GET", "/metrics").text
    for name, value in (
        ("cpu_cache_usage_perc", 0.75),
        ("kv_blocks_swapped_out_total", 21.0),
        ("kv_blocks_swapped_in_total", 22.0),
        ("admissions_slowed_total", 23.0),
    ):
        assert f'quire:{name}{{engine="0",model_name="quire-demo"}} {value}' in page


def test_server_info_of_a_model_with_recurrent_states_has_its_blocks_and_snapshots(keyless):
    assert "states" not in keyless.ask(None, "GET", "/get_server_info").json()
    service = service_of(small_engine())
    service.cache = replace(service.cache, states=state_group(40))
    with run_app(make_app(service)) as url:
        states = httpx.get(f"{url}/get_server_info").json()["states"]
    assert (states["kind"], states["num_blocks"], states["snapshots"]) == ("delta", 40, 0)


def test_metrics_of_the_cache(keyless, figures):
    page = keyless.ask(None, "GET", "/metrics").text
    for name, kind, value in (
        ("prefix_cache_queries_total", "counter", 200),
        ("prefix_cache_hits_total", "counter", 50),
        ("kv_blocks_cached", "gauge", 11),
        ("kv_blocks_evicted_total", "counter", 12),
        ("kv_tokens_copied_total", "counter", 14),
    ):
        assert f"# TYPE quire:{name} {kind}" in page
        assert f'quire:{name}{{engine="0",model_name="quire-demo"}} {value:.1f}' in page
