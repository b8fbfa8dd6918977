"""Defaults of omitted request fields: the model's generation config, then the route's."""

import dataclasses

import httpx
import pytest
from embedded_model_server import CHAT, STORY, run_app, service_of, small_engine

from quire.server.app import make_app
from quire.server.request_params import with_default_max_tokens

ROUTES = {
    "/v1/completions": {"prompt": STORY, "ignore_eos": True},
    "/v1/chat/completions": {"messages": CHAT, "ignore_eos": True},
    "/generate": {"text": STORY, "sampling_params": {"ignore_eos": True}},
}


@pytest.fixture(scope="module")
def recommending():
    """A server whose model has a generation config, and one whose model has none."""
    built = small_engine()
    other = small_engine()
    recommended = {"temperature": 0.0, "max_tokens": 7}
    with (
        run_app(make_app(service_of(dataclasses.replace(built, sampling_defaults=recommended)))) as with_defaults,
        run_app(make_app(service_of(dataclasses.replace(other, sampling_defaults={})))) as without,
    ):
        yield with_defaults, without


def ask(url, path, **fields):
    """(prompt tokens, output tokens, text)."""
    body = dict(ROUTES[path])
    if path == "/generate":
        names = {"max_tokens": "max_new_tokens"}
        given = {names.get(name, name): value for name, value in fields.items()}
        got = httpx.post(url + path, json={**body, "sampling_params": {"ignore_eos": True, **given}}, timeout=60).json()
        return got["meta_info"]["prompt_tokens"], got["meta_info"]["completion_tokens"], got["text"]
    got = httpx.post(url + path, json={**body, **fields}, timeout=60).json()
    choice = got["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"], text


@pytest.mark.parametrize("path", ROUTES)
def test_the_model_recommends(recommending, path):
    url, _ = recommending
    _, num_tokens, text = ask(url, path)
    assert num_tokens == 7
    assert ask(url, path, temperature=None, max_tokens=None)[2] == text  # greedy: the same text
    assert ask(url, path, max_tokens=3)[1] == 3
    texts = {ask(url, path, temperature=50, max_tokens=10)[2] for _ in range(3)}
    assert len(texts) == 3


def test_the_route_s_limit_is_not_raised_by_the_model():
    assert with_default_max_tokens({"max_tokens": 400, "top_k": 3}, 16) == {"max_tokens": 16, "top_k": 3}


@pytest.mark.parametrize(("path", "expected"), [("/v1/completions", 16), ("/generate", 128)])
def test_the_route_has_a_limit(recommending, path, expected):
    _, url = recommending
    assert ask(url, path)[1] == expected


def test_a_chat_may_fill_the_context(recommending):
    _, url = recommending
    num_prompt, num_output, _ = ask(url, "/v1/chat/completions")
    assert num_prompt + num_output == 512
