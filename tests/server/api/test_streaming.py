"""A stream adds up to the complete answer, for any fields."""

import json

import httpx
import pytest
from embedded_model_server import CHAT, MODEL, STORY, run_app, service_of, small_engine

from quire.server.app import make_app

SAMPLED = {"seed": 5, "temperature": 1.5, "max_tokens": 14}
COMPLETIONS = {
    "plain": {},
    "three with logprobs": {"n": 3, "logprobs": 2},
    "batch of ids": {"n": 3, "prompt": [STORY, "é 😀"], "logprobs": 1, "return_token_ids": True},
    "echo": {"n": 3, "echo": True, "logprobs": 2, "prompt": "é 😀 One"},
    "echo alone": {"n": 3, "echo": True, "max_tokens": 0},
    "prompt logprobs": {"n": 3, "prompt_logprobs": 2},
    "stop": {"n": 3, "stop": ["e", "a"], "logprobs": 0},
    "stop included": {"n": 3, "stop": ["e", "a"], "include_stop_str_in_output": True},
    "token ids as tokens": {"logprobs": 2, "return_tokens_as_token_ids": True, "logprob_token_ids": [67]},
}
CHATS = {
    "plain": {},
    "three with logprobs": {"n": 3, "logprobs": True, "top_logprobs": 2},
    "given tokens": {"n": 3, "logprobs": True, "logprob_token_ids": [67, 68]},
    "ids and the prompt": {"n": 3, "prompt_logprobs": 1, "return_token_ids": True},
    "stop": {"n": 3, "stop": ["e"]},
    "echo": {"messages": [*CHAT, {"role": "assistant", "content": "Hello"}], "echo": True},
}
ONCE = ("index", "finish_reason", "stop_reason", "prompt_logprobs", "prompt_token_ids", "role", "refusal")


def add(whole, part):
    """Append a part of an answer to the parts before."""
    for name, value in part.items():
        if value is None:
            whole.setdefault(name, None)
        elif name in ONCE or whole.get(name) is None:
            whole[name] = value
        elif isinstance(value, dict):
            whole[name] = add(dict(whole[name]), value)
        else:
            whole[name] = whole[name] + value
    return whole


def joined(answer):
    """The choices of a stream, and the prompt data of its chunks."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    choices, about = {}, {}
    for chunk in map(json.loads, lines[:-1]):
        about |= {name: chunk[name] for name in ("prompt_logprobs", "prompt_token_ids") if name in chunk}
        for choice in chunk["choices"]:
            choices[choice["index"]] = add(choices.get(choice["index"], {}), choice)
    return [choices[i] for i in sorted(choices)], about


@pytest.mark.parametrize("fields", COMPLETIONS.values(), ids=COMPLETIONS.keys())
def test_completions(http, fields):
    body = {"prompt": STORY, **SAMPLED, **fields}
    whole = http.post("/v1/completions", json=body).json()["choices"]
    streamed, _ = joined(http.post("/v1/completions", json={**body, "stream": True}))
    assert streamed == whole
    assert [choice["index"] for choice in whole] == list(range(len(whole)))


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS.keys())
def test_chats(http, fields):
    body = {"messages": CHAT, **SAMPLED, **fields}
    whole = http.post("/v1/chat/completions", json=body).json()
    streamed, about = joined(http.post("/v1/chat/completions", json={**body, "stream": True}))
    for choice in streamed:
        choice["message"] = {**choice.pop("delta"), "refusal": None, "reasoning": None}
    for choice in (*streamed, *whole["choices"]):  # only streams omit fields without content
        choice["logprobs"] = choice["logprobs"] and choice["logprobs"]["content"]
    assert streamed == whole["choices"]
    assert about == {name: whole[name] for name in about}
    wanted = {name for name in ("prompt_logprobs", "prompt_token_ids") if whole[name] is not None}
    assert {name for name, value in about.items() if value is not None} == wanted


def test_every_chunk_has_a_list_of_token_ids(http):
    body = {"messages": CHAT, **SAMPLED, "stream": True, "return_token_ids": True}
    lines = http.post("/v1/chat/completions", json=body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    lists = [chunk["choices"][0]["token_ids"] for chunk in chunks]
    assert lists[0] == [] and sum(map(len, lists)) > 5


@pytest.mark.parametrize("always", [False, True])
def test_usage(client, always):
    stream = client.completions.create(
        model=MODEL,
        prompt=[STORY, "a b c"],
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": always},
        extra_body={"ignore_eos": True},
        n=2,
        max_tokens=5,
    )
    *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage.completion_tokens == 20
    assert last.usage.total_tokens == last.usage.prompt_tokens + 20
    counts = [chunk.usage.completion_tokens if chunk.usage else None for chunk in chunks]
    if always:
        assert counts == sorted(counts)
        assert counts[-1] == 20
        assert {chunk.usage.prompt_tokens for chunk in chunks} == {last.usage.prompt_tokens}
    else:
        assert set(counts) == {None}


@pytest.mark.parametrize("more", [{}, {"structured_outputs": {"json": {"const": {"name": "Mira", "price": 5}}}}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_of_a_chunk_counts_up_to_its_own_tokens(http, path, more):
    body = {"prompt": STORY} if path == "/v1/completions" else {"messages": CHAT}
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    asked = {**body, **SAMPLED, **more, **options, "return_token_ids": True, "max_tokens": 20}
    lines = http.post(path, json=asked).text.splitlines()
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    num_tokens = 0
    for chunk in chunks:
        num_tokens += len(chunk["choices"][0]["token_ids"] or ())
        usage = chunk["usage"]
        assert usage["completion_tokens"] == num_tokens
        assert usage.get("completion_tokens_details", {}).get("forced_tokens", 0) <= num_tokens
    assert {**chunks[-1]["usage"], "prompt_tokens_details": 0} == {**last["usage"], "prompt_tokens_details": 0}
    assert num_tokens > 5


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_server_can_report_the_usage_in_every_stream(path):
    body = {"prompt": STORY} if path == "/v1/completions" else {"messages": CHAT}
    service = service_of(small_engine(), always_reports_usage=True)
    with run_app(make_app(service)) as url:
        for options in ({}, {"stream_options": {"include_usage": False}}):
            asked = {**body, "stream": True, "max_tokens": 6, "ignore_eos": True, **options}
            lines = httpx.post(f"{url}{path}", json=asked, timeout=60).text.splitlines()
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts) and counts[-2:] == [6, 6] and chunks[-1]["choices"] == []


def test_cached_tokens_are_counted_once_for_all_sequences(http):
    body = {"prompt": list(range(67, 107)), "n": 3, "max_tokens": 1}
    usages = [http.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
    assert {usage["prompt_tokens"] for usage in usages} == {40}
    assert all(0 <= usage["prompt_tokens_details"]["cached_tokens"] < 40 for usage in usages)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_obfuscated_chunks_have_few_sizes(http, path):
    body = {"prompt": STORY} if path == "/v1/completions" else {"messages": CHAT}
    asked = {**body, **SAMPLED, "stream": True}
    texts = []
    for obfuscated in (False, True):
        lines = http.post(path, json={**asked, "stream_options": {"include_obfuscation": obfuscated}}).text.splitlines()
        chunks = [line for line in lines if line.startswith("data: {")]
        assert all(("obfuscation" in json.loads(chunk.removeprefix("data: "))) == obfuscated for chunk in chunks)
        sizes = {len(chunk.encode()) + 2 for chunk in chunks}
        assert all(size % 256 == 0 for size in sizes) == obfuscated
        choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
        texts.append("".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices))
    assert texts[0] == texts[1]
    assert texts[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_drafted_tokens_are_returned_by_index(path):
    built = small_engine()
    built.engine.scheduler.speculator.governs = False
    asked = {"prompt": STORY} if path == "/v1/completions" else {"messages": CHAT}
    asked |= {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_drafted": True}
    with run_app(make_app(service_of(built))) as url, httpx.Client(base_url=url, timeout=60) as http:
        (plain,) = http.post(path, json={**asked, "speculation": False}).json()["choices"]
        assert plain["drafted"] == []
        text = plain.get("text") or plain["message"]["content"]
        asked["prediction"] = {"type": "content", "content": text}
        whole = http.post(path, json=asked).json()
        accepted = whole["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
        drafted = whole["choices"][0]["drafted"]
        assert 0 < accepted <= len(drafted) < 24 and len(drafted) > 8
        streamed, offset = [], 0
        for line in http.post(path, json={**asked, "stream": True, "return_token_ids": True}).text.splitlines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                streamed += [offset + place for place in choice["drafted"]]
                offset += len(choice["token_ids"])
        assert offset == 24 and len(streamed) > 8
        assert streamed == sorted(set(streamed)) and streamed[-1] < 24
        assert "drafted" not in http.post(path, json={**asked, "return_drafted": None}).json()["choices"][0]


def test_predictions_of_completions_and_generate(http):
    text = http.post("/v1/completions", json={"prompt": STORY, "temperature": 0}).json()["choices"][0]["text"]
    body = {"prompt": STORY, "temperature": 0, "prediction": {"type": "content", "content": text}}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == text
    assert "accepted_prediction_tokens" in answer["usage"]["completion_tokens_details"]
    params = {"temperature": 0, "max_new_tokens": 16, "prediction": text}
    assert http.post("/generate", json={"text": STORY, "sampling_params": params}).json()["text"] == text
    refused = http.post("/generate", json={"text": STORY, "sampling_params": {**params, "prediction": 3}})
    assert refused.status_code == 400
