"""The native routes of llama.cpp's server, as its clients use them."""

import json

import pytest
from embedded_model_server import CHAT, STORY
from multi_tenant_server import error_of

GREEDY = {"prompt": STORY, "n_predict": 8, "temperature": 0}


def continued(http):
    body = {"prompt": STORY, "max_tokens": 8, "temperature": 0}
    return http.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_a_completion_has_the_text_of_completions_and_its_figures(http):
    found = http.post("/completion", json=GREEDY).json()
    assert found["content"] == continued(http)
    assert (found["stop"], found["stop_type"], found["tokens_predicted"]) == (True, "limit", 8)
    assert found["generation_settings"]["n_predict"] == 8
    timings = found["timings"]
    assert timings["predicted_n"] == 8
    assert timings["prompt_n"] + timings["cache_n"] == found["tokens_evaluated"]
    assert timings["prompt_ms"] > 0 and timings["predicted_per_second"] >= 0  # 0 if all tokens came at once


def test_a_stream_gives_the_same_text_in_pieces(http):
    answer = http.post("/completion", json={**GREEDY, "stream": True})
    events = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]
    assert "".join(one["content"] for one in events) == continued(http)
    assert [one["stop"] for one in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["tokens_predicted"] == 8


def test_several_prompts_give_a_list_and_a_stop_word_is_named(http):
    word = continued(http).split()[1]
    found = http.post("/completion", json={**GREEDY, "prompt": [STORY, "Hello"], "stop": [word]}).json()
    assert len(found) == 2
    assert (found[0]["stop_type"], found[0]["stopping_word"]) == ("word", word)


def test_probabilities_of_the_tokens(http):
    found = http.post("/completion", json={**GREEDY, "n_probs": 3, "return_token_ids": True}).json()
    rows = found["completion_probabilities"]
    assert [row["id"] for row in rows] == found["tokens"]
    assert all(len(row["top_logprobs"]) == 3 for row in rows)


def test_the_template_of_a_conversation_is_applied(http):
    prompt = http.post("/apply-template", json={"messages": CHAT}).json()["prompt"]
    rendered = http.post("/tokenize", json={"messages": CHAT}).json()["tokens"]
    assert http.post("/tokenize", json={"content": prompt}).json()["tokens"] == rendered


def test_texts_become_tokens_and_texts_again(http):
    tokens = http.post("/tokenize", json={"content": STORY}).json()["tokens"]
    pieces = http.post("/tokenize", json={"content": STORY, "with_pieces": True}).json()["tokens"]
    assert [one["id"] for one in pieces] == tokens
    assert http.post("/detokenize", json={"tokens": tokens}).json()["content"] == STORY


def test_props_describe_the_model(http):
    props = http.get("/props").json()
    limit = http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert props["default_generation_settings"]["n_ctx"] == limit
    assert "messages" in props["chat_template"]
    assert props["total_slots"] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_predict": -5}, "n_predict"),
        ({"mirostat": 2}, "mirostat is not supported"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"model": "no-such-model"}, "is not served here"),
        ({"use_beam_search": True}, "use_beam_search is not supported"),
        ({"prompt_logprobs": 2}, "prompt_logprobs is not supported"),
    ],
)
def test_a_wrong_field_is_named(http, fields, message):
    assert message in error_of(http.post("/completion", json={**GREEDY, **fields}))["message"]


def test_choices_are_numbered_in_a_stream_and_without_one(http):
    body = {**GREEDY, "prompt": [STORY, "Hello"], "n": 2, "temperature": 1, "n_predict": 3, "n_probs": 1}
    whole = http.post("/completion", json=body).json()
    assert [one["index"] for one in whole] == [0, 1, 2, 3]
    answer = http.post("/completion", json={**body, "stream": True})
    events = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]
    assert {one["index"] for one in events if one["stop"]} == {0, 1, 2, 3}
    rows = [row for one in events if one["index"] == 2 for row in one.get("completion_probabilities", ())]
    assert len(rows) == 3
