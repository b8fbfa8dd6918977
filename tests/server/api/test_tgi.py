"""Text Generation Inference's routes, as its clients use them."""

import json

import pytest
from embedded_model_server import STORY
from multi_tenant_server import error_of

GREEDY = {"inputs": STORY, "parameters": {"max_new_tokens": 8}}


def events(answer):
    return [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]


def continued(http, **fields):
    """The text that /v1/completions has for the same prompt."""
    body = {"prompt": STORY, "max_tokens": 8, "temperature": 0, "include_stop_str_in_output": True, **fields}
    return http.post("/v1/completions", json=body).json()["choices"][0]


def test_each_route_has_the_text_of_completions(http):
    text = continued(http)["text"]
    assert http.post("/generate", json=GREEDY).json() == {"generated_text": text}
    assert http.post("/", json=GREEDY).json() == [{"generated_text": text}]
    for path, more in (("/generate_stream", {}), ("/", {"stream": True})):
        found = events(http.post(path, json={**GREEDY, **more}))
        assert "".join(one["token"]["text"] for one in found if one["token"]) == text
        assert [one["generated_text"] for one in found if one["details"]] == [text]
        assert found[-1]["details"]["generated_tokens"] == 8


def test_details_have_tokens_and_the_reason_of_the_end(http):
    parameters = {**GREEDY["parameters"], "details": True, "decoder_input_details": True, "top_n_tokens": 2}
    details = http.post("/generate", json={"inputs": STORY, "parameters": parameters}).json()["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 8)
    assert len(details["tokens"]) == len(details["top_tokens"]) == 8
    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert len(top) == 2
        assert top[0] == token, "greedy"
    prompt = http.post("/tokenize", json={"prompt": STORY}).json()["tokens"]
    assert [one["id"] for one in details["prefill"]] == prompt
    assert details["prefill"][0]["logprob"] is None


def test_a_stop_string_ends_the_text_and_is_part_of_it(http):
    word = continued(http)["text"].split()[1]
    parameters = {**GREEDY["parameters"], "stop": [word], "details": True, "return_full_text": True}
    found = http.post("/generate", json={"inputs": STORY, "parameters": parameters}).json()
    assert found["generated_text"].startswith(STORY)
    assert found["generated_text"].endswith(word)
    assert found["details"]["finish_reason"] == "stop_sequence"


def test_it_samples_if_asked_to_or_if_a_field_of_sampling_is_set(http):
    def texts(**parameters):
        body = {"inputs": STORY, "parameters": {"max_new_tokens": 12, **parameters}}
        return {http.post("/generate", json=body).json()["generated_text"] for _ in range(6)}

    assert len(texts()) == len(texts(do_sample=False)) == len(texts(do_sample=True, seed=5)) == 1
    assert len(texts(do_sample=True)) > 1
    assert len(texts(temperature=1.5)) > 1


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "json", "value": {"type": "integer", "minimum": 10, "maximum": 99}},
        {"type": "json_schema", "value": {"name": "n", "schema": {"type": "integer", "minimum": 10, "maximum": 99}}},
        {"type": "regex", "value": "[1-9][0-9]"},
    ],
)
def test_a_grammar_constrains_the_output(http, grammar):
    body = {"inputs": STORY, "parameters": {"max_new_tokens": 8, "grammar": grammar}}
    assert 10 <= int(http.post("/generate", json=body).json()["generated_text"]) <= 99


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_new_tokens": -5}, "parameters.max_new_tokens"),
        ({"top_p": 7.0}, "parameters.top_p"),
        ({"watermark": True}, "watermark is not supported"),
        ({"typical_p": 0.5}, "typical_p is not supported"),
        ({"decoder_input_details": True}, "needs details to be true"),
        ({"adapter_id": "no-such-model"}, "the model 'no-such-model' is not served here"),
        ({"grammar": {"type": "regex", "value": 5}}, "needs a pattern as its value"),
        ({"max_tokens": 5}, "unknown field 'max_tokens'"),
        ({"top_n_tokens": -1}, "top_n_tokens"),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/"])
def test_a_wrong_parameter_is_named(http, path, parameters, message):
    answer = http.post(path, json={"inputs": STORY, "parameters": parameters})
    assert 400 <= answer.status_code < 500
    assert message in error_of(answer)["message"]


def test_info_names_the_model_and_its_limits(http):
    info = http.get("/info").json()
    limit = http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert (info["model_id"], info["max_total_tokens"]) == ("quire-demo", limit)


def test_tokens_have_their_places(http):
    tokens = http.post("/tokenize", json={"inputs": STORY}).json()
    assert [one["id"] for one in tokens] == http.post("/tokenize", json={"prompt": STORY}).json()["tokens"]
    assert "".join(one["text"] for one in tokens) == STORY
    assert all(STORY[one["start"] : one["stop"]] == one["text"] for one in tokens)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"inputs": "a", "text": "b"}, "text is no field of TGI's form, which inputs begins"),
        ({"inputs": "a", "lora_path": "b"}, "lora_path is no field of TGI's form"),
        ({"text": "a", "parameters": {}}, "parameters is a field of TGI's form; give inputs, or sampling_params"),
    ],
)
def test_the_two_forms_of_generate_are_not_mixed(http, body, message):
    assert message in error_of(http.post("/generate", json=body))["message"]


def test_a_salt_and_a_model_may_be_named(http):
    body = {**GREEDY, "model": "quire-demo", "cache_salt": "a"}
    assert all(http.post(path, json=body).is_success for path in ("/", "/generate_stream"))
    assert http.post("/generate", json={**GREEDY, "cache_salt": "a"}).is_success
    assert http.post("/", json={**GREEDY, "model": "no-such-model"}).status_code == 404
