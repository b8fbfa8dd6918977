"""/v1/chat/completions/batch against the same conversations, one by one."""

import json

import pytest

from quire.server.api import conversation

ROUTE, CHAT = "/v1/chat/completions/batch", "/v1/chat/completions"
CONVERSATIONS = [
    [{"role": "user", "content": "How much is the lamp?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}],
    [{"role": "user", "content": "What is 6 plus 7?"}],
]
GREEDY = {"temperature": 0, "max_completion_tokens": 90}
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_price",
        "parameters": {"type": "object", "properties": {"item": {"enum": ["lamp", "fan"]}}, "required": ["item"]},
    },
}
FIELDS = {
    "plain": {},
    "reasoning": {"chat_template_kwargs": {"enable_thinking": True}, "max_completion_tokens": 200},
    "logprobs and ids": {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "prompt_logprobs": 0},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
    "stop_regex": {"stop_regex": "[a-e]{2}", "n": 1, "stream": False, "best_of": 1, "use_beam_search": False},
}


def without_ids(choice):
    """A choice without the random ids of its tool calls, and with rounded logprobs."""
    text = json.dumps(choice)
    for call in choice["message"].get("tool_calls", ()):
        text = text.replace(call["id"], "id")
    return json.loads(text, parse_float=lambda number: round(float(number), 2))


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
def test_each_conversation_is_answered_as_alone(http, fields):
    answer = http.post(ROUTE, json={**GREEDY, **fields, "messages": CONVERSATIONS})
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    alone = [http.post(CHAT, json={**GREEDY, **fields, "messages": one}).json() for one in CONVERSATIONS]
    assert whole["object"] == "chat.completion"
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    for choice, one in zip(whole["choices"], alone, strict=True):
        about_prompt = {name: one[name] for name in ("prompt_token_ids", "prompt_logprobs")}
        assert without_ids(choice) == without_ids({**one["choices"][0], "index": choice["index"], **about_prompt})
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][name] == sum(one["usage"][name] for one in alone)
    details = [one["usage"].get("completion_tokens_details", {}) for one in alone]
    assert whole["usage"].get("completion_tokens_details", {}) == {
        name: sum(one.get(name, 0) for one in details)
        for name in dict.fromkeys(name for one in details for name in one)
    }


def test_shared_documents_times_conversations_are_bounded(http, monkeypatch):
    """A short request must not be many long prompts."""
    monkeypatch.setattr(conversation, "MAX_SHARED", 5000)
    documents = [{"text": "x" * 2000}]
    assert http.post(ROUTE, json={**GREEDY, "messages": CONVERSATIONS[:2], "documents": documents}).status_code == 200
    refused = http.post(ROUTE, json={**GREEDY, "messages": CONVERSATIONS, "documents": documents})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "messages")
    assert "send fewer conversations at once" in error["message"]


def test_an_echo_is_that_of_the_conversation(http):
    continued = [*CONVERSATIONS[0], {"role": "assistant", "content": "The lamp"}]
    more = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    (choice,) = http.post(ROUTE, json={**GREEDY, **more, "messages": [continued]}).json()["choices"]
    assert choice["message"]["content"].startswith("The lamp ")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", ""),
        ({"messages": [[]]}, "messages.0", ""),
        ({"messages": CONVERSATIONS[0]}, "messages.0", ""),
        ({"messages": [CONVERSATIONS[0], [{"role": "user", "content": "a " * 3000}]]}, "messages", "max_model_len"),
        ({"messages": [CONVERSATIONS[0]] * 1025}, "messages", "1024"),
        ({"n": 2}, "n", "not supported"),
        ({"stream": True}, "stream", "not supported"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"temprature": 0}, "temprature", "did you mean 'temperature'"),
        ({"top_logprobs": 129, "logprobs": True}, "top_logprobs", "between 0 and 128"),
        ({"stop_regex": "a*"}, "stop_regex", "matches the empty text"),
    ],
)
def test_fields_that_a_chat_batch_does_not_support_are_rejected(http, fields, param, message):
    answer = http.post(ROUTE, json={"messages": CONVERSATIONS, "max_tokens": 3, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"]
