"""Structured outputs of a server conform on every route, and an invalid constraint is rejected at once."""

import json
import re

import httpx
import openai
import pytest
from embedded_model_server import CHAT, MODEL, STORY, run_app, service_of, small_engine
from jsonschema import validate
from multi_tenant_server import run_site
from pydantic import BaseModel
from server_probes import Page

from quire.errors import RequestError
from quire.server.app import make_app
from quire.structured_outputs import grammar_cache, grammar_compilation

ASKED = [{"role": "user", "content": "Faye took 18 white ladders on Thursday.\nJSON keys: name, count, color"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "color": {"type": "string"}},
    "required": ["name", "count", "color"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "record", "schema": SCHEMA, "strict": True}}
TIGHT = {"json": SCHEMA, "disable_any_whitespace": True}
GREEDY = {"temperature": 0, "max_tokens": 80}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": " the<n>", "schema": {"enum": [1, 2]}, "end": "</n>"}],
    "triggers": [" the"],  # it occurs in the story
}
TAG_FORMAT = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": [" the"],
        "tags": [{"begin": " the<n>", "content": {"type": "regex", "pattern": "[12]"}, "end": "</n>"}],
    },
}
ROUTES = {"/v1/completions": {"prompt": STORY}, "/v1/chat/completions": {"messages": ASKED}}


class Record(BaseModel):
    name: str
    count: int
    color: str


def contents(answer):
    assert answer.status_code == 200, answer.text
    return [choice.get("text") or choice["message"]["content"] for choice in answer.json()["choices"]]


def is_record(text):
    validate(json.loads(text), SCHEMA)
    return True


def is_tagged(text):
    """Whether there are tags after triggers, and nowhere else."""
    return " the<n>" in text and not re.search(r" the(?!<n>\s*[12]\s*</n>).{20}", text)


# fields of a body -> a check of the text
FORMS = [
    ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ({"response_format": BY_SCHEMA}, is_record),
    ({"response_format": BY_SCHEMA, "structured_outputs": {"disable_any_whitespace": True}}, is_record),
    (
        {"structured_outputs": TIGHT},
        lambda text: is_record(text) and text == json.dumps(json.loads(text)),
    ),
    ({"structured_outputs": {"regex": "[a-c]{3,5}-[0-9]{2}"}}, lambda text: re.fullmatch("[a-c]{3,5}-[0-9]{2}", text)),
    ({"structured_outputs": {"choice": ["red", "green"]}}, lambda text: text in ("red", "green")),
    (
        {"structured_outputs": {"grammar": 'start: "a" B+\nB: "b" | "c"', "fast_forward": False}},
        lambda text: re.fullmatch("a[bc]+", text),
    ),
    ({"ebnf": 'root ::= "yes" | "no" " way"'}, lambda text: text in ("yes", "no way")),
    ({"guided_choice": ["red"]}, lambda text: text == "red"),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("fields", "holds"), FORMS, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_the_output_has_the_form(http, path, fields, holds):
    answer = http.post(path, json={**ROUTES[path], **GREEDY, **fields})
    (text,) = contents(answer)
    if answer.json()["choices"][0]["finish_reason"] == "stop":
        assert holds(text), text
    else:  # some constraints have no end
        assert fields.keys() & {"structured_outputs", "response_format"}


def test_white_space_is_free_where_a_request_asks_for_it_and_the_server_allows_it(http):
    built = small_engine()
    (newline,) = built.tokenizer.encode("\n", add_special_tokens=False)
    asked = {"messages": ASKED, **GREEDY, "logit_bias": {str(newline): 100}}
    spaced = {"json": SCHEMA, "whitespace_pattern": "\n?"}
    free = {"json": SCHEMA, "disable_any_whitespace": False}
    with run_app(make_app(service_of(built, disable_any_whitespace=True))) as url:
        for path, fields, has_lines in (
            (http.base_url, {"response_format": BY_SCHEMA}, False),
            (http.base_url, {"structured_outputs": free}, True),
            (http.base_url, {"structured_outputs": spaced}, True),
            (url, {"structured_outputs": free}, False),
            (url, {"structured_outputs": spaced}, True),
        ):
            (text,) = contents(httpx.post(f"{path}/v1/chat/completions", json={**asked, **fields}, timeout=60))
            assert is_record(text)
            assert ("\n" in text) == has_lines, text


def test_a_structural_tag_has_its_form_in_free_text(http):
    for fields in (
        {"response_format": TAG},
        {"response_format": TAG_FORMAT},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
    ):
        assert is_tagged(contents(http.post("/v1/completions", json={"prompt": STORY, **GREEDY, **fields}))[0])


def test_the_openai_client_parses_structured_outputs(client):
    answer = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Record, **GREEDY)
    assert answer.choices[0].message.parsed == Record(name="Faye", count=18, color="white")
    assert 0 < answer.usage.completion_tokens_details.forced_tokens < answer.usage.completion_tokens
    with client.chat.completions.stream(model=MODEL, messages=ASKED, response_format=Record, **GREEDY) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


@pytest.mark.parametrize("fast_forward", [True, False])
def test_streams_add_up_to_the_whole_answer_and_count_forced_tokens(client, fast_forward):
    form = {"structured_outputs": {**TIGHT, "fast_forward": fast_forward}}
    body = {"model": MODEL, "messages": ASKED, "n": 2, "seed": 3, "temperature": 1.2, "max_tokens": 120}
    for _ in range(2):  # the second time the prompt is cached, as for the stream
        whole = client.chat.completions.create(**body, extra_body=form)
    chunks = list(
        client.chat.completions.create(
            **body,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            extra_body=form,
        )
    )
    for choice in whole.choices:
        parts = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert parts[-1].finish_reason == choice.finish_reason
        if choice.finish_reason == "stop":
            is_record(choice.message.content)
    forced_counts = [chunk.usage.completion_tokens_details.forced_tokens for chunk in chunks]
    assert forced_counts == sorted(forced_counts)
    assert forced_counts[-1] == whole.usage.completion_tokens_details.forced_tokens
    assert (forced_counts[-1] > 0) == fast_forward
    assert chunks[-1].usage == whole.usage


def test_usage_without_a_constraint_has_no_forced_tokens(http):
    for path, body in ROUTES.items():
        usage = http.post(path, json={**body, "max_tokens": 2}).json()["usage"]
        assert "forced_tokens" not in usage.get("completion_tokens_details", {})
    answer = http.post("/generate", json={"text": STORY, "sampling_params": {"max_new_tokens": 2}}).json()
    assert "forced_tokens" not in answer["meta_info"]


@pytest.mark.parametrize("stream", [False, True])
def test_generate_accepts_the_same_constraints(http, stream):
    def ask(**params):
        body = {"text": STORY, "stream": stream, "sampling_params": {"temperature": 0, "max_new_tokens": 60, **params}}
        answer = http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text.strip().split("data: ")[-2]) if stream else answer.json()

    got = ask(
        json_schema=json.dumps(
            {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
        )
    )
    assert json.loads(got["text"])["a"] in (1, 2)
    assert got["meta_info"]["finish_reason"]["type"] == "stop"
    assert 0 < got["meta_info"]["forced_tokens"] <= got["meta_info"]["completion_tokens"]
    assert re.fullmatch("[0-9]{3}", ask(regex="[0-9]{3}")["text"])
    assert ask(ebnf='root ::= "a" "b"')["text"] == "ab"
    assert is_tagged(ask(structural_tag=json.dumps(TAG))["text"])


def test_each_prompt_may_have_its_own_constraint(http):
    params = [{"regex": "[0-9]{2}"}, {"max_new_tokens": 2}, {"json_schema": {"const": "x"}}]
    got = http.post("/generate", json={"text": [STORY] * 3, "sampling_params": params}).json()
    assert re.fullmatch("[0-9]{2}", got[0]["text"])
    assert got[2]["text"].strip() == '"x"'
    assert ["forced_tokens" in one["meta_info"] for one in got] == [True, False, True]


REFUSED = [
    ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex"),
    ({"regex": "(?<!a)b"}, "regex"),
    ({"response_format": {**BY_SCHEMA, "json_schema": {"name": "x", "schema": {"type": "strnig"}}}}, "response_format"),
    ({"response_format": {**BY_SCHEMA, "json_schema": {"name": "x", "schema": {"pattern": "("}}}}, "response_format"),
    ({"guided_json": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}, "guided_json"),
    ({"structured_outputs": {"json": {"colour": 1}, "unknown_keywords": "refuse"}}, "structured_outputs.json"),
    ({"guided_json": {"colour": 1}, "structured_outputs": {"unknown_keywords": "refuse"}}, "guided_json"),
    ({"structured_outputs": {"grammar": 'start: "a" missing'}}, "structured_outputs.grammar"),
    ({"ebnf": "root ::= missing"}, "ebnf"),
    (
        {"structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": "x"}},
        "structured_outputs.whitespace_pattern",
    ),
    ({"response_format": {"type": "structural_tag", "format": {"type": "nothing"}}}, "response_format"),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_form_is_refused_before_anything_is_streamed(http, path, fields, param):
    answer = http.post(path, json={**ROUTES[path], "stream": True, "max_tokens": 3, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", "invalid_value")


def test_a_bad_form_is_refused_in_the_native_route(http):
    answer = http.post("/generate", json={"text": ["a", "b"], "sampling_params": [{}, {"ebnf": "root ::= missing"}]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "ebnf"


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"structured_outputs": {"jason": {}}}, "structured_outputs.jason", "did you mean 'json'?"),
        ({"response_format": {"type": "text", "shema": 1}}, "response_format.shema", "unknown field 'shema'"),
        ({"guided_jsn": {}}, "guided_jsn", "did you mean 'guided_json'?"),
    ],
)
def test_a_field_that_is_not_known_is_named(http, fields, param, hint):
    error = http.post("/v1/completions", json={"prompt": STORY, **fields}).json()["error"]
    assert (error["param"], error["code"]) == (param, "unknown_parameter")
    assert hint in error["message"]


@pytest.mark.parametrize("path", [*ROUTES, "/generate"])
def test_a_constraint_that_fails_in_the_engine_process_is_a_400(monkeypatch, path):
    def refuse(*_args):
        raise RequestError("this vocabulary has no letters")

    monkeypatch.setattr(grammar_compilation, "compile_grammar", refuse)
    form = {"sampling_params": {"regex": "[0-9]"}, "text": STORY} if path == "/generate" else {"regex": "[0-9]"}
    with run_site() as site:
        answer = site.post(None, path, **ROUTES.get(path, {}), **form)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "this vocabulary has no letters")
        assert site.post(None, "/v1/completions", prompt=STORY, max_tokens=1).status_code == 200


def test_no_tenant_and_no_salt_uses_what_another_has_compiled(monkeypatch):
    """Front end and engine compile a constraint once for each tenant and salt."""
    calls = {"check": [], "compile": []}
    check, compile_grammar = grammar_cache.check, grammar_compilation.compile_grammar

    def count_check(params, *args):
        calls["check"].append(params.text)
        return check(params, *args)

    def count_compile(params, *args):
        calls["compile"].append(params.text)
        return compile_grammar(params, *args)

    monkeypatch.setattr(grammar_cache, "check", count_check)
    monkeypatch.setattr(grammar_compilation, "compile_grammar", count_compile)
    body = {"prompt": STORY, "max_tokens": 3, "regex": "[0-9]{2}"}
    with run_site("alice", "bob") as site:
        for number, (who, salt) in enumerate([("alice", {}), ("bob", {}), ("alice", {"cache_salt": "x"})], 1):
            for _ in range(2):
                assert site.post(who, "/v1/completions", **body, **salt).status_code == 200
            assert calls == {"check": ["[0-9]{2}"] * number, "compile": ["[0-9]{2}"] * number}


def test_openai_s_client_raises_for_a_bad_schema(client):
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": []}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ASKED, response_format=bad)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("stream", [False, True])
def test_forced_tokens_are_marked_among_logprobs(client, stream):
    body = {"model": MODEL, "stream": stream, "extra_body": {"structured_outputs": TIGHT}, **GREEDY}
    answer = client.chat.completions.create(messages=ASKED, logprobs=True, top_logprobs=2, **body)
    choices = [part.choices[0] for part in (answer if stream else [answer])]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    forced = [entry for entry in entries if entry.model_extra.get("forced")]
    assert 0 < len(forced) < len(entries)
    assert {entry.logprob for entry in forced} == {0}
    assert {len(entry.top_logprobs) for entry in forced} == {1}
    assert {len(entry.top_logprobs) for entry in entries if entry not in forced} == {2}

    answer = client.completions.create(prompt=STORY, logprobs=2, **body)
    lists = [part.choices[0].logprobs for part in (answer if stream else [answer]) if part.choices[0].logprobs]
    marks = [mark for part in lists for mark in part.model_extra["forced"]]
    values = [value for part in lists for value in part.token_logprobs]
    tokens = [token for part in lists for token in part.tokens]
    assert len(marks) == len(values) == len(tokens) > sum(marks) > 0
    assert {value for value, mark in zip(values, marks, strict=True) if mark} == {0}


def test_generate_returns_logprobs_of_forced_tokens(http):
    params = {"temperature": 0, "regex": "aaaa[bc]dddd"}
    body = {
        "text": STORY,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "token_ids_logprob": [99],
        "sampling_params": params,
    }
    about = http.post("/generate", json=body).json()["meta_info"]
    entries = about["output_token_logprobs"]
    assert len(entries) == len(about["output_top_logprobs"]) == len(about["output_token_ids_logprobs"])
    alone = [len(one) for one in about["output_token_ids_logprobs"]].count(0)
    assert alone == about["forced_tokens"] > 0


def test_an_output_that_other_parameters_do_not_allow_is_refused(http, llm):
    tokenizer = llm.get_tokenizer()
    body = {"prompt": STORY, "allowed_token_ids": tokenizer.encode("x"), "max_tokens": 9}
    answer = http.post("/v1/completions", json={**body, "regex": "[0-9]"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "structured_outputs"


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_end_behind_good_tokens_is_why_a_choice_ends(http, llm, stream):
    tokenizer = llm.get_tokenizer()
    body = {"prompt": STORY, "allowed_token_ids": tokenizer.encode("x"), "max_tokens": 9, "n": 2, "stream": stream}
    answer = http.post("/v1/completions", json={**body, "structured_outputs": {"regex": "x{1,3}[0-9]"}})
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    choices = [choice for one in (lines or [answer.json()]) for choice in one["choices"]]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "xxx"
        assert mine[-1]["finish_reason"] == "error"
        assert "the constraint on the output allows nothing here" in mine[-1]["stop_reason"]


def test_figures(http):
    def page():
        return Page(http.get("/metrics").text)

    def figures():
        metrics = page()
        checks = [metrics.value("quire:grammar_checks_total", result=result) for result in ("ok", "bad", "slow")]
        return [*checks, metrics.value("quire:grammar_check_seconds_count"), metrics.value("quire:forced_tokens_total")]

    before = figures()
    usage = http.post("/v1/completions", json={"prompt": STORY, "regex": "figures: [0-9]"}).json()["usage"]
    for pattern in ("figures: [0-9]", "figures("):
        http.post("/v1/completions", json={"prompt": STORY, "regex": pattern, "max_tokens": 1})
    ok, bad, slow, count, forced = (after - was for after, was in zip(figures(), before, strict=True))
    assert (ok, bad, slow, count) == (1, 1, 0, 2)
    assert forced >= usage["completion_tokens_details"]["forced_tokens"] > 0


def test_echo_and_a_conversation_s_end_go_with_a_form(http):
    body = {"prompt": STORY, "echo": True, "logprobs": 1, "regex": " to the (sea|river)", **GREEDY}
    answer = http.post("/v1/completions", json=body)
    (text,) = contents(answer)
    assert re.fullmatch(re.escape(STORY) + " to the (sea|river)", text)
    lists = answer.json()["choices"][0]["logprobs"]
    assert len({len(values) for values in lists.values()}) == 1
    assert not any(lists["forced"][: answer.json()["usage"]["prompt_tokens"]])
    said = [*CHAT, {"role": "assistant", "content": "My number is"}]
    body = {"messages": said, "continue_final_message": True, "regex": " [0-9]{4}", **GREEDY}
    assert re.fullmatch(" [0-9]{4}", contents(http.post("/v1/chat/completions", json=body))[0])
