"""Internal errors: clients get an id and a sentence, wherever the error was."""

import logging

import httpx
import pytest
from embedded_model_server import run_app, service_of, small_engine
from multi_tenant_server import GENERATING, WHOLE, error_of
from server_probes import routes

from quire.server.app import make_app

SECRET = "the secret weights of tenant zebra"
HARMLESS = {"/", "/docs", "/page/mode.json", "/openapi.json", "/v1/models", "/v1/models/{name:path}"}
BODIES = {**GENERATING, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [67]}, "/flush_cache": None}


class Broken:
    """Raises on every access, also when it is awaited or called."""

    def __getattr__(self, name):
        raise RuntimeError(SECRET)


@pytest.fixture(scope="module")
def broken():
    """A server whose service breaks after its start."""
    service = service_of(small_engine())
    app = make_app(service)
    with run_app(app) as url:
        whole = {name: getattr(service, name) for name in ("engine", "thread_pool", "metrics", "tokenizer")}
        for name in whole:
            setattr(service, name, Broken())
        yield app, url
        for name, value in whole.items():
            setattr(service, name, value)


def test_no_route_shows_what_broke(broken, caplog):
    app, url = broken
    caplog.set_level(logging.CRITICAL)  # the log may contain it, and does
    failed = set()
    client = httpx.Client()
    for method, path in routes(app):
        for stream in (False, True):
            body = BODIES.get(path)
            if stream and path in GENERATING and path not in WHOLE:
                body = {**body, "stream": True}
            answer = client.request(method, url + path, json=body)
            assert "secret" not in str(answer.headers)
            assert "zebra" not in answer.text
            assert "Traceback" not in answer.text
            assert answer.headers["x-request-id"]
            if answer.status_code == 500 and method != "HEAD":  # whose answer has no body
                failed.add(path)
                error = error_of(answer)
                assert error["type"] in ("server_error", "api_error", None)
                assert error["code"] in error["message"]
    assert failed >= {*GENERATING, "/tokenize", "/detokenize", "/health", "/ready", "/metrics", "/get_server_info"}
    assert not failed & HARMLESS
    assert client.get(f"{url}/openapi.json").status_code == 200
    client.close()


def test_the_log_has_what_the_client_has_not(broken, caplog):
    _, url = broken
    with caplog.at_level(logging.ERROR):
        error = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).json()["error"]
    logged = "".join(record.getMessage() + str(record.exc_info) for record in caplog.records)
    assert error["code"] in logged
    assert SECRET in logged
