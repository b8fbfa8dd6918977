"""Unknown fields: refused at the top of a body, or ignored and counted by option; in messages they are accepted."""

import re

import httpx
import pytest
from embedded_model_server import CHAT, MODEL, STORY, run_app, service_of, small_engine
from multi_tenant_server import GENERATING, error_of

from quire.server.app import make_app

BODIES = {
    "/v1/completions": {"prompt": STORY, "max_tokens": 1},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/embeddings": {"input": STORY},
    "/generate": {"text": STORY, "sampling_params": {"max_new_tokens": 1}},
    "/": {"inputs": STORY},
    "/generate_stream": {"inputs": STORY},
    "/completion": {"prompt": STORY, "max_tokens": 1},
    "/apply-template": {"messages": CHAT},
    "/tokenize": {"prompt": STORY},
    "/detokenize": {"tokens": [5]},
    "/v1/programs/end": {"id": "a"},
    **{path: body for path, body in GENERATING.items() if path not in ("/v1/completions", "/v1/embeddings")},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": CHAT},
    "/api/show": {"model": MODEL},
    "/api/pull": {"model": MODEL},
    "/classify": {"input": STORY},
    "/v1/classify": {"input": STORY},
    **{path: {"lora_name": "a", "lora_path": "a"} for path in ("/v1/load_lora_adapter", "/load_lora_adapter")},
    **{path: {"lora_name": "a"} for path in ("/v1/unload_lora_adapter", "/unload_lora_adapter")},
}
HAS_NOT = ("no classification head", "started without adapters")  # of the model and the server of these tests


def counted(http, place):
    found = re.search(rf'^quire:unknown_fields_total{{.*place="{place}"}} (.*)$', http.get("/metrics").text, re.M)
    return float(found[1])


def is_accepted(answer):
    """Whether it succeeds, or fails for what this model and this server do not have."""
    return answer.is_success or any(one in error_of(answer)["message"] for one in HAS_NOT)


@pytest.fixture(scope="module")
def lenient():
    service = service_of(small_engine(), unknown_fields="ignore")
    with run_app(make_app(service)) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


NOT_IN_THE_DOCUMENT = {"/"}  # the address of the page
WITH_STORED_FILES = {"/v1/files", "/v1/batches"}  # a form, and a body that names a stored file


def test_the_cases_cover_all_routes_with_a_body(http):
    paths = http.get("/openapi.json").json()["paths"]
    with_body = {path for path, of in paths.items() if "requestBody" in of.get("post", {})}
    assert with_body == (BODIES.keys() - NOT_IN_THE_DOCUMENT) | WITH_STORED_FILES


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_refused_unless_it_is_null(http, path):
    error = error_of(http.post(path, json={**BODIES[path], "top_z": 1}))
    assert (error["code"], error["param"]) == ("unknown_parameter", "top_z")
    assert is_accepted(http.post(path, json={**BODIES[path], "top_z": None}))


@pytest.mark.parametrize("path", BODIES)
def test_a_server_can_ignore_them(lenient, path):
    before = counted(lenient, "body")
    answer = lenient.post(path, json={**BODIES[path], "top_z": 1, "top_y": 0.5, "top_x": None})
    assert is_accepted(answer), answer.text
    assert counted(lenient, "body") == before + 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_misspelled_name_of_a_missing_field_is_named_in_either_case(http, lenient, path):
    wrong = {"/v1/completions": {"promt": STORY}, "/v1/chat/completions": {"mesages": CHAT}}[path]
    for client in (http, lenient):
        error = client.post(path, json=wrong).json()["error"]
        assert error["message"].startswith("unknown field")
        assert "did you mean" in error["message"]


def test_fields_inside_of_an_object_are_refused_in_either_case(lenient):
    for more in ({"stream_options": {"include_usag": True}, "stream": True}, {"response_format": {"typ": "text"}}):
        error = lenient.post("/v1/completions", json={"prompt": "a", **more}).json()["error"]
        assert error["code"] in ("unknown_parameter", "missing_required_parameter")


def test_messages_of_other_programs_are_accepted_and_their_fields_counted(http):
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]},
        {
            **{"role": "assistant", "content": "Hi", "provider_specific_fields": {"refusal": None}, "reasoning": "a"},
            **{"id": "m1", "annotations": [{"type": "url_citation"}], "tool_calls": [], "function_call": None},
        },
        *CHAT,
    ]
    before = counted(http, "messages")
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {**BODIES[path], "messages": history}
        body.pop("prompt", None)
        assert http.post(path, json=body).is_success
    assert counted(http, "messages") == before + 2 * 5


def test_roles_are_for_the_template_to_know(http):
    contents = ("Hello", [{"type": "text", "text": "Hello"}])
    asked = [{"messages": [{"role": "my-role.2", "content": content}]} for content in contents]
    whole, parts = (http.post("/tokenize", json=body).json()["tokens"] for body in asked)
    assert whole == parts
    assert "my-role.2" in http.post("/detokenize", json={"tokens": whole}).json()["prompt"]


def test_unsupported_message_fields_that_change_the_meaning_are_rejected(http):
    for more in ({"audio": {"id": "a"}}, {"function_call": {"name": "f", "arguments": "{}"}}):
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": "assistant", "content": "a", **more}]})
        assert answer.json()["error"]["code"] == "unsupported_parameter"
