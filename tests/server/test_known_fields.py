"""Fields of other servers: each name that one documents is taken, or refused by name; the others stay unknown."""

import re

import known_fields_table
import pytest
from embedded_model_server import CHAT, STORY
from multi_tenant_server import error_of
from other_servers_fields import DOCUMENTED

from quire.server.known_fields import KNOWN, split

# values with a meaning, for fields whose type matters; others get 1
VALUES = {
    **{
        "messages": CHAT,
        "prompt": STORY,
        "stop": ["zz"],
        "stop_regex": "zz",
        "bad_words": ["zz"],
        "model": "quire-demo",
    },
    **{
        "max_tokens": 2,
        "max_completion_tokens": 2,
        "n_predict": 2,
        "n": 1,
        "best_of": 1,
        "temperature": 0.5,
        "top_p": 0.5,
    },
    **{"stream_options": {"include_usage": True}, "stream": True, "logprobs": True, "top_logprobs": 2, "n_probs": 2},
    **{
        "response_format": {"type": "text"},
        "logit_bias": {"20": 1},
        "metadata": {"a": "b"},
        "chat_template_kwargs": {},
    },
    **{
        "tools": None,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "a"},
    },
    **{"reasoning_effort": "low", "reasoning": {"effort": "low"}, "thinking": {"type": "disabled"}, "think": False},
    **{"modalities": ["text"], "audio": None, "functions": [], "function_call": "auto", "moderation": None},
    **{"structured_outputs": {"regex": "a+"}, "guided_regex": "a+", "guided_json": None, "guided_choice": None},
    **{"guided_grammar": None, "regex": None, "ebnf": None, "grammar": None, "json_schema": None},
    **{"truncate_prompt_tokens": None, "prompt_logprobs": None, "cache_salt": "a", "extra_key": "a", "documents": []},
    **{"stop_token_ids": [5], "allowed_token_ids": None, "logprob_token_ids": None, "repetition_detection": None},
    **{"use_beam_search": False, "early_stopping": False, "length_penalty": 1, "priority": 0, "seed": 1, "top_k": 5},
    **{"ignore_eos": False, "echo": False, "reasoning_format": "none", "chat_template": None, "suffix": None},
    **{"include_stop_str_in_output": True, "skip_special_tokens": True, "spaces_between_special_tokens": True},
    **{
        "no_stop_trim": True,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
    },
    **{
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "include_reasoning": True,
        "separate_reasoning": True,
    },
    **{"truncation_side": "left", "no_repeat_ngram_size": 0, "thinking_token_budget": 9, "enable_thinking": False},
    **{"typical_p": 1, "tfs_z": 1, "top_n_sigma": -1, "mirostat": 0, "dynatemp_range": 0, "xtc_probability": 0},
    **{"dry_multiplier": 0, "adaptive_target": -1, "min_keep": 0, "top_a": 0, "lora": [], "logits_processors": []},
    **{"lora_path": None, "adapter_id": None, "custom_logit_processor": None, "return_hidden_states": False},
    **{
        "return_routed_experts": False,
        "kv_transfer_params": None,
        "session_params": None,
        "post_sampling_probs": False,
        "return_tokens": True,
        "watermark": False,
        "image_data": [],
        "data_sources": [],
    },
}


@pytest.mark.parametrize("server", DOCUMENTED)
def test_a_body_with_every_field_of_a_server_is_answered(http, server):
    body = {name: VALUES.get(name, 1) for name in DOCUMENTED[server]}
    answer = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 2, **body})
    assert answer.is_success, error_of(answer)


def test_the_table_names_only_servers_that_document_a_field():
    for name, known in KNOWN[""].items():
        for server in set(known.servers) & DOCUMENTED.keys():
            assert name in DOCUMENTED[server], (name, server)


def test_the_table_of_the_documents_is_current():
    assert known_fields_table.PART.is_current(), "run python tests/rigs/known_fields_table.py"


def test_a_field_without_effect_is_reported_in_the_answer_and_the_metrics(http):
    body = {"messages": CHAT, "max_tokens": 1, "user": "ann", "provider": {"order": ["a"]}, "log_metrics": None}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["x-quire-ignored"] == "user, provider"
    assert 'quire:ignored_fields_total{engine="0",field="provider",' in http.get("/metrics").text
    assert "x-quire-ignored" not in http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1}).headers


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"n_predict": 3}, {"max_tokens": 3}),
        ({"max_tokens": 9, "repeat_penalty": 1.3}, {"max_tokens": 9, "repetition_penalty": 1.3}),
        ({"max_tokens": 9, "repeat_penalty": 1.3, "repeat_last_n": 0}, {"max_tokens": 9}),
        ({"max_tokens": 9, "repeat_last_n": 64}, {"max_tokens": 9}),
        (
            {"max_tokens": 9, "logit_bias": [[20, False], [21, 2]]},
            {"max_tokens": 9, "logit_bias": {"20": -100, "21": 2}},
        ),
        (
            {"max_tokens": 9, "stop": " the", "no_stop_trim": True},
            {"max_tokens": 9, "stop": " the", "include_stop_str_in_output": True},
        ),
    ],
)
def test_another_name_or_form_means_the_same(http, given, same):
    common = {"prompt": STORY, "temperature": 0}
    one, other = (http.post("/v1/completions", json={**common, **fields}).json() for fields in (given, same))
    assert one["choices"][0]["text"] == other["choices"][0]["text"]


@pytest.mark.parametrize(
    "given",
    [
        {"think": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"enable_thinking": False},
    ],
)
def test_reasoning_can_be_turned_off_in_the_words_of_each_server(http, given):
    counts = [
        http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1, **fields}).json()["usage"][
            "prompt_tokens"
        ]
        for fields in (given, {"enable_thinking": False}, {"enable_thinking": True})
    ]
    assert counts[0] == counts[1] != counts[2]


def test_probabilities_are_asked_for_by_number(http):
    chat = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1, "n_probs": 3}).json()
    assert len(chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3
    none = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1, "n_probs": 0}).json()
    assert none["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n_predict": 3, "max_tokens": 4}, "n_predict and max_tokens say the same; give one of them"),
        ({"mirostat": 2}, "mirostat is not supported yet: leave it out, or send 0"),
        ({"think": True, "reasoning": {"enabled": False}}, "reasoning and think say the same; give one of them"),
        ({"thinking": True}, "thinking is not as DeepSeek's `thinking`: an object"),
        ({"lora": [{"id": 0}]}, "lora is not supported yet: name an adapter in model"),
        ({"data_sources": [{"type": "azure_search"}]}, "put the texts that were found into the messages"),
        ({"repeat_penalty": -1}, "repeat_penalty"),
        ({"logit_bias": [[20, "a"]]}, "logit_bias: must map token ids to numbers"),
        ({"logit_bias": [["Hello", False]]}, "a list of .token id, number"),
        ({"temprature": 1}, "unknown field 'temprature' .did you mean 'temperature'"),
        ({"zzzz": 1}, "unknown field 'zzzz'"),
    ],
)
def test_what_changes_the_output_and_is_not_supported_is_refused_by_name(http, body, message):
    error = error_of(http.post("/v1/chat/completions", json={"messages": CHAT, **body}))
    assert re.search(message, error["message"])


@pytest.mark.parametrize(
    "format",
    [
        {"type": "json_object", "value": {"type": "integer"}},
        {"type": "json", "value": {"type": "integer"}},
        {"type": "regex", "value": "[0-9]{2}"},
        {"type": "json_schema", "value": {"type": "integer"}},
    ],
)
def test_constraints_in_the_words_of_tgi(http, format):
    body = {"messages": CHAT, "max_tokens": 6, "temperature": 1, "seed": 1, "response_format": format}
    content = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert content.strip().lstrip("-").isdigit()


def test_the_same_constraint_under_two_names_is_one(http):
    body = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "b+"}, "guided_regex": "b+"}
    assert set(http.post("/v1/completions", json=body).json()["choices"][0]["text"]) == {"b"}
    error = error_of(http.post("/v1/completions", json={**body, "guided_regex": "c+"}))
    assert "each set a constraint on the output; give one" in error["message"]


ODD = [[], {}, 5, -1, 0.5, "x", True, False, [[]], {"type": []}, 1e300]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/messages"]
)
def test_odd_values_of_known_fields_are_taken_or_refused(http, path):
    body = {
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
        "/v1/messages": {"messages": CHAT, "max_tokens": 1},
    }[path]
    for name, known in KNOWN[""].items():
        if known.meaning is not None or known.own:
            for value in ODD:
                answer = http.post(path, json={**body, name: value})
                assert answer.status_code in (200, 400), (name, value, answer.text)


def test_a_budget_of_reasoning_is_taken_from_other_servers_forms():
    own = {"enable_thinking", "thinking_token_budget", "reasoning_effort", "include_reasoning"}
    for body, meant in (
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, {"enable_thinking": True, "thinking_token_budget": 5}),
        ({"reasoning": {"max_tokens": 7, "exclude": True}}, {"thinking_token_budget": 7, "include_reasoning": False}),
        ({"think": "low"}, {"reasoning_effort": "low"}),
    ):
        assert split("", body, own).own == meant


def test_a_name_is_reported_once(http):
    params = [{"max_new_tokens": 1, "stream_interval": 1, "custom_params": {}}] * 3
    answer = http.post("/generate", json={"text": ["a"] * 3, "sampling_params": params})
    assert answer.headers["x-quire-ignored"] == "sampling_params.stream_interval, sampling_params.custom_params"
