"""A server with two engine processes: what its routes say of each, drains under load, restarts."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from embedded_model_server import CHAT, run_app
from server_probes import Page
from typer.testing import CliRunner

from quire.cli import app as cli
from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.server.app import make_app
from quire.server.options import ServerOptions
from quire.server.serve import launched

SMALL = EngineOptions(max_num_seqs=8, memory="256MiB", max_model_len=512, dtype="float32", calibration=0.0, threads=1)


@pytest.fixture(scope="module")
def server():
    """(client, processes of the replicas)."""
    options = ServerOptions(data_parallel_size=2)
    with (
        launched(SMALL, options, report=lambda _line: None, progress=lambda *_: None) as service,
        run_app(make_app(service)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client, lambda: [handle.process.pid for handle in service.engine.engine_handles]


def text(client, i):
    """The text of a request, which a drain must not change."""
    body = {"prompt": [5 + i] * 20, "max_tokens": 160, "temperature": 0, "ignore_eos": True, "deterministic": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def fleet(client):
    return client.get("/v1/fleet").json()["data"]


def test_requests_are_spread_and_each_engine_has_samples_of_its_own(server):
    client, _ = server
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: text(client, i), range(8)))
    page = Page(client.get("/metrics").text)
    tokens = {one.labels["engine"]: one.value for one in page.families["quire:generation_tokens"].samples}
    assert set(tokens) == {"0", "1"} and all(value >= 160 for value in tokens.values())
    assert sum(tokens.values()) == 8 * 160
    entries = fleet(client)
    assert [(one["number"], one["state"], one["requests"], one["drained"]) for one in entries] == [
        (0, "serving", 0, False),
        (1, "serving", 0, False),
    ]
    health = client.get("/health").json()
    assert [one["number"] for one in health["replicas"]] == [0, 1]
    assert health["kv_blocks_total"] == sum(one["kv_blocks_total"] for one in entries)
    assert len(client.get("/get_server_info").json()["costs_of_replicas"]) == 2


def test_a_drain_and_a_restart_under_load_lose_nothing_and_change_no_token(server):
    client, pids = server
    expected, before = [text(client, i) for i in range(6)], pids()
    for number in (0, 1):
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(text, client, i) for i in range(6)]
            drained = client.post(f"/v1/fleet/{number}/drain").json()
            assert (drained["drained"], drained["requests"]) == (True, 0)
            last = client.post(f"/v1/fleet/{1 - number}/drain")
            assert (last.status_code, last.json()["error"]["code"]) == (409, "last_replica")
            again = client.post(f"/v1/fleet/{number}/restart").json()
            assert (again["drained"], again["state"], again["restarts"]) == (False, "serving", 1)
            assert [one.result() for one in answers] == expected
    assert set(before).isdisjoint(pids())


def test_numbers_that_no_replica_has_are_refused_by_name(server):
    client, _ = server
    for method, path in (("POST", "/v1/fleet/2/drain"), ("POST", "/v1/fleet/7/restart"), ("GET", "/monitor?engine=2")):
        answer = client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "replica_not_found"), path
    assert client.post("/v1/fleet/x/drain").status_code in (400, 422)


def test_a_viewer_sees_the_engine_that_it_names(server):
    client, _ = server
    assert client.get("/page/mode.json").json()["replicas"] == 2
    for number in (0, 1):
        with client.stream("GET", f"/monitor?engine={number}") as stream:
            event = next(line for line in stream.iter_lines() if line.startswith("data:"))
        assert "step" in event or "pools" in event


def test_more_replicas_than_cores_are_refused_before_anything_is_loaded():
    options = ServerOptions(data_parallel_size=64)
    with (
        pytest.raises(ConfigError, match=r"64 replicas need a core each"),
        launched(SMALL, options, report=lambda _line: None, progress=lambda *_: None),
    ):
        pass


def test_a_batch_uses_all_replicas(tmp_path, monkeypatch):
    source, target, asked = tmp_path / "in.jsonl", tmp_path / "out.jsonl", []
    body = {"messages": CHAT, "max_tokens": 4}
    lines = [{"custom_id": f"{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(5)]
    source.write_text("\n".join(map(json.dumps, lines)))
    semaphore = asyncio.Semaphore
    monkeypatch.setattr(asyncio, "Semaphore", lambda number: asked.append(number) or semaphore(number))
    options = ["--memory", "256MiB", "--max-model-len", "512", "--threads", "1", "--data-parallel-size", "2"]
    done = CliRunner().invoke(cli, ["run-batch", "-i", str(source), "-o", str(target), *options])
    assert done.exit_code == 0, done.output
    assert "replicas   2 serve" in done.output
    answers = [json.loads(line)["response"]["status_code"] for line in target.read_text().splitlines()]
    assert answers == [200] * 5
    assert 512 in asked
