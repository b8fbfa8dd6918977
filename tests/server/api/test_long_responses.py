"""Responses with long conversations, outputs and event streams: what of them is in memory, where it is decoded."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager, contextmanager

import pytest
from embedded_model_server import CHAT, service_of, small_engine
from held_items import held
from waiting import until
from watched_database import watch

from quire import tenant_memory
from quire.server import held_answer
from quire.server import store as store_module
from quire.server.api.openai import responses_generation, stored_responses
from quire.server.api_keys import KEYLESS_CALLER
from quire.server.app import make_app
from quire.server.held_answer import PIECE_BYTES
from quire.server.middleware.quota import Quota
from quire.server.store import Store
from quire.tenant_memory import LARGE

HELLO = CHAT[0]["content"]
TURN = [{"role": "user", "content": "a" * 3600}, {"role": "assistant", "content": "b" * 3600}]
ASK = {"role": "user", "content": HELLO}
DETAILED = {
    "max_output_tokens": 300,
    "ignore_eos": True,
    "top_logprobs": 20,
    "include": ["message.output_text.logprobs"],
}


class Client:
    """An ASGI client of one app, on its event loop. memory: of its tenant."""

    def __init__(self, app, service, store):
        self.app = app
        self.engine = service.engine
        self.store = store
        self.memory = service.memories.of(KEYLESS_CALLER.tenant)
        self.most_held = 0

    async def ask(self, method, path, body=None, read=lambda _: asyncio.sleep(0)):
        """Status and body of an answer. read(messages): waits until the client takes the last of these."""
        data, messages, sent = b"" if body is None else json.dumps(body).encode(), [], asyncio.Event()
        path, _, query = path.partition("?")

        async def receive():
            if sent.is_set():
                await asyncio.Event().wait()
            sent.set()
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message):
            messages.append(message)
            self.most_held = max(self.most_held, self.memory.num_held)
            await read(messages)

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(data)).encode()))
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http"}
        scope |= {"path": path, "raw_path": path.encode(), "root_path": "", "query_string": query.encode()}
        scope |= {"headers": headers, "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 80), "state": {}}
        await self.app(scope, receive, send)
        return messages[0]["status"], b"".join(one.get("body", b"") for one in messages)

    async def json(self, method, path, body=None):
        status, data = await self.ask(method, path, body)
        return status, json.loads(data)

    async def respond(self, **fields):
        status, answer = await self.json("POST", "/v1/responses", {"max_output_tokens": 2, "temperature": 0, **fields})
        assert status == 200, answer
        return answer


@pytest.fixture(scope="module")
def built():
    return small_engine()


@pytest.fixture
def run(built):
    """Run a scenario with a client on an event loop of its own."""

    @asynccontextmanager
    async def client():
        service, store = service_of(built), Store()
        app = make_app(service, store=store)
        async with app.router.lifespan_context(app):
            yield Client(app, service, store)

    def run(scenario):
        async def main():
            async with client() as one:
                await scenario(one)
                assert one.memory.num_held == one.memory.num_waiting == 0

        asyncio.run(asyncio.wait_for(main(), 120))

    return run


@contextmanager
def watched(monkeypatch, owner, name):
    """The calls of a function: the thread's name, and the bytes of its last argument."""
    calls, function = [], getattr(owner, name)

    def call(*args):
        calls.append((threading.current_thread().name, len(args[-1])))
        return function(*args)

    monkeypatch.setattr(owner, name, call)
    yield calls


def test_a_long_conversation_is_continued_from_its_last_pieces_on_a_thread(run, monkeypatch):
    items = [{"role": "system", "content": "Be kind."}, *(TURN * 25), ASK]

    async def scenario(client):
        first = await client.respond(input=items, truncation="auto")
        with watched(monkeypatch, stored_responses, "_shown_items") as calls:
            second = await client.respond(input="Thanks", previous_response_id=first["id"], truncation="auto")
        assert first["usage"]["input_tokens"] < second["usage"]["input_tokens"] < 512
        assert {name for name, _ in calls} == {"quire-pool"}
        assert 2 <= len(calls) <= 3, "the last pieces, and the first for the message of the system"
        assert max(num_bytes for _, num_bytes in calls) < PIECE_BYTES + 100
        status, refused = await client.json(
            "POST", "/v1/responses", {"input": "x", "previous_response_id": second["id"]}
        )
        assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
        assert "truncation" in refused["error"]["message"]
        _, page = await client.json("GET", f"/v1/responses/{second['id']}/input_items?order=asc&limit=2")
        assert [one["role"] for one in page["data"]] == ["system", "user"]
        number, after = 0, ""
        while page["has_more"]:
            _, page = await client.json("GET", f"/v1/responses/{second['id']}/input_items?order=asc&limit=100{after}")
            number, after = number + len(page["data"]), f"&after={page['last_id']}"
        assert number == len(items) + 2, "all are kept, with the first answer"
        assert page["data"][-1]["content"][0]["text"] == "Thanks"
        _, page = await client.json("GET", f"/v1/responses/{second['id']}/input_items?limit=2")
        assert [one["content"][0]["text"] for one in page["data"]] == [
            "Thanks",
            first["output"][0]["content"][0]["text"],
        ]

    run(scenario)


def test_truncation_never_keeps_a_tool_result_without_its_call(run):
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "c"}
    question = {"role": "user", "content": "x"}

    async def scenario(client):
        for items in ([call, *(TURN * 15), result, *(TURN * 10), ASK], [ASK, call, *(TURN * 15), question, result]):
            first = await client.respond(input=items, truncation="auto")
            assert await client.respond(input=HELLO, previous_response_id=first["id"], truncation="auto")

    run(scenario)


def test_many_requests_with_one_long_conversation_hold_bounded_bytes_and_all_are_answered(run, monkeypatch):
    bound = 2**21
    monkeypatch.setattr(tenant_memory, "MAX_TENANT_BYTES", bound)

    async def scenario(client):
        first = await client.respond(input=TURN * 100 + [ASK], truncation="auto")
        pieces = stored_responses.StoredResponses.earlier
        together = [0, 0]

        async def counted(*args):
            result = await pieces(*args)
            together[0] = max(together[0], client.memory.num_held)
            return result

        monkeypatch.setattr(stored_responses.StoredResponses, "earlier", counted)
        body = {"input": "a" * 2**17, "previous_response_id": first["id"], "truncation": "auto", "max_output_tokens": 1}
        answers = await asyncio.gather(*(client.json("POST", "/v1/responses", body) for _ in range(40)))
        codes = {answer["error"]["code"] for status, answer in answers if status != 200}
        assert codes == {"context_length_exceeded"}, "the last turn does not fit"
        loaded = 80 * 64 * 512 + 4 * PIECE_BYTES  # 80 bytes of objects for each character that may be read
        assert bound < together[0] <= bound + loaded

    run(scenario)


def test_a_long_input_is_held_by_the_store_and_not_in_memory_during_generation(run):
    async def scenario(client):
        async def read(messages):
            if messages[-1]["type"] == "http.response.body":
                assert client.memory.num_held < LARGE, "only outputs that are not read yet"

        body = {"input": [*(TURN * 25), ASK], "truncation": "auto", "max_output_tokens": 5, "stream": True}
        status, data = await client.ask("POST", "/v1/responses", body, read)
        assert (status, data.count(b"response.completed")) == (200, 0)
        assert b"response.incomplete" in data

    run(scenario)


def test_a_long_response_whose_client_leaves_is_deleted(run):
    class Left(OSError):
        """The connection is closed."""

    async def scenario(client):
        async def read(messages):
            if len(messages) == 3:
                raise Left

        body = {"input": [*(TURN * 25), ASK], "truncation": "auto", "max_output_tokens": 100, "stream": True}
        await client.ask("POST", "/v1/responses", body, read)
        while await client.store._run("ann", lambda db: db.execute("SELECT count(*) FROM objects").fetchone()[0]):
            await asyncio.sleep(0.01)

    run(scenario)


LONG = {"input": [*(TURN * 25), ASK], "truncation": "auto", "max_output_tokens": 50, "ignore_eos": True}


def test_a_long_response_without_room_in_the_store_is_answered_or_in_the_background_refused(run, monkeypatch):
    monkeypatch.setattr(store_module, "LIMITS", {**store_module.LIMITS, "response": store_module.Limit(9, 2**17)})

    async def scenario(client):
        answer = await client.respond(**LONG)
        assert (answer["status"], answer["store"]) == ("incomplete", False)
        before = held(client.engine)
        status, refused = await client.json("POST", "/v1/responses", {**LONG, "background": True})
        assert held(client.engine) == before, "it is not generated on"
        assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
        assert "no room to store this response" in refused["error"]["message"]

    run(scenario)


def test_a_long_response_on_a_full_disk_is_answered_or_in_the_background_refused(run, monkeypatch):
    disk = watch(monkeypatch)

    async def scenario(client):
        with disk.is_full():
            answer = await client.respond(**LONG)
            assert (answer["status"], answer["store"]) == ("incomplete", False)
            before = held(client.engine)
            status, refused = await client.json("POST", "/v1/responses", {**LONG, "background": True})
            assert held(client.engine) == before, "it is not generated on"
            assert (status, refused["error"]["code"]) == (503, "store_unavailable")

    run(scenario)


def test_a_response_that_is_cancelled_twice_while_its_events_are_stored_is_stored_as_cancelled(run, monkeypatch):
    append, may_store, is_storing = stored_responses.ResponseObject.append, asyncio.Event(), asyncio.Event()

    async def held_up(self, piece):
        is_storing.set()
        await may_store.wait()
        return await append(self, piece)

    cancel, num_cancelled = responses_generation.Running.cancel, 0

    async def counted(self):
        nonlocal num_cancelled
        num_cancelled += 1
        await cancel(self)

    monkeypatch.setattr(stored_responses.ResponseObject, "append", held_up)
    monkeypatch.setattr(responses_generation.Running, "cancel", counted)

    async def scenario(client):
        body = {"input": HELLO, "background": True, **DETAILED}
        sent = []

        async def read(messages):
            sent.append(messages[-1].get("body", b""))

        generated = asyncio.ensure_future(client.ask("POST", "/v1/responses", {**body, "stream": True}, read))
        await is_storing.wait()
        id = json.loads(b"".join(sent).split(b"\n\n")[0].partition(b"data: ")[2])["response"]["id"]
        cancelled = [asyncio.ensure_future(client.json("POST", f"/v1/responses/{id}/cancel")) for _ in range(2)]
        await until(lambda: num_cancelled == 2)
        may_store.set()
        assert [answer["status"] for _, answer in await asyncio.gather(*cancelled)] == ["cancelled"] * 2
        await generated
        assert (await client.json("GET", f"/v1/responses/{id}"))[1]["status"] == "cancelled"

    run(scenario)


def test_references_read_pieces_on_a_thread_and_take_the_first_of_an_id(run, monkeypatch):
    async def scenario(client):
        first = await client.respond(input=[*(TURN * 25), ASK], truncation="auto")
        _, page = await client.json("GET", f"/v1/responses/{first['id']}/input_items?limit=1")
        ids = [page["data"][0]["id"], first["output"][0]["id"]]
        with watched(monkeypatch, stored_responses, "_wanted") as calls:
            again = await client.respond(input=[{"type": "item_reference", "id": id} for id in ids])
        assert {name for name, num_bytes in calls if num_bytes > 2**10} == {"quire-pool"}
        assert max(num_bytes for _, num_bytes in calls) < PIECE_BYTES + 100
        _, page = await client.json("GET", f"/v1/responses/{again['id']}/input_items?order=asc")
        assert [one["id"] for one in page["data"]] == ids

    run(scenario)


def test_an_unread_replay_of_a_response_holds_one_piece_in_memory(run, monkeypatch):
    async def scenario(client):
        first = await client.respond(input=HELLO, background=True, **DETAILED | {"stream": False})
        body = {"input": HELLO, "background": True, "stream": True, **DETAILED}
        status, live = await client.ask("POST", "/v1/responses", body)
        id = json.loads(live.split(b"\n\n")[0].partition(b"data: ")[2])["response"]["id"]
        assert status == 200 and len(live) > 8 * PIECE_BYTES
        reading, taken, read_rows = asyncio.Event(), [], []
        content = Store.content

        async def counted(*args):
            read_rows.append(args)
            return await content(*args)

        monkeypatch.setattr(Store, "content", counted)

        async def read(messages):
            taken.append(len(messages[-1].get("body", b"")))
            if len(taken) > 1:
                await reading.wait()

        replay = asyncio.ensure_future(client.ask("GET", f"/v1/responses/{id}?stream=true", None, read))
        await until(lambda: len(taken) == 2)
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert len(taken) == 2 and len(read_rows) == 1
        reading.set()
        status, replayed = await replay
        assert replayed == live
        assert max(taken) <= PIECE_BYTES
        number = live.count(b"\n\n")
        for behind in (0, number // 2, number - 2):
            _, rest = await client.ask("GET", f"/v1/responses/{id}?stream=true&starting_after={behind}")
            assert rest == b"".join(one + b"\n\n" for one in live.split(b"\n\n")[behind + 1 : -1])
        assert await client.json("GET", f"/v1/responses/{first['id']}")

    run(scenario)


def test_readers_of_a_running_response_hold_no_events_of_their_own(run):
    async def scenario(client):
        body = {"input": HELLO, "background": True, "stream": True, **DETAILED}
        ids, answers = asyncio.Queue(), []

        async def read(messages):
            if len(messages) == 2:
                ids.put_nowait(json.loads(messages[1]["body"].partition(b"data: ")[2].partition(b"\n")[0]))

        first = asyncio.ensure_future(client.ask("POST", "/v1/responses", body, read))
        id = (await ids.get())["response"]["id"]
        path = f"/v1/responses/{id}?stream=true"
        others = [asyncio.ensure_future(client.ask("GET", path)) for _ in range(5)]
        answers = [data for _, data in await asyncio.gather(first, *others)]
        assert set(answers) == {answers[0]}, "whether they come from memory or from the store"

    run(scenario)


def test_a_long_answer_counts_until_it_is_read_and_the_next_one_waits(run, monkeypatch):
    async def scenario(client):
        first = await client.respond(input=HELLO, **DETAILED)
        path = f"/v1/responses/{first['id']}"
        whole = (await client.ask("GET", path))[1]
        assert json.loads(whole) == first
        assert len(whole) > 4 * PIECE_BYTES
        monkeypatch.setattr(tenant_memory, "MAX_TENANT_BYTES", len(whole) + 1000)
        reading, sizes = asyncio.Event(), []

        async def read(messages):
            sizes.append(len(messages[-1].get("body", b"")))
            await reading.wait()

        unread = asyncio.ensure_future(client.ask("GET", path, None, read))
        await until(lambda: sizes)
        assert client.memory.num_held == len(whole)
        waiting = asyncio.ensure_future(client.ask("GET", path))
        await until(lambda: client.memory.num_waiting)
        monkeypatch.setattr(held_answer, "TURN_SECONDS", 0.0)
        status, refused = await client.json("GET", path)
        assert (status, refused["error"]["code"]) == (429, "tenant_memory_full")
        assert "This bound has no setting" in refused["error"]["message"]
        small = await client.json("GET", "/v1/batches?limit=1")
        assert small[0] == 200, "small answers wait for nothing"
        reading.set()
        assert (await unread)[1] == (await waiting)[1] == whole
        assert max(sizes) <= PIECE_BYTES

    run(scenario)


def test_a_long_response_is_encoded_on_a_thread(run, monkeypatch):
    names, encode = [], responses_generation.msgspec.json.encode

    def watching(value):
        if isinstance(value, dict) and value.get("object") == "response":
            names.append(threading.current_thread().name)
        return encode(value)

    async def scenario(client):
        monkeypatch.setattr(responses_generation, "_MANY_EVENTS", 3)
        monkeypatch.setattr(responses_generation.msgspec.json, "encode", watching)
        await client.respond(input=HELLO, max_output_tokens=40, ignore_eos=True)
        assert set(names[1:]) == {"quire-pool"}, "all but the fields at the begin"

    run(scenario)


def test_long_tools_of_a_response_count_while_it_is_generated(run):
    async def scenario(client):
        held = []

        async def read(messages):
            held.append(client.memory.num_held)

        tool = {"type": "function", "name": "f", "description": "\u6f22" * 30_000, "parameters": {}}
        body = {"input": HELLO, "tools": [tool], "tool_choice": "none", "max_output_tokens": 5, "stream": True}
        assert (await client.ask("POST", "/v1/responses", body, read))[0] == 200
        assert min(held) > 90_000

    run(scenario)


def test_reading_stored_responses_counts_for_the_limits_of_the_key(built, monkeypatch):
    async def main():
        service, store = service_of(built), Store()
        app = make_app(service, store=store)
        async with app.router.lifespan_context(app):
            client = Client(app, service, store)
            body = {"input": HELLO, "background": True, "stream": True}
            _, live = await client.ask("POST", "/v1/responses", {**body, "max_output_tokens": 5})
            id = json.loads(live.split(b"\n\n")[0].partition(b"data: ")[2])["response"]["id"]
            spent = []
            for name in ("count_download", "spend_bytes"):
                monkeypatch.setattr(Quota, name, lambda _quota, *args, name=name: spent.append((name, *args)))
            sizes = []
            for path in ("", "/input_items", "?stream=true"):
                sizes.append(len((await client.ask("GET", f"/v1/responses/{id}{path}"))[1]))
            assert spent == [one for size in sizes for one in (("count_download",), ("spend_bytes", size))]

    asyncio.run(asyncio.wait_for(main(), 60))
