"""Beam search in the front end: parameters, text, request fields, errors."""

import pytest
from embedded_model_server import CHAT, STORY

from quire.core.output import EndCause, Output
from quire.core.request import Beams
from quire.engine.inputs import Generation, TokenizedPrompt
from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import BeamSearchOutput
from quire.errors import RequestError
from quire.params import BeamSearchParams, SamplingParams
from quire.server.api.openai.schema import ChatBody, CompletionBody

EOS = 2
ROUTES = {"/v1/completions": {"prompt": STORY}, "/v1/chat/completions": {"messages": CHAT}}
DEFAULTS = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}  # a model's generation config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width must be between 1 and 128, not 0"),
        ({"beam_width": 129}, "beam_width must be between 1 and 128"),
        ({"beam_width": 2.0}, "beam_width must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be between 1 and"),
        ({"min_tokens": 10}, r"min_tokens \(10\) is above max_tokens \(9\)"),
        ({"temperature": 0.5}, "temperature must be 0"),
        ({"temperature": "0"}, "temperature must be a number"),
        ({"length_penalty": 11}, "length_penalty must be between -10 and 10"),
        ({"length_penalty": float("nan")}, "length_penalty must be between"),
        ({"early_stopping": "always"}, "early_stopping must be true, false or 'never'"),
        ({"early_stopping": 1}, "early_stopping must be true, false or 'never'"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output must be true or false"),
        ({"beam_widht": 2}, "did you mean 'beam_width'"),
    ],
)
def test_parameters_are_bounded(fields, message):
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 9, **fields})


def test_parameters_of_the_request():
    same = {"max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "include_stop_str_in_output": True}
    search = BeamSearchParams(beam_width=3, **same)
    assert search.sampling_params() == SamplingParams(n=3, temperature=0, **same)
    assert search.sampling_params(n=2).n == 2


def scripted(results):
    """Engine outputs of a search: all results at once, the best first."""
    return [
        Output("r", i, 9, ids, EndCause(reason), ids[-1] if reason == "stop" else None, cumulative_logprob=total)
        for i, (ids, reason, total) in enumerate(results)
    ]


def test_results_become_text(tokenizer):
    params = BeamSearchParams(beam_width=2, max_tokens=3).sampling_params()
    run = RequestOutputProcessor("r", Generation(TokenizedPrompt(None, [67]), params), tokenizer, now=1.0)
    for output in scripted([([68, EOS], "stop", -1.5), ([69, 70, 71], "length", -2.5)]):
        assert not run.finished
        assert run.process_output(output, 2.0).stopped_after is None
    assert run.finished
    returned = [(o.index, o.text, o.finish_reason, o.stop_reason, o.cumulative_logprob) for o in run.result().outputs]
    assert returned == [(0, "b", "stop", None, -1.5), (1, "cde", "length", None, -2.5)]


@pytest.fixture
def searching(llm, monkeypatch):
    """An LLM over an engine with fixed search results. `asked` has the requests."""
    asked = []
    found = [([68, EOS], "stop", -1.5), ([69, 70, 71], "length", -2.5)]

    def outputs(requests, is_open, on_step):
        asked.extend(requests)
        for request in requests:
            for output in scripted(found):
                yield Output(request.id, *[getattr(output, name) for name in output.__struct_fields__[1:]])

    monkeypatch.setattr(llm, "_outputs", outputs)
    llm.asked = asked
    yield llm
    del llm.asked


@pytest.mark.parametrize("included", [False, True])
def test_beam_search_returns_tokens_texts_and_finish_reasons_per_beam(searching, monkeypatch, included):
    monkeypatch.setattr(searching.llm_engine, "eos_token_ids", (EOS, 3, 4, 5))
    params = BeamSearchParams(
        beam_width=2, max_tokens=3, length_penalty=0.5, early_stopping=True, include_stop_str_in_output=included
    )
    results = searching.beam_search(["a", {"prompt_token_ids": [67, 67]}], params)
    assert all(isinstance(result, BeamSearchOutput) for result in results)
    assert [[beam.tokens for beam in result.sequences] for result in results] == [
        [[67, 68, EOS], [67, 69, 70, 71]],
        [[67, 67, 68, EOS], [67, 67, 69, 70, 71]],
    ]
    ended, cut = results[0].sequences
    assert (ended.text, ended.finish_reason, ended.cum_logprob) == ("ab" + "<|im_end|>" * included, "stop", -1.5)
    assert (cut.text, cut.finish_reason, cut.cum_logprob) == ("acde", "length", -2.5)
    first, second = searching.asked
    assert first.beams == second.beams
    assert first.beams == Beams(width=2, num_candidates=6, length_penalty=0.5, early_stopping=True)
    assert first.params.n == 2
    assert first.params.temperature == 0
    assert (first.prompt, second.prompt) == ([67], [67, 67])


def test_a_search_wants_its_own_parameters(llm):
    with pytest.raises(RequestError, match="must be BeamSearchParams"):
        llm.beam_search("a", SamplingParams())
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.beam_search([[]], BeamSearchParams(beam_width=2, max_tokens=3))
    assert not llm.llm_engine.has_work


def read(**fields):
    body = CompletionBody(prompt="a", **fields)
    params = body.sampling_params(DEFAULTS)
    return params, body.beams(params, vocab_size=2048, num_end_tokens=5)


def test_fields_of_a_search():
    params, beams = read(use_beam_search=True, n=3)
    assert params == SamplingParams(n=3, temperature=0, max_tokens=16), "nothing of what the model recommends"
    assert beams == Beams(width=3, num_candidates=8, length_penalty=1.0, early_stopping=False)
    params, beams = read(
        use_beam_search=True, n=2, best_of=5, length_penalty=2, early_stopping="never", ignore_eos=True
    )
    assert params == SamplingParams(n=2, temperature=0, max_tokens=16, ignore_eos=True)
    assert beams == Beams(width=5, num_candidates=10, length_penalty=2.0, early_stopping="never")
    _, beams = read(use_beam_search=True, length_penalty=0, stop_token_ids=list(range(20)), early_stopping=True)
    assert beams == Beams(width=1, num_candidates=26, length_penalty=0.0, early_stopping=True)
    _, beams = read(use_beam_search=True, ignore_eos=True)
    assert beams.num_candidates == 2
    params, beams = read(best_of=4)
    assert (params.best_of, params.temperature, beams) == (4, 0.7, None)


def test_fields_of_a_search_in_chat():
    body = ChatBody(messages=CHAT, use_beam_search=True, n=2, max_completion_tokens=7, logprobs=False)
    params = body.sampling_params(DEFAULTS)
    assert params == SamplingParams(n=2, temperature=0, max_tokens=7)
    assert body.beams(params, vocab_size=2048, num_end_tokens=1).width == 2


NEUTRAL = {
    **{"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0.0},
    **{"repetition_penalty": 1, "logit_bias": {}, "bad_words": [], "stop": [], "stream": False, "deterministic": False},
    **{"logprobs": None, "seed": None, "user": "a"},
}


def test_neutral_parameters_are_accepted_with_beam_search():
    assert read(use_beam_search=True, n=2, **NEUTRAL)[0].temperature == 0
    assert read(use_beam_search=True, temperature=0)[0].temperature == 0
    assert read(use_beam_search=False, length_penalty=1.0, early_stopping=False)[1] is None


REFUSED = {
    **{"temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 1},
    **{"repetition_penalty": 2, "logit_bias": {"5": 1}, "allowed_token_ids": [5], "bad_words": ["a"], "stop": "a"},
    **{"stream": True, "prompt_logprobs": 0, "deterministic": True, "max_tokens": 0, "seed": 3},
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", REFUSED)
def test_parameters_without_effect_in_beam_search_are_rejected_by_name(http, path, name):
    answer = http.post(path, json={**ROUTES[path], "max_tokens": 2, "use_beam_search": True, name: REFUSED[name]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"use_beam_search": True, "logprobs": 0}, "logprobs"),
        ("/v1/chat/completions", {"use_beam_search": True, "logprobs": True}, "logprobs"),
        ("/v1/completions", {"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ("/v1/completions", {"use_beam_search": True, "n": 129}, "n"),
        ("/v1/completions", {"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
        ("/v1/completions", {"use_beam_search": True, "early_stopping": "always"}, "early_stopping"),
        ("/v1/completions", {"use_beam_search": "yes"}, "use_beam_search"),
        ("/v1/completions", {"use_beam_search": True, "best_of": 4, "stream": True}, "stream"),
        ("/v1/completions", {"length_penalty": 2}, "length_penalty"),
        ("/v1/completions", {"early_stopping": True}, "early_stopping"),
        ("/v1/chat/completions", {"early_stopping": "never", "use_beam_search": False}, "early_stopping"),
        ("/v1/chat/completions", {"use_beam_search": True, "n": 2, "best_of": 3}, "best_of"),
    ],
)
def test_fields_that_contradict_each_other(http, path, fields, param):
    answer = http.post(path, json={**ROUTES[path], "max_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]


def test_a_search_over_many_prompts_counts_its_width(http):
    body = {"prompt": ["a"] * 9, "use_beam_search": True, "best_of": 128, "max_tokens": 2}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "best_of" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_end_tokens_of_model_and_request_have_candidates_beside_them(served, http, monkeypatch, path):
    asked, add = [], served.built.engine.add
    monkeypatch.setattr(served.built.engine, "add", lambda request: (asked.append(request.beams), add(request)))
    body = {**ROUTES[path], "use_beam_search": True, "max_tokens": 2, "stop_token_ids": [67, 68]}
    assert http.post(path, json=body).is_success
    ends = len(served.built.engine.eos_token_ids)
    assert ends > 0
    assert [beams.num_candidates for beams in asked] == [1 + ends + 2]


@pytest.mark.parametrize("value", ["always", 1, ["never"]])
def test_a_bad_early_stopping_error_lists_the_allowed_values(http, value):
    answer = http.post("/v1/completions", json={"prompt": "a", "use_beam_search": True, "early_stopping": value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "early_stopping")
    assert "true, false or 'never'" in error["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_a_width_that_the_server_has_no_rows_for(http, path):
    body = {**ROUTES[path], "use_beam_search": True, "max_tokens": 2, "n": 17}
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
    if path == "/v1/completions":
        assert http.post(path, json={**body, "n": 1, "best_of": 17}).json()["error"]["param"] == "best_of"


def test_a_width_that_the_vocabulary_cannot_feed():
    with pytest.raises(RequestError, match=r"n \(100\) is too large") as raised:
        CompletionBody(prompt="a", use_beam_search=True, n=100).beams(
            SamplingParams(n=100), vocab_size=104, num_end_tokens=5
        )
    assert raised.value.param == "n"
