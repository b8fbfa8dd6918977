"""The access log: its fields, content that it never has, and errors in it that end no request."""

import json
import os
import re
import threading

import httpx
import pytest
from multi_tenant_server import run_site
from waiting import wait_until

from quire.errors import ConfigError
from quire.server.observability import access_log
from quire.server.observability.access_log import AccessLog, line_of
from quire.server.observability.middleware import check_observers
from quire.server.observability.request_record import RequestRecord
from quire.server.options import ServerOptions

SECRET = "Osterhase"
FIELDS = {
    *(
        "time",
        "request_id",
        "answer_id",
        "tenant",
        "client",
        "method",
        "route",
        "status",
        "error",
        "ignored",
        "complete",
    ),
    *("bytes", "seconds", "first_byte_seconds", "model", "prompt_tokens", "completion_tokens", "cached_tokens"),
    "finish_reasons",
}


def lines_of(path, count):
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= count)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == count
    return lines


def record(id):
    scope = {"type": "http", "method": "GET", "path": "/", "state": {}}
    return RequestRecord(id, "0" * 32, scope, arrival_time=1.5, began=2.0, status=200, ended=2.25)


@pytest.fixture
def lost():
    return []


@pytest.fixture
def log(tmp_path, lost):
    log = AccessLog(str(tmp_path / "log"), lost.append)
    yield log
    log.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("logs") / "access.jsonl"


@pytest.fixture(scope="module")
def site(path):
    with run_site("ann", "root", options=ServerOptions(access_log=str(path))) as site:
        yield site


def test_each_request_has_an_access_log_line_without_its_content(site, path):
    body = {"prompt": [f"{SECRET} one", "two"], "max_tokens": 3, "n": 2, "ignore_eos": True, "temperature": 0}
    whole = site.post("ann", "/v1/completions", **body)
    streamed = site.post("ann", "/v1/completions", **{**body, "prompt": [67, 68, 69] * 20, "n": 1, "stream": True})
    lines_of(path, 2)  # a client has the last byte of a stream before its line is written
    site.post("ann", "/v1/completions", prompt=SECRET, **{SECRET: 1})
    site.post(None, "/v1/completions", prompt=SECRET)
    site.ask("ann", "GET", f"/{SECRET}?q={SECRET}")
    embedded = site.post("ann", "/v1/embeddings", input=[67, 68])
    site.ask("root", "GET", f"/v1/requests/{SECRET}/explain")
    lines = lines_of(path, 7)
    assert all(set(line) == FIELDS for line in lines)
    said = [(line["status"], line["route"], line["tenant"], line["error"]) for line in lines]
    assert said == [
        (200, "/v1/completions", "ann", None),
        (200, "/v1/completions", "ann", None),
        (400, "/v1/completions", "ann", "unknown_parameter"),
        (401, None, None, "invalid_api_key"),
        (404, None, "ann", "route_not_found"),
        (200, "/v1/embeddings", "ann", None),
        (404, "/v1/requests/{id}/explain", "root", "request_not_found"),
    ]
    assert lines[0]["answer_id"] == lines[0]["request_id"] == whole.json()["id"]
    usage = whole.json()["usage"]
    assert (lines[0]["prompt_tokens"], lines[0]["completion_tokens"]) == (usage["prompt_tokens"], 12)
    assert lines[0]["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert lines[0]["finish_reasons"] == ["length"] * 4
    assert [line["bytes"] for line in lines[:2]] == [len(whole.content), len(streamed.content)]
    assert (lines[1]["prompt_tokens"], lines[1]["completion_tokens"]) == (60, 3)
    assert (lines[5]["prompt_tokens"], lines[5]["completion_tokens"]) == (2, 0)
    assert lines[5]["bytes"] == len(embedded.content)
    assert [line["model"] for line in lines[:2]] == ["quire-demo"] * 2
    for line in lines:
        assert line["complete"] and line["client"] == "127.0.0.1"
        assert 0 < line["first_byte_seconds"] <= line["seconds"] < 60
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])
    text = path.read_text()
    for secret in (SECRET, *site.keys.values(), whole.json()["choices"][0]["text"].strip()):
        assert secret and secret not in text


def test_prompts_are_written_where_that_is_asked_for(tmp_path):
    path = tmp_path / "log"
    options = ServerOptions(access_log=str(path), log_prompts=True)
    with run_site(options=options) as site:
        answer = site.post(None, "/v1/completions", prompt=["Hello", "Moin"], max_tokens=3, ignore_eos=True)
        body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{site.url}/v1/completions", json=body) as lines:
            next(lines.iter_lines())
        first, left = lines_of(path, 2)
    assert first["prompts"] == ["Hello", "Moin"]
    assert first["outputs"] == [choice["text"] for choice in answer.json()["choices"]]
    assert (left["finish_reasons"], left["complete"], left["status"]) == (["abort"], False, 200)


def test_the_access_log_survives_rename_truncation_and_removal(log, tmp_path):
    path = tmp_path / "log"
    log(record("a"))
    lines_of(path, 1)
    path.rename(tmp_path / "log.1")
    log(record("b"))
    assert [line["request_id"] for line in lines_of(path, 1)] == ["b"]
    os.truncate(path, 0)
    log(record("c"))
    assert [line["request_id"] for line in lines_of(path, 1)] == ["c"]
    path.unlink()
    log(record("d"))
    assert [line["request_id"] for line in lines_of(path, 1)] == ["d"]
    assert [line["request_id"] for line in lines_of(tmp_path / "log.1", 1)] == ["a"]


def test_closing_the_access_log_writes_all_lines(tmp_path, lost):
    path = tmp_path / "log"
    log = AccessLog(str(path), lost.append)
    for i in range(1000):
        log(record(f"{i}"))
    log.close()
    assert [line["request_id"] for line in lines_of(path, 1000)] == [f"{i}" for i in range(1000)]
    assert not lost


def test_a_line_has_no_control_characters_that_a_terminal_obeys(log, tmp_path):
    said = "\x1b[2J\x9b31m\x7f\u202e\u2066é"
    log(record(said))
    (line,) = lines_of(tmp_path / "log", 1)
    assert line["request_id"] == said
    written = (tmp_path / "log").read_text(encoding="utf-8")
    assert not [one for one in said[:-1] if not one.isascii() or not one.isprintable() if one in written]
    assert "é" in written


def test_a_full_disk_loses_lines_and_nothing_else(log, tmp_path, lost, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(access_log.os, "write", full)
        for id in "abc":
            log(record(id))
        wait_until(lambda: sum(lost) >= 3)
    log(record("d"))
    assert [line["request_id"] for line in lines_of(tmp_path / "log", 1)] == ["d"]
    assert sum(lost) == 3
    assert caplog.text.count("the access log cannot be written") == 1, "said once, until it works again"


def test_a_slow_disk_does_not_block_logging(tmp_path, lost, monkeypatch):
    monkeypatch.setattr(access_log, "MAX_PENDING_LINES", 5)
    go_on = threading.Event()
    waited = []
    monkeypatch.setattr(AccessLog, "_reopen_if_rotated", lambda self: waited.append(go_on.wait(60)))
    log = AccessLog(str(tmp_path / "log"), lost.append)
    for i in range(100):
        log(record(f"{i}"))
    assert not waited, "all were logged before the disk took the first one"
    go_on.set()
    log.close()
    written = len((tmp_path / "log").read_text().splitlines())
    assert written + sum(lost) == 100
    assert sum(lost) >= 85


def test_long_lines_that_wait_are_bounded_in_bytes(tmp_path, lost, monkeypatch):
    monkeypatch.setattr(access_log, "MAX_PENDING_BYTES", 4000)
    writes, go_on = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(AccessLog, "_reopen_if_rotated", lambda self: writes.release() or go_on.wait(60))
    log = AccessLog(str(tmp_path / "log"), lost.append)
    log(record("a" * 5000))  # a single record may have any length
    assert writes.acquire(timeout=60)
    for _ in range(50):
        log(record("b"))
    assert sum(lost) == 50
    go_on.set()
    lines_of(tmp_path / "log", 1)
    wait_until(lambda: log._num_queued_bytes == log._num_written_bytes)
    for _ in range(5):
        log(record("c"))
    log.close()
    assert [line["request_id"] for line in lines_of(tmp_path / "log", 6)] == ["a" * 5000, *"ccccc"]
    assert sum(lost) == 50


def test_a_method_is_one_that_http_knows():
    made = record("a")
    made.scope["method"] = "X" * 60_000
    assert line_of(made, with_content=False)["method"] == "other"


def test_standard_output_may_be_the_log(capfd, lost):
    log = AccessLog("-", lost.append)
    log(record("a"))
    log.close()
    assert json.loads(capfd.readouterr().out)["request_id"] == "a"


@pytest.mark.parametrize("name", ["nowhere/log", "", "a\0b", "."])
def test_a_log_that_cannot_be_made_is_refused_at_the_start(tmp_path, name):
    path = name if "\0" in name or not name else str(tmp_path / name)
    with pytest.raises(ConfigError, match="access log"):
        check_observers(ServerOptions(access_log=path))


def test_prompts_need_a_log_to_go_to():
    with pytest.raises(ConfigError, match="access_log"):
        check_observers(ServerOptions(log_prompts=True))
