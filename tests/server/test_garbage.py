"""Requests leave nothing that only a garbage collection would free."""

import gc
import json
import subprocess
import sys

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
# in another process, so that the garbage of the client does not count
CLIENT = """
import sys
import httpx
url, content = sys.argv[1:]
for _ in range(10):
    httpx.post(url + "/v1/completions", content=content, headers={"content-type": "application/json"}, timeout=30)
"""


@pytest.fixture(scope="module")
def url():
    with run_app(make_app(service_of(small_engine()))) as url:
        yield url


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_request_leaves_no_garbage(url, kind):
    def unreachable_after_requests() -> list[str]:
        gc.collect()
        subprocess.run([sys.executable, "-c", CLIENT, url, CONTENTS[kind]], check=True, timeout=60)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        names = [type(item).__name__ for item in gc.garbage]
        gc.garbage.clear()
        return names

    gc.disable()
    try:
        unreachable_after_requests()  # first uses import modules
        assert len(unreachable_after_requests()) < 10, "less than one object for each of ten requests"
    finally:
        gc.enable()
