"""/tokenize and /detokenize against the tokenizer."""

import pytest
from embedded_model_server import CHAT, STORY
from hypothesis import given, settings
from hypothesis import strategies as st

TOOL = {"type": "function", "function": {"name": "reserve", "parameters": {"type": "object"}}}


@given(text=st.text(min_size=1, max_size=40))
@settings(max_examples=30)
def test_a_text_there_and_back(http, tokenizer, text):
    answer = http.post("/tokenize", json={"prompt": text}).json()
    assert answer == {
        "count": len(answer["tokens"]),
        "max_model_len": 512,
        "tokens": tokenizer.encode(text),
        "token_strs": None,
    }
    back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == dict.fromkeys(("prompt", "content"), tokenizer.decode(answer["tokens"]))


def test_tokens_as_the_vocabulary_writes_them(http, tokenizer):
    answer = http.post("/tokenize", json={"prompt": "a kettle", "return_token_strs": True, "model": "quire-demo"})
    assert answer.json()["token_strs"] == tokenizer.convert_ids_to_tokens(answer.json()["tokens"]) == ["a", "Ġkettle"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"reasoning_effort": "high"},
        {"documents": [{"text": "a"}]},
        {"messages": [*CHAT, {"role": "assistant", "content": "I am"}], "continue_final_message": True},
    ],
)
def test_a_conversation_has_the_tokens_that_chat_counts(http, fields):
    body = {"messages": CHAT, **fields}
    answer = http.post("/tokenize", json=body).json()
    chat = http.post("/v1/chat/completions", json={**body, "max_tokens": 0, "return_token_ids": True}).json()
    assert answer["tokens"] == chat["prompt_token_ids"]
    assert answer["count"] == chat["usage"]["prompt_tokens"]


def test_tools_and_template_switches_reach_the_template(http):
    def count(**fields):
        return http.post("/tokenize", json={"messages": CHAT, **fields}).json()["count"]

    plain = count()
    assert count(tools=[TOOL]) > plain == count(tools=[TOOL], tool_choice="none")
    assert count(chat_template_kwargs={"enable_thinking": True}) > plain
    assert count(add_generation_prompt=False) < plain


def test_an_effort_turns_reasoning_on_or_off_unless_another_field_does(http):
    def count(**fields):
        return http.post("/tokenize", json={"messages": CHAT, **fields}).json()["count"]

    off, on = (count(enable_thinking=value) for value in (False, True))
    assert off < on
    assert count(reasoning_effort="none") == off
    assert count(reasoning_effort="minimal") == count(reasoning_effort="high") == on
    assert count(reasoning_effort="high", enable_thinking=False) == off
    assert count(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}) == off


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a" * 40000}, "prompt"),
        ("/tokenize", {"prompt": STORY, "promt": "a"}, "promt"),
        ("/tokenize", {"messages": CHAT, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
def test_refusals(http, path, body, param):
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_other_models_are_not_served(http):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        assert http.post(path, json={**body, "model": "gpt-7"}).status_code == 404
