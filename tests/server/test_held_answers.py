"""What grows with something other than a request: answers that count, error texts, work that belongs on threads."""

import json
import threading

import pytest
from multi_tenant_server import run_site
from waiting import wait_until

from quire import tenant_memory
from quire.server import held_answer
from quire.server.api import pooling
from quire.server.api.native import tokenize
from quire.server.errors import MAX_MESSAGE, MAX_PARAM
from quire.server.held_answer import HeldAnswer

LONG = "k" * 100_000
ASK = {"messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "a"}}


@pytest.fixture(scope="module")
def site():
    with run_site("ann") as site:
        yield site


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**ASK, "logit_bias": {LONG: "x"}}),
        ("/v1/chat/completions", {**ASK, LONG: 1}),
        ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "a", LONG: 1}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        ("/v1/chat/completions", {**ASK, "tools": [{"type": "function", "function": {"name": LONG}}]}),
        (
            "/v1/chat/completions",
            {**ASK, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": LONG}}},
        ),
        ("/v1/chat/completions", {**ASK, "chat_template": f"{{{{ raise_exception('{LONG}') }}}}"}),
        ("/v1/chat/completions", {**ASK, "chat_template": f"{{% {LONG} %}}"}),
        ("/v1/chat/completions", {**ASK, "chat_template_kwargs": {"messages": LONG, LONG: 1}}),
        ("/v1/completions", {"prompt": "a", "model": LONG}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": f"({LONG}"}}),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"json": {LONG: 1, "properties": {LONG: {"type": 1}}}}},
        ),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"grammar": f"root ::= {LONG}"}}),
        ("/v1/completions", {"prompt": "a", "stop_regex": f"({LONG}"}),
        ("/v1/completions", {"prompt": "a", "temperature": -(10**2000)}),
        ("/v1/responses", {"input": "a", "metadata": {LONG: 1}}),
        ("/v1/responses", {"input": "a", "previous_response_id": LONG}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": LONG}]}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": LONG, "output": "a"}]}),
        ("/v1/embeddings", {"input": "a", "pooling": LONG}),
        ("/v1/messages", {**ASK, "max_tokens": 1, "tools": [{"name": LONG, "input_schema": {}}]}),
        ("/api/chat", {**ASK, "model": "quire-demo", "options": {LONG: 1}}),
        ("/generate", {"text": "a", "sampling_params": {LONG: 1}}),
        ("/detokenize", {"tokens": [10**2000]}),
        ("/v1/batches", {"input_file_id": LONG, "endpoint": LONG, "completion_window": LONG}),
    ],
)
def test_an_error_quotes_a_short_piece_of_its_request(site, path, body):
    answer = site.post("ann", path, **body)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 2 * MAX_MESSAGE + MAX_PARAM


def test_large_whole_answers_are_sent_in_pieces_that_count(site, monkeypatch):
    sent = []
    call = HeldAnswer.__call__

    async def watched(answer, scope, receive, send):
        memory = answer._held.memory

        async def counted(message):
            sent.append((len(message.get("body", b"")), memory.num_held))
            await send(message)

        await call(answer, scope, receive, counted)
        sent.append((0, memory.num_held))

    monkeypatch.setattr(HeldAnswer, "__call__", watched)
    answer = site.post("ann", "/tokenize", prompt="a x" * 10_000, return_token_strs=True)
    assert answer.json()["count"] > 10_000
    wait_until(lambda: sent[-1] == (0, 0))
    assert max(size for size, _ in sent) == held_answer.PIECE_BYTES
    assert {held for _, held in sent[:-1]} == {len(answer.content)}
    assert answer.headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a"] * 100}),
        ("/v1/embeddings", {"input": ["a"] * 100, "encoding_format": "float"}),
        ("/api/embed", {"model": "quire-demo", "input": ["a"] * 100}),
    ],
)
def test_many_vectors_are_written_on_a_thread(site, monkeypatch, path, body):
    threads, encode = set(), pooling.encoded_vector

    def watched(vector):
        threads.add(threading.current_thread().name)
        return encode(vector)

    for module in ("quire.server.api.openai.embeddings", "quire.server.api.ollama.embed"):
        monkeypatch.setattr(f"{module}.encoded_vector", watched)
    monkeypatch.setattr(pooling, "_MAX_FEW_VALUES", 1000)
    assert site.post("ann", path, **body).status_code == 200
    assert threads == {"quire-pool"}
    threads.clear()
    assert site.post("ann", path, **{**body, "input": ["a"]}).status_code == 200
    assert threads == {"MainThread"} or "quire-pool" not in threads


def test_the_text_of_many_tokens_counts_before_it_is_decoded(site, monkeypatch):
    held, text = [], tokenize._text

    def watched(tokens, service):
        held.append(service.memories.of("ann").num_held)
        return text(tokens, service)

    monkeypatch.setattr(tokenize, "_text", watched)
    assert site.post("ann", "/detokenize", tokens=[5] * 10).status_code == 200
    assert site.post("ann", "/detokenize", tokens=[5] * 10_000).status_code == 200
    assert held == [0, 2 * 64 * 10_000]  # the answer has the text by two names


def test_lists_and_explanations_count_before_they_are_built(site, monkeypatch):
    held = []
    hold = held_answer.HeldBytes.hold

    async def watched(holder, num_bytes, seconds):
        held.append(num_bytes)
        await hold(holder, num_bytes, seconds)

    monkeypatch.setattr(held_answer.HeldBytes, "hold", watched)
    for path in ("/v1/files", "/v1/batches?limit=100", "/v1/requests/x/explain"):
        assert site.ask("ann", "GET", path).status_code in (200, 404)
    assert len(held) == 3
    assert max(held) <= tenant_memory.MAX_TENANT_BYTES // 4


def test_a_refusal_for_memory_names_the_bound(site, monkeypatch):
    monkeypatch.setattr(held_answer, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(tenant_memory, "MAX_TENANT_BYTES", 0)

    async def never(_memory, _num_bytes, _holder=None):
        raise TimeoutError

    monkeypatch.setattr(tenant_memory.TenantMemory, "acquire", never)
    answer = site.ask("ann", "GET", "/v1/files")
    assert answer.status_code == 429
    error = json.loads(answer.content)["error"]
    assert error["code"] == "tenant_memory_full"
    assert "33,554,432" in error["message"] and "no setting" in error["message"]
    assert answer.headers["retry-after"] == "1"
