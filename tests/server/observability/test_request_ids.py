"""Request ids: ids sent by clients, ids in answers, and explanations by id."""

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multi_tenant_server import GENERATING, WHOLE
from waiting import wait_until

from quire.server.observability import request_record
from quire.server.observability.request_record import RequestIds, RequestRecord, store_record, valid_client_id
from quire.server.sse import DONE

OWN = re.compile(r"[0-9a-f]{32}")
BAD = ["", "a b", "x" * 129, 'a"b', "a\\b", "{}", "ü", "a,b", "a;b", "a\x7fb"]


@given(st.text(max_size=140))
def test_an_id_is_taken_as_it_is_or_not_at_all(text):
    safe = 0 < len(text) <= 128 and all(c.isascii() and (c.isalnum() or c in "._:/=+@-") for c in text)
    assert valid_client_id(text) == (text if safe else None)


def test_the_longest_id_is_taken():
    assert valid_client_id("x" * 128) == "x" * 128
    assert valid_client_id("x\n") is None
    assert valid_client_id(None) is None


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_has_the_id_that_the_client_chose(keyless, path, stream):
    body = GENERATING[path] if path in WHOLE else {**GENERATING[path], "stream": stream}
    answer = httpx.post(keyless.url + path, json=body, headers={"x-request-id": "job-7/a"}, timeout=60)
    assert answer.status_code == 200
    assert answer.headers.get_list("x-request-id") == ["job-7/a"]
    if path.startswith("/v1/c") and not stream:
        assert re.fullmatch(r"(chat)?cmpl-job-7/a-[0-9a-f]{12}", answer.json()["id"])


@pytest.mark.parametrize("id", BAD)
def test_an_id_that_could_do_harm_is_replaced(keyless, id):
    answer = httpx.get(f"{keyless.url}/live", headers={"x-request-id": id.encode()})
    assert OWN.fullmatch(answer.headers["x-request-id"])


def test_every_refusal_has_an_id(site):
    answers = [
        site.ask(None, "GET", "/v1/models"),
        site.ask("ann", "GET", "/nothing-here"),
        site.ask("ann", "GET", "/v1/completions"),
        site.ask("ann", "GET", "/metrics"),
        site.post("ann", "/v1/completions", prompt="x", model="another"),
        site.post("ann", "/v1/completions", prompt="x", max_tokens=-2),
        site.ask("ann", "GET", "/v1/requests/none/explain"),
    ]
    assert [answer.status_code for answer in answers] == [401, 404, 405, 403, 404, 400, 404]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(ids)
    assert all(re.search(r"[0-9a-f]{32}\Z", id) for id in ids)


def test_an_unexpected_error_has_one_too_and_the_log_says_which(keyless, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError("a bug with internals")

    monkeypatch.setattr(RequestIds, "make", fail)
    headers = {"x-request-id": "job-8"}
    answer = httpx.post(f"{keyless.url}/v1/completions", json={"prompt": "x"}, headers=headers)
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "job-8"
    assert "internals" not in answer.text
    number = answer.json()["error"]["code"]
    wait_until(lambda: f"request job-8 was answered with 500 ({number})" in caplog.text)


def test_the_same_id_many_times_at_once(site):
    def ask(who):
        body = {"prompt": f"of {who}", "max_tokens": 4, "ignore_eos": True}
        headers = {"authorization": f"Bearer {site.keys[who]}", "x-request-id": "same"}
        return httpx.post(f"{site.url}/v1/completions", json=body, headers=headers, timeout=60)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, ["ann", "bob"] * 8))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 16
    for who in ("ann", "bob"):
        ids = [answer.json()["id"] for answer, asked in zip(answers, ["ann", "bob"] * 8, strict=True) if asked == who]
        explained = site.ask(who, "GET", "/v1/requests/same/explain").json()
        assert [one["tenant"] for one in explained["prompts"]] == [who]
        assert explained["prompts"][0]["request_id"].removesuffix("-0") in ids
    assert site.ask("root", "GET", "/v1/requests/same/explain").status_code == 404, "it is not root's own"


def test_client_request_ids_are_kept_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(request_record, "MAX_CLIENT_IDS", 2)
    ids = RequestIds("m")

    class Asked:
        def __init__(self, given):
            self.scope = {"type": "http", "state": {}}
            store_record(self.scope, RequestRecord(given, given * 32, self.scope, 0.0, 0.0))

    made = {given: ids.make("cmpl", Asked(given)) for given in "aba"}
    made["c"] = ids.make("cmpl", Asked("c"))
    assert ids.answer_id("", "a") == made["a"] == "cmpl-a-" + "a" * 12
    assert ids.answer_id("", "b") == "b"
    assert ids.answer_id("other", "a") == "a"


def test_a_stream_has_its_id_before_its_first_event(keyless):
    body = {"prompt": [70], "stream": True, "max_tokens": 3, "ignore_eos": True}
    with httpx.stream("POST", f"{keyless.url}/v1/completions", json=body, headers={"x-request-id": "s"}) as answer:
        assert answer.headers["x-request-id"] == "s"
        assert b"".join(answer.iter_bytes()).endswith(DONE)


@pytest.mark.parametrize("written", ["team/job:1", "team%2Fjob:1"])
def test_an_id_with_slashes_leads_to_its_explanation(site, written):
    body = {"prompt": [70], "max_tokens": 1}
    headers = {"authorization": f"Bearer {site.keys['ann']}", "x-request-id": "team/job:1"}
    answer = httpx.post(f"{site.url}/v1/completions", json=body, headers=headers, timeout=60).json()
    for id in (written, answer["id"]):
        explained = site.ask("ann", "GET", f"/v1/requests/{id}/explain")
        assert explained.status_code == 200
        assert explained.json()["prompts"][0]["request_id"] == f"{answer['id']}-0"
    assert site.ask("bob", "GET", f"/v1/requests/{written}/explain").status_code == 404
