"""Schemas that cannot be enforced are rejected by name; no schema takes long or ends the process."""

import json
import time

import pytest
from grammar_mask_walks import matches
from json_schema_cases import INTEGER, STRING
from python_steps import python_steps

from quire.errors import RequestError
from quire.params import SamplingParams
from quire.params import StructuredOutputsParams as Asked
from quire.structured_outputs.backends import check
from quire.structured_outputs.json_schema.bounds import ANNOTATIONS, ENFORCED


def refusal(**asked: object) -> str:
    with pytest.raises(RequestError) as caught:
        check(Asked(**asked))
    assert caught.value.param is not None
    return str(caught.value)


def test_a_keyword_is_enforced_or_an_annotation():
    assert not ENFORCED & ANNOTATIONS


@pytest.mark.parametrize("schema", [{"proprties": {}}, {"items": {"x": {}}}, {"format": "colour"}, {"extends": {}}])
def test_unknown_keywords_and_formats_are_annotations_unless_they_are_refused(schema):
    check(Asked(json=schema))
    assert "unknown" in refusal(json=schema, unknown_keywords="refuse")


def test_known_annotations_and_extensions_are_not_unknown():
    schema = {"x-order": 3, "nullable": True, "format": "double", "then": {}, "contentEncoding": "base64"}
    check(Asked(json=schema, unknown_keywords="refuse"))


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("int32", -(2**31), 2**31 - 1), ("int64", 1024 - 2**63, 2**63 - 1024), ("uint8", 0, 255)]
)
def test_an_integer_format_is_a_range(kind, low, high):
    asked = Asked(json={"type": "integer", "format": kind})
    assert matches(asked, str(low))
    assert matches(asked, str(high))
    assert not matches(asked, str(low - 1))
    assert not matches(asked, str(high + 1))


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS - {"$schema", "$defs", "definitions"}))
def test_annotations_change_nothing(keyword):
    check(Asked(json={"type": "object", "properties": {"a": {"type": "string", keyword: "#x"}}}))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"const": "x" * 4097}, "#/const: a text must have at most 4,096 characters"),
        ({"enum": [["a", {"x" * 4097: 1}]]}, "#/enum/0/1: a text must have at most 4,096 characters"),
        ({"items": {"type": "strng"}}, "#/items/type: unknown type 'strng' (did you mean 'string'?)"),
        ({"anyOf": [{}, 5]}, "#/anyOf/1: a schema is an object, true or false"),
        ({"anyOf": []}, "#/anyOf: anyOf is a list of schemas, at least one"),
        ({"type": []}, "type is a name or a list of names"),
        ({"enum": []}, "enum is a list of values, at least one"),
        ({"required": "a"}, "required is a list of names"),
        ({"minLength": -1}, "#/minLength: must be a whole number, 0 or more"),
        ({"minItems": 2**40}, "must be at most 2,147,483,647"),
        ({"const": 2**53 + 1}, "numbers beyond 2**53 are not exact"),
        ({"minimum": 2**70}, "#/minimum: no number that large"),
        ({"const": {"a": [1e-300]}}, "#/const/a/0: numbers closer to zero than 1e-09"),
        ({"multipleOf": 0}, "must be above 0"),
        ({"minimum": True}, "must be a number"),
        ({"format": 3}, "#/format: a format is a string"),
        ({"not": {"pattern": "a"}}, "#/not: 'not' is not enforced: #/not/pattern has no negation"),
        (
            {"type": "object", "properties": {"a": {"if": {"format": "date"}, "then": {}, "else": {"type": "null"}}}},
            "#/properties/a/if",
        ),
        ({"uniqueItems": True}, "#/uniqueItems: 'uniqueItems' is not enforced"),
        ({"propertyNames": {"pattern": "a", "maxLength": 3}}, "#/propertyNames: only 'propertyNames' of a single"),
        ({"dependentRequired": {"a/b": "c"}}, "#/dependentRequired/a~1b"),
        (
            {
                "properties": {
                    "p": {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(5)]}
                }
            },
            "#/properties/p: more than 1024 combinations",
        ),
        ({"pattern": 5}, "a pattern is a string"),
        ({"pattern": r"\bx"}, "#/pattern: pattern: \\b is not supported"),
        ({"pattern": r"^\u0001$"}, "control characters"),
        ({"pattern": "[^]"}, "the set '[^]' is not supported"),
        ({"pattern": "(?=a)"}, "look-around"),
        ({"const": "\x01"}, "#/const: control characters"),
        ({"properties": {"\x00": {}}}, "control characters"),
        ({"$ref": "#/$defs/none"}, "#/$ref: the schema has nothing at '#/$defs/none'"),
        ({"$ref": "http://a.test/x"}, "only references within the schema"),
        ({"items": {"$id": "http://a.test/x", "$ref": "#/x"}}, "#/items/$ref: a subschema with its own $id"),
        ({"$schema": "http://a.test/x"}, "unknown dialect 'http://a.test/x'"),
        ({"minProperties": 2}, "more properties than are required by name, and one"),
        ({"$ref": "#"}, "a recursive $ref"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "a recursive $ref"),
        ({"$ref": "#", "title": "x", "minLength": 3}, "a recursive $ref"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "numbers that are no integers"),
        ({"allOf": [INTEGER, STRING]}, "#: no value satisfies the schema"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "#: no value satisfies the schema"),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/x/y"}},
                "required": ["a"],
                "type": "object",
                "$defs": {"x": {"y": {"items": {"allOf": [INTEGER, STRING]}, "minItems": 1, "type": "array"}}},
            },
            "schema at #/$defs/x/y/items: no value satisfies the schema",
        ),
        ({"type": "number", "multipleOf": 99991}, "multipleOf"),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "multipleOf"),
    ],
)
def test_a_schema_is_refused_with_its_place_and_a_reason(schema, why):
    message = refusal(json=schema)
    assert why in message
    assert message.startswith("schema at #") or "not valid Unicode" in message
    assert not any(internal in message for internal in ("$defs/d0", "&&", "json-schema:"))


def test_a_limit_on_products_of_alternatives_costs_little():
    def thing(i: int, j: int) -> dict:
        properties = {f"p{i}{j}{k}": STRING for k in range(4)}
        return {"type": "object", "properties": properties, "required": [f"p{i}{j}0"]}

    product = {"allOf": [{"anyOf": [thing(i, j) for j in range(4)]} for i in range(5)]}
    union = {"anyOf": [thing(i, j) for i in range(5) for j in range(4)]}
    assert "combinations of alternatives" in refusal(json={"items": product})
    refused = min(python_steps(lambda: refusal(json={"items": product}))[0] for _ in range(3))
    accepted = min(python_steps(check, Asked(json={"items": union}))[0] for _ in range(3))
    assert refused < 40 * accepted, "15 times; 90 times if the backend expands the product"


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "string", "format": "uri"}, {"const": "none"}],  # formats are annotations for some validators
        [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}],
        [{"type": "array", "contains": INTEGER}, {"type": "array", "items": STRING}],
        [{"type": "integer", "format": "int32"}, {"type": "integer", "minimum": 2**31}],
    ],
)
def test_branches_that_exclude_each_other_only_for_quire_are_refused(branches):
    assert "cannot be proven to exclude each other" in refusal(json={"oneOf": branches})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"oneOf": [{"type": "string", "pattern": "^[0-9]+$"}, {"enum": ["any"]}, {"type": "object"}]},
            ['"12"', '"any"', "{}"],
            ['"x"', "1"],
        ),
        (
            {"oneOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}, "additionalProperties": False}]},  # noqa: E501
            ['{"a": 1}', '{"b": 1}'],
            ["{}", "1", '{"a": 1, "b": 1}'],
        ),
        ({"type": "object", "not": {"required": ["a"]}}, ["{}", '{"b": 1}'], ['{"a": 1}']),
        ({"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True}, ['["y", "x"]', "[]"], ['["x", "x"]']),
        ({"if": {"type": "string"}, "then": {"maxLength": 2}, "else": {"const": 3}}, ['"ab"', "3"], ['"abc"', "4"]),
        ({"type": "string", "format": "email"}, ['"a.b.c.d@raw.githubusercontent.com"', f'"{"x" * 64}@web01"'], ['"a..b@c"', '"a@b.1"']),  # noqa: E501
        ({"type": "string", "format": "hostname"}, ['"web01"', f'"{"a" * 63}.example.com"'], [f'"{"a" * 64}.com"', '"1.2.3.4"', '"ab--c.d"']),  # noqa: E501
        ({"type": "string", "format": "ipv6"}, ['"::ffff:1.2.3.4"', '"1:2:3:4:5:6:1.2.3.4"'], ['"1:2:3:4:5:6:7:1.2.3.4"', '"::1.2.3"']),  # noqa: E501
        ({"type": "string", "format": "date-time"}, ['"2024-02-29t12:00:00z"'], ['"2023-02-29T12:00:00Z"']),
    ],
)  # fmt: skip
def test_an_output_is_what_the_schema_asks_for(schema, good, bad):
    for text in good:
        assert matches(Asked(json=schema), text), text
    for text in bad:
        assert not matches(Asked(json=schema), text), text


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "a" * 8193}, "at most 8,192 characters"),
        ({"grammar": "start: ("}, "Expected token"),
        ({"grammar": 'start: "' + "x" * 4097 + '"'}, "line 1: a text must have at most 4,096 characters"),
        ({"grammar": 'root ::= "' + "x" * 4097 + '"'}, "line 1: a text must have at most 4,096 characters"),
        ({"choice": ["a", "x" * 4097]}, "one choice must have at most 4,096 characters"),
        ({"json": {"const": "\ud800"}}, "not valid Unicode"),
        ({"json": '{"const": "\\ud800"}'}, "not valid Unicode"),
        ({"json": '{"properties": {"a\\ud800": {"type": "x"}}}'}, "not valid Unicode"),
        ({"json": {"$ref": "#/a/\ud800"}}, "not valid Unicode"),
        ({"grammar": 'start: %json {"const": "\\ud800"}'}, "not valid Unicode"),
        ({"structural_tag": '{"triggers": ["\\ud800"]}'}, "not valid Unicode"),
        *(
            ({"regex": "a", name: value}, f"{name} must be true or false")
            for name, value in (
                ("fast_forward", None),
                ("disable_any_whitespace", "yes"),
                ("disable_additional_properties", None),
            )
        ),
        ({"grammar": "start: <|im_end|>"}, "grammar, line 1: special tokens such as '<|im_end|>' are not supported"),
        ({"grammar": 'start: "a"\n<[1]>'}, "grammar, line 2"),
        ({"grammar": 'start: %json {"not": {"pattern": "a"}}'}, "schema at #/not: 'not' is not enforced"),
        (
            {"grammar": 'start: %json {"x-guidance": {"lenient": true}, "if": 1, "then": {}}'},
            "#/if: a schema is an object",
        ),
        ({"grammar": "start: %json {"}, "%json needs JSON"),
        ({"grammar": '%llguidance {"allow_invalid_utf8": true}\nstart: "a"'}, "options are"),
        ({"grammar": "start: @x"}, "cannot be enforced"),
        ({"grammar": 'start[stop="x"]: /a*/'}, "stop="),
        ({"grammar": "%lark start"}, "unknown directive '%lark'"),
        ({"grammar": "start: start"}, "no output satisfies this grammar"),
        ({"grammar": '{"grammars": [{"json_schema": {"not": {}}}]}'}, "cannot be enforced"),
        ({"grammar": "root ::= ("}, "grammar, line 1: expected"),
        ({"grammar": "root ::= a"}, "there is no rule 'a'"),
        ({"grammar": 'a ::= "x"'}, "there is no rule root"),
        ({"grammar": 'root ::= "a"\nroot ::= "b"'}, "grammar, line 2: rule 'root' is defined twice"),
        ({"grammar": "root ::= ~"}, "grammar, line 1: unexpected '~'"),
        ({"grammar": "root ::= [z-a]"}, "the range z-a is empty"),
        ({"grammar": 'root ::= "a"{3,2}'}, "repetition"),
        ({"grammar": "root ::= root"}, "no output satisfies"),
        ({"structural_tag": {"type": "x"}}, "structural_tag is"),
        ({"structural_tag": {"format": {}}}, "format/type: unknown type None"),
        ({"structural_tag": {"triggers": ["<"], "structures": []}}, "structures is a list"),
        (
            {"structural_tag": {"triggers": ["<"], "structures": [{"begin": "a"}]}},
            "must start with one of the triggers",
        ),
        ({"structural_tag": {"triggers": ["<"], "structures": [{"begin": "<", "schema": {"not": 1}}]}}, "#/not"),
        ({"json": {}, "whitespace_pattern": "[^a]*"}, "whitespace_pattern may be made of"),
        ({"json": {}, "whitespace_pattern": "a"}, "whitespace_pattern may be made of"),
    ],
)
def test_other_constraints_are_refused_with_a_reason(asked, why):
    assert why in refusal(**asked)


def test_fields_of_a_form_have_names():
    with pytest.raises(RequestError, match="structured_outputs must be"):
        SamplingParams(structured_outputs={1: 2})


def chain(length: int) -> dict:
    """Definitions, each nested in the previous one."""
    definitions = {
        f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": INTEGER}}


def bomb(length: int) -> dict:
    """Definitions, each twice as large as the previous one if references are expanded."""

    def joined(i: int) -> dict:
        return {"type": "object", "allOf": [{"$ref": f"#/$defs/d{i}"}]}

    halves = {
        f"d{i}": {"type": "object", "properties": {"x": joined(i + 1), "y": joined(i + 1)}} for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**halves, f"d{length}": {"type": "object"}}}


def nested(depth: int) -> dict:
    return {"type": "object", "properties": {"a": nested(depth - 1)}, "required": ["a"]} if depth else STRING


WORDS = [f"{i:x}" * 6 for i in range(4000)]
EVIL = {
    "a chain of definitions": {"json": chain(1100)},
    "a bomb of definitions": {"json": bomb(30)},
    "many branches": {"json": {"anyOf": [{"type": "object", "properties": {f"p{i}": STRING}} for i in range(2000)]}},
    "products of branches": {
        "json": {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(9)]} for i in range(9)]}
    },
    "many properties": {"json": {"type": "object", "properties": {f"p{i}": INTEGER for i in range(3000)}}},
    "nested objects": {"json": nested(31)},
    "a large enum": {"json": {"enum": WORDS}},
    "objects in an enum": {"json": {"enum": [{"a": i, "b": str(i)} for i in range(1500)]}},
    "long strings": {"json": {"type": "string", "minLength": 10**9, "maxLength": 2 * 10**9}},
    "many items": {"json": {"type": "array", "minItems": 10**9, "items": {"type": "array", "maxItems": 10**9}}},
    "a costly pattern": {"json": {"type": "string", "pattern": "^(a|b)*a(a|b){60}$", "maxLength": 10**6}},
    "many patterns": {
        "json": {"type": "object", "patternProperties": {f"^{i}.*x{{{i}}}$": INTEGER for i in range(90)}}
    },
    "doubt": {"regex": "(a|b)*a(a|b){400}"},
    "many doubts": {"regex": "(a?){1000}a{1000}"},
    "repeated repetitions": {"regex": "((([a-z]{0,1000}){0,1000}){0,1000}){0,1000}"},
    "unions of stars": {"regex": "|".join(f".*{word[:4]}.*" for word in WORDS[:800])},
    "classes": {"regex": r"[\w\W]" * 1300},
    "parentheses": {"regex": "(" * 4000 + "a" + ")" * 4000},
    "many choices": {"choice": tuple(WORDS)},
    "a chain of rules": {"grammar": "\n".join(f'start{i or ""}: "a" start{i + 1}' for i in range(2000))},
    "a chain of terminals": {"grammar": "start: T0\n" + "\n".join(f"T{i}: T{i + 1}" for i in range(2000))},
    "powers of rules": {
        "grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40: "a"'
    },
    "powers of terminals": {
        "grammar": "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(40)) + 'R40: "a"'
    },
    "an ambiguous grammar": {"grammar": 'start: s\ns: s s | s s s | "a" | "a" s | ""'},
    "parentheses in a grammar": {"grammar": "start: " + "(" * 15000 + '"a"' + ")" * 15000},
    "parentheses in ebnf": {"grammar": "root ::= " + "(" * 15000 + '"a"' + ")" * 15000},
    "parentheses in rules": {
        "grammar": "start: t0\n" + "".join(f"t{i}: {'(' * 9}t{i + 1}{')?' * 9}\n" for i in range(500))
    },
    "parentheses in rules of ebnf": {
        "grammar": "root ::= t0\n"
        + "".join(f"t{i} ::= {'(' * 9}t{i + 1}{')?' * 9}\n" for i in range(500))
        + "t500 ::= root"
    },
    "repeated repetitions in ebnf": {"grammar": 'root ::= "a"' + "*" * 30000},
    "many recursive rules": {
        "grammar": "root ::= a0\n"
        + "".join(f'a{i} ::= [a-z] a{i + 1} "x{i}"?\n' for i in range(500))
        + "a500 ::= root?"
    },
    "a chain of ebnf": {"grammar": "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(1900))},
}


@pytest.mark.parametrize("name", EVIL)
def test_checking_a_hostile_constraint_takes_bounded_time(name):
    def check_constraint():
        try:
            check(Asked(**EVIL[name]))
        except RequestError as error:
            assert len(str(error)) < 600

    steps, _ = python_steps(check_constraint)
    assert steps < 40_000_000, "it takes 8 million at most"


def required(count, kind=INTEGER):
    names = [f"p{i}" for i in range(count)]
    return {"type": "object", "properties": dict.fromkeys(names, kind), "required": names}


def test_schemas_within_the_bounds_are_accepted():
    check(Asked(json=chain(100)))
    check(Asked(json=nested(31)))
    check(Asked(json={"type": "object", "properties": {f"p{i}": INTEGER for i in range(1000)}}))
    check(Asked(choice=tuple(WORDS)))
    check(Asked(json=json.dumps({"enum": WORDS[:2000]})))


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
OF_OPENAIS_SIZE = {  # within OpenAI's limits for strict schemas, or near them
    "5,000 properties": required(5000),
    "1,000 properties of 120,000 characters": required(1000, {"type": "string", "description": "x" * 110}),
    "20 objects of 250": {"type": "object", "properties": {f"o{i}": required(250) for i in range(20)}},
    "1,500 nullable": required(1500, NULLABLE),
    "100 definitions of 30": {
        "type": "object",
        "properties": {f"o{i}": {"$ref": f"#/$defs/d{i}"} for i in range(100)},
        "$defs": {f"d{i}": required(30) for i in range(100)},
    },
    "1,000 enum values": {"enum": [f"value {i}" for i in range(1000)]},
    "10 levels": chain(10),
}


@pytest.mark.parametrize("name", OF_OPENAIS_SIZE)
def test_schemas_of_openais_size_are_compiled_in_a_second(name):
    began = time.process_time()
    check(Asked(json=OF_OPENAIS_SIZE[name]))
    assert time.process_time() - began < 2, "0.3 s on a quiet machine; the goal is 1"


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (required(5001), "more than 5,000 properties"),
        (
            {"type": "object", "properties": dict.fromkeys(required(1001)["properties"], INTEGER)},
            "more than 1,000 of one",
        ),
        (
            required(4100, {"anyOf": [{"type": name} for name in ("integer", "string", "null", "boolean")]}),
            "than 20,000 parts",
        ),
    ],
)
def test_a_schema_above_a_limit_is_refused_with_the_limit(schema, says):
    with pytest.raises(RequestError, match=says):
        check(Asked(json=schema))
