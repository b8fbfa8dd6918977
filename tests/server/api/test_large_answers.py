"""Answers with many logprobs: how many there may be, and how they are written."""

import json
import re
import threading

import pytest
from embedded_model_server import CHAT, STORY
from waiting import wait_until

from quire.engine.inputs import Generation, TokenizedPrompt
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.server import json_pieces, reply
from quire.server.api import limits
from quire.server.api.limits import MAX_ANSWER_VALUES, MAX_EVENT_VALUES, bounded_answer
from quire.server.api.openai import chat, completions
from quire.server.api.openai.logprobs import LogprobFormat
from quire.server.api.sglang.logprobs import EntryFormat
from quire.server.thread_pool import ThreadPool
from quire.tenant_memory import TenantMemories

CONTEXT = 2**15


def asked(count=1, num_prompt=100, **params):
    return [Generation(TokenizedPrompt(None, [1] * num_prompt), SamplingParams(**params))] * count


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 20, "max_tokens": 4096},
        {"logprobs": 20, "max_tokens": 4096, "n": 8},
        {"logprobs": 5, "max_tokens": None},
        {"logprobs": 0, "max_tokens": 4096, "n": 128},
        {"logprobs": 1, "max_tokens": None, "n": 64},
        {"logprobs": 128, "max_tokens": 512, "n": 63},
        {"logprobs": 127, "max_tokens": 10**9},  # the context has room for no more
        {"max_tokens": None, "n": 128},
        {"max_tokens": 10**6, "n": 128},
    ],
    ids=str,
)
def test_usual_parameters_are_within_the_answer_bound(params):
    given = asked(**params)
    assert bounded_answer(given, CONTEXT) is given


@pytest.mark.parametrize(
    ("count", "params"),
    [
        (1, {"logprobs": 128, "max_tokens": 600, "n": 64}),
        (64, {"logprobs": 128, "max_tokens": 600}),
        (1, {"logprobs": 128, "max_tokens": 600, "n": 1, "best_of": 64}),
        (1, {"logprobs": 2, "logprob_token_ids": tuple(range(126)), "max_tokens": 600, "n": 64}),
        (8, {"logprobs": 128, "max_tokens": None, "min_tokens": 600, "n": 8}),
    ],
)
def test_more_logprobs_than_the_server_keeps_are_refused_beforehand(count, params):
    with pytest.raises(RequestError, match=r"more than 4,194,304, .*; lower max_tokens, n, logprobs or the number"):
        bounded_answer(asked(count, **params), CONTEXT)


def test_without_max_tokens_an_answer_ends_at_the_bound():
    both = [
        *asked(2, logprobs=128, n=64, max_tokens=None),
        *asked(logprobs=20, max_tokens=1000),
        *asked(max_tokens=None),
    ]
    bounded = bounded_answer(both, CONTEXT)
    first, second, third, fourth = (one.params.max_tokens for one in bounded)
    assert first == second == (MAX_ANSWER_VALUES - 21_000) // (2 * 64 * 129)
    assert (third, fourth) == (1000, None)
    assert bounded_answer(bounded, CONTEXT) is bounded
    (event,) = bounded_answer(asked(logprobs=20, max_tokens=None), CONTEXT, MAX_EVENT_VALUES)
    assert event.params.max_tokens == MAX_EVENT_VALUES // 21


def test_every_dialect_has_the_bound(http, monkeypatch):
    monkeypatch.setattr(limits, "MAX_ANSWER_VALUES", 100)
    monkeypatch.setattr(bounded_answer, "__defaults__", (100,))
    monkeypatch.setattr("quire.server.api.conversation.MAX_ANSWER_VALUES", 100)
    monkeypatch.setattr("quire.server.api.conversation.MAX_EVENT_VALUES", 100)
    monkeypatch.setattr("quire.server.api.sglang.routes.MAX_EVENT_VALUES", 50)
    asking = {"messages": CHAT, "logprobs": True, "top_logprobs": 9}
    options = {"num_predict": 11}
    ollama = {"stream": False, "logprobs": True, "top_logprobs": 9}
    listed = {"return_logprob": True, "top_logprobs_num": 9}
    response = {"input": "Hello", "top_logprobs": 9, "include": ["message.output_text.logprobs"]}
    cases = [
        ("/v1/chat/completions", {**asking, "max_tokens": 11}, "top_logprobs"),
        ("/v1/chat/completions", {**asking, "top_logprobs": 0, "max_tokens": 51, "n": 2}, "top_logprobs"),
        ("/v1/chat/completions/batch", {**asking, "messages": [CHAT, CHAT], "max_tokens": 6}, "top_logprobs"),
        ("/v1/completions", {"prompt": [STORY] * 2, "logprobs": 9, "max_tokens": 6}, "logprobs"),
        ("/generate", {"text": STORY, **listed, "sampling_params": {"max_new_tokens": 11}}, "top_logprobs_num"),
        ("/generate", {"text": STORY, **listed, "stream": True, "sampling_params": {"max_new_tokens": 6}}, None),
        ("/api/chat", {"messages": CHAT, **ollama, "options": options}, "top_logprobs"),
        ("/api/generate", {"prompt": "Hello", **ollama, "options": options}, "top_logprobs"),
        ("/api/generate", {"prompt": "Hello", **ollama, "raw": True, "options": options}, "top_logprobs"),
        ("/v1/responses", {**response, "max_output_tokens": 11}, "top_logprobs"),
    ]
    for path, body, param in cases:
        answer = http.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert "the bound of what the server keeps for one answer" in answer.text
        if param and "/api/" not in path:
            assert answer.json()["error"]["param"] == param
    for path, body in (
        ("/v1/chat/completions", {**asking, "max_tokens": 11, "stream": True}),
        ("/v1/completions", {"prompt": STORY, "logprobs": 9, "max_tokens": 11, "stream": True}),
        ("/api/chat", {"messages": CHAT, **ollama, "stream": True, "options": options}),
    ):
        assert http.post(path, json=body).status_code == 200
    whole = http.post("/v1/completions", json={"prompt": STORY, "logprobs": 9, "max_tokens": 10}).json()
    assert whole["usage"]["completion_tokens"] == 10


VARYING = re.compile(rb'"(id|created|created_at|e2e_latency|\w+_duration)":("[^"]*"|[0-9.e-]+)')
LARGE = [
    ("/v1/completions", {"prompt": [STORY, "One day"], "n": 3, "logprobs": 20, "echo": True, "prompt_logprobs": 20}),
    ("/v1/completions", {"prompt": STORY, "n": 2, "logprobs": 3, "regex": "(ab|cd)efgh.*", "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": CHAT, "n": 3, "logprobs": True, "top_logprobs": 20, "prompt_logprobs": 2}),
    ("/v1/chat/completions/batch", {"messages": [CHAT, CHAT], "logprobs": True, "top_logprobs": 20}),
    ("/generate", {"text": [STORY, "One day"], "return_logprob": True, "top_logprobs_num": 5, "logprob_start_len": 0}),
    (
        "/generate",
        {"text": STORY, "return_logprob": True, "token_ids_logprob": [67, 68], "return_text_in_logprobs": True},
    ),
    ("/api/chat", {"messages": CHAT, "stream": False, "logprobs": True, "top_logprobs": 20}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 30}),
]


@pytest.mark.parametrize(("path", "body"), LARGE, ids=lambda value: value if isinstance(value, str) else "")
def test_a_large_answer_has_the_bytes_of_a_small_one(http, monkeypatch, path, body):
    common = {"temperature": 0} if "/api/" not in path and path != "/generate" else {}
    if path == "/generate":
        common = {"sampling_params": {"temperature": 0, "max_new_tokens": 30}}
    if path == "/api/chat":
        common = {"options": {"temperature": 0, "num_predict": 30}}
    if path.startswith("/v1/c"):
        common |= {"max_tokens": 30}
    http.post(path, json={**body, **common})  # so that both find the same KV
    small = http.post(path, json={**body, **common})
    assert small.status_code == 200, small.text
    assert int(small.headers["content-length"]) == len(small.content)

    made = []
    run = ThreadPool.run

    async def counted(self, tenant, work):
        def there():
            made.append(threading.current_thread().name)
            return work()

        return await run(self, tenant, there)

    monkeypatch.setattr(reply, "_MANY_VALUES", 0)
    monkeypatch.setattr(json_pieces, "PIECE", 500)
    monkeypatch.setattr(ThreadPool, "run", counted)
    large = http.post(path, json={**body, **common})
    assert "content-length" not in large.headers
    assert VARYING.sub(b"", large.content) == VARYING.sub(b"", small.content)
    assert set(made) == {"quire-pool"}
    if "logprobs" in json.dumps(body):
        assert len(made) > len(large.content) // 4000


def test_rows_are_formatted_on_a_thread_and_count_until_they_are_sent(http, monkeypatch):
    names, held, memories = set(), [], []
    format, of = LogprobFormat._chat_token, TenantMemories.of

    def found(self, tenant):
        memories.append(of(self, tenant))
        return memories[-1]

    def formatted(self, row):
        names.add(threading.current_thread().name)
        held.append(memories[-1].num_held)
        return format(self, row)

    monkeypatch.setattr(LogprobFormat, "_chat_token", formatted)
    monkeypatch.setattr(TenantMemories, "of", found)
    body = {"messages": CHAT, "n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 40, "ignore_eos": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert [len(one["logprobs"]["content"]) for one in answer["choices"]] == [40] * 16
    assert names == {"quire-pool"}
    num_values = 16 * 40 * 21
    assert min(held) >= 8 * num_values
    assert max(held) < 24 * num_values
    wait_until(lambda: memories[-1].num_held == 0)
    names.clear()
    http.post("/v1/chat/completions", json={**body, "n": 1})
    assert "quire-pool" not in names


def test_tokens_of_a_large_answer_count_until_it_is_sent_but_not_while_the_engine_generates(http, monkeypatch):
    held, memories, of = [], [], TenantMemories.of
    json_pieces, read = reply.json_pieces, reply.Reply._read

    def found(self, tenant):
        memories.append(of(self, tenant))
        return memories[-1]

    def noted(function):
        def call(*args):
            held.append(memories[-1].num_held)
            return function(*args)

        return call

    monkeypatch.setattr(TenantMemories, "of", found)
    monkeypatch.setattr(reply, "_MANY_VALUES", 16)
    monkeypatch.setattr(reply.Reply, "_read", noted(read))
    monkeypatch.setattr(reply, "json_pieces", noted(json_pieces))
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 32, "ignore_eos": True})
    assert held[-1] == 32 * 128, "bytes of 32 tokens with their offsets and texts"
    assert max(held[:-1]) == 0
    wait_until(lambda: memories[-1].num_held == 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [STORY, "One day"], "n": 2, "prompt_logprobs": 2}),
        ("/v1/chat/completions", {"messages": CHAT, "prompt_logprobs": 2}),
        ("/generate", {"text": STORY, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}),
    ],
)
def test_long_prompts_are_described_on_a_thread_once_in_a_stream(http, monkeypatch, path, body):
    made = []
    writers = (completions, "prompt_logprobs_json"), (chat, "prompt_logprobs_json"), (EntryFormat, "of_prompt")
    for module, name in writers:
        write = getattr(module, name)

        def written(*given, write=write):
            made.append(threading.current_thread().name)
            return write(*given)

        monkeypatch.setattr(module, name, written)
    sampling = {"sampling_params": {"max_new_tokens": 5}} if path == "/generate" else {"max_tokens": 5}
    for most, name in ((10**6, "MainThread"), (0, "quire-pool")):
        made.clear()
        monkeypatch.setattr(reply, "_MANY_VALUES", most)
        answer = http.post(path, json={**body, **sampling, "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text
        assert len(made) == (2 if path == "/v1/completions" else 1)
        assert all((one == "quire-pool") == (name == "quire-pool") for one in made)
