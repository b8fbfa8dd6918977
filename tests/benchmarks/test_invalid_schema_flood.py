"""A few seconds of benchmarks/structured/flood.py: each invalid constraint is rejected, and streams do not change."""

import asyncio
import json
import threading

import pytest
from multi_tenant_server import run_site

from benchmarks.structured import flood as floods
from benchmarks.structured.flood import REFUSED, Traffic, bad_forms, flood, normal
from quire.server.middleware import tarpit

SECONDS = 1.5


@pytest.fixture(scope="module")
def site():
    with run_site("root") as site:  # an admin's answers are not delayed
        yield site


@pytest.mark.parametrize("name", bad_forms())
def test_each_kind_is_refused(site, name):
    form = json.loads(json.dumps(bad_forms()[name]).replace(floods.MARK, "00000000"))
    answer = site.post("root", "/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], **form)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].split(".")[0] in ("response_format", "structured_outputs")
    assert len(error["message"]) < 1500


def test_streams_beside_a_flood_have_no_error(monkeypatch):
    monkeypatch.setattr(tarpit, "MAX_SECONDS", 0.05)  # otherwise the flood is slow
    answers, traffic = [], Traffic()
    with run_site() as site:
        attack = threading.Thread(target=lambda: answers.append(flood(site.url, SECONDS, 8)))
        attack.start()
        asyncio.run(normal(site.url, SECONDS, 4, traffic, seed=1))
        attack.join(30)
    assert not traffic.errors
    assert len(traffic.requests) >= 4
    (answered,) = answers
    assert sum(answered.values()) > len(bad_forms())
    assert all(one.rpartition(" ")[2] in REFUSED for one in answered), answered
