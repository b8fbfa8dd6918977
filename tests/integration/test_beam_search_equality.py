"""Beam search and best_of in the whole engine, against a search with `generate` and against transformers."""

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.config import EngineOptions
from quire.fleet.fleet import Fleet
from quire.hub import embedded
from quire.params import BeamSearchParams
from quire.scheduler.beam_search import Rules, Search
from quire.server.app import make_app
from quire.server.service import Service
from quire.startup.build import build
from quire.startup.model_info import model_info_of
from quire.supervisor.engine_handle import EngineThread

SMALL = {"dtype": "float32", "memory": "400MiB", "max_num_seqs": 16, "max_model_len": 512}
PROMPTS = ["One Tuesday Mira went", "Hello! Who are", "The kettle"]
STOPPING = (True, False, "never")
MOST_ENDS = 8  # candidates beside the width: at least the number of end tokens of the model


@pytest.fixture(scope="module")
def llm():
    made = LLM(**SMALL)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tight():
    """Few rows and small blocks, so that beams of different requests take turns."""
    made = LLM(**SMALL | {"max_num_seqs": 5, "block_size": 4, "kernels": "reference"}, max_num_batched_tokens=24)
    yield made
    made.close()


def slow_search(llm, prompt, params):
    """A search that generates one token at a time and recomputes every prefix: (tokens, logprob, reason)."""
    ends = frozenset() if params.ignore_eos else frozenset(llm.llm_engine.eos_token_ids)
    rules = Rules(
        params.beam_width, params.max_tokens, params.length_penalty, params.early_stopping, ends, params.min_tokens
    )
    ids = llm.get_tokenizer().encode(prompt)
    search, outputs = Search(rules), [[]]
    asked = SamplingParams(temperature=0, max_tokens=1, logprobs=params.beam_width + MOST_ENDS, ignore_eos=True)
    while not search.is_over:
        rows = [result.outputs[0].logprobs[0] for result in llm.generate([ids + one for one in outputs], asked)]
        ranked = [sorted(row.items(), key=lambda item: item[1].rank)[: asked.logprobs] for row in rows]
        candidates = np.array([[token for token, _ in row] for row in ranked])
        values = np.array([[entry.logprob for _, entry in row] for row in ranked])
        selection = search.advance(outputs, candidates, values)
        outputs = [[*outputs[beam.parent], beam.token] for beam in selection.live]
    return [(ids + one.token_ids, one.cumulative_logprob, one.finish_reason) for one in search.hypotheses]


def beams_of(output):
    return [(beam.tokens, pytest.approx(beam.cum_logprob, abs=1e-3), beam.finish_reason) for beam in output.sequences]


@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (2, 0.5), (3, 1.0), (5, 2.0)])
def test_a_search_is_that_of_one_token_at_a_time(llm, width, penalty, stopping):
    params = BeamSearchParams(
        beam_width=width, max_tokens=14, length_penalty=penalty, early_stopping=stopping, min_tokens=width
    )
    results = llm.beam_search(PROMPTS, params)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert slow_search(llm, prompt, params) == beams_of(result), prompt
    assert not llm.llm_engine.has_work


def test_beam_search_with_width_1_equals_greedy_decoding(llm):
    params = BeamSearchParams(beam_width=1, max_tokens=20, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    for result, one in zip(llm.beam_search(PROMPTS, params), llm.generate(PROMPTS, greedy), strict=True):
        (beam,) = result.sequences
        assert beam.tokens == one.prompt_token_ids + one.outputs[0].token_ids
        assert beam.cum_logprob == pytest.approx(one.outputs[0].cumulative_logprob, abs=1e-3)
        assert beam.text == one.prompt + one.outputs[0].text


def test_beams_that_have_little_room(llm, tight):
    params = BeamSearchParams(beam_width=4, max_tokens=24)
    assert [beams_of(one) for one in tight.beam_search(PROMPTS * 3, params)] == [
        [(beam.tokens, beam.cum_logprob, beam.finish_reason) for beam in one.sequences]
        for one in llm.beam_search(PROMPTS * 3, params)
    ]
    stats = tight.llm_engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


@pytest.mark.parametrize("stopping", STOPPING)
def test_as_transformers(llm, stopping):
    reference = AutoModelForCausalLM.from_pretrained(embedded.folder(), dtype=torch.float32).eval()
    ends = list(llm.llm_engine.eos_token_ids)
    for prompt in PROMPTS:
        params = BeamSearchParams(beam_width=3, max_tokens=16, early_stopping=stopping)
        (result,) = llm.beam_search(prompt, params)
        ids = llm.get_tokenizer().encode(prompt)
        with torch.inference_mode():
            found = reference.generate(
                torch.tensor([ids]),
                num_beams=3,
                num_return_sequences=3,
                max_new_tokens=16,
                early_stopping=stopping,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=ends[0],
                return_dict_in_generate=True,
                output_scores=True,
            )
        for beam, row, score in zip(result.sequences, found.sequences, found.sequences_scores, strict=True):
            assert beam.tokens == row[: len(beam.tokens)].tolist()
            assert beam.cum_logprob / (len(beam.tokens) - len(ids)) == pytest.approx(float(score), abs=1e-3)


@pytest.mark.parametrize(("n", "best_of"), [(1, 4), (3, 4), (2, 16)])
def test_the_best_of_many_are_those_of_all(llm, n, best_of):
    sampled = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    for prompt in PROMPTS:
        (everything,) = llm.generate(prompt, SamplingParams(**sampled, n=best_of, logprobs=0))
        expected = sorted(everything.outputs, key=lambda one: -one.cumulative_logprob / len(one.token_ids))[:n]
        (result,) = llm.generate(prompt, SamplingParams(**sampled, n=n, best_of=best_of))
        assert [one.token_ids for one in result.outputs] == [one.token_ids for one in expected]
        assert [one.index for one in result.outputs] == list(range(n))
        assert all(one.logprobs is None for one in result.outputs)
        for one, same in zip(result.outputs, expected, strict=True):
            assert one.cumulative_logprob == pytest.approx(same.cumulative_logprob, abs=1e-3)


def test_the_best_of_what_stop_strings_end(llm):
    sampled = {"temperature": 1.0, "seed": 6, "max_tokens": 20, "stop": ["e"]}
    (everything,) = llm.generate(PROMPTS[0], SamplingParams(**sampled, n=6, logprobs=0))
    assert any(one.stop_reason == "e" for one in everything.outputs)
    expected = max(everything.outputs, key=lambda one: one.cumulative_logprob / len(one.token_ids))
    (result,) = llm.generate(PROMPTS[0], SamplingParams(**sampled, best_of=6))
    assert result.outputs[0].token_ids == expected.token_ids


@pytest.fixture(scope="module")
def http():
    built = build(EngineOptions(**SMALL), report=lambda line: None, progress=lambda done, total: None)
    facts = model_info_of(built)
    host = EngineThread(built.engine, facts)
    host.launch()
    service = Service(facts, built.tokenizer, Fleet(host))
    with TestClient(make_app(service), base_url="http://127.0.0.1") as client:
        yield client


def test_over_http(http, llm):
    params = BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=0.5, early_stopping=True)
    expected = llm.beam_search(PROMPTS, params)
    body = {"prompt": PROMPTS, "max_tokens": 12, "use_beam_search": True, "return_token_ids": True}
    body |= {"length_penalty": 0.5, "early_stopping": True}
    answer = http.post("/v1/completions", json={**body, "n": 4}).json()
    assert [one["index"] for one in answer["choices"]] == list(range(12))
    beams = [beam for result in expected for beam in result.sequences]
    for choice, beam in zip(answer["choices"], beams, strict=True):
        assert choice["prompt_token_ids"] + choice["token_ids"] == beam.tokens
        assert choice["finish_reason"] == beam.finish_reason
        assert beam.text.endswith(choice["text"])
    fewer = http.post("/v1/completions", json={**body, "n": 1, "best_of": 4}).json()
    assert [one["text"] for one in fewer["choices"]] == [one["text"] for one in answer["choices"][::4]]


def test_over_http_in_chat(http):
    body = {"messages": [{"role": "user", "content": "Hello! Who are you?"}], "max_tokens": 40}
    greedy = http.post("/v1/chat/completions", json={**body, "temperature": 0}).json()
    one = http.post("/v1/chat/completions", json={**body, "use_beam_search": True}).json()
    assert one["choices"][0]["message"] == greedy["choices"][0]["message"]
    three = http.post("/v1/chat/completions", json={**body, "use_beam_search": True, "n": 3}).json()
    assert len({choice["message"]["content"] for choice in three["choices"]}) == 3


def test_best_of_over_http(http, llm):
    body = {"prompt": PROMPTS[0], "max_tokens": 12, "seed": 5, "temperature": 1, "n": 2, "best_of": 5}
    answer = http.post("/v1/completions", json=body).json()
    asked = SamplingParams(max_tokens=12, seed=5, temperature=1, n=2, best_of=5)
    (result,) = llm.generate(PROMPTS[0], asked)
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in result.outputs]
    assert answer["usage"]["completion_tokens"] > sum(len(one.token_ids) for one in result.outputs)
