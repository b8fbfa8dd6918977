"""Every limit of a request: one more is rejected with the limit in the error, and never with a 5xx.

Headers, slow bodies and invalid HTTP: test_http_protocol.py. Limits of templates: test_chat_sandbox.py.
"""

import json
from itertools import pairwise

import httpx
import pytest
from embedded_model_server import STORY, run_app, service_of, small_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.scheduling_params import MAX_NAME_LEN, MAX_SECONDS
from quire.params import (
    MAX_BAD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BEAMS,
    MAX_LISTED_TOKENS,
    MAX_LOGPROB_IDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TOKENS,
)
from quire.server.api.limits import MAX_CHOICES, MAX_PROMPT_VALUES
from quire.server.api.native.explain import MAX_ID
from quire.server.api.sglang.routes import MAX_RID
from quire.server.app import make_app
from quire.server.request_body import MAX_BODY, MAX_NESTING, Structure
from quire.server.request_params import MAX_PROMPT_TOKENS, MAX_PROMPTS, MAX_SALT, MAX_TIMEOUT
from quire.server.service import CHARACTERS_PER_TOKEN
from quire.tokenizer.messages import MAX_DEPTH

JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "a"}
CONTEXT = 512  # of the test server
COMPLETIONS, CHAT, EMBEDDINGS, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/generate"
TEXT_LIMIT = CHARACTERS_PER_TOKEN * CONTEXT


def completion(**fields):
    return COMPLETIONS, {"prompt": "a", "max_tokens": 1, **fields}


def chat(**fields):
    return CHAT, {"messages": [USER], "max_tokens": 1, **fields}


def generate(**params):
    return GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": 1, **params}}


def nested(depth):
    value = "a"
    for _ in range(depth):
        value = [value]
    return value


# name -> limit, a request of that size (or None, if it would cost too much here), a part of the error
LIMITS = {
    "prompts": (MAX_CHOICES, lambda size: completion(prompt=["a"] * size), "prompts"),
    "prompts in a body": (MAX_PROMPTS, lambda size: completion(prompt=["a"] * size), "prompts"),
    "inputs": (MAX_PROMPTS, lambda size: (EMBEDDINGS, {"input": ["a"] * size}), "prompts"),
    "texts": (MAX_CHOICES, lambda size: (GENERATE, {"text": ["a"] * size}), "prompts times n"),
    "token ids": (MAX_PROMPT_TOKENS, lambda size: completion(prompt=[1] * size), "token ids"),
    "tokens": (CONTEXT, lambda size: completion(prompt=[67] * size), "max_model_len"),
    "characters": (TEXT_LIMIT, lambda size: completion(prompt="a" * size), "max_model_len"),
    "characters of messages": (TEXT_LIMIT, lambda size: chat(messages=[{**USER, "content": "a" * size}]), "characters"),
    "characters to tokenize": (TEXT_LIMIT, lambda size: ("/tokenize", {"prompt": "a" * size}), "characters"),
    "messages": (CONTEXT, lambda size: chat(messages=[USER] * size), "max_model_len"),
    "depth of tools": (MAX_DEPTH, lambda size: chat(tools=[{"a": nested(size)}]), "deep"),
    "depth of variables": (MAX_DEPTH, lambda size: chat(chat_template_kwargs={"a": nested(size)}), "deep"),
    "n": (MAX_N, lambda size: completion(n=size), f"{MAX_N}"),
    "n of chat": (MAX_N, lambda size: chat(n=size), f"{MAX_N}"),
    "n of generate": (MAX_N, lambda size: generate(n=size), f"{MAX_N}"),
    "best_of": (MAX_N, lambda size: completion(best_of=size), f"{MAX_N}"),
    "beams": (MAX_BEAMS, lambda size: completion(n=size, use_beam_search=True), f"{MAX_BEAMS}"),
    "prompts times n": (MAX_CHOICES // 128, lambda size: completion(prompt=["a"] * size, n=128), "1,024"),
    "logprobs": (MAX_LOGPROBS, lambda size: completion(logprobs=size), f"{MAX_LOGPROBS}"),
    "top_logprobs": (MAX_LOGPROBS, lambda size: chat(logprobs=True, top_logprobs=size), f"{MAX_LOGPROBS}"),
    "prompt_logprobs": (MAX_LOGPROBS, lambda size: completion(prompt_logprobs=size), f"{MAX_LOGPROBS}"),
    "logprob_token_ids": (
        MAX_LOGPROB_IDS,
        lambda size: completion(logprobs=0, logprob_token_ids=[67] * size),
        f"{MAX_LOGPROB_IDS}",
    ),
    "prompt values": (
        MAX_PROMPT_VALUES // 500 // 129,
        lambda size: completion(prompt=[[67] * 500] * size, prompt_logprobs=128, echo=True, logprobs=128),
        f"more than {MAX_PROMPT_VALUES:,}",
    ),
    "stop strings": (MAX_STOPS, lambda size: completion(stop=["zq"] * size), f"{MAX_STOPS} stop"),
    "length of a stop string": (MAX_STOP_LENGTH, lambda size: completion(stop="z" * size), f"{MAX_STOP_LENGTH}"),
    "stop_token_ids": (MAX_STOPS, lambda size: completion(stop_token_ids=[67] * size), f"{MAX_STOPS}"),
    "bad words": (MAX_BAD_WORDS, lambda size: completion(bad_words=["zq"] * size), f"{MAX_BAD_WORDS}"),
    "characters of bad words": (
        MAX_BAD_CHARACTERS // 64,
        lambda size: completion(bad_words=["z" * 64] * size),
        f"{MAX_BAD_CHARACTERS} characters",
    ),
    "biases": (
        MAX_LISTED_TOKENS,
        lambda size: completion(logit_bias=dict.fromkeys(map(str, range(size)), 1)),
        f"{MAX_LISTED_TOKENS:,}",
    ),
    "a bias": (100, lambda size: completion(logit_bias={"67": size}), "-100"),
    "allowed_token_ids": (MAX_LISTED_TOKENS, lambda size: completion(allowed_token_ids=[67] * size), "65536"),
    "temperature": (int(MAX_TEMPERATURE), lambda size: completion(temperature=size), "100"),
    "max_tokens": (MAX_TOKENS, lambda size: completion(prompt="a", max_tokens=size, stop="e"), f"{MAX_TOKENS:,}"),
    "seed": (2**64 - 1, lambda size: completion(seed=size), f"{2**64 - 1:,}"),
    "cache_salt": (MAX_SALT, lambda size: completion(cache_salt="a" * size), f"{MAX_SALT}"),
    "program": (MAX_NAME_LEN, lambda size: completion(program={"id": "a" * size}), f"{MAX_NAME_LEN}"),
    "rid": (MAX_RID, lambda size: (GENERATE, {**generate()[1], "rid": "a" * size}), f"{MAX_RID}"),
    "timeout": (int(MAX_TIMEOUT), lambda size: completion(timeout=size), "86400"),
    "deadline": (int(MAX_SECONDS), lambda size: completion(deadline=size), "deadline"),
}
# at the limit rejected for another reason, or slow
_ONLY_BEYOND = {"prompts", "prompts in a body", "inputs", "texts", "token ids", "characters", "characters of messages"}
_ONLY_BEYOND |= {
    "tokens",
    "messages",
    "prompt values",
    "prompts times n",
    "biases",
    "allowed_token_ids",
    "beams",
}
_ONLY_BEYOND |= {"depth of tools", "depth of variables", "n", "n of chat", "n of generate", "best_of"}


def post(http, path, body):
    return http.post(path, content=json.dumps(body), headers=JSON)


@pytest.mark.parametrize("limit", LIMITS)
def test_one_element_beyond_a_limit_is_rejected_with_the_field_to_change(http, limit):
    allowed, make, says = LIMITS[limit]
    answer = post(http, *make(allowed + 1))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["param"]
    assert len(error["message"]) < 1000


@pytest.mark.parametrize("limit", sorted(LIMITS.keys() - _ONLY_BEYOND))
def test_as_much_as_is_allowed_is_served(http, limit):
    allowed, make, _ = LIMITS[limit]
    answer = post(http, *make(allowed))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("timeout", [0, -1, "nan", 1e400, "1", True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, EMBEDDINGS, GENERATE])
def test_timeouts_that_are_none(http, path, timeout):
    body = {
        COMPLETIONS: {"prompt": "a"},
        CHAT: {"messages": [USER]},
        EMBEDDINGS: {"input": "a"},
        GENERATE: {"text": "a"},
    }
    answer = post(http, path, {**body[path], "timeout": float("nan") if timeout == "nan" else timeout})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timeout"


def test_the_body_is_bounded(http):
    answer = http.post(COMPLETIONS, content=b'{"prompt": "' + b"a" * MAX_BODY + b'"}', headers=JSON)
    assert answer.status_code == 413
    assert f"{MAX_BODY} bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [1000, 100_000])
@pytest.mark.parametrize("field", ["prompt", "metadata", "logit_bias"])
def test_the_depth_of_json_is_bounded(http, field, depth):
    body = f'{{"prompt": "a", "max_tokens": 1, "{field}": {"[" * depth}{"]" * depth}}}'
    answer = http.post(COMPLETIONS, content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(("depth", "status"), [(MAX_NESTING - 1, 200), (MAX_NESTING, 400)])
def test_the_bound_of_depth_is_the_same_on_every_python(http, depth, status):
    body = f'{{"prompt": "a", "max_tokens": 1, "metadata": {"[" * depth}{"]" * depth}}}'
    answer = http.post(COMPLETIONS, content=body, headers=JSON)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize("text", ["[" * 2000, '"' * 1000 + "{" * 2000, "\\" * 999 + "[" * 2000, '\\"[' * 2000])
def test_brackets_in_texts_are_not_nested(http, text):
    answer = post(http, COMPLETIONS, {"prompt": "a", "max_tokens": 1, "metadata": {"a": text}})
    assert answer.status_code == 200, answer.text


@settings(max_examples=300, deadline=None)
@given(
    value=st.recursive(
        st.text('[]{}"\\a') | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text('[]{}"\\'), inner)
    ),
    data=st.data(),
)
def test_nesting_is_that_of_the_value_however_its_text_is_cut(value, data):
    def depth(one):
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    text = json.dumps(value).encode()
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5))), len(text)]
    structure = Structure()
    assert max(structure.depth_after(text[a:b]) for a, b in pairwise(cuts)) == depth(value)


@pytest.mark.parametrize("length", [MAX_ID, MAX_ID + 1, 30_000])
def test_names_in_paths_are_not_repeated_at_length(http, length):
    for path in (f"/v1/requests/{'a' * length}/explain", f"/v1/models/{'a' * length}"):
        answer = http.get(path)
        assert answer.status_code == 404
        assert len(answer.text) < 1000


def test_many_unknown_fields_are_named_once(http):
    answer = post(http, *completion(**{f"field{i}": i for i in range(10_000)}))
    assert answer.status_code == 400
    assert len(answer.text) < 500


def test_a_server_can_lower_the_number_of_logprobs():
    chat, sampled = {"messages": [USER], "max_tokens": 1, "logprobs": True}, {"max_new_tokens": 1}
    asked = (
        (COMPLETIONS, {"prompt": STORY, "max_tokens": 1}, "logprobs"),
        (COMPLETIONS, {"prompt": STORY, "max_tokens": 1}, "prompt_logprobs"),
        (CHAT, chat, "top_logprobs"),
        (GENERATE, {"text": STORY, "sampling_params": sampled, "return_logprob": True}, "top_logprobs_num"),
    )
    with run_app(make_app(service_of(small_engine(), max_logprobs=3))) as url:
        for path, body, name in asked:
            assert httpx.post(f"{url}{path}", json={**body, name: 3}, timeout=60).is_success
            refused = httpx.post(f"{url}{path}", json={**body, name: 4}, timeout=60)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, name)
            assert "allows 3 at most" in error["message"]
