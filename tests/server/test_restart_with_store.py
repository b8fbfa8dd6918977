"""What is stored in a file is there after a restart of the server: responses go on, and so do batches."""

import json
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from embedded_model_server import CHAT, MODEL, STORY, run_app, service_of, small_engine
from test_store import Clock
from waiting import wait_until
from watched_database import watch

from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.server.api_keys import Keys, new_key
from quire.server.app import make_app
from quire.server.batch import background
from quire.server.middleware.drain import Drain
from quire.server.options import LoraModule, ServerOptions
from quire.server.serve import serve
from quire.server.store import Store

HELLO = CHAT[0]["content"]
LINES = [
    {
        "custom_id": f"{i}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": f"{STORY} {i}", "max_tokens": 60, "ignore_eos": True, "temperature": 0},
    }
    for i in range(30)
]


@contextmanager
def server(path, keys=None, key="none", drain=None, service=None, **more):
    app = make_app(service or service_of(small_engine()), keys, drain=drain, store=Store(path, **more))
    with run_app(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        yield client


def test_responses_and_files_expire(tmp_path):
    clock = Clock()
    with server(None, clock=clock) as client:
        response = client.responses.create(model=MODEL, input=HELLO, max_output_tokens=2)
        file = client.files.create(
            file=b"x", purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        clock.now += 3599
        assert client.files.retrieve(file.id) == file
        clock.now += 1
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        assert client.responses.retrieve(response.id) == response
        clock.now += 30 * 86_400
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)


def test_after_a_restart_all_is_there_and_a_batch_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "FLUSH_SECONDS", 0.0)
    path = tmp_path / "store"
    made = new_key("ann", "user")
    keys = Keys([made[1]])
    with server(path, keys, made[0]) as client:
        first = client.responses.create(model=MODEL, input=HELLO, temperature=0)
        data = "\n".join(map(json.dumps, LINES)).encode()
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        cut = client.responses.create(model=MODEL, input=HELLO, background=True, extra_body={"ignore_eos": True})
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 2)
        before = client.batches.retrieve(batch.id)
    assert before.status == "in_progress"
    with server(path, keys, made[0]) as client:
        assert client.responses.retrieve(first.id) == first
        after = client.responses.create(model=MODEL, input="Thanks", previous_response_id=first.id, temperature=0)
        assert after.status == "completed"
        ended = client.responses.retrieve(cut.id)
        assert (ended.status, ended.error.code) == ("failed", "server_error")
        assert client.files.content(file.id).content == data
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (30, 0)
        assert done.in_progress_at == before.in_progress_at
        results = list(map(json.loads, client.files.content(done.output_file_id).text.splitlines()))
        assert sorted(int(result["custom_id"]) for result in results) == list(range(30)), "each one once"
    other = new_key("bob", "user")
    with server(path, Keys([other[1]]), other[0]) as client:
        assert client.batches.list().data == []
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)


@pytest.mark.parametrize(("of_first", "of_key", "num_failed"), [(None, ["json"], 1), ([], None, 0)])
def test_after_a_restart_a_batch_may_use_the_adapters_of_its_key(tmp_path, monkeypatch, of_first, of_key, num_failed):
    monkeypatch.setattr(background, "FLUSH_SECONDS", 0.0)
    first, other = (new_key("ann", "user", adapters=names) for names in (of_first, of_key))
    keys, adapters = Keys([first[1], other[1]]), Path(__file__).parents[1] / "assets"
    modules = [LoraModule(name, str(adapters / f"demo_{name}")) for name in ("pirate", "json")]

    def service():
        return service_of(small_engine(enable_lora=True), lora_modules=modules)

    last = [{**LINES[0], "custom_id": name, "body": {**LINES[0]["body"], "model": name}} for name in ("pirate", "json")]
    with server(tmp_path / "store", keys, other[0], service=service()) as client:
        data = "\n".join(map(json.dumps, [*LINES, *last])).encode()
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 2)
        assert client.batches.retrieve(batch.id).request_counts.failed == 0
    with server(tmp_path / "store", keys, first[0], service=service()) as client:
        assert ({"pirate", "json"} < {model.id for model in client.models.list()}) is (of_first is None)
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (32 - num_failed, num_failed)
        if num_failed:
            assert json.loads(client.files.content(done.error_file_id).text)["custom_id"] == "pirate"


def test_in_a_drain_requests_in_progress_are_finished_and_no_other_is_sent(tmp_path):
    path, drain = tmp_path / "store", Drain()
    with server(path, drain=drain) as client:
        data = "\n".join(map(json.dumps, LINES)).encode()
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        running = client.responses.create(model=MODEL, input=HELLO, background=True, extra_body={"ignore_eos": True})
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 2)
        drain.begin()
        wait_until(lambda: not drain.num_open)
        assert client.responses.retrieve(running.id).status == "incomplete", "it has filled the context"
        wait_until(lambda: client.batches.retrieve(batch.id).output_file_id)
        before = client.batches.retrieve(batch.id)
        results = client.files.content(before.output_file_id).text.splitlines()
    assert before.status == "in_progress"
    assert 2 < before.request_counts.completed == len(results) < 30
    with server(path) as client:
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        after = client.files.content(before.output_file_id).text.splitlines()
        assert after[: len(results)] == results
        assert len(after) == 30


def test_a_batch_of_a_tenant_without_a_key_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "FLUSH_SECONDS", 0.0)
    made = new_key("ann", "user")
    with server(tmp_path / "store", Keys([made[1]]), made[0]) as client:
        data = "\n".join(map(json.dumps, LINES)).encode()
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    other = new_key("bob", "user")
    with server(tmp_path / "store", Keys([other[1]]), other[0]):
        pass
    with server(tmp_path / "store", Keys([made[1]]), made[0]) as client:
        found = client.batches.retrieve(batch.id)
        assert (found.status, found.errors.data[0].code) == ("failed", "key_removed")


def test_a_server_that_was_killed_starts_again_on_a_full_disk(tmp_path, monkeypatch):
    """A response in the background and a batch were running. They end as far as they can, and are written later."""
    path, later = tmp_path / "store", tmp_path / "later"
    with server(path) as client:
        file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, LINES)).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        cut = client.responses.create(model=MODEL, input=HELLO, background=True, extra_body={"ignore_eos": True})
        for name in ("store", "store-wal"):  # what a killed server leaves
            (tmp_path / name.replace("store", "later")).write_bytes((tmp_path / name).read_bytes())
    disk = watch(monkeypatch)
    with disk.is_full():
        app = server(later)
        client = app.__enter__()
        for _ in range(2):
            assert client.responses.retrieve(cut.id).status == "failed"
        assert client.batches.retrieve(batch.id).status in ("validating", "in_progress")
        assert client.files.content(file.id).content
        for refused in (
            lambda: client.files.create(file=b"x", purpose="user_data"),
            lambda: client.files.delete(file.id),
            lambda: client.responses.delete(cut.id),
            lambda: client.responses.create(model=MODEL, input=HELLO, background=True),
            lambda: client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"),
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                refused()
            assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
        whole = client.responses.create(model=MODEL, input=HELLO, max_output_tokens=2)
        assert (whole.status, whole.to_dict()["store"]) == ("incomplete", False), "it is answered, and not stored"
    try:
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        assert client.batches.retrieve(batch.id).request_counts.completed == 30
        assert client.responses.retrieve(cut.id).status == "failed"
        assert client.responses.delete(cut.id) is None
    finally:
        app.__exit__(None, None, None)


def test_a_batch_and_a_response_whose_store_fails_while_they_run(monkeypatch):
    monkeypatch.setattr(background, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(background, "RETRY_SECONDS", 0.05)
    disk = watch(monkeypatch)
    with server(None) as client:
        file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, LINES)).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        cut = client.responses.create(model=MODEL, input=HELLO, background=True, extra_body={"ignore_eos": True})
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 2)
        with disk.is_full():
            ended = client.responses.cancel(cut.id)
            assert ended.status == "cancelled"
            found = client.responses.retrieve(cut.id)
            assert (found.status, found.error.code) == ("failed", "server_error"), "its end could not be stored"
            assert client.batches.retrieve(batch.id).status == "in_progress"
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        results = list(map(json.loads, client.files.content(done.output_file_id).text.splitlines()))
        assert sorted(int(result["custom_id"]) for result in results) == list(range(30)), "each one once"


def test_a_server_ends_although_a_batch_waits_for_its_store(monkeypatch):
    disk = watch(monkeypatch)
    with server(None) as client:
        file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, LINES)).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 2)
        disk.fails = lambda _number, statement: True
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3)


def test_batches_go_on_once_a_store_that_failed_at_the_start_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "RETRY_SECONDS", 0.05)
    path = tmp_path / "store"
    with server(path) as client:
        file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, LINES)).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    disk = watch(monkeypatch)
    disk.fails = lambda _number, _statement: True
    with server(path) as client:
        for call in (client.batches.list, lambda: client.files.retrieve(file.id)):
            with pytest.raises(openai.InternalServerError, match="cannot use its store"):
                call()
        disk.fails = lambda _number, _statement: False
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")


def test_a_bad_store_is_an_error_before_the_model_is_loaded(tmp_path):
    (tmp_path / "text").write_text("no store" * 200)
    quiet = {"report": lambda line: None, "progress": lambda done, total: None}
    with pytest.raises(ConfigError, match="store_path"):
        serve(EngineOptions(model="missing"), ServerOptions(store_path=str(tmp_path / "text"), port=0), **quiet)
