"""A server with two engine processes: what its routes say of each, drains under load, restarts."""

import asyncio
import json
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from embedded_model_server import CHAT, run_app
from server_probes import Page
from typer.testing import CliRunner

from quire.cli import app as cli
from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.fleet.shuffle_shards import replica_order
from quire.fleet.tenant_service import SEND_SECONDS
from quire.scheduler.journal import ServedElsewhere, read_records, replay_journal
from quire.scheduler.queue.fair import OUTPUT_WEIGHT
from quire.server.app import make_app
from quire.server.options import ServerOptions
from quire.server.serve import launched

SMALL = EngineOptions(max_num_seqs=8, memory="256MiB", max_model_len=512, dtype="float32", calibration=0.0, threads=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(client, processes of the replicas). At the end its placements are replayed."""
    options, journal = ServerOptions(data_parallel_size=2), tmp_path_factory.mktemp("journals") / "j"
    small = replace(SMALL, journal=str(journal))
    with (
        launched(small, options, report=lambda _line: None, progress=lambda *_: None) as service,
        run_app(make_app(service)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client, lambda: [handle.process.pid for handle in service.engine.engine_handles]
    replayed = CliRunner().invoke(cli, ["replay", f"{journal}.routing"])
    assert re.fullmatch(r"(\d+) placements, all the same\n", replayed.output), replayed.output
    assert int(replayed.output.split()[0]) > 10
    with (
        pytest.raises(ConfigError, match=r"j.engine-0' exists"),
        launched(small, options, report=lambda _line: None, progress=lambda *_: None),
    ):
        pass


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


def test_a_prompt_follows_its_prefix_and_the_explanation_says_why(server):
    client, _ = server
    common, found = [7, 11] * 60, []
    for i in range(6):
        body = {"prompt": [*common, 20 + i], "max_tokens": 2, "temperature": 0}
        answer = client.post("/v1/completions", json=body).json()
        (explained,) = client.get(f"/v1/requests/{answer['id']}/explain").json()["prompts"]
        found.append((explained["placement"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]))
    homes = {placement["replica"] for placement, _ in found}
    assert len(homes) == 1
    for placement, num_cached in found[1:]:
        matched = {one["replica"]: one["num_cached_tokens"] for one in placement["candidates"]}
        assert matched == {one: len(common) // 16 * 16 * (one in homes) for one in range(2)}
        assert num_cached == len(common), "the engine copies the beginning of a block, too"
        assert placement["routing"] == "predicted"
        assert 0 < placement["actual_seconds"] < 60 and placement["predicted_seconds"] >= 0
    page = Page(client.get("/metrics").text)
    matched = sum(one.value for one in page.families["quire:routing_matched_tokens"].samples)
    placed = sum(one.value for one in page.families["quire:routing_requests"].samples)
    errors = [one for one in page.families["quire:routing_error_seconds"].samples if one.name.endswith("_count")]
    assert matched >= 5 * 112
    assert {one.labels["engine"] for one in errors} == {"0", "1"}
    assert sum(one.value for one in errors) == placed >= 6


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


@pytest.mark.parametrize("size", [0, 3])
def test_a_shard_that_is_no_part_of_the_fleet_is_refused(size):
    options = ServerOptions(data_parallel_size=2, tenant_shuffle_shard=size)
    with pytest.raises(ConfigError, match=rf"cannot use {size} of 2 replicas; choose 1 to 2, or change data_parallel"):
        options.check()
    ServerOptions(data_parallel_size=2, tenant_shuffle_shard=2).check()


def test_an_engine_hears_of_the_service_of_a_tenant_that_only_another_one_serves(tmp_path):
    options = replace(SMALL, policy="fair", journal=str(tmp_path / "journal"))
    server = ServerOptions(data_parallel_size=2, tenant_shuffle_shard=1)
    with (
        launched(options, server, report=lambda _line: None, progress=lambda *_: None) as service,
        run_app(make_app(service)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for i in range(3):
            text(client, i)
        time.sleep(5 * SEND_SECONDS)
    home, other = replica_order("", 2)
    served, heard = Counter(), Counter()
    for number, found in (home, served), (other, heard):
        path = tmp_path / f"journal.engine-{number}"
        assert replay_journal(path).difference == ""
        with path.open("rb") as file:
            for record in read_records(file):
                if isinstance(record, ServedElsewhere):
                    found.update(record.service)
    assert (served, heard) == (Counter(), Counter({"": 3 * (20 + OUTPUT_WEIGHT * 160)}))


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
