"""Schemas that cannot be enforced are rejected by name; no schema takes long or ends the process."""

import json
import time

import pytest
from json_schema_cases import INTEGER, STRING

from quire.errors import RequestError
from quire.params import SamplingParams
from quire.params import StructuredOutputsParams as Asked
from quire.structured_outputs.backends import check
from quire.structured_outputs.json_schema.bounds import ANNOTATIONS, ENFORCED, REFUSED
from quire.structured_outputs.json_schema.values import FORMATS


def refusal(**asked: object) -> str:
    with pytest.raises(RequestError) as caught:
        check(Asked(**asked))
    assert caught.value.param is not None
    return str(caught.value)


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_a_keyword_that_is_not_enforced_is_refused_where_it_stands(keyword):
    schema = {"type": "object", "properties": {"a/b": {"items": {keyword: True}}}}
    assert refusal(json=schema).startswith(f"schema at #/properties/a~1b/items/{keyword}: {keyword!r} is not enforced")


def test_keywords_are_enforced_or_annotations_or_refused():
    assert not ENFORCED & ANNOTATIONS
    assert not (ENFORCED | ANNOTATIONS) & REFUSED.keys()


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS - {"$schema", "$defs", "definitions"}))
def test_annotations_change_nothing(keyword):
    check(Asked(json={"type": "object", "properties": {"a": {"type": "string", keyword: "#x"}}}))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"const": "x" * 4097}, "#/const: a text must have at most 4,096 characters"),
        ({"enum": [["a", {"x" * 4097: 1}]]}, "#/enum/0/1: a text must have at most 4,096 characters"),
        ({"proprties": {}}, "#/proprties: unknown keyword 'proprties' (did you mean 'properties'?)"),
        ({"items": {"type": "strng"}}, "#/items/type: unknown type 'strng' (did you mean 'string'?)"),
        ({"x": {}, "anyOf": [{}, 5]}, "unknown keyword 'x'"),
        ({"anyOf": [{}, 5]}, "#/anyOf/1: a schema is an object, true or false"),
        ({"anyOf": []}, "#/anyOf: anyOf is a list of schemas, at least one"),
        ({"type": []}, "type is a name or a list of names"),
        ({"enum": []}, "enum is a list of values, at least one"),
        ({"required": "a"}, "required is a list of names"),
        ({"minLength": -1}, "#/minLength: must be a whole number, 0 or more"),
        ({"minItems": 2**40}, "must be at most 2,147,483,647"),
        ({"maximum": 2**53 + 1}, "numbers beyond 2**53 are not exact"),
        ({"const": {"a": [1e-300]}}, "#/const/a/0: numbers closer to zero than 1e-09"),
        ({"multipleOf": 0}, "must be above 0"),
        ({"minimum": True}, "must be a number"),
        ({"format": "idn-email"}, f"use one of {', '.join(sorted(FORMATS))}"),
        ({"pattern": 5}, "a pattern is a string"),
        ({"pattern": r"\bx"}, "#/pattern: pattern: \\b is not supported"),
        ({"pattern": r"^\u0001$"}, "control characters"),
        ({"pattern": "[^]"}, "the set '[^]' is not supported"),
        ({"pattern": "(?=a)"}, "look-around"),
        ({"const": "\x01"}, "#/const: control characters"),
        ({"properties": {"\x00": {}}}, "control characters"),
        ({"$ref": "#/$defs/none"}, "#/$ref: the schema has nothing at '#/$defs/none'"),
        ({"$ref": "http://a.test/x"}, "only references within the schema"),
        ({"items": {"$id": "http://a.test/x"}}, "cannot have its own $id"),
        ({"$schema": "http://a.test/x"}, "unknown dialect 'http://a.test/x'"),
        ({"minProperties": 2}, "more properties than are required by name, and one"),
        ({"$ref": "#"}, "a recursive $ref"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "a recursive $ref"),
        ({"$ref": "#", "title": "x", "minLength": 3}, "a recursive $ref"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "cannot be proven to exclude each other; use anyOf"),
        ({"allOf": [INTEGER, STRING]}, "nsatisfiable"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "nsatisfiable"),
        ({"type": "number", "multipleOf": 99991}, "multipleOf"),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "multipleOf"),
    ],
)
def test_a_schema_is_refused_with_its_place_and_a_reason(schema, why):
    assert why in refusal(json=schema)


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
            ({"regex": "a", name: None}, f"{name} must be true or false")
            for name in ("fast_forward", "disable_any_whitespace", "disable_additional_properties")
        ),
        ({"grammar": "start: <|im_end|>"}, "grammar, line 1: special tokens such as '<|im_end|>' are not supported"),
        ({"grammar": 'start: "a"\n<[1]>'}, "grammar, line 2"),
        ({"grammar": 'start: %json {"not": {}}'}, "schema at #/not: 'not' is not enforced"),
        ({"grammar": 'start: %json {"x-guidance": {"lenient": true}, "if": 1}'}, "'if' is not enforced"),
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
        ({"structural_tag": {"format": {}}}, "format is not supported"),
        ({"structural_tag": {"triggers": ["<"], "structures": []}}, "structures is a list"),
        (
            {"structural_tag": {"triggers": ["<"], "structures": [{"begin": "a"}]}},
            "must start with one of the triggers",
        ),
        ({"structural_tag": {"triggers": ["<"], "structures": [{"begin": "<", "schema": {"if": 1}}]}}, "#/if"),
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
def test_nothing_that_is_asked_takes_long(name):
    began = time.perf_counter()
    try:
        check(Asked(**EVIL[name]))
    except RequestError as error:
        assert len(str(error)) < 600
    assert time.perf_counter() - began < 1, "of a machine that does other things, too; alone it is 0.15 s at most"


def test_what_is_within_the_bounds_is_not_refused():
    check(Asked(json=chain(100)))
    check(Asked(json=nested(31)))
    check(Asked(json={"type": "object", "properties": {f"p{i}": INTEGER for i in range(512)}}))
    check(Asked(choice=tuple(WORDS)))
    check(Asked(json=json.dumps({"enum": WORDS[:2000]})))
