"""Lark's directives for arguments that are not JSON, and for special tokens."""

import contextlib
import itertools
import json

import jsonschema
import pytest
from grammar_mask_walks import BYTES, END, allowed, matches
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.params import StructuredOutputsParams as Asked
from quire.structured_outputs.backends import check, compile
from quire.structured_outputs.grammar_compilation import vocabulary_of
from quire.structured_outputs.vocabulary import Vocabulary

TAGS = {"key_begin": "<", "key_end": "=", "value_begin": "", "value_end": "/>"}
STRING = {"type": "string"}


def tagged(value, **more):
    schema = {"type": "object", "properties": {"a": value}, "required": ["a"], **more}
    return Asked(grammar=f"start: %tagged {json.dumps({'schema': schema, **TAGS})}")


def keywords(properties, required=(), **more):
    schema = {"type": "object", "properties": properties, "required": list(required), **more}
    return Asked(grammar=f'start: "f(" %keywords {json.dumps(schema)} ")"', disable_any_whitespace=True)


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        (STRING, ["", "b", "/", "a\nb", "/ >", "日本🎉", "null", "{"], ["/>", "a/>b"]),
        ({}, ["", "5", "[1]"], ["/>"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "日本🎉", "a/b"], ["a", "abcd"]),
        ({"type": "string", "minLength": 2}, ["ab", "abcdef"], ["a", ""]),
        ({"type": "string", "maxLength": 2}, ["", "ab"], ["abc"]),
        ({"type": "string", "pattern": "^[a-z/]+$"}, ["ab", "a/b"], ["", "a1"]),
        ({"type": "string", "pattern": "^a"}, ["a", "ab\n"], ["ba"]),
        ({"type": "string", "pattern": "b$"}, ["b", "ab"], ["ba"]),
        ({"type": "string", "pattern": "x|y"}, ["x", "ayb"], ["a"]),
        ({"type": "string", "pattern": r"\d[/]"}, ["1/", "a2/b"], ["1", "/"]),
        ({"type": "string", "pattern": "^b", "maxLength": 2}, ["b", "bc"], ["bcd", "c"]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "x"]),
        ({"type": "string", "not": {"enum": ["a", "b/"]}}, ["ab", "b"], ["a", "b/"]),
        ({"allOf": [{"type": "string"}]}, ["x"], ["/>"]),
        ({"type": "string", "anyOf": [{"maxLength": 1}, {"pattern": "^b"}]}, ["", "a", "bc"], ["ac"]),
        ({"type": "string", "enum": ["a", "ab", "/>"]}, ["a", "ab"], ["b", "/>"]),
        ({"const": "null"}, ["null"], ["x"]),
        ({"enum": ["auto", 5, None, True, 1.5]}, ["auto", "5", "null", "true", "1.5"], ["no", "None"]),
        ({"enum": ["5", 5, None, "null"]}, ["5", "null"], ['"5"']),
        ({"type": ["string", "null"]}, ["null", "a", "5", "[]"], [" null", "None"]),
        ({"anyOf": [STRING, {"type": "null"}]}, ["null", "a"], ["null\n"]),
        ({"type": ["string", "integer"]}, ["12", "-3", "a", "null"], ["1.5", "007", "+1", "1e5", " 2", "1a"]),
        ({"type": ["string", "number"]}, ["1.5", "x"], ["1.", " 1", "1e5"]),
        ({"type": ["string", "boolean"]}, ["true", "false", "yes"], ["True", " true"]),
        ({"type": ["string", "array"]}, ["a"], ["[1]", " [", "(1)"]),
        ({"type": ["string", "object"]}, ["a"], ["{}", "{"]),
        ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer", "minimum": 5}]}, ["a"], ["7", "ab"]),
        ({"type": "integer"}, ["5", "-1"], ["1.5", "a", ""]),
        ({"type": "boolean"}, ["true"], ["True", "yes"]),
        ({"type": "array", "items": STRING}, ["[]", '["/>"]'], ["['a']"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["5", "null"], ["a"]),
    ],
)
def test_a_value_between_tags(value, good, bad):
    asked = tagged(value)
    for text in good:
        assert matches(asked, f"<a={text}/>"), text
    for text in bad:
        assert not matches(asked, f"<a={text}/>"), text


POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": STRING}, "required": ["x"]}
INTEGERS = {"type": "array", "items": {"type": "integer"}}
PAIR = {"type": "array", "prefixItems": [{"type": "integer"}, STRING]}
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
}
REFUSED_BY_ALL = ["", "'a'", "$a", "[,]", "{x}", "[1, 2]", "{x: 1}"]


def quoted(value, **more):
    schema = {"type": "object", "properties": {"a": value}, "required": ["a"], **more}
    return Asked(grammar=f"start: %quoted {json.dumps({'schema': schema, 'quote': '$'})}")


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        (STRING, ["$$", "$b$", '$"{a:1},\n$', "$日本🎉$"], ['"a"', "a", "5", "$a$b$"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["$ab$", "$日本🎉$"], ["$a$", "$abcd$", "$$"]),
        ({"type": "string", "pattern": "^[a-z]+$"}, ["$ab$"], ["$$", "$a1$"]),
        ({"type": "string", "format": "date"}, ["$2024-02-29$"], ["$2023-02-29$"]),
        ({"enum": ["b", 5, None, True, [1, "c"], {"d": 1.5}]}, ["$b$", "5", "null", "[1,$c$]", "{d:1.5}"], ["$5$"]),
        ({"type": ["string", "null"]}, ["$a$", "null"], ["None", "true"]),
        ({"type": "integer", "minimum": 5}, ["5", "70"], ["4", "5.5", "$5$"]),
        ({"type": "number"}, ["5", "-1.5"], ["true"]),
        ({"type": "boolean"}, ["true", "false"], ["True", "null"]),
        ({"type": ["boolean", "integer"], "not": {"enum": [True, 5]}}, ["false", "6"], ["true", "5"]),
        ({"allOf": [POINT, {"required": ["y"]}]}, ["{x:1,y:$$}"], ["{x:1}", "{}"]),
        ({"$ref": "#/$defs/n", "required": ["v"]}, ["{v:1}", "{v:1,kids:[{}]}"], ["{}"]),
        ({"allOf": [{"type": ["integer", "string"]}, {"minimum": 5}]}, ["5", "$a$"], ["4", "null"]),
        ({"anyOf": [{"type": "integer"}, POINT]}, ["5", "{x:1}"], ["{y:$b$}", "null"]),
        (POINT, ["{x:1}", "{x:1,y:$b$}"], ["{}", "{y:$b$,x:1}", "{x:1,z:2}", '{"x":1}', "{x:1,}"]),
        ({"type": "object"}, ["{}", "{b:1,c:[{d:$e$},null,2.5]}"], ["{b c:1}", "[]"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", "{b:1,c:2}"], ["{b:$c$}"]),
        ({"type": "array", "items": STRING}, ["[]", "[$b$]", "[$b$,$c$,$$]"], ["[1]", "[$b$,]"]),
        ({**INTEGERS, "minItems": 2, "maxItems": 3}, ["[1,2]", "[1,2,3]"], ["[1]", "[1,2,3,4]"]),
        ({**INTEGERS, "minItems": 2}, ["[1,2]", "[1,2,3,4,5]"], ["[1]", "[]"]),
        ({**INTEGERS, "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        (PAIR, ["[]", "[1]", "[1,$b$]", "[1,$b$,null,{}]"], ["[$b$]", "[1,2]"]),
        ({**PAIR, "items": False, "minItems": 1}, ["[1]", "[1,$b$]"], ["[]", "[1,$b$,2]"]),
        ({**PAIR, **INTEGERS, "minItems": 3}, ["[1,$b$,3]", "[1,$b$,3,4]"], ["[1,$b$]", "[1,$b$,$c$]"]),
        ({**PAIR, **INTEGERS, "maxItems": 3}, ["[]", "[1,$b$,3]"], ["[1,$b$,3,4]"]),
        ({**PAIR, "maxItems": 1}, ["[]", "[1]"], ["[1,$b$]"]),
        ({}, ["$b$", "5", "null", "[1,[$c$]]", "{d:{}}"], []),
        ({"$ref": "#/$defs/n"}, ["{}", "{v:1}", "{v:1,kids:[{v:2,kids:[{}]}]}"], ["{kids:[1]}"]),
    ],
)  # fmt: skip
def test_a_value_with_quotes(value, good, bad):
    asked = quoted(value, **{"$defs": {"n": NODE}})
    for text in good:
        assert matches(asked, f"{{a:{text}}}"), text
    for text in (*bad, *REFUSED_BY_ALL):
        assert not matches(asked, f"{{a:{text}}}"), text


def test_properties_with_quotes_have_the_order_of_the_schema():
    asked = quoted(STRING, properties={"b": STRING, "a": STRING, "c d": {"type": "integer"}})
    for text in ("{a:$$}", "{b:$x$,a:$$}", "{a:$$,c d:1}", "{b:$$,a:$$,c d:1}"):
        assert matches(asked, text), text
    for text in ("{}", "{b:$$}", "{a:$$,b:$$}", "{a:$$}}", "{a:$$,d:1}"):
        assert not matches(asked, text), text


def test_a_quote_that_is_a_special_token_is_written_as_one():
    known = Vocabulary([*BYTES.tokens, b""], (END,), frozenset({END, 257}), BYTES.encode, {257: b"$"})
    compiled = compile(quoted({"type": "string", "maxLength": 2}), known)
    for text in (b"", b"b", b"bc"):
        matcher = compiled.new_matcher(fast_forward=False)
        assert not matcher.advance([*b"{a:", 257, *text, 257, *b"}"]).error
        assert END in allowed(matcher, known)
    assert compiled.new_matcher(fast_forward=False).advance([*b"{a:", 257, *b"bcd"]).error
    assert compiled.new_matcher(fast_forward=False).advance(list(b"{a:$")).error


def test_properties_between_tags_have_the_order_of_the_schema():
    asked = tagged(STRING, properties={"b": STRING, "a": STRING, "c": {"type": "integer"}})
    for text in ("<a=/>", "<b=x/><a=/>", "<a=/><c=1/>", "<b=/><a=/><c=1/>"):
        assert matches(asked, text), text
    for text in ("", "<b=/>", "<a=/><b=/>", "<a=/><a=/>", "<a=/><d=/>", "<a=/> "):
        assert not matches(asked, text), text


def test_an_object_without_properties_takes_any_texts_between_tags():
    for schema in (True, {"type": "object"}, {"$ref": "#/$defs/o", "$defs": {"o": {"type": "object"}}}):
        asked = Asked(grammar=f"start: %tagged {json.dumps({'schema': schema, **TAGS})}")
        for text in ("", "<x=1/>", "<x=/><y_1=a/>"):
            assert matches(asked, text), text
        assert not matches(asked, "<a b=1/>")
    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    asked = Asked(grammar=f'start: "-" %tagged {json.dumps({"schema": closed, **TAGS})}')
    assert matches(asked, "-")
    assert not matches(asked, "-<x=1/>")


@pytest.mark.parametrize(
    ("properties", "required", "good", "bad"),
    [
        ({}, "", ["f()"], ["f(a=1)"]),
        ({"a": STRING}, "a", ['f(a="x")', r'f(a="\"\\\n")'], ["f()", "f(a='x')", "f(a=1)", 'f(a="x", )']),
        ({"a": {"type": "integer"}, "b": {"type": "number"}}, "a b", ["f(a=1, b=2.5)"], ["f(b=2.5, a=1)", "f(a=1)"]),
        ({"a": STRING, "b": {"type": "integer"}}, "b", ["f(b=1)", 'f(a="", b=1)'], ["f()", 'f(a="")', "f(b=1, b=1)"]),
        ({"a": {"const": 1}, "b": {"const": 2}}, "", ["f()", "f(a=1)", "f(b=2)", "f(a=1, b=2)"], ["f(b=2, a=1)"]),
        ({"a": {"type": "boolean"}}, "a", ["f(a=True)", "f(a=False)"], ["f(a=true)", "f(a=None)", "f(a=1)"]),
        ({"a": {"type": ["integer", "null"]}}, "a", ["f(a=3)", "f(a=None)"], ["f(a=null)", "f(a=True)"]),
        ({"a": {"enum": [True, None, "x", 5]}}, "a", ["f(a=True)", "f(a=None)", 'f(a="x")', "f(a=5)"], ["f(a=False)"]),
        ({"a": {}}, "a", ["f(a=True)", "f(a=None)", 'f(a={"x": [1, true]})'], ["f(a=)"]),
        ({"a": {"type": "array", "items": {"type": "boolean"}}}, "a", ["f(a=[true])"], ["f(a=[True])"]),
    ],
)  # fmt: skip
def test_keyword_arguments(properties, required, good, bad):
    asked = keywords(properties, required.split(), additionalProperties=False)
    for text in good:
        assert matches(asked, text), text
    for text in bad:
        assert not matches(asked, text), text


NUMBERS = {name: {"type": "integer"} for name in "abc"}
KIND = {"kind": {"enum": ["in", "out"]}, "a": {"type": "integer"}}
A, B = {"required": ["a"]}, {"required": ["b"]}
INPUT = {"properties": {"kind": {"const": "in"}, "a": {"type": "integer"}}, "required": ["kind", "a"]}
OUTPUT = {"properties": {"kind": {"const": "out"}, "b": STRING}, "required": ["kind", "b"]}
ONLY_A = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
ONLY_B = {"properties": {"b": STRING}, "required": ["b"]}
IF_INPUT = {"if": {"properties": {"kind": {"const": "in"}}}, "then": A}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"properties": NUMBERS, "anyOf": [A, B]},
            ["a=1", "b=1", "a=1, b=2", "a=1, c=2"],
            ["", "c=1", "b=1, a=1"],
        ),
        ({"properties": NUMBERS, "oneOf": [A, B]}, ["a=1", "b=1", "a=1, c=2"], ["", "a=1, b=2", "c=1"]),
        (
            {"properties": NUMBERS, "required": ["c"], "allOf": [{"properties": {"d": STRING}, "required": ["d"]}]},
            ['c=1, d="x"', 'a=1, c=1, d=""'],
            ["c=1", 'd="x"'],
        ),
        ({"properties": NUMBERS, "anyOf": [A], "additionalProperties": False}, ["a=1"], ["b=1"]),
        (
            {"properties": KIND, "required": ["kind"], **IF_INPUT},
            ['kind="in", a=1', 'kind="out"', 'kind="out", a=2'],
            ['kind="in"', "a=1", 'kind="up", a=1'],
        ),
        ({"oneOf": [INPUT, OUTPUT]}, ['kind="in", a=1', 'kind="out", b=""'], ['kind="in", b=""', 'kind="out"', ""]),
        ({"anyOf": [{"$ref": "#/$defs/x"}, ONLY_B], "$defs": {"x": ONLY_A}}, ["a=1", 'b="x"'], ["", 'a="x"']),
        ({"properties": {"a": STRING}, "anyOf": [{"properties": {"a": {"maxLength": 1}}}, A]}, ["", 'a="xy"'], []),
    ],
)
def test_alternatives_of_properties(schema, good, bad):
    """As keyword arguments, and between tags."""
    whole = {"type": "object", **schema}
    as_keywords = Asked(grammar=f'start: "f(" %keywords {json.dumps(whole)} ")"', disable_any_whitespace=True)
    between_tags = Asked(grammar=f"start: %tagged {json.dumps({'schema': whole, **TAGS})}")
    for text in (*good, *bad):
        assert matches(as_keywords, f"f({text})") == (text in good), text
        written = "".join(f"<{one.strip()}/>" for one in text.replace('"', "").split(",") if one)
        assert matches(between_tags, written) == (text in good), written


CONDITIONS = st.recursive(
    st.one_of(
        st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True).map(lambda names: {"required": names}),
        st.sampled_from("abc").map(lambda name: {"properties": {name: False}}),
        st.sampled_from("abc").map(lambda name: {"properties": {name: {"enum": [1, 3]}}}),
    ),
    lambda inner: st.builds(
        lambda keyword, schemas: {keyword: schemas},
        st.sampled_from(["anyOf", "oneOf", "allOf"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=4,
)


@settings(max_examples=30, deadline=None)
@given(CONDITIONS)
def test_alternatives_of_properties_are_those_of_the_schema(condition):
    schema = {"type": "object", "properties": {name: {"enum": [1, 2]} for name in "abc"}, "allOf": [condition]}
    asked = Asked(grammar=f'start: "f(" %keywords {json.dumps(schema)} ")"')
    valid = jsonschema.Draft202012Validator(schema).is_valid
    choices = [dict(zip("abc", values, strict=True)) for values in itertools.product((None, 1, 2), repeat=3)]
    objects = [{name: value for name, value in one.items() if value is not None} for one in choices]
    try:
        grammar = compile(asked, BYTES)
    except RequestError:
        assume(not any(map(valid, objects)))  # or the branches of a oneOf cannot be distinguished
        return
    for one in objects:
        text = ", ".join(f"{name}={value}" for name, value in one.items())
        matcher = grammar.new_matcher(fast_forward=False)
        is_accepted = not matcher.advance(list(f"f({text})".encode())).error and END in allowed(matcher, BYTES)
        assert is_accepted == valid(one), (schema, text)


def test_schemas_that_refer_to_each_other_many_times_are_refused_at_once():
    schemas = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(8)}
    for last in (False, {"properties": {"a": {}}}):
        for write in (tagged, quoted):
            asked = write(STRING, **{"$ref": "#/$defs/d0", "$defs": {**schemas, "d8": last}})
            with pytest.raises(RequestError):
                check(asked)


def test_references_that_follow_each_other_many_times_are_written_or_refused():
    for num, write in ((500, lambda to: to), (160, lambda to: {"type": "array", "items": to})):
        schemas = {f"d{i}": write({"$ref": f"#/$defs/d{i + 1}"}) for i in range(num)}
        asked = quoted({"$ref": "#/$defs/d0"}, **{"$defs": {**schemas, f"d{num}": STRING}})
        with contextlib.suppress(RequestError):
            check(asked)


def test_an_object_without_properties_takes_any_keyword_arguments():
    asked = Asked(grammar='start: "f(" %keywords {"type": "object"} ")"', disable_any_whitespace=True)
    for text in ("f()", "f(a=1)", 'f(a=True, b={"c": null})'):
        assert matches(asked, text), text
    assert not matches(asked, "f(1)")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (tagged(STRING, patternProperties={"b": {}}), "in this format 'patternProperties' beside the properties"),
        (tagged(STRING, anyOf=[{"required": ["b"]}]), "schema at #: in this format the required 'b' must be in"),
        (tagged(STRING, anyOf=[{"properties": {"a": {"type": "null"}}}]), "#/properties/a: .* two descriptions of one"),
        (tagged(STRING, anyOf=[{"required": [x]} for x in "aa" * 17]), "more than 32 alternatives"),
        (tagged(STRING, required=["b"]), "schema at #: in this format the required 'b' must be in properties"),
        (tagged(STRING, type="array"), "schema at #: no arguments satisfy the schema"),
        (tagged({"enum": ["/>"]}), "schema at #/properties/a: in this format no text satisfies the schema"),
        (tagged({"type": "string", "pattern": "a^b"}), r"schema at #/properties/a/pattern: pattern: in this format \^"),
        (tagged({"type": "string", "pattern": "^a|b$"}), "schema at #/properties/a/pattern"),
        (tagged({"type": "string", "anyOf": [{"enum": ["b"]}]}), "'enum' beside other keywords is not enforced"),
        (
            quoted(STRING, properties={"a:b": {}}, required=[]),
            "schema at #/properties/a:b: in this format a name cannot",
        ),
        (quoted({"enum": ["$"]}), "schema at #/properties/a: in this format no text satisfies the schema"),
        (quoted({"type": "object", "patternProperties": {"b": {}}}), "'patternProperties' beside the properties"),
        (quoted(STRING, type="array"), "schema at #: no arguments satisfy the schema"),
        (Asked(grammar='start: %quoted {"schema": false, "quote": "$"}'), "schema at #: no arguments satisfy"),
        (Asked(grammar='start: %quoted {"schema": {}, "quote": ""}'), "%quoted needs an object with a schema and"),
        (keywords({"a b": {}}), "schema at #/properties/a b: in this format a name must be a Python identifier"),
        (Asked(grammar="start: %keywords false"), "schema at #: no arguments satisfy the schema"),
        (Asked(grammar='start: %keywords {"type": 5, "x-name": "tool g"}'), "tool g: schema at #/type"),
        (Asked(grammar="start: %special 5"), "grammar, line 1: %special needs a text"),
        (Asked(grammar="start: %tagged 5"), "grammar, line 1: %tagged needs an object with a schema"),
        (Asked(grammar='start: %tagged {"schema": {}}'), "%tagged needs a schema and the texts key_begin, key_end"),
    ],
)
def test_call_argument_schemas_that_a_format_cannot_write_are_rejected(asked, message):
    with pytest.raises(RequestError, match=message):
        check(asked)


def test_a_special_token_in_a_text_is_that_token_if_the_vocabulary_has_it():
    asked = Asked(grammar='start: %special "a<|x|>b" %special "<|y|>"')
    check(asked)
    assert matches(asked, "a<|x|>b<|y|>")
    known = Vocabulary([*BYTES.tokens, b""], (END,), frozenset({END, 257}), BYTES.encode, {257: b"<|x|>"})
    matcher = compile(asked, known).new_matcher(fast_forward=True)
    verdict = matcher.advance([])
    assert verdict.forced == [ord("a"), 257, *b"b<|y|>"]
    assert verdict.is_over
    slow = compile(asked, known).new_matcher(fast_forward=False)
    slow.advance([ord("a")])
    assert allowed(slow, known) == [257]
    assert slow.advance(list(b"<|x|>b")).error


def test_the_vocabulary_knows_the_texts_of_special_tokens(tokenizer):
    known = vocabulary_of(tokenizer, tokenizer.vocab_size, ())
    assert set(known.special_ids_by_text.values()) == known.special_ids - set(known.end_ids)
    for text, token in known.special_ids_by_text.items():
        assert tokenizer.encode(text, add_special_tokens=False) == [token]
    assert "<|im_start|>" in known.special_ids_by_text
