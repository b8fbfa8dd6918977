"""SGLang's /generate against /v1/completions."""

import json
import re

import pytest
from embedded_model_server import STORY

IDS = [67, 68, 69, 70]
GREEDY = {"temperature": 0, "max_new_tokens": 12}


def events(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def without_clock(value):
    """An answer without the fields that vary."""
    about = {name: item for name, item in value["meta_info"].items() if name not in ("id", "e2e_latency")}
    return {"text": value["text"], "output_ids": value["output_ids"], "meta_info": about}


@pytest.fixture
def ask(http):
    def ask(**body):
        answer = http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return events(answer) if body.get("stream") else answer.json()

    return ask


@pytest.fixture
def complete(http):
    def complete(**body):
        answer = http.post("/v1/completions", json={"return_token_ids": True, **body}).json()
        return answer["choices"], answer["usage"]

    return complete


def test_generate_of_one_prompt_equals_completions(ask, complete):
    complete(prompt=STORY, temperature=0, max_tokens=12)  # so that both have a prefix match
    got = ask(text=STORY, sampling_params=GREEDY, rid="mine")
    (choice,), usage = complete(prompt=STORY, temperature=0, max_tokens=12)
    assert (got["text"], got["output_ids"]) == (choice["text"], choice["token_ids"])
    about = got["meta_info"]
    assert about["id"] == "mine"
    assert about["finish_reason"] == {"type": "length", "length": 12}
    assert (about["prompt_tokens"], about["completion_tokens"]) == (usage["prompt_tokens"], 12)
    assert about["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert 0 < about["e2e_latency"] < 60
    assert set(about) == {
        *("id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency"),
    }


def test_batches_and_several_sequences(ask, complete):
    sampled = {"temperature": 1, "sampling_seed": 3, "max_new_tokens": 6, "n": 2}
    got = ask(text=[STORY, "a"], sampling_params=sampled)
    choices, _ = complete(prompt=[STORY, "a"], temperature=1, seed=3, max_tokens=6, n=2)
    assert [each["text"] for each in got] == [choice["text"] for choice in choices]
    each_its_own = ask(input_ids=[IDS, [67]], sampling_params=[{**GREEDY, "n": 2}, {**GREEDY, "max_new_tokens": 3}])
    assert [len(each["output_ids"]) for each in each_its_own] == [12, 12, 3]
    assert isinstance(ask(input_ids=IDS, sampling_params=GREEDY), dict)
    assert isinstance(ask(input_ids=[IDS], sampling_params=GREEDY), list)
    assert len(ask(text="a", sampling_params={**GREEDY, "n": 2})) == 2
    rids = ask(text=["a", "b"], sampling_params=GREEDY, rid=["x", "y"])
    assert [each["meta_info"]["id"] for each in rids] == ["x", "y"]


FIELDS = {
    "min_new_tokens": ({}, 12, "min_tokens"),
    "top_p": ({"temperature": 5, "sampling_seed": 1}, 0.01, "top_p"),
    "top_k": ({"temperature": 5, "sampling_seed": 1}, 1, "top_k"),
    "min_p": ({"temperature": 5, "sampling_seed": 1}, 1.0, "min_p"),
    "frequency_penalty": ({}, 2.0, "frequency_penalty"),
    "presence_penalty": ({}, 2.0, "presence_penalty"),
    "repetition_penalty": ({}, 3.0, "repetition_penalty"),
    "logit_bias": ({}, {"67": 100}, "logit_bias"),
    "stop": ({}, ["e"], "stop"),
    "stop_token_ids": ({}, [69], "stop_token_ids"),
    "ignore_eos": ({}, True, "ignore_eos"),
    "no_stop_trim": ({"stop": ["e"]}, True, "include_stop_str_in_output"),
    "skip_special_tokens": ({"ignore_eos": True}, False, "skip_special_tokens"),
    "spaces_between_special_tokens": ({}, False, "spaces_between_special_tokens"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_parameter_means_what_it_means_elsewhere(ask, complete, name):
    beside, value, openai_name = FIELDS[name]
    got = ask(text=STORY, sampling_params={**GREEDY, **beside, name: value})
    renamed = {"seed" if key == "sampling_seed" else key: item for key, item in beside.items()}
    (choice,), _ = complete(prompt=STORY, **{"temperature": 0, "max_tokens": 12, **renamed, openai_name: value})
    assert (got["text"], got["output_ids"]) == (choice["text"], choice["token_ids"])


def test_generate_reports_the_finish_reason_and_the_matched_stop(ask, tokenizer):
    plain = ask(text=STORY, sampling_params=GREEDY)
    token, text = plain["output_ids"][3], plain["text"][:3]
    for stop, matched in (({"stop": text}, text), ({"stop_token_ids": [token]}, token)):
        got = ask(text=STORY, sampling_params={**GREEDY, **stop})
        assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hello! Who are you?"}])
    got = ask(text=prompt, sampling_params={"temperature": 0})
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert got["output_ids"][-1] == 2


@pytest.mark.parametrize("with_text", [False, True])
def test_logprobs(ask, complete, tokenizer, with_text):
    report = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    about = ask(text=STORY, sampling_params=GREEDY, return_text_in_logprobs=with_text, **report)["meta_info"]
    (choice,), _ = complete(prompt=STORY, temperature=0, max_tokens=12, echo=True, logprobs=2)
    lists = choice["logprobs"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    entries = about["input_token_logprobs"] + about["output_token_logprobs"]
    assert [entry[1] for entry in entries] == ids
    assert [entry[0] for entry in entries] == pytest.approx(lists["token_logprobs"], abs=1e-4)
    assert [entry[2] for entry in entries] == (lists["tokens"] if with_text else [None] * len(ids))
    tops = about["input_top_logprobs"] + about["output_top_logprobs"]
    assert tops[0] is lists["top_logprobs"][0] is None
    for top, named in zip(tops[1:], lists["top_logprobs"][1:], strict=True):
        assert len(top) == 2
        assert {tokenizer.token_text(token) for _, token, _ in top} <= set(named)


def test_logprobs_of_given_tokens(ask, complete):
    fields = {"return_logprob": True, "token_ids_logprob": [[68, 67], [69]]}
    got = ask(text=[STORY, "a"], sampling_params=GREEDY, **fields)
    choices, _ = complete(
        prompt=STORY,
        temperature=0,
        max_tokens=12,
        logprobs=0,
        logprob_token_ids=[67, 68],
        return_tokens_as_token_ids=True,
    )
    for those, named in zip(
        got[0]["meta_info"]["output_token_ids_logprobs"], choices[0]["logprobs"]["top_logprobs"], strict=True
    ):
        assert [token for _, token, _ in those] == [68, 67]
        assert [value for value, _, _ in those] == pytest.approx([named["token_id:68"], named["token_id:67"]], abs=1e-4)
    assert all([token for _, token, _ in those] == [69] for those in got[1]["meta_info"]["output_token_ids_logprobs"])


def test_logprobs_from_a_token_on(ask):
    whole = ask(text=STORY, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0)["meta_info"]
    part = ask(text=STORY, sampling_params=GREEDY, return_logprob=True, logprob_start_len=2)["meta_info"]
    none = ask(text=STORY, sampling_params=GREEDY, return_logprob=True)["meta_info"]
    assert part["input_token_logprobs"][0] == [None, whole["input_token_logprobs"][2][1], None]
    assert part["input_token_logprobs"][1:] == whole["input_token_logprobs"][3:]
    assert none["input_token_logprobs"] == []
    for cached, computed in zip(none["output_token_logprobs"], part["output_token_logprobs"], strict=True):
        assert cached == [pytest.approx(computed[0], abs=1e-4), *computed[1:]]
    assert "output_top_logprobs" not in none
    each = ask(text=["a", "a b"], sampling_params=GREEDY, return_logprob=[True, False])
    assert ["output_token_logprobs" in one["meta_info"] for one in each] == [True, False]


@pytest.mark.parametrize("n", [1, 3])
def test_a_generate_stream_is_cumulative_and_ends_with_the_whole_answer(ask, n):
    body = {
        "text": STORY,
        "sampling_params": {"temperature": 1, "sampling_seed": 2, "max_new_tokens": 8, "n": n},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    whole = ask(**body)
    got = ask(**body, stream=True)
    last = {event.get("index"): event for event in got}
    expected = {None: whole} if n == 1 else dict(enumerate(whole))
    assert {index: without_clock(event) for index, event in last.items()} == {
        index: without_clock(one) for index, one in expected.items()
    }
    for index, one in expected.items():
        texts = [event["text"] for event in got if event.get("index") == index]
        assert texts == sorted(texts, key=len)
        assert all(one["text"].startswith(text) for text in texts)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": IDS}, "text"),
        ({"text": []}, "text"),
        ({"text": ""}, "text"),
        ({"text": "a " * 5000}, "text"),
        ({"input_ids": [99999]}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf"),
        ({"text": "a", "sampling_params": {"regex": 3}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"stop_regex": "a*"}}, "stop_regex"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": "x"}, "rid"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "top_logprobs_num": 3}, "return_logprob"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 129}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        (
            {"text": "a", "return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [67]},
            "token_ids_logprob",
        ),
        ({"text": ["a"] * 9, "sampling_params": {"n": 128}}, "text"),
    ],
)
def test_refusals(http, body, param):
    answer = http.post("/generate", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "prompt_logprobs" not in error["message"]


WRONG_PATTERN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]}
LONG = {"type": "object", "properties": {"a": {"enum": [f"value {i}" for i in range(20_000)]}}}
PLAIN = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("parameters", "params", "message", "field"),
    [
        (LONG, {}, r"the grammar of the tools has .* of f \(", "tools"),
        (WRONG_PATTERN, {}, "tools cannot be enforced", "tools"),
        (PLAIN, {"json_schema": WRONG_PATTERN}, "json_schema cannot be enforced", "json_schema"),
    ],
)
def test_a_constraint_of_tools_that_is_refused_names_the_field_that_was_sent(http, parameters, params, message, field):
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    answer = http.post("/generate", json={"text": "a", "tools": [tool], "sampling_params": params})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert re.match(message, error["message"])
