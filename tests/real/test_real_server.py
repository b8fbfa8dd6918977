"""`quire serve` with a published model: streams, and an engine process that is killed."""

import openai
import pytest
from real_model import served

QUESTION = {"role": "user", "content": "Write a short story about a lighthouse."}
ASKED = {"model": "smollm2", "messages": [QUESTION], "temperature": 0}


@pytest.fixture(scope="module")
def server(file):
    flags = ("--memory", "2GiB", "--max-model-len", "2048", "--served-model-name", "smollm2")
    with served(str(file), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def text_of(chunk):
    return chunk.choices[0].delta.content or ""


def test_a_stream_has_the_text_of_the_whole_answer(client):
    # deterministic: the second request is drafted from the first, and AMX rounds products of several rows differently
    asked = {**ASKED, "max_tokens": 48, "extra_body": {"deterministic": True}}
    whole = client.chat.completions.create(**asked)
    pieces = [text_of(chunk) for chunk in client.chat.completions.create(**asked, stream=True)]
    assert len(pieces) > 4
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 48


def test_a_stream_goes_on_after_its_engine_was_killed(server, client):
    asked = {**ASKED, "max_tokens": 96, "extra_body": {"deterministic": True, "ignore_eos": True}}
    expected = client.chat.completions.create(**asked).choices[0].message.content
    found, killed = "", False
    for chunk in client.chat.completions.create(**asked, stream=True):
        found += text_of(chunk)
        if len(found) > 40 and not killed:
            server.kill_engine()
            killed = True
    assert killed
    assert found == expected
