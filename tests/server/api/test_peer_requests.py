"""Requests that the server tests of vLLM and SGLang send, and LiteLLM, with the answers that their clients rely on.

peer_requests.json has one request per line: route, body (GET without one), and what the answer must be. status: 200 by
default. param: of an error. has, equals, one_of: dotted places in the answer, of a stream in its first chunk.
usage_grows: each chunk of the stream counts more output than the one before. until: the feature that will change this
refusal.
"""

import json
from pathlib import Path

import pytest

REQUESTS = json.loads(Path(__file__).with_name("peer_requests.json").read_text())


def at(value, place):
    """The value at a dotted place. Raises LookupError if there is none."""
    for name in place.split("."):
        value = value[int(name) if isinstance(value, list) else name]
    return value


def events(text):
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("sent", REQUESTS, ids=lambda sent: f"{sent['peer']}: {sent['name']}")
def test_a_request_of_a_peers_tests(http, sent):
    body = sent.get("body")
    response = http.get(sent["route"]) if body is None else http.post(sent["route"], json=body)
    assert response.status_code == sent.get("status", 200), response.text
    if response.is_error:
        assert response.json()["error"]["param"] == sent.get("param")
        return
    chunks = events(response.text) if body and body.get("stream") else [response.json()]
    assert not any(isinstance(chunk, dict) and chunk.get("error") for chunk in chunks)
    for place in sent.get("has", ()):
        assert at(chunks[0], place) is not None
    for place, value in sent.get("equals", {}).items():
        assert at(chunks[0], place) == value
    for place, values in sent.get("one_of", {}).items():
        assert at(chunks[0], place) in values
    if sent.get("usage_grows"):
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts[-1] == counts[-2] > 1  # the last chunk has no choices
        written = [count for count in counts[:-1] if count]
        assert written == sorted(set(written))


def test_all_peers_are_there_and_names_are_distinct():
    names = [(sent["peer"], sent["name"]) for sent in REQUESTS]
    assert len(set(names)) == len(names)
    assert {peer for peer, _ in names} == {"vllm", "sglang", "litellm"}
