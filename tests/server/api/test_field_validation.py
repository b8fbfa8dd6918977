"""Validation of fields: no field is ignored or changed, fields that exclude each other, texts of errors."""

import json

import pytest
from embedded_model_server import CHAT, STORY

from quire.errors import RequestError
from quire.params import SamplingParams

COMPLETIONS, CHATS, GENERATE, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"


@pytest.fixture
def refused(http):
    def refused(path, **body):
        answer = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    return refused


@pytest.fixture
def both_ways(http):
    """The choices of a complete answer, and the logprobs in the chunks of a stream."""

    def ask(path, **body):
        whole = http.post(path, json=body).json()["choices"]
        lines = http.post(path, json={**body, "stream": True}).text.splitlines()
        chunks = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
        return whole, [choice["logprobs"] for choices in chunks for choice in choices if choice["logprobs"]]

    return ask


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_with_prompt_logprobs_alone(both_ways, max_tokens):
    (choice,), streamed = both_ways(COMPLETIONS, prompt=STORY, echo=True, max_tokens=max_tokens, prompt_logprobs=1)
    assert choice["text"].startswith(STORY)
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) > 1
    assert choice["logprobs"] is None
    assert streamed == []


def test_no_token_no_logprobs(both_ways, http):
    (choice,), streamed = both_ways(COMPLETIONS, prompt=STORY, max_tokens=0, logprobs=1)
    assert choice["logprobs"] is None
    assert streamed == []
    (choice,), streamed = both_ways(CHATS, messages=CHAT, max_tokens=0, logprobs=True)
    assert choice["logprobs"] is None
    assert streamed == []
    (choice,), streamed = both_ways(COMPLETIONS, prompt=STORY, max_tokens=0, logprobs=1, echo=True)
    assert len(choice["logprobs"]["tokens"]) > 1
    assert streamed == [choice["logprobs"]]


@pytest.mark.parametrize(("path", "name"), [(COMPLETIONS, "max_tokens"), (CHATS, "max_completion_tokens")])
def test_a_truncation_that_would_leave_nothing(refused, http, path, name):
    prompt = {"messages": CHAT} if path == CHATS else {"prompt": STORY}
    error = refused(path, **prompt, truncate_prompt_tokens=-1, **{name: 512})
    assert error["param"] == name
    assert error["message"].startswith(f"{name} (512) leaves none of this model's context of 512 tokens")
    assert http.post(path, json={**prompt, "truncate_prompt_tokens": -1, name: 511}).json()["usage"][
        "prompt_tokens"
    ] == (1)


def test_parts_of_messages(refused, http):
    part = {"type": "text", "text": "a"}
    for more in ({}, {"cache_control": {"type": "ephemeral"}, "id": None}):
        body = {"messages": [{"role": "user", "content": [{**part, **more}]}], "max_tokens": 1}
        assert http.post(CHATS, json=body).is_success
    error = refused(CHATS, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert "'image_url' are not supported yet" in error["message"]


@pytest.mark.parametrize(
    "field",
    [
        {"tools": []},
        {"documents": []},
        {"chat_template_kwargs": {}},
        {"add_generation_prompt": True},
        {"continue_final_message": False},
        {"reasoning_effort": "low"},
        {"chat_template": "default"},
    ],
)
def test_tokenize_has_no_use_for_it_with_a_prompt(refused, field):
    (name,) = field
    assert refused(TOKENIZE, prompt="a", **field)["param"] == name


def test_return_text_in_logprobs_without_logprobs_is_rejected(refused, http):
    params = {"max_new_tokens": 1}
    error = refused(GENERATE, text="a", return_text_in_logprobs=True, sampling_params=params)
    assert error["param"] == "return_text_in_logprobs"
    assert http.post(
        GENERATE, json={"text": "a", "return_text_in_logprobs": False, "sampling_params": params}
    ).is_success


@pytest.mark.parametrize("rid", ["", "a" * 257, "\ud800"])
@pytest.mark.parametrize("listed", [False, True])
def test_ids_of_requests(refused, http, rid, listed):
    prompts, ids = (["a", "b"], ["fine", rid]) if listed else ("a", rid)
    assert refused(GENERATE, text=prompts, rid=ids)["param"] == "rid"
    longest = {"text": "a", "rid": "é" * 256, "sampling_params": {"max_new_tokens": 1}}
    assert http.post(GENERATE, json=longest).json()["meta_info"]["id"] == longest["rid"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (CHATS, {"logprobs": True, "top_logprobs": 129}, "top_logprobs", "top_logprobs must be between 0 and 128"),
        (CHATS, {"max_completion_tokens": -2}, "max_completion_tokens", "max_completion_tokens must be between"),
        (CHATS, {"max_tokens": -2}, "max_tokens", "max_tokens must be between 0 and 2,147,483,647, not -2"),
        (CHATS, {"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens", "above max_completion_tokens (2)"),
        (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias", "token ids in logit_bias must be integers, not 'a'"),
        (COMPLETIONS, {"logit_bias": {"5": 1, "a": 1, "b": 2}}, "logit_bias", "integers, not 'a', 'b'"),
        (COMPLETIONS, {"logit_bias": dict.fromkeys("abcdefghij", 1)}, "logit_bias", "'g', 'h' and 2 more"),
        (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias", "must be between -100 and 100, not 101.0"),
        (COMPLETIONS, {"stop_token_ids": [-1]}, "stop_token_ids", "a token id in stop_token_ids must be between 0"),
        (GENERATE, {"sampling_params": {"min_new_tokens": 3, "max_new_tokens": 2}}, "min_new_tokens", "above max_new_"),
        (GENERATE, {"sampling_params": {"sampling_seed": 2**70}}, "sampling_seed", "sampling_seed must be between"),
    ],
)
def test_errors_name_the_field_that_was_sent(refused, path, fields, param, message):
    prompt = {COMPLETIONS: {"prompt": "a"}, CHATS: {"messages": CHAT}, GENERATE: {"text": "a"}}[path]
    error = refused(path, **prompt, **fields)
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert message in error["message"]


def test_a_list_is_not_called_a_number():
    with pytest.raises(RequestError, match="a token id in stop_token_ids must be an integer, not True"):
        SamplingParams(stop_token_ids=[True])


def test_too_much_text(refused):
    error = refused(COMPLETIONS, prompt="a" * 100_000)
    assert error["message"].startswith("there are more than 32,768 characters in prompt")
    assert (
        "this model takes 511 with at least one token of output." in refused(COMPLETIONS, prompt="a " * 999)["message"]
    )


@pytest.mark.parametrize(
    "variables",
    [{"messages": []}, {"continue_final_message": True}, {"add_generation_prompt": True}, {"tools": []}, {1: 2}, []],
)
def test_variables_of_a_template_are_checked_offline_as_well(llm, variables):
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        llm.chat(CHAT, SamplingParams(max_tokens=1), chat_template_kwargs=variables)
