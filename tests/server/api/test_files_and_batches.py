"""/v1/files and /v1/batches through OpenAI's client, with the embedded model."""

import io
import json
from dataclasses import replace

import httpx
import openai
import pytest
from embedded_model_server import CHAT, STORY, run_app, service_of
from multi_tenant_server import Noting
from waiting import wait_until

from quire.config import EngineOptions
from quire.server import request_body
from quire.server import store as store_module
from quire.server.app import make_app
from quire.server.batch import background
from quire.server.batch.background import LOWEST_PRIORITY
from quire.startup.build import build

SHORT = {"max_tokens": 4, "temperature": 0}
ENDED = ("completed", "failed", "expired", "cancelled")


def line(name, url="/v1/completions", **body):
    body = body or {"prompt": STORY, **SHORT}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def content(*lines):
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


def upload(client, *lines, purpose="batch"):
    return client.files.create(file=("in.jsonl", content(*lines)), purpose=purpose)


def started(client, *lines, endpoint="/v1/completions", **fields):
    file = upload(client, *lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client, batch):
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def results(client, file_id):
    return {one["custom_id"]: one for one in map(json.loads, client.files.content(file_id).text.splitlines())}


def test_a_file_is_stored_listed_and_deleted(client):
    data = bytes(range(256)) * 3000  # several pieces
    earlier = [one.id for one in client.files.list(order="asc", purpose="user_data")]
    file = client.files.create(file=("données.bin", io.BytesIO(data)), purpose="user_data")
    assert (file.bytes, file.filename, file.purpose, file.status) == (
        len(data),
        "données.bin",
        "user_data",
        "processed",
    )
    assert client.files.retrieve(file.id) == file
    answer = client.files.content(file.id)
    assert answer.content == data
    assert answer.response.headers["content-type"] == "application/octet-stream"
    other = upload(client, line("a"))
    assert [one.id for one in client.files.list(limit=1)][:2] == [other.id, file.id], "newest first, over pages"
    assert [one.id for one in client.files.list(order="asc", purpose="user_data")] == [*earlier, file.id]
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(file.id)
        assert caught.value.code == "not_found"
    with pytest.raises(openai.NotFoundError):
        client.files.list(after=file.id)


def test_a_file_that_grows_while_it_is_sent_has_its_length(http, client, monkeypatch):
    """A running batch adds results to its files."""
    file = client.files.create(file=("a", b"x" * 300_000), purpose="user_data")
    content = store_module.Store.content

    async def growing(store, tenant, kind, id, place):
        await store.append(tenant, kind, id, b"more")
        return await content(store, tenant, kind, id, place)

    monkeypatch.setattr(store_module.Store, "content", growing)
    assert http.get(f"/v1/files/{file.id}/content").content == b"x" * 300_000


def test_a_file_expires_when_it_is_to(client):
    file = client.files.create(file=b"x", purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    for seconds in (10, 10**9):
        with pytest.raises(openai.BadRequestError) as caught:
            client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": seconds})
        assert caught.value.param == "expires_after"


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "fun"}}, "purpose"),
        ({"files": {"file": ("a", b"x")}}, "purpose"),
        ({"files": {"document": ("a", b"x")}, "data": {"purpose": "batch"}}, "document"),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "batch", "porpose": "x"}}, "porpose"),
        ({"files": [("file", ("a", b"x")), ("file", ("b", b"x"))], "data": {"purpose": "batch"}}, "file"),
        ({"files": {"file": ("a" * 600, b"x")}, "data": {"purpose": "batch"}}, "file"),
        ({"files": {"purpose": (None, "batch")}}, "file"),
        ({"json": {"purpose": "batch"}}, None),
        ({"content": b"", "headers": {"content-type": "multipart/form-data; boundary=x"}}, None),
    ],
)
def test_an_invalid_upload_form_names_the_field_and_stores_no_file(http, client, form, param):
    before = [file.id for file in client.files.list()]
    answer = http.post("/v1/files", **form)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert [file.id for file in client.files.list()] == before


def test_uploads_are_bounded(http, client, monkeypatch):
    monkeypatch.setattr(request_body, "MAX_UPLOAD", 5000)
    form = {"files": {"file": ("a", b"x" * 6000)}, "data": {"purpose": "batch"}}
    assert http.post("/v1/files", **form).status_code == 413
    monkeypatch.setattr(request_body, "MAX_UPLOAD", 10**6)
    used = sum(file.bytes for file in client.files.list())
    limits = {**store_module.LIMITS, "file": store_module.Limit(1000, used + 300_000)}
    monkeypatch.setattr(store_module, "LIMITS", limits)
    refused = http.post("/v1/files", files={"file": ("a", b"x" * 900_000)}, data={"purpose": "batch"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "store_full")
    assert upload(client, line("a")).bytes, "the room of what was refused is free again"


def test_an_upload_that_is_cut_off_is_not_stored(served, client):
    before = [file.id for file in client.files.list()]
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 600_000

    def pieces():
        yield head
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        httpx.post(
            f"{served.url}/v1/files", content=pieces(), headers={"content-type": "multipart/form-data; boundary=x"}
        )
    assert [file.id for file in client.files.list()] == before


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": STORY, **SHORT}),
        ("/v1/chat/completions", {"messages": CHAT, **SHORT}),
        ("/v1/embeddings", {"input": "Hello"}),
        ("/v1/responses", {"input": CHAT[0]["content"], "max_output_tokens": 4, "temperature": 0}),
    ],
)
def test_a_batch_has_the_answers_of_its_route(client, http, endpoint, body):
    batch = started(
        client,
        *(line(f"{i}", endpoint, **body) for i in range(3)),
        line("bad", endpoint, **body, temprature=1),
        endpoint=endpoint,
        metadata={"a": "b"},
    )
    assert batch.status in ("validating", "in_progress")
    done = ended(client, batch)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 4, 3, 1)
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.metadata == {"a": "b"}
    expected = http.post(endpoint, json=body).json()
    found = results(client, done.output_file_id)
    assert set(found) == {"0", "1", "2"}
    for result in found.values():
        answer = result["response"]["body"]
        assert answer.keys() == expected.keys()
        for name in ("choices", "data"):
            assert answer.get(name) == expected.get(name)
    (bad,) = results(client, done.error_file_id).values()
    assert bad["response"]["status_code"] == 400
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    size = client.files.retrieve(done.output_file_id).bytes
    assert size == len(client.files.content(done.output_file_id).content)
    assert client.batches.list(limit=1).data[0] == done
    if endpoint == "/v1/responses":
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(found["0"]["response"]["body"]["id"])


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        ([], ["empty_file"]),
        ([b"nonsense", line("a"), line("b", method="x")], ["invalid_line"]),
        ([line("a"), line("a")], ["duplicate_custom_id"]),
        ([line("a"), line("b", "/v1/embeddings", input="x")], ["mismatched_endpoint"]),
        ([line("a", prompt="x", stream=True)], ["invalid_line"]),
        ([line("a")] * 5, ["duplicate_custom_id"] * 3),
        ([line(str(i)) for i in range(9)], ["too_many_lines"]),
    ],
)
def test_a_batch_of_an_invalid_file_fails_and_sends_nothing(client, monkeypatch, lines, codes):
    monkeypatch.setattr(background, "MAX_LINES", 8)
    monkeypatch.setattr(background, "MAX_PROBLEMS", 3)
    done = ended(client, started(client, *lines))
    assert done.status == "failed"
    assert [problem.code for problem in done.errors.data] == codes
    assert done.failed_at
    assert done.output_file_id is None


def test_a_batch_needs_a_file_of_its_purpose(client):
    other = upload(client, line("a"), purpose="user_data")
    for id, error in (("file-x", openai.NotFoundError), (other.id, openai.BadRequestError)):
        with pytest.raises(error) as caught:
            client.batches.create(input_file_id=id, endpoint="/v1/completions", completion_window="24h")
        assert caught.value.param == "input_file_id"
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_x")
    with pytest.raises(openai.NotFoundError):
        client.batches.cancel("batch_x")
    with pytest.raises(openai.NotFoundError):
        client.batches.list(after="batch_x")


def long_lines(number, num_tokens=300):
    return [line(f"{i}", prompt=f"{STORY} {i}", max_tokens=num_tokens, ignore_eos=True) for i in range(number)]


def test_a_batch_is_cancelled_and_keeps_its_results(client, monkeypatch):
    monkeypatch.setattr(background, "FLUSH_SECONDS", 0.0)
    batch = started(client, *long_lines(60))
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed)
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "cancelled")
    done = ended(client, batch)
    assert done.status == "cancelled"
    assert done.cancelled_at >= done.cancelling_at
    assert len(results(client, done.output_file_id)) == done.request_counts.completed < 60
    assert client.batches.cancel(batch.id) == done


def test_a_batch_leaves_rows_free_for_other_requests(client, http):
    half = 8  # of max_num_seqs
    counts = []

    def count():
        health = http.get("/health").json()
        counts.append(health["requests_running"] + health["requests_waiting"])
        return counts[-1]

    batch = started(client, *long_lines(40))
    wait_until(lambda: count() >= half)
    for _ in range(20):
        count()
    client.batches.cancel(batch.id)
    assert max(counts) == half


def test_requests_of_a_batch_have_the_lowest_priority():
    options = EngineOptions(memory="256MiB", max_model_len=512, max_num_seqs=16, policy="priority")
    built = build(options, report=lambda line: None, progress=lambda done, total: None)
    engine = Noting(built.engine)
    with (
        run_app(make_app(service_of(replace(built, engine=engine)))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        body = {"prompt": STORY, **SHORT}
        ended(client, started(client, line("a"), line("b", **body, priority=None), line("c", **body, priority=3)))
    priorities = [params.priority for params in engine.scheduling_params.values()]
    assert sorted(priorities) == [3, LOWEST_PRIORITY, LOWEST_PRIORITY]


def test_a_batch_whose_file_is_deleted_fails(client, monkeypatch):
    monkeypatch.setattr(background, "FLUSH_SECONDS", 0.0)
    batch = started(client, *long_lines(20, 60))
    wait_until(lambda: client.batches.retrieve(batch.id).output_file_id)
    client.files.delete(client.batches.retrieve(batch.id).output_file_id)
    done = ended(client, batch)
    assert (done.status, done.errors.data[0].code) == ("failed", "file_deleted")


def test_a_batch_ends_when_its_time_is_over(client, monkeypatch):
    monkeypatch.setattr(background, "WINDOW", 1)
    batch = started(client, *long_lines(400))
    done = ended(client, batch)
    assert done.status == "expired"
    assert done.expired_at
    assert done.request_counts.completed < 400


def test_batches_of_a_tenant_run_one_after_the_other(client):
    first, second = started(client, *long_lines(20, 30)), started(client, line("a"))
    assert ended(client, second).in_progress_at >= ended(client, first).in_progress_at
    assert client.batches.retrieve(first.id).completed_at <= client.batches.retrieve(second.id).completed_at


def test_tenants_do_not_see_each_others_files_and_batches(site):
    def ask(who, method, path, **more):
        headers = {"authorization": f"Bearer {site.keys[who]}"}
        return httpx.request(method, site.url + path, headers=headers, timeout=60, **more)

    form = {"files": {"file": ("a", content(line("a")))}, "data": {"purpose": "batch"}}
    file = ask("ann", "POST", "/v1/files", **form).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert ask("bob", "POST", "/v1/batches", json=asked).status_code == 404
    batch = ask("ann", "POST", "/v1/batches", json=asked).json()
    wait_until(lambda: ask("ann", "GET", f"/v1/batches/{batch['id']}").json()["status"] in ENDED)
    batch = ask("ann", "GET", f"/v1/batches/{batch['id']}").json()
    assert batch["status"] == "completed"
    assert {namespace.tenant for namespace in site.engine.namespaces.values()} == {"ann"}
    for id in (file["id"], batch["output_file_id"]):
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert ask("bob", method, f"/v1/files/{id}{path}").status_code == 404
    for method, path in (("GET", ""), ("POST", "/cancel")):
        assert ask("bob", method, f"/v1/batches/{batch['id']}{path}").status_code == 404
    assert ask("bob", "GET", "/v1/files").json()["data"] == ask("bob", "GET", "/v1/batches").json()["data"] == []
    assert len(ask("ann", "GET", "/v1/files").json()["data"]) == 2


def test_pages_of_other_sites_store_and_change_nothing(http):
    headers = {"sec-fetch-site": "cross-site"}
    form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
    for method, path, more in (
        ("POST", "/v1/files", form),
        ("DELETE", "/v1/files/x", {}),
        ("POST", "/v1/batches/x/cancel", {}),
    ):
        assert http.request(method, path, headers=headers, **more).json()["error"]["code"] == "cross_site_request"
