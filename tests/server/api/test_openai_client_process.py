"""OpenAI's own client, sync and async, against `quire serve` in a process of its own."""

import asyncio
import os
import re
import subprocess
import sys

import openai
import pytest
from embedded_model_server import CHAT, GREEDY, MODEL, STORY

LONG = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """URL and key of a server that has one key."""
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    quire = [sys.executable, "-c", "from quire.cli import main; main()"]
    made = subprocess.run([*quire, "key", "ann", "--file", str(keys)], stdout=subprocess.PIPE, text=True, check=True)
    flags = [
        "--port",
        "0",
        "--memory",
        "256MiB",
        "--max-model-len",
        "512",
        "--dtype",
        "float32",
        "--calibration",
        "0.1",
    ]
    process = subprocess.Popen(
        [*quire, "serve", *flags, "--api-key-file", str(keys)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    try:
        ready = next((line for line in process.stdout if line.startswith("ready")), None)
        assert ready, process.stderr.read()
        yield re.search(r"http://127\.0\.0\.1:\d+", ready)[0], made.stdout.strip()
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def client(server):
    url, key = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def on_loop(server):
    """The result of a coroutine function of an asynchronous client."""
    url, key = server

    def run(work):
        async def main():
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
                return await work(client)

        return asyncio.run(main())

    return run


def test_models(client, on_loop):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert on_loop(lambda client: client.models.retrieve(MODEL)).id == MODEL


def test_completions_are_those_of_the_offline_interface(client, on_loop, offline):
    expected = offline(**GREEDY).outputs[0]
    whole = client.completions.create(model=MODEL, prompt=STORY, **GREEDY)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected.text, "length")
    assert whole.usage.completion_tokens == len(expected.token_ids)
    undrafted = {"extra_body": {"speculation": False}}  # or a chunk may have several tokens
    chunks = list(client.completions.create(model=MODEL, prompt=STORY, stream=True, **undrafted, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert len(chunks) > 5

    async def streamed(client):
        stream = await client.completions.create(model=MODEL, prompt=STORY, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    assert on_loop(streamed) == expected.text
    assert on_loop(lambda client: client.completions.create(model=MODEL, prompt=STORY, **GREEDY)).choices[0].text == (
        expected.text
    )


def test_chat_whole_and_streamed_with_usage(client, on_loop):
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, **GREEDY)
    text = whole.choices[0].message.content
    assert (whole.choices[0].message.role, bool(text)) == ("assistant", True)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(model=MODEL, messages=CHAT, **options, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert last.usage.total_tokens == whole.usage.total_tokens

    async def streamed(client):
        stream = await client.chat.completions.create(model=MODEL, messages=CHAT, stream=True, **GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert on_loop(streamed) == text


def test_the_stream_helper_of_the_client(client):
    with client.chat.completions.stream(model=MODEL, messages=CHAT, **GREEDY) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == final.choices[0].message.content
    assert final.choices[0].finish_reason in ("stop", "length")


def test_several_choices_of_one_seed(client):
    asked = {"model": MODEL, "messages": CHAT, "n": 3, "seed": 7, "max_tokens": 12, "temperature": 3}
    whole = [choice.message.content for choice in client.chat.completions.create(**asked).choices]
    texts = [""] * 3
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == whole
    assert len(set(whole)) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, stream):
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, logprobs=True, top_logprobs=3, stream=stream, max_tokens=6, temperature=0
    )
    parts = [part.choices[0] for part in (answer if stream else [answer])]
    entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    text = "".join((part.delta if stream else part.message).content or "" for part in parts)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == text
    assert [len(entry.top_logprobs) for entry in entries] == [3] * len(entries)
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in entries)
    legacy = client.completions.create(model=MODEL, prompt=STORY, logprobs=2, stream=stream, max_tokens=4)
    tokens = [
        t
        for part in (legacy if stream else [legacy])
        if (logprobs := part.choices[0].logprobs)
        for t in logprobs.tokens
    ]
    assert len(tokens) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, stream):
    def ask(**more):
        answer = client.completions.create(model=MODEL, prompt=STORY, stream=stream, **LONG, **more)
        choices = [part.choices[0] for part in (answer if stream else [answer])]
        return "".join(choice.text for choice in choices), choices[-1].finish_reason

    free, reason = ask()
    stop = free[9:14]
    assert reason == "length"
    assert ask(stop=["never there", stop]) == (free[: free.index(stop)], "stop")


def test_embeddings(client, on_loop):
    vectors = client.embeddings.create(model=MODEL, input=[STORY, "Hello"])  # base64 is the client's default
    plain = on_loop(
        lambda client: client.embeddings.create(model=MODEL, input=[STORY, "Hello"], encoding_format="float")
    )
    assert [one.index for one in vectors.data] == [0, 1]
    for one, other in zip(vectors.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
        assert sum(x * x for x in one.embedding) == pytest.approx(1, abs=1e-3)
    assert vectors.usage.prompt_tokens == vectors.usage.total_tokens > 2


def test_invalid_requests_raise_the_openai_clients_errors(client, on_loop, server):
    url, _ = server
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model=MODEL, messages=CHAT, temperature=-1)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    assert caught.value.request_id
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        client.completions.create(model=MODEL, prompt="a", stream=True, extra_body={"temprature": 1})
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input="a " * 3000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.completions.create(model="gpt-7", prompt="a")
    with pytest.raises(openai.NotFoundError, match=MODEL):
        on_loop(lambda client: client.models.retrieve("gpt-7"))
    wrong = client.with_options(api_key="wrong")
    for ask in (wrong.models.list, lambda: wrong.chat.completions.create(model=MODEL, messages=CHAT, stream=True)):
        with pytest.raises(openai.AuthenticationError, match="API key"):
            ask()
    with pytest.raises(openai.PermissionDeniedError, match="admin"):
        client.get(f"{url}/metrics", cast_to=str)


def test_many_at_once_and_some_that_leave(on_loop, offline):
    """Cancelled streams do not affect others."""
    expected = offline(**GREEDY).outputs[0].text

    async def one(client, leaves):
        stream = await client.completions.create(model=MODEL, prompt=STORY, stream=True, **GREEDY)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if leaves:
                await stream.close()
                return None
        return text

    async def all_of_them(client):
        return await asyncio.gather(*(one(client, i % 3 == 0) for i in range(30)))

    texts = on_loop(all_of_them)
    assert texts == [None if i % 3 == 0 else expected for i in range(30)]
