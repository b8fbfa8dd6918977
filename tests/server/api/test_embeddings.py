"""Embeddings: vectors against transformers' hidden states, and OpenAI's format."""

import base64

import numpy as np
import openai
import pytest
import torch
from embedded_model_server import MODEL, STORY, run_app, service_of, small_engine
from transformers import AutoModel

from quire.core.output import EndCause, Output
from quire.core.step import Pooling
from quire.engine.embeddings import (
    POOLINGS,
    Embedder,
    EmbeddingBatch,
    EmbeddingDeadlineMissed,
    EmbeddingFailed,
    PooledPrompt,
)
from quire.engine.inputs import Generation, TokenizedPrompt
from quire.errors import RequestError
from quire.hub import embedded
from quire.models.sentence_transformers import EmbeddingConfig
from quire.params import SamplingParams
from quire.server.app import make_app

TEXTS = [STORY, "é 😀", "the kettle stands on the shelf " * 8]


@pytest.fixture(scope="module")
def states():
    """The last layer's hidden states of a text, after the final norm."""
    model = AutoModel.from_pretrained(embedded.folder(), dtype=torch.float32).eval()

    def states(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).last_hidden_state[0].numpy()

    return states


def weighted_mean(states):
    weights = np.arange(1, len(states) + 1)[:, None]
    return (states * weights).sum(0) / weights.sum()


ORACLES = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "cls": lambda states: states[0],
    "max": lambda states: states.max(0),
    "mean_sqrt_len": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean": weighted_mean,
}


def pooled(states, pooling):
    return ORACLES[pooling](states)


def test_each_pooling_has_an_oracle():
    assert set(ORACLES) == set(POOLINGS)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", ORACLES)
def test_vectors_are_those_of_transformers(llm, states, pooling, normalize):
    results = llm.embed(TEXTS, pooling=pooling, normalize=normalize)
    for text, result in zip(TEXTS, results, strict=True):
        assert result.finished
        assert result.prompt_token_ids == llm.get_tokenizer().encode(text)
        expected = pooled(states(result.prompt_token_ids), pooling)
        expected = expected / np.linalg.norm(expected) if normalize else expected
        assert result.outputs.embedding == pytest.approx(
            expected.tolist(), abs=2e-3 * max(1.0, float(np.abs(expected).max()))
        )


def test_a_long_prompt_is_pooled_over_all_its_chunks(llm, states):
    ids = llm.get_tokenizer().encode("One Tuesday Mira went to the shelf, and " * 60)[:600]
    llm.embed([ids[:300]])
    for pooling in ORACLES:
        (result,) = llm.embed(ids, pooling=pooling, normalize=False)
        expected = pooled(states(ids), pooling)
        assert result.outputs.embedding == pytest.approx(
            expected.tolist(), abs=5e-3 * max(1.0, float(np.abs(expected).max()))
        )
    assert llm.embed([]) == []


def test_invalid_embedding_prompts_are_rejected(llm):
    for prompts, more in ((["a", ""], {}), ([[99999]], {}), ("a", {"pooling": "median"}), ("a " * 5000, {})):
        with pytest.raises(RequestError):
            llm.embed(prompts, **more)
    assert len(llm.embed("a " * 5000, truncate_prompt_tokens=-1)[0].prompt_token_ids) == llm.max_model_len


def test_the_official_client_gets_numbers(client, llm):
    """By default it requests base64 and decodes it."""
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    plain = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    assert [item.index for item in answer.data] == [0, 1, 2]
    expected = [result.outputs.embedding for result in llm.embed(TEXTS)]
    for item, same, vector in zip(answer.data, plain.data, expected, strict=True):
        assert item.embedding == pytest.approx(vector, abs=1e-5)
        assert same.embedding == pytest.approx(vector, abs=1e-5)
    count = sum(len(llm.get_tokenizer().encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    assert answer.object == "list"


def test_base64_holds_little_endian_floats(http, llm):
    body = {"input": STORY, "encoding_format": "base64", "normalize": False}
    (item,) = http.post("/v1/embeddings", json=body).json()["data"]
    vector = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    (expected,) = llm.embed(STORY, normalize=False)
    assert vector.tolist() == pytest.approx(expected.outputs.embedding, abs=1e-3)


def test_forms_of_input_mean_the_same(client, llm):
    ids = llm.get_tokenizer().encode(STORY)
    (expected,) = client.embeddings.create(model=MODEL, input=STORY).data
    for form in ([STORY], ids, [ids]):
        (item,) = client.embeddings.create(model=MODEL, input=form).data
        assert item.embedding == pytest.approx(expected.embedding, abs=1e-5)


RIGHT = {"truncate_prompt_tokens": 3, "truncation_side": "right"}


@pytest.mark.parametrize("fields", [{"pooling": "mean"}, {"normalize": False}, {"truncate_prompt_tokens": 2}, RIGHT])
def test_extra_fields(client, llm, fields):
    (plain,) = client.embeddings.create(model=MODEL, input=STORY).data
    (item,) = client.embeddings.create(model=MODEL, input=STORY, extra_body=fields).data
    (expected,) = llm.embed(STORY, **fields)
    assert item.embedding == pytest.approx(expected.outputs.embedding, abs=1e-3)
    assert item.embedding != pytest.approx(plain.embedding, abs=1e-2)


def test_refusals(client, llm):
    size = len(llm.embed("a")[0].outputs.embedding)
    assert client.embeddings.create(model=MODEL, input="a", dimensions=size, user="b").data
    for fields, param in (
        ({"dimensions": size - 1}, "dimensions"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[99999]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"extra_body": {"pooling": "median"}}, "pooling"),
        ({"extra_body": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens"),
        ({"extra_body": {"dimension": 3}}, "dimension"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(**{"model": MODEL, "input": "a", **fields})
        assert caught.value.param == param
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input="a " * 5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


def output(vector, finish_reason=None):
    return Output("r", 0, 0, [], pooled=np.array(vector, np.float32), end=finish_reason and EndCause(finish_reason))


def test_chunks_are_put_together():
    expected = {
        Pooling.LAST: [3, 1],
        Pooling.CLASS: [3, 1],
        Pooling.CLS: [1, 2],
        Pooling.MAX: [3, 2],
        Pooling.MEAN: [1, 0.75],
        Pooling.MEAN_SQRT_LEN: [2, 1.5],
        Pooling.WEIGHTED_MEAN: [0.4, 0.3],
    }
    assert set(expected) == set(Pooling) - {Pooling.NONE}
    for pooling, state in expected.items():
        one = PooledPrompt("r", [1, 2, 3, 4], pooling)
        one.accumulate(output([1.0, 2.0]))
        one.accumulate(Output("r", 0, 0, []))
        assert one.finish_reason is None
        one.accumulate(output([3.0, 1.0], "stop"))
        assert one.finish_reason == "stop"
        assert one.state().tolist() == pytest.approx(state)


def test_a_vector_of_nothing_stays_finite():
    one = PooledPrompt("r", [1], Pooling.LAST)
    one.accumulate(output([0.0, 0.0], "stop"))
    assert Embedder(EmbeddingConfig(2)).vectors([one]).tolist() == [[0, 0]]


def test_a_batch_of_prompts_ends_with_its_last_one_or_the_first_that_fails():
    asked = [Generation(TokenizedPrompt(None, [i]), SamplingParams(max_tokens=0)) for i in (5, 6)]
    batch = EmbeddingBatch(asked, Pooling.LAST)
    first, second = (request.id for request in batch.requests)
    vector = np.ones(4, np.float32)
    assert batch.process_output(Output(second, 0, 0, [], end=EndCause.LENGTH, pooled=vector)).prompt_token_ids == [6]
    assert (batch.is_open(first), batch.is_open(second), batch.finished) == (True, False, False)
    with pytest.raises(EmbeddingFailed, match="could not be embedded: a kernel failed"):
        batch.process_output(Output(first, 0, 0, [], end=EndCause.STEP_FAILED, error="a kernel failed"))
    assert batch.finished
    assert [one.prompt_token_ids for one in batch] == [[5], [6]]


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_a_prompt_that_was_given_up_for_its_deadline_has_no_vector(pooling):
    batch = EmbeddingBatch([Generation(TokenizedPrompt(None, [5, 6]), SamplingParams(max_tokens=0))], pooling)
    name = batch.requests[0].id
    if pooling is Pooling.MEAN:
        batch.process_output(Output(name, 0, 0, [], pooled=np.ones(4, np.float32)))  # of its first chunk
    with pytest.raises(EmbeddingDeadlineMissed, match="waited too long"):
        batch.process_output(Output(name, 0, 0, [], end=EndCause.DEADLINE, error="it waited too long"))


def test_over_http_that_is_the_error_of_a_missed_deadline(monkeypatch, http):
    built = small_engine()
    service = service_of(built)

    async def generate(requests):
        class Stream:
            def close(self):
                pass

            async def __anext__(self):
                return [Output(requests[0].id, 0, 0, [], end=EndCause.DEADLINE, error="it waited too long")]

        return Stream()

    with run_app(make_app(service)) as url:
        monkeypatch.setattr(service.engine, "generate", generate)
        answer = http.post(f"{url}/v1/embeddings", json={"input": ["a", "b"], "deadline": 5})
    assert answer.status_code == 429
    assert answer.json()["error"]["message"].startswith("it waited too long; allow more time")
