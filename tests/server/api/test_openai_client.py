"""The server with OpenAI's client, streaming and not, against the offline interface."""

import asyncio

import httpx
import openai
import pytest
from embedded_model_server import CHAT, GREEDY, MODEL, STORY

from quire import SamplingParams


def test_models(client, served):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, 512)
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.models.retrieve("gpt-7")


def test_completion(client, offline):
    answer = client.completions.create(model=MODEL, prompt=STORY, **GREEDY)
    expected = offline(**GREEDY)
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == 20 + len(expected.prompt_token_ids)
    again = client.completions.create(model=MODEL, prompt=STORY, **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1
    assert answer.object == "text_completion"


def test_streamed_completion(client, offline):
    undrafted = {"extra_body": {"speculation": False}}  # or few events would have all tokens
    stream = client.completions.create(
        model=MODEL, prompt=STORY, stream=True, stream_options={"include_usage": True}, **undrafted, **GREEDY
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == offline(**GREEDY).outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len(chunks) > 3


def test_forms_of_a_prompt(client, llm):
    ids = llm.get_tokenizer().encode(STORY)
    (expected,) = client.completions.create(model=MODEL, prompt=STORY, **GREEDY).choices
    for prompt in ([STORY], ids, [ids]):
        (choice,) = client.completions.create(model=MODEL, prompt=prompt, **GREEDY).choices
        assert choice.text == expected.text
    for prompts in ([STORY, STORY], [ids, ids]):
        answer = client.completions.create(model=MODEL, prompt=prompts, **GREEDY)
        assert [(c.index, c.text) for c in answer.choices] == [(0, expected.text), (1, expected.text)]
        assert answer.usage.prompt_tokens == 2 * len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_sequences(client, offline, stream):
    prompts = [STORY, "Hello"]
    params = {"n": 2, "seed": 3, "max_tokens": 10}
    expected = [output.text for prompt in prompts for output in offline(prompt, **params).outputs]
    answer = client.completions.create(model=MODEL, prompt=prompts, stream=stream, **params)
    texts = [""] * 4
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_chat(client, llm):
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0)
    (expected,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=100))
    message = answer.choices[0].message
    assert message.content == expected.outputs[0].text
    assert message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.object == "chat.completion"
    again = client.chat.completions.create(
        model=MODEL, messages=[*CHAT, message, {"role": "user", "content": "Thanks"}], max_completion_tokens=3
    )
    assert again.usage.completion_tokens <= 3


def test_streamed_chat(client, llm):
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    (expected,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=100))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == expected.outputs[0].text
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_the_async_client(served, offline):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.completions.create(model=MODEL, prompt=STORY, **GREEDY)
            stream = await client.completions.create(model=MODEL, prompt=STORY, stream=True, **GREEDY)
            chat = client.chat.completions.create(model=MODEL, messages=CHAT, **GREEDY)
            chat_stream = await client.chat.completions.create(model=MODEL, messages=CHAT, stream=True, **GREEDY)
            text = "".join([chunk.choices[0].text async for chunk in stream])
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in chat_stream])
            return (await whole).choices[0].text, text, (await chat).choices[0].message.content, said

    whole, text, chat, said = asyncio.run(main())
    assert whole == text == offline(**GREEDY).outputs[0].text
    assert chat == said


def test_same_seed_same_text(client):
    def ask(seed):
        return client.chat.completions.create(model=MODEL, messages=CHAT, seed=seed, n=2, max_tokens=20, temperature=3)

    first, again, other = ([c.message.content for c in ask(seed).choices] for seed in (5, 5, 6))
    assert first == again != other
    assert first[0] != first[1]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, offline, stream):
    free = offline(**GREEDY).outputs[0].text
    stop = free[12:22]
    answer = client.completions.create(model=MODEL, prompt=STORY, stop=["zzz", stop], stream=stream, **GREEDY)
    choices = [part.choices[0] for part in (answer if stream else [answer])]
    assert "".join(choice.text for choice in choices) == free[: free.index(stop)]
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == stop


def test_stop_token(client, offline):
    ids = offline(**GREEDY).outputs[0].token_ids
    extra = {"stop_token_ids": [ids[3]]}
    answer = client.completions.create(model=MODEL, prompt=STORY, extra_body=extra, **GREEDY)
    assert answer.choices[0].stop_reason == ids[3]
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(client, offline, stream):
    answer = client.completions.create(model=MODEL, prompt=STORY, logprobs=3, stream=stream, **GREEDY)
    parts = [part.choices[0] for part in (answer if stream else [answer])]
    text = "".join(part.text for part in parts)
    logprobs = [part.logprobs for part in parts if part.logprobs]
    tokens = [token for part in logprobs for token in part.tokens]
    values = [value for part in logprobs for value in part.token_logprobs]
    tops = [top for part in logprobs for top in part.top_logprobs]
    offsets = [offset for part in logprobs for offset in part.text_offset]
    assert "".join(tokens) == text
    assert [text[offset:].startswith(token) for offset, token in zip(offsets, tokens, strict=True)] == [True] * 20
    expected = offline(logprobs=3, **GREEDY).outputs[0].logprobs
    sampled = [next(iter(row.values())).logprob for row in expected]
    assert values == pytest.approx(sampled, abs=1e-5)  # the prompt may have been computed in another batch
    assert all(len(top) == 3 and max(top.values()) == value for top, value in zip(tops, values, strict=True))


@pytest.mark.parametrize("top", [0, 1])
def test_the_sampled_token_is_among_the_most_likely_ones_of_a_completion(client, top):
    answer = client.completions.create(
        model=MODEL, prompt=STORY, logprobs=top, temperature=50, seed=1, max_tokens=40, extra_body={"ignore_eos": True}
    )
    logprobs = answer.choices[0].logprobs
    for token, value, best in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert best[token] == value
        assert len(best) <= top + 1
    assert max(len(best) for best in logprobs.top_logprobs) == top + 1


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client, stream):
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, logprobs=True, top_logprobs=2, stream=stream, **GREEDY
    )
    parts = [part.choices[0] for part in (answer if stream else [answer])]
    text = "".join((part.delta if stream else part.message).content or "" for part in parts)
    entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(text)
    for entry in entries:
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 2


def test_errors_reach_the_client_as_its_own(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=STORY, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.chat.completions.create(model="gpt-7", messages=CHAT)


def test_documentation(served):
    assert httpx.get(f"{served.url}/docs").status_code == 200
    schema = httpx.get(f"{served.url}/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(schema["paths"])
    assert schema["components"]["schemas"]["ChatBody"]["properties"]["stop"]["description"]
