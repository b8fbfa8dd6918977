"""Several served names, and what a 404 of a route of another server says."""

import json
import re

import httpx
import pytest
from embedded_model_server import CHAT, run_app, service_of, small_engine
from server_probes import routes

from quire.errors import ConfigError
from quire.server.app import make_app
from quire.server.options import ServerOptions
from quire.server.route_hints import HINTS, route_hint


@pytest.fixture(scope="module")
def app():
    return make_app(service_of(small_engine(), model_names=["claude-small", "gpt-small:4b", "claude-small"]))


@pytest.fixture(scope="module")
def named(app):
    with run_app(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_all_names_are_listed_and_described(named):
    listed = named.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["claude-small", "gpt-small:4b"]
    assert {one["root"] for one in listed} == {"claude-small"}
    assert named.get("/v1/models/gpt-small:4b").json() == listed[1]
    assert named.get("/v1/models/quire-demo").status_code == 404
    tags = [one["name"] for one in named.get("/api/tags").json()["models"]]
    assert tags == ["claude-small:latest", "gpt-small:4b"]


@pytest.mark.parametrize("name", ["claude-small", "gpt-small:4b", None])
def test_each_name_is_accepted_and_the_first_is_reported(named, name):
    body = {"messages": CHAT, "max_tokens": 1, "model": name}
    assert named.post("/v1/chat/completions", json=body).json()["model"] == "claude-small"
    if name is not None:
        assert named.post("/v1/messages", json=body).json()["model"] == "claude-small"


def test_another_name_is_refused_with_all_that_are_served(named):
    for name in ("quire-demo", "claude", ""):
        answer = named.post("/v1/completions", json={"prompt": "a", "model": name})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "'claude-small' and 'gpt-small:4b'" in answer.json()["error"]["message"]
    for name in ("claude-small:latest", "tgi", "dummy"):
        assert named.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "model": name}).is_success


def test_patterns_stand_for_the_model():
    names = ["claude-*", "small", "gpt-*-mini"]
    with run_app(make_app(service_of(small_engine(), model_names=names))) as url, httpx.Client(base_url=url) as client:
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["small"]
        for name in ("claude-x", "gpt-5-mini", "small", "small:latest"):
            answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "model": name})
            assert answer.json()["model"] == "small"
        error = client.post("/v1/completions", json={"prompt": "a", "model": "gpt-5"}).json()["error"]
        assert "this server has 'small' and 'claude-*' and 'gpt-*-mini'" in error["message"]


@pytest.mark.parametrize("stream", [None, False])
def test_the_served_model_can_be_pulled_as_from_ollama(http, stream):
    answer = http.post("/api/pull", json={"model": "quire-demo:latest", "stream": stream})
    statuses = [json.loads(line)["status"] for line in answer.text.splitlines()]
    assert statuses == (["success"] if stream is False else ["pulling manifest", "success"])


def test_names_are_checked():
    ServerOptions(served_model_name=("a", "b/c:latest")).check()
    for name in ("", "a\nb", "x" * 257):
        with pytest.raises(ConfigError, match="served_model_name"):
            ServerOptions(served_model_name=("a", name)).check()


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/audio/transcriptions", "text models only"),
        ("/v1/images/generations", "no images"),
        ("/v1/moderations", "/v1/classify"),
        ("/v1/threads/thread_1/messages", "/v1/responses"),
        ("/v1/threads", "/v1/responses"),
        ("/chat/completions", "use /v1/chat/completions"),
        ("/models/", "use /v1/models"),
        ("/abort_request", "close the connection"),
        ("/infill", "not supported"),
        ("/v1/v1/chat/completions", "leave one of them out"),
        ("/openai/deployments/a/chat/completions", "OpenAI's client"),
        ("/nothing/here", "/openapi.json"),
        ("/" + "a/" * 5000, "/openapi.json"),
    ],
)
def test_an_unknown_route_is_a_404_with_the_nearest_route(http, path, hint):
    for method in ("GET", "POST"):
        answer = http.request(method, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "route_not_found")
        assert hint in error["message"]


def test_in_ollamas_dialect_the_error_is_a_text(http):
    answer = http.post("/api/pull", json={"model": "llama3"})
    assert answer.status_code == 404
    assert "quire serve MODEL" in answer.json()["error"]


@pytest.mark.usefixtures("named")  # closes what the app has opened
def test_hints_name_routes_that_exist(app):
    known = {re.sub(r"\{\w+(:path)?\}", "ID", path) for _, path in routes(app)}
    elsewhere = {"/v1/responses", "/v1/files", "/v1/batches"}
    named = {path for hint in HINTS.values() for path in re.findall(r"(?<![\w.])/[\w/.]+\w", hint)}
    assert named - known - elsewhere == set()
    assert not {path for path in HINTS if path in known}, "they are served"
    assert route_hint("/v1/messages/batches/b_1/results") == HINTS["/v1/messages/batches/"]
