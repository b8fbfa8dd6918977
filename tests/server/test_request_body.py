"""Request bodies: where they are parsed, what is refused before, and how many bytes of one tenant are held."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from multi_tenant_server import run_site
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from waiting import wait_until

from quire.errors import ContextLengthExceeded
from quire.server import held_answer, request_body
from quire.server.middleware.auth import AuthMiddleware
from quire.server.request_body import (
    LARGE,
    MAX_BODY,
    MAX_CONTAINERS,
    MAX_FIELDS,
    MAX_VALUES,
    RequestBodies,
)
from quire.tenant_memory import MAX_TENANT_BYTES, TenantMemories

JSON = "application/json"
USER = {"role": "user", "content": "a"}


class Threads(BaseModel):
    """A model that remembers the thread that made it."""

    messages: list[object] = []
    thread: str = ""

    def model_post_init(self, _context):
        self.thread = threading.current_thread().name


def parsed(body, max_messages=100):
    return request_body._parsed(body, JSON, Threads, max_messages)[0]


@pytest.mark.parametrize(
    ("body", "on_thread"),
    [
        ({"messages": [USER] * 9}, False),
        ({"messages": ["a" * (LARGE - 100)]}, False),
        ({"messages": ["a" * LARGE]}, True),
        ({"messages": [[{}] * 300]}, True),
    ],
    ids=["short", "long text", "longer text", "many objects"],
)
def test_long_bodies_and_many_objects_are_parsed_on_a_thread(body, on_thread):
    bodies, app = RequestBodies(100, lambda request, body, ignored: None, TenantMemories()), FastAPI()
    router = APIRouter(route_class=bodies.route_class())

    @router.post("/")
    async def thread(body: Threads, request: Request) -> Response:
        assert request.state.body_bytes.is_large == on_thread
        return Response(body.thread)

    app.include_router(router)
    app.add_middleware(AuthMiddleware, keys=None)
    with TestClient(app, base_url="http://localhost") as client:
        assert client.post("/", json=body).text.startswith("quire-pool") == on_thread
    bodies.close()


def test_more_messages_than_fit_into_the_context_make_no_models():
    with pytest.raises(ContextLengthExceeded, match="has 16,000 messages, more than the 100") as caught:
        parsed(json.dumps({"messages": [USER] * 16_000}).encode())
    assert caught.value.param == "messages"
    assert len(parsed(json.dumps({"messages": [USER] * 100}).encode()).messages) == 100


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"messages": [' + b"{}," * MAX_CONTAINERS + b"{}]}", "more than 131,072 objects and lists"),
        (b'{"messages": {' + b'"a":1,' * MAX_FIELDS + b'"a":1}}', "more than 131,072 fields of objects"),
        (b'{"messages": [' + b"1," * MAX_VALUES + b"1]}", "more than 1,179,648 values"),
    ],
)
def test_json_of_too_many_values_is_not_parsed(monkeypatch, body, says):
    monkeypatch.setattr(request_body, "_json", None)
    with pytest.raises(HTTPException, match=says) as caught:
        parsed(body)
    assert caught.value.status_code == 400


def test_commas_and_brackets_in_texts_are_no_values():
    text = ",[{:" * (MAX_VALUES + 1)
    assert parsed(json.dumps({"messages": [text]}).encode()).messages == [text]


@pytest.mark.parametrize("body", [b"{", b"[1, 2", b'{"messages": 5}' + b" " * LARGE + b"x"])
def test_bodies_that_are_no_json_are_refused_on_either_way(body):
    with pytest.raises(RequestValidationError) as caught:
        parsed(body)
    assert caught.value.errors()[0]["type"] == "json_invalid"


def test_half_sent_bodies_of_a_tenant_delay_its_own_large_bodies_alone(monkeypatch):
    monkeypatch.setattr(request_body, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(held_answer, "TURN_SECONDS", 0.5)
    with run_site("ann", "bob") as site:
        host, port = site.url.removeprefix("http://").split(":")
        large = json.dumps({"messages": [{**USER, "content": "a" * 2**17}]})
        held = []
        for _ in range(MAX_TENANT_BYTES // MAX_BODY):
            client = socket.create_connection((host, int(port)))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            head += f"authorization: Bearer {site.keys['ann']}\r\ncontent-length: {MAX_BODY}\r\n\r\n"
            client.sendall(head.encode() + b"{" * 2**18)  # which gives the client 4 seconds more
            held.append(client)
        wait_until(lambda: site.ask("ann", "POST", "/v1/chat/completions", content=large).status_code == 429)
        assert site.ask("bob", "POST", "/v1/chat/completions", content=large).status_code == 400
        assert site.ask("ann", "POST", "/v1/chat/completions", content="{}").status_code == 400
        for client in held:
            client.close()
        wait_until(lambda: site.ask("ann", "POST", "/v1/chat/completions", content=large).status_code == 400)


def test_a_flood_of_large_bodies_delays_other_requests_only_briefly():
    body = json.dumps({"messages": [USER] * 16_000}).encode()
    with run_site("ann", "bob") as site, ThreadPoolExecutor(16) as pool, httpx.Client() as client:

        def longest_delay():
            """Of another request during a flood, as a share of the flood's time."""
            flood = [pool.submit(site.ask, "ann", "POST", "/v1/chat/completions", content=body) for _ in range(40)]
            longest, began = 0.0, time.monotonic()
            while not all(one.done() for one in flood):
                before = time.monotonic()
                assert client.get(f"{site.url}/live").status_code == 200
                longest = max(longest, time.monotonic() - before)
            ended = time.monotonic()
            assert {one.result().json()["error"]["code"] for one in flood} == {"context_length_exceeded"}
            return longest / (ended - began)

        # other programs may delay a request at any time, but hardly in each of several floods
        assert any(longest_delay() < 0.25 for _ in range(5))
