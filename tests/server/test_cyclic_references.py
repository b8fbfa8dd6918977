"""Requests leave no cycles of references, which only a garbage collection would free."""

import gc
import json
import socket

import pytest
from embedded_model_server import run_app, service_of, small_engine

from quire.server.app import make_app

GOOD = {"prompt": [67] * 50, "max_tokens": 4, "ignore_eos": True}
CONTENTS = {
    "whole answer": json.dumps(GOOD),
    "stream": json.dumps(GOOD | {"stream": True}),
    "unknown field": json.dumps(GOOD | {"nope": [["a"] * 100]}),
    "no JSON": '{"prompt": "' + "a" * 5000,
}
NUM_REQUESTS = 20


@pytest.fixture(scope="module")
def address():
    with run_app(make_app(service_of(small_engine()))) as url:
        gc.collect()
        gc.freeze()  # collections look at objects of requests alone
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)
        gc.unfreeze()


def answer_of(address, content):
    """An answer, read to its end. Sockets leave no garbage of the client, which would count."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n{content}".encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_request_leaves_no_cyclic_references(address, kind):
    status = b"HTTP/1.1 200" if kind in ("whole answer", "stream") else b"HTTP/1.1 400"

    def unreachable_after_requests() -> list[str]:
        gc.collect()
        for _ in range(NUM_REQUESTS):
            assert answer_of(address, CONTENTS[kind]).startswith(status)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        names = [type(item).__name__ for item in gc.garbage]
        gc.garbage.clear()
        return names

    gc.disable()
    try:
        unreachable_after_requests()  # first uses import modules
        assert len(unreachable_after_requests()) < NUM_REQUESTS / 2, "less than one object for every other request"
    finally:
        gc.enable()
