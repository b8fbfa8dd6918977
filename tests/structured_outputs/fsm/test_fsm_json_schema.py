"""JSON schemas as automata: every accepted text is valid, and unsupported keywords are rejected by name."""

import datetime
import json
import random

import jsonschema
import pytest
from fsm_oracles import demo_vocabulary, samples
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schema_oracle import faults

from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.fsm.backend import FsmBackend, automaton
from quire.structured_outputs.fsm.construct import node_to_dfa
from quire.structured_outputs.fsm.dfa import Dfa
from quire.structured_outputs.fsm.json_text import integers
from quire.structured_outputs.json_schema.values import FORMATS


def compiled(schema: object, **options: object) -> Dfa:
    return automaton(StructuredOutputsParams(json=json.dumps(schema), **options))


def texts_of(schema: object, count: int = 60, **options: object) -> list[str]:
    return [data.decode() for data in samples(compiled(schema, **options), count)]


PERSON = {
    "title": "a person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "born": {"$ref": "#/$defs/day"},
        "tags": {"type": "array", "items": {"enum": ["new", 'o"ld', None, 3, {"a": [1, {}]}]}, "maxItems": 3},
    },
    "required": ["age"],
    "additionalProperties": False,
    "$defs": {"day": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}},
}

# (schema, valid values that the automaton accepts, invalid values)
SCHEMAS = [
    (PERSON, [{"age": 0}, {"name": "Ann", "age": 120, "born": "2024-02-29", "tags": ["new", 3]}], [{}, {"age": 121}]),
    ({"type": "string"}, ["", "é\n\"\\/\t😀"], [1, None]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é😀\n"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a+$"}, ["a", "aaa"], ["", "ba"]),
    ({"type": "string", "pattern": 'b"\\\\'}, ['b"\\', 'xb"\\\n'], ["b", '"b\\']),
    ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb", "b"], ["bx", ""]),
    ({"type": "string", "pattern": "^[^a-y]$"}, ["z", "\n", "\u0001", '"', "é"], ["a", "zz"]),
    ({"type": "integer"}, [0, -1, 12345678901234567890], [1.5, "1"]),
    ({"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 2.5}, [-2, 0, 2], [-3, 3]),
    ({"type": "number"}, [0, -1.25, 1e-7, 12.5e20], ["1"]),
    ({"type": "number", "minimum": 0}, [0, 0.5, 3], [-1, -0.5]),
    ({"type": ["boolean", "null", "integer"], "maximum": 3}, [True, None, 3, -9], [4, "x"]),
    ({"const": {"a": [1, "x\n", None], "b": {}}}, [{"a": [1, "x\n", None], "b": {}}], [{}]),
    ({"enum": [1, 2.5, "a", True, [], {"k": "é"}]}, [1, 2.5, "a", True, [], {"k": "é"}], [False, {}]),
    ({"type": "string", "enum": [1, "a", None]}, ["a"], [1, None]),
    ({"type": "array", "items": {"type": "boolean"}}, [[], [True] * 5], [[1], {}]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3}, [[None] * 2], [[None] * 4]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 2}, [[None] * 9], [[None]]),
    ({"type": "array", "items": {"type": "null"}, "maxItems": 0}, [[]], [[None]]),
    ({"type": "array", "prefixItems": [{"type": "null"}, {"const": 1}], "items": False}, [[None, 1]], [[], [None]]),
    ({"type": "object", "properties": {}, "additionalProperties": False}, [{}], [{"a": 1}]),
    ({"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]}, [3, "ab"], [None, "abc"]),
    ({"oneOf": [{"enum": [1, "a"]}, {"const": 2}]}, [1, 2, "a"], [3]),
    ({"allOf": [{"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": {"const": 1}}}, [1], [2]),
    ({"anyOf": [{"$ref": "#/$defs/x"}] * 2, "$defs": {"x": {"type": "null"}}}, [None], [1]),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": name}, "v": {"type": "null"}}, "required": ["kind"]}
                for name in ("a", "b")
            ]
        },
        [{"kind": "a"}, {"kind": "b", "v": None}],
        [{"kind": "c"}, {}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS, ids=lambda part: json.dumps(part)[:50])
def test_the_automaton_of_a_schema_accepts_exactly_its_valid_values(schema, good, bad):
    for options in ({}, {"disable_any_whitespace": False}, {"whitespace_pattern": "[ \\n]{0,3}"}):
        dfa = compiled(schema, **options)
        for data in samples(dfa, 25):
            jsonschema.validate(json.loads(data), schema)
        for value in good:
            assert dfa.matches(json.dumps(value, ensure_ascii=False).encode()), value
        for value in bad:
            assert not dfa.matches(json.dumps(value, ensure_ascii=False).encode()), value


@pytest.mark.parametrize("negative", ["\\S", "[^\\s]", "[^\\s\\d]", "[\\S]"])
def test_no_unicode_white_space_is_outside_of_white_space(negative):
    dfa = compiled({"type": "string", "pattern": f"^{negative}$"})
    assert dfa.matches('"é"'.encode())
    for blank in "\t\n\x0b\x1f \x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000\ufeff":
        assert not dfa.matches(json.dumps(blank, ensure_ascii=False).encode()), blank
    assert not compiled({"type": "string", "pattern": "^[^\\S]$"}).matches('"\x85"'.encode())
    assert compiled({"type": "string", "pattern": "^\\s$"}).matches('"\u2003"'.encode())


def test_white_space_is_what_was_asked_for():
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"const": 1}}}, "required": ["a"]}
    for options in ({}, {"disable_any_whitespace": True}):
        plain = texts_of(schema, **options)
        assert plain and all(text == json.dumps(json.loads(text)) for text in plain)
    free = compiled(schema, disable_any_whitespace=False)
    assert free.matches(b'{"a":[1, 1]}') and free.matches(b'{\n"a":\t[ 1,1\n] }')
    assert not free.matches(b'{  "a":[1]}')
    assert not free.matches(b'{\n\n"a":[1]}')
    assert compiled(schema, whitespace_pattern="( |\\n){2}").matches(b'{  "a": \n[  1  ] \n}')
    for pattern in (r"\s", "x?", ".", "[ -#]"):
        with pytest.raises(RequestError, match="only spaces, tabs and line breaks") as caught:
            compiled(schema, whitespace_pattern=pattern)
        assert caught.value.param == "whitespace_pattern"


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"email", "hostname"}))
def test_formats_are_enforced(name):
    for text in texts_of({"type": "string", "format": name}, 100):
        assert not list(faults({"type": "string", "format": name}, text.encode())), text


def test_every_day_of_the_calendar_is_a_date():
    dfa = compiled({"type": "string", "format": "date"})
    for year in (1900, 1999, 2000, 2023, 2024, 2100, 2400):
        for month in range(14):
            for day in range(33):
                text = f"{year}-{month:02}-{day:02}"
                try:
                    expected = bool(datetime.date.fromisoformat(text))
                except ValueError:
                    expected = False
                assert dfa.matches(f'"{text}"'.encode()) == expected, text


@settings(max_examples=50)
@given(st.none() | st.integers(-3000, 3000), st.none() | st.integers(-3000, 3000), st.integers(0, 10**9))
def test_bounds_of_integers_are_exact(least, most, seed):
    node = integers(least, most)
    try:
        dfa = node_to_dfa(node, "json")
    except RequestError:
        assert least is not None and most is not None and least > most
        return
    chance = random.Random(seed)
    edges = {edge + step for edge in (least, most, 0, 9, 10, 99, 100, 1000) if edge is not None for step in (-1, 0, 1)}
    for value in [
        *sorted(edges | {-edge for edge in edges}),
        *(chance.randint(-9999, 9999) for _ in range(100)),
        10**40,
    ]:
        inside = (least is None or value >= least) and (most is None or value <= most)
        assert dfa.matches(str(value).encode()) == inside, value
    assert not any(dfa.matches(text) for text in (b"-0", b"00", b"01", b"-", b"", b"1.0"))


REFUSED = [
    ({"type": "string", "format": "hostname"}, "hostname"),
    ({"type": "string", "pattern": "a", "minLength": 1}, "'minLength' together with 'pattern'"),
    ({"type": "string", "pattern": "(?=a)"}, "look-ahead"),
    ({"type": "number", "maximum": 3}, "maximum"),
    ({"type": "number", "minimum": 1}, "minimum"),
    ({"type": ["integer", "number"], "maximum": 3}, "maximum"),
    ({"type": "integer", "multipleOf": 3}, "multipleOf"),
    ({"type": "array"}, "items"),
    ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "items": {"type": "null"}, "contains": {}}, "allOf|anyOf"),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "null"}}, "prefixItems"),
    ({"type": "array", "prefixItems": [{"type": "null"}], "minItems": 2}, "prefixItems"),
    ({"type": "object"}, "properties"),
    ({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True}, "additionalProperties"),
    ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]}, "'b'"),
    ({"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 1}, "anyOf"),
    ({"type": "object", "properties": {"a": {"type": "object", "patternProperties": {}}}}, "at #/properties/a: "),
    ({"not": {"const": 5}}, "anyOf|not"),
    ({"const": 1, "minimum": 3}, "minimum"),
    ({"anyOf": [{"type": "null"}], "type": "null"}, "type"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "anyOf|no integers"),
    ({"oneOf": [{"const": 1}, {"enum": [1, 2]}]}, "oneOf"),
    ({"allOf": [{"type": "null"}, {"type": "null"}]}, "allOf"),
    ({}, "any type"),
    (True, "any type"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, "recursive"),
    ({"type": "array", "items": {"$ref": "#"}}, "recursive"),
    ({"$ref": "other.json"}, "within"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "what"), REFUSED, ids=lambda part: json.dumps(part)[:50])
def test_schema_keywords_that_fsm_does_not_enforce_are_rejected_by_name(schema, what):
    asked = StructuredOutputsParams(json=json.dumps(schema))
    with pytest.raises(RequestError, match=what) as caught:
        FsmBackend().check(asked)
    assert caught.value.param == "json"


NULL = {"type": "null"}
WRONG = [
    *[{"type": name} for name in ("what", 3, [])],
    *[{"enum": []}, {"enum": 3}, {"anyOf": []}, {"const": float("inf")}, {"$ref": "#/$defs/none"}, {"$ref": 3}],
    *[{"type": "string", "maxLength": most} for most in (-1, 2.5, 100_000)],
    {"type": "string", "minLength": 3, "maxLength": 2},
    *[{"type": "string", "pattern": pattern} for pattern in (3, "\ud800", "(")],
    *[{"type": "string", "enum": [3]}, {"type": "string", "format": []}],
    *[{"type": "integer", "minimum": least} for least in ("0", 1e40, True)],
    {"type": "integer", "minimum": 3, "maximum": 2},
    *[
        {"type": "object", "properties": properties}
        for properties in ([], {"a": 3}, {str(i): NULL for i in range(600)})
    ],
    {"type": "object", "properties": {"a": NULL}, "required": [[]]},
    {"$ref": "#/$defs/a/b", "$defs": {"a": 3}},
    {"type": "array", "items": NULL, "minItems": 10**9},
    {
        "$ref": "#/$defs/0",
        "$defs": {str(i): {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(90)},
    },
    {"$ref": "#/$defs/0", "$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(80)}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"oneOf": [{"$ref": "#/$defs/a"}, NULL]}}},
    {"oneOf": [{"type": "object", "properties": 3, "required": 3}, {"type": "object", "required": ["a"]}]},
]


@pytest.mark.parametrize("schema", WRONG, ids=lambda schema: str(schema)[:50])
def test_a_schema_that_is_wrong_or_too_large_is_refused(schema):
    with pytest.raises(RequestError):
        compiled(schema)


def test_a_schema_of_many_large_parts_is_refused():
    bounded = {"type": "integer", "minimum": -123456789, "maximum": 98765}
    schema = {"type": "object", "properties": {f"p{i}": bounded for i in range(150)}}
    with pytest.raises(RequestError, match="more than 60,000 parts"):
        compiled(schema)


def test_an_object_of_many_optional_properties_is_small():
    schema = {"type": "object", "properties": {f"property{i}": {"type": "boolean"} for i in range(150)}}
    dfa = compiled(schema)
    assert dfa.num_states < 8000
    assert dfa.matches(b'{"property3": true, "property99": false}')
    assert not dfa.matches(b'{"property9": true, "property8": true}')


def test_arrays_within_arrays_are_small():
    schema: dict = {"type": "integer"}
    for _ in range(30):
        schema = {"type": "array", "items": schema}
    dfa = compiled(schema, disable_any_whitespace=True)
    assert dfa.num_states < 200
    assert dfa.matches(b"[" * 30 + b"1, -2" + b"]" * 30) and not dfa.matches(b"[" * 31 + b"1" + b"]" * 31)


def test_fast_forward_writes_what_a_schema_fixes():
    vocabulary = demo_vocabulary()
    asked = StructuredOutputsParams(
        json=json.dumps(PERSON | {"required": ["name", "age"]}), disable_any_whitespace=True
    )
    matcher = FsmBackend().compile(asked, vocabulary).new_matcher(fast_forward=True)
    text = b"".join(vocabulary.tokens[token] for token in matcher.advance([]).forced)
    assert text and b'{"name": "'.startswith(text)
