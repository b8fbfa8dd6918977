"""Each request field: its effect, equal to the offline interface, or its error."""

import dataclasses

import pytest
from embedded_model_server import CHAT, GREEDY, MODEL, STORY

from quire import SamplingParams

ROUTES = {"/v1/completions": {"prompt": STORY}, "/v1/chat/completions": {"messages": CHAT}}
OF_FOUR = {"temperature": 1.0, "seed": 4, "allowed_token_ids": [67, 68, 69, 70]}  # repeats tokens
WILD = {"temperature": 5.0, "seed": 4}
END = "<|im_end|>"

# field -> (further fields, its value); None: derived from the first token of the plain output
CHANGES = {
    "presence_penalty": (OF_FOUR, -2.0),
    "frequency_penalty": (OF_FOUR, 2.0),
    "repetition_penalty": ({}, 4.0),
    "no_repeat_ngram_size": ({}, 1),
    "repetition_detection": (OF_FOUR, {"max_pattern_size": 4, "min_count": 2}),
    "logit_bias": ({}, None),
    "allowed_token_ids": ({}, [67, 68, 69]),
    "bad_words": ({}, None),
    "stop": ({}, ["e"]),
    "stop_regex": ({}, ["zz", " [a-z]+ "]),
    "stop_token_ids": ({}, None),
    "include_stop_str_in_output": ({"stop": ["e"]}, True),
    "truncate_prompt_tokens": ({}, 2),
    "truncation_side": ({"truncate_prompt_tokens": 2}, "right"),
    "top_k": (WILD, 1),
    "top_p": (WILD, 0.01),
    "min_p": (WILD, 1.0),
    "temperature": (WILD, 0.3),
    "seed": (WILD, 9),
    "max_tokens": ({}, 3),
}


@pytest.fixture(params=ROUTES)
def ask(request, http):
    """Send fields to one of the routes. Returns the text and the whole answer."""

    def ask(**fields):
        answer = http.post(request.param, json={**ROUTES[request.param], **GREEDY, **fields})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice.get("text", choice.get("message", {}).get("content")), answer.json()

    ask.route = request.param
    return ask


@pytest.fixture
def expect(ask, llm):
    """The result of the offline interface with the same fields."""

    def expect(**fields):
        params = dataclasses.replace(llm.get_default_sampling_params(), **{**GREEDY, **fields})
        (result,) = llm.generate(STORY, params) if ask.route == "/v1/completions" else llm.chat(CHAT, params)
        return result

    return expect


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_changes_the_output_as_it_does_offline(ask, expect, llm, name):
    beside, value = CHANGES[name]
    plain = expect(**beside).outputs[0]
    first = plain.token_ids[0]
    word = llm.get_tokenizer().token_text(first)
    value = {"logit_bias": {str(first): -100}, "stop_token_ids": [first], "bad_words": [word]}.get(name, value)
    changed = expect(**{**beside, name: value}).outputs[0].text
    assert ask(**{**beside, name: value})[0] == changed != plain.text
    assert ask(**beside)[0] == plain.text


def test_min_tokens_and_ignore_eos(http, llm):
    (plain,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=100))
    length = len(plain.outputs[0].token_ids)
    assert plain.outputs[0].finish_reason == "stop"
    for field in ({"min_tokens": length + 5}, {"ignore_eos": True}):
        body = {"messages": CHAT, "temperature": 0, "max_tokens": length + 5, **field}
        answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == length + 5
        assert answer["choices"][0]["message"]["content"].startswith(plain.outputs[0].text)


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_and_what_ended_the_output_are_text_where_asked_for(client, llm, stream):
    def ask(**fields):
        answer = client.chat.completions.create(
            model=MODEL, messages=CHAT, temperature=0, max_tokens=100, stream=stream, extra_body=fields
        )
        parts = [part.choices[0] for part in (answer if stream else [answer])]
        return "".join((part.delta if stream else part.message).content or "" for part in parts)

    plain = ask()
    assert END not in plain
    assert ask(skip_special_tokens=False) == ask(include_stop_str_in_output=True) == plain
    assert ask(skip_special_tokens=False, include_stop_str_in_output=True) == plain + END
    shown = ask(skip_special_tokens=False, ignore_eos=True)
    assert shown.startswith(plain + END)
    assert END not in ask(ignore_eos=True)


def test_deterministic_and_spaces_are_passed_on(ask):
    plain = ask()[0]
    assert ask(deterministic=True)[0] == plain
    assert ask(spaces_between_special_tokens=False)[0] == plain  # a byte-level tokenizer adds no spaces


@pytest.mark.parametrize("length", [3, -1])
def test_a_truncated_prompt_is_counted_as_it_is_kept(http, llm, length):
    ids = llm.get_tokenizer().encode("the kettle " * 300)
    body = {"prompt": ids, "max_tokens": 12, "truncate_prompt_tokens": length, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body).json()
    kept = 3 if length == 3 else 512 - 12
    assert answer["usage"]["prompt_tokens"] == kept
    whole = http.post("/v1/completions", json={**body, "prompt": ids[-kept:], "truncate_prompt_tokens": None}).json()
    assert answer["choices"][0]["text"] == whole["choices"][0]["text"]


@pytest.mark.parametrize("path", ROUTES)
def test_ids_are_added_where_asked_for(http, offline, llm, path):
    body = {**ROUTES[path], **GREEDY, "n": 2, "return_token_ids": True}
    answer = http.post(path, json=body).json()
    params = SamplingParams(**GREEDY, n=2)
    (expected,) = llm.generate(STORY, params) if path == "/v1/completions" else llm.chat(CHAT, params)
    assert [choice["token_ids"] for choice in answer["choices"]] == [o.token_ids for o in expected.outputs]
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]] if "prompt" in body else (
        [answer["prompt_token_ids"]]
    )  # fmt: skip
    assert all(ids == expected.prompt_token_ids for ids in prompts)
    assert http.post(path, json={**body, "return_token_ids": None}).json()["choices"][0]["token_ids"] is None


@pytest.mark.parametrize(
    ("fields", "matched"),
    [
        ({"stop": ["e"]}, "e"),
        ({"stop_regex": "[a-e]+"}, "[a-e]+"),
        ({"stop_token_ids": [292]}, 292),
        ({"max_tokens": 500}, "an end token"),
        ({"max_tokens": 2}, None),
        ({"repetition_detection": {"max_pattern_size": 9, "min_count": 2}, **OF_FOUR}, None),
    ],
)
@pytest.mark.parametrize("path", ROUTES)
def test_matched_stop_and_stop_reason_name_the_end_of_an_output(http, path, fields, matched):
    answer = http.post(path, json={**ROUTES[path], **GREEDY, **fields, "return_token_ids": True}).json()
    (choice,) = answer["choices"]
    if matched == "an end token" or (matched == 292 and choice["stop_reason"] is None):
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None
        assert choice["matched_stop"] == choice["token_ids"][-1]
    else:
        assert choice["matched_stop"] == choice["stop_reason"] == matched or choice["finish_reason"] == "repetition"
    assert (choice["matched_stop"] is None) == (choice["finish_reason"] != "stop")


WITHOUT_EFFECT = {
    **{"user": "a", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "a"},
    **{"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h", "safety_identifier": "a"},
    **{"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "best_of": 1},
    **{"priority": 0, "deadline": None, "retention": {}, "structured_outputs": None, "cache_salt": None},
    **{"response_format": {"type": "text"}, "prompt_logprobs": None, "logit_bias": {}, "stop": [], "top_p": None},
    **{"cache_prompt": True, "id_slot": -1, "min_keep": 0, "typical_p": 1.0, "tfs_z": 1, "top_n_sigma": -1.0},
    **{"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0},
    **{"xtc_probability": 0.0, "xtc_threshold": 0.1, "dry_multiplier": 0.0, "dry_base": 1.75, "repeat_last_n": -1},
    **{"dry_allowed_length": 2, "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n"], "repeat_penalty": 1.0},
}
FOR_CHAT = {
    **{"parallel_tool_calls": False, "modalities": ["text"], "functions": [], "function_call": "auto", "audio": None},
    **{"tool_choice": "auto", "verbosity": "medium", "prediction": {"type": "content", "content": "a"}},
    **{"moderation": None, "web_search_options": None, "documents": [], "chat_template": None},
}
FOR_COMPLETIONS = {"suffix": "", "echo": False}
REFUSED_IN_CHAT = {
    **{"functions": [{"name": "f"}], "function_call": {"name": "f"}, "audio": {"voice": "x"}},
    **{"modalities": ["text", "audio"]},
    **{"moderation": {"model": "m"}},
}


@pytest.mark.parametrize("path", ROUTES)
def test_fields_that_ask_for_nothing_change_nothing(http, path):
    fields = {**WITHOUT_EFFECT, **(FOR_COMPLETIONS if path == "/v1/completions" else FOR_CHAT)}
    body = {**ROUTES[path], **GREEDY}

    def content(answer):
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice.get("text") or choice["message"]["content"]

    assert content(http.post(path, json={**body, **fields})) == content(http.post(path, json=body))


@pytest.mark.parametrize("path", ROUTES)
def test_llama_cpp_s_names_mean_the_same(http, path):
    body = {**ROUTES[path], "temperature": 0, "ignore_eos": True}
    for theirs, ours in (
        ({"n_predict": 5, "repeat_penalty": 4.0}, {"max_tokens": 5, "repetition_penalty": 4.0}),
        ({"n_predict": -1, "grammar": 'root ::= "a" [bc]+ "."'}, {"max_tokens": -1, "ebnf": 'root ::= "a" [bc]+ "."'}),
    ):
        choices = [http.post(path, json={**body, **fields}).json()["choices"] for fields in (theirs, ours)]
        assert choices[0] == choices[1]
    for fields, param, message in (
        ({"n_predict": 3, "max_tokens": 4}, "n_predict", "n_predict and max_tokens say the same"),
        ({"repeat_penalty": 0}, "repeat_penalty", "repeat_penalty must be above 0"),
        ({"n_predict": -3}, "n_predict", "n_predict must be between"),
        ({"mirostat": 2}, "mirostat", "not supported yet"),
        ({"repeat_penalty": 2, "use_beam_search": True}, "repeat_penalty", "cannot be combined"),
    ):
        error = http.post(path, json={**body, **fields}).json()["error"]
        assert error["param"] == param and message in error["message"]


@pytest.mark.parametrize("name", [*REFUSED_IN_CHAT, "suffix"])
def test_unsupported_fields_are_rejected_by_name(http, name):
    value = {**REFUSED_IN_CHAT, "suffix": "the end"}[name]
    path = "/v1/completions" if name == "suffix" else "/v1/chat/completions"
    answer = http.post(path, json={**ROUTES[path], "max_tokens": 1, name: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert "not supported yet" in error["message"]


def test_given_tokens_take_the_place_of_the_most_likely_ones(http):
    fields = {
        "logprob_token_ids": [67, 68, 67],
        "allowed_token_ids": [70],
        "return_tokens_as_token_ids": True,
        "seed": 1,
    }
    for ids, expected in (([67, 68], {67, 68, 70}), ([70, 67], {70, 67})):
        asked = {**fields, "logprob_token_ids": ids, "max_tokens": 2}
        answer = http.post("/v1/completions", json={"prompt": STORY, "logprobs": 5, **asked}).json()
        named = {f"token_id:{token}" for token in expected}
        assert [set(row) for row in answer["choices"][0]["logprobs"]["top_logprobs"]] == [named, named]
        body = {"messages": CHAT, "logprobs": True, "top_logprobs": 5, **asked}
        content = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
        assert [sorted(top["token"] for top in one["top_logprobs"]) for one in content] == [sorted(named)] * 2
