"""Fields of constraints on every route, and errors of invalid ones."""

import json

import pytest
from embedded_model_server import CHAT, STORY

from quire.errors import RequestError
from quire.params import MAX_CHARACTERS, MAX_NESTING, MAX_SCHEMA, StructuredOutputsParams
from quire.server.api.openai.schema import ChatBody, CompletionBody
from quire.server.api.sglang.schema import ROUTE_NAMES, GenerateParams
from quire.server.errors import renamed_fields

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
OLD_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<"],
}
ROUTES = {"/v1/completions": {"prompt": STORY}, "/v1/chat/completions": {"messages": CHAT}}
BODIES = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}

# fields of a body -> their parameters
FORMS = [
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"json": SCHEMA},
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "description": "y", "schema": True}}},
        {"json": True},
    ),
    ({"response_format": TAG}, {"structural_tag": TAG}),
    ({"response_format": OLD_TAG}, {"structural_tag": OLD_TAG}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json": SCHEMA}),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"disable_any_whitespace": True}},
        {"json_object": True, "disable_any_whitespace": True},
    ),
    ({"response_format": {"type": "text"}, "regex": "a+"}, {"regex": "a+"}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "json_object": False}}, {"json": SCHEMA}),
    ({"structured_outputs": {"regex": "a+", "fast_forward": False}}, {"regex": "a+", "fast_forward": False}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
    ({"structured_outputs": {"grammar": 'start: "a"', "json": None}}, {"grammar": 'start: "a"'}),
    ({"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}}, None),
    ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}}, None),
    (
        {"json_schema": SCHEMA, "structured_outputs": {"unknown_keywords": "refuse"}},
        {"json": SCHEMA, "unknown_keywords": "refuse"},
    ),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, {"structural_tag": TAG}),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b")}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ({"json_schema": json.dumps(SCHEMA)}, {"json": SCHEMA}),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
]
NOTHING = [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": None}]


@pytest.fixture(params=ROUTES)
def read(request):
    """The parameters of a body on one of the routes. Errors name the route's fields."""

    def read(**fields):
        body = BODIES[request.param].model_validate({**ROUTES[request.param], **fields})
        with renamed_fields(body.constraint_names()):
            return body.sampling_params({})

    return read


@pytest.mark.parametrize(("fields", "expected"), FORMS, ids=lambda value: "-".join(value) if value else "same")
def test_a_constraint_is_read_from_each_field_of_the_body(read, fields, expected):
    expected = StructuredOutputsParams(**(fields["structured_outputs"] if expected is None else expected))
    assert read(**fields).structured_outputs == expected


@pytest.mark.parametrize("fields", NOTHING)
def test_a_body_without_constraint_fields_is_unconstrained(read, fields):
    assert read(**fields).structured_outputs is None


DEEP = "[" * (MAX_NESTING + 2) + "]" * (MAX_NESTING + 2)
BIG = {"enum": ["x" * 1000] * (MAX_SCHEMA // 1000)}
# fields of a body -> the error's param and a part of its message
REFUSED = [
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "not regex and choice"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", "not none"),
    ({"structured_outputs": {}}, "structured_outputs", "not none"),
    ({"regex": "a", "ebnf": "b"}, "ebnf", "regex and ebnf each set a constraint on the output"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "response_format and structured_outputs each set",
    ),
    (
        {"guided_regex": "a", "structured_outputs": {"json": True}},
        "guided_regex",
        "structured_outputs and guided_regex",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs a json_schema with a schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "with a schema"),
    ({"response_format": {"type": "text", "format": {}}}, "response_format", "type text has no format"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format", "type text has no schema"),
    (
        {"response_format": {"type": "json_schema", "schema": SCHEMA, "json_schema": {"name": "x", "schema": True}}},
        "response_format",
        "has two schemas",
    ),
    ({"response_format": {**TAG, "json_schema": {"name": "x"}}}, "response_format", "has no json_schema"),
    (
        {"structured_outputs": {"json": DEEP}},
        "structured_outputs.json",
        "structured_outputs.json is nested more than 64",
    ),
    ({"guided_json": DEEP}, "guided_json", "guided_json is nested more than 64"),
    ({"json_schema": "{"}, "json_schema", "json_schema is not valid JSON"),
    ({"regex": "\ud800"}, "regex", "regex is not valid Unicode"),
    ({"regex": "a" * (MAX_CHARACTERS + 1)}, "regex", "regex must have 1 to 131,072 characters"),
    ({"regex": ""}, "regex", "regex must have 1 to"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must have 1 to 4096 strings"),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": ""}},
        "structured_outputs.whitespace_pattern",
        "",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BIG}}},
        "response_format",
        "response_format must have 1 to 524,288 characters",
    ),
    ({"guided_json": {"enum": [1] * MAX_SCHEMA}}, "guided_json", "and has more"),
    ({"regex": "a", "use_beam_search": True}, "regex", "cannot be combined with use_beam_search"),
    (
        {"response_format": {"type": "json_object"}, "use_beam_search": True},
        "response_format",
        "cannot be combined with",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_a_form_that_cannot_be_is_refused_by_the_name_of_its_field(read, fields, param, message):
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.param == param
    assert message in str(caught.value)


def test_a_schema_may_be_longer_than_other_forms(read):
    schema = {"enum": ["x" * 1000] * (2 * MAX_CHARACTERS // 1000)}
    assert len(read(guided_json=schema).structured_outputs.json) > 2 * MAX_CHARACTERS


def test_beam_search_accepts_neutral_constraint_fields(read):
    assert read(use_beam_search=True, response_format={"type": "text"}).structured_outputs is None


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("json_schema", json.dumps(SCHEMA), "json"),
        ("json_schema", SCHEMA, "json"),
        ("regex", "a+", "regex"),
        ("ebnf", 'root ::= "a"', "grammar"),
        ("structural_tag", json.dumps(TAG), "structural_tag"),
    ],
)
def test_a_form_in_the_native_route(field, value, kind):
    params = GenerateParams.model_validate({field: value, "max_new_tokens": 3}).make_params({})
    assert params.structured_outputs == StructuredOutputsParams(**{kind: value})
    assert params.max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"regex": "a", "ebnf": "b"}, "ebnf"), ({"json_schema": "{"}, "json_schema"), ({"ebnf": ""}, "ebnf")],
)
def test_a_form_that_cannot_be_is_refused_in_the_native_route(fields, param):
    with pytest.raises(RequestError) as caught, renamed_fields(ROUTE_NAMES):
        GenerateParams.model_validate(fields).make_params({})
    assert caught.value.param == param
