"""Requests that are refused without the engine, after it has refused one of their tenant."""

from concurrent.futures import ThreadPoolExecutor, as_completed

import httpx
from embedded_model_server import run_app, service_of
from multi_tenant_server import error_of

from quire.config import EngineOptions
from quire.errors import MAX_EXPECTED_RETRIES, QueueFull
from quire.server.api_keys import Keys, new_key
from quire.server.app import make_app
from quire.server.middleware.queue_full import QUEUED_PATHS, REMEMBERED_SECONDS, RecentRefusals
from quire.startup.build import build

LONG = {"prompt": [67, 68, 69], "max_tokens": 300, "ignore_eos": True}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_each_further_request_of_a_rejected_tenant_gets_a_later_retry_after():
    refusals = RecentRefusals(clock := Clock())
    assert refusals.next_error("loud") is None
    refusals.record("loud", QueueFull("full", 2.0, 0.25))
    retry_afters = [refusals.next_error("loud").retry_after for _ in range(3)]
    assert retry_afters == [2.25, 2.5, 2.75]
    assert refusals.next_error("quiet") is None
    clock.now += REMEMBERED_SECONDS * 1.01
    assert refusals.next_error("loud") is None, "the engine is asked again"
    refusals.record("loud", QueueFull("full", 2.0, 0.25))
    assert str(refusals.next_error("loud")) == "full; try again in 2.9 s", "behind those that the engine does not know"


def test_a_refusal_applies_no_longer_than_its_retry_after():
    refusals = RecentRefusals(clock := Clock())
    refusals.record("loud", QueueFull("full", 0.02, 0.01))
    clock.now += 0.03
    assert refusals.next_error("loud") is None


def test_requests_of_an_earlier_flood_do_not_count():
    refusals = RecentRefusals(clock := Clock())
    refusals.record("loud", QueueFull("full", 2.0, 0.25))
    for _ in range(400):
        refusals.next_error("loud")
    clock.now += 1.0
    refusals.record("loud", QueueFull("full", 2.0, 0.25))
    assert refusals.next_error("loud").retry_after == 2.25


def test_a_flood_does_not_raise_the_time_without_bound():
    refusals = RecentRefusals(Clock())
    refusals.record("loud", QueueFull("full", 2.0, 0.25))
    retry_afters = [refusals.next_error("loud").retry_after for _ in range(MAX_EXPECTED_RETRIES + 100)]
    assert max(retry_afters) == retry_afters[-1] == 2.0 + MAX_EXPECTED_RETRIES * 0.25


def test_a_queue_full_error_specific_to_one_request_is_not_repeated():
    refusals = RecentRefusals(Clock())
    refusals.record("loud", QueueFull("full", 2.0, 0.25))
    refusals.record("loud", QueueFull("too long", 2.0))
    assert refusals.next_error("loud") is None


def test_a_flood_is_refused_before_bodies_are_parsed_and_other_tenants_are_served(monkeypatch, no_refills):
    monkeypatch.setattr(RecentRefusals.__init__, "__defaults__", (Clock(),))  # so that a slow test is no later request
    options = EngineOptions(max_num_seqs=1, max_queued_requests=2, policy="fair", memory="256MiB", max_model_len=512)
    service = service_of(build(options, report=lambda line: None, progress=lambda done, total: None))
    made = {who: new_key(who, "user", requests_per_minute=9) for who in ("loud", "quiet")}
    keys = Keys([entry for _, entry in made.values()])
    headers = {who: {"authorization": f"Bearer {key}"} for who, (key, _) in made.items()}
    with ThreadPoolExecutor() as pool, run_app(make_app(service, keys)) as url:

        def post(who):
            return httpx.post(f"{url}/v1/completions", json=LONG, headers=headers[who], timeout=60)

        answers = [pool.submit(post, "loud") for _ in range(4)]  # at most one runs and two wait
        refused = next(as_completed(answers)).result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        left = refused.headers["x-ratelimit-remaining-requests"]
        for path in QUEUED_PATHS:
            answer = httpx.post(url + path, content=b"this is not JSON", headers=headers["loud"])
            error = error_of(answer)
            assert (answer.status_code, error["code"]) == (429, "queue_full")
            assert error["type"] in ("rate_limit_error", None)
            assert "the queue is full (max_queued_requests 2, shared by tenants)" in error["message"]
            assert int(answer.headers["retry-after"]) >= int(refused.headers["retry-after"])
            assert answer.headers["x-ratelimit-limit-requests"] == "9"
        other = httpx.post(f"{url}/tokenize", json={"prompt": "a"}, headers=headers["loud"])
        assert other.status_code == 200
        assert other.headers["x-ratelimit-remaining-requests"] == str(int(left) - 1), "refusals here do not count"
        assert post("quiet").status_code == 200
        assert {answer.result().status_code for answer in answers} == {200, 429}


def test_each_post_route_is_refused_in_a_flood_or_queues_nothing():
    options = EngineOptions(memory="256MiB", max_model_len=512)
    service = service_of(build(options, report=lambda line: None, progress=lambda done, total: None))
    app = make_app(service)
    paths = {path for path, methods in app.openapi()["paths"].items() if "post" in methods}
    queues_nothing = {"/tokenize", "/detokenize", "/flush_cache", "/v1/programs/end"}
    queues_nothing |= {"/v1/files", "/v1/batches", "/v1/batches/{id}/cancel", "/v1/responses/{id}/cancel"}
    queues_nothing |= {"/v1/messages/count_tokens", "/api/show", "/api/pull", "/apply-template"}
    queues_nothing |= {f"/v1/fleet/{{replica}}/{what}" for what in ("drain", "restart")}
    queues_nothing |= {f"{path}_lora_adapter" for path in ("/v1/load", "/v1/unload", "/load", "/unload")}
    assert paths | {"/"} == QUEUED_PATHS | queues_nothing, "add a route that generates to QUEUED_PATHS"
