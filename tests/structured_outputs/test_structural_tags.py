"""Structural tags: texts of a format are those of an equivalent pattern of Python, and invalid formats are refused."""

import json
import random
import re

import pytest
from grammar_mask_walks import allowed, core, matches, text_of, vocabulary, walk
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.backends import check, compile
from quire.structured_outputs.vocabulary import Vocabulary


def asked(value):
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": value})


def const(text):
    return {"type": "const_string", "value": text}


def schema(value):
    return {"type": "json_schema", "json_schema": value}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def until(ends, excluded=()):
    """The pattern of free text up to the first of some texts. ends: () is the end of the output."""
    stops = "|".join(map(re.escape, [*ends, *excluded]))
    text = f"(?:(?!{stops})(?s:.))*" if stops else "(?s:.)*"
    return text + either(map(re.escape, ends))


def either(patterns):
    found = list(patterns)
    return f"(?:{'|'.join(found)})" if found else ""


def pattern_of(value, ends=()):
    """The pattern of a format followed by one of some texts."""
    behind = either(map(re.escape, ends))
    kind = value.get("type", "tag")
    match kind:
        case "const_string":
            return re.escape(value["value"]) + behind
        case "json_schema":
            return re.escape(json.dumps(value["json_schema"]["const"])) + behind
        case "regex" | "grammar":
            return f"(?:{value.get('pattern', 'x[a-c]*')}){behind}"  # the second one is that of GRAMMAR
        case "any_text":
            return until(ends, value.get("excludes", ()))
        case "or":
            return either(pattern_of(one, ends) for one in value["elements"])
        case "tag":
            own = value["end"] if isinstance(value["end"], list) else [value["end"]]
            return re.escape(value["begin"]) + pattern_of(value["content"], own) + behind
        case "sequence":
            one, *later = value["elements"]
            if not later:
                return pattern_of(one, ends)
            if one["type"] not in ("any_text", "triggered_tags"):
                return pattern_of(one) + pattern_of({"type": "sequence", "elements": later}, ends)
            lead = "begin" if later[0]["type"] == "tag" else "value"  # free text ends at the first such text
            rest = [{**later[0], lead: ""}, *later[1:]]
            return pattern_of(one, [later[0][lead]]) + pattern_of({"type": "sequence", "elements": rest}, ends)
    tags = either(map(pattern_of, value["tags"]))
    least, only = value.get("at_least_one", False), value.get("stop_after_first", False)
    if kind == "tags_with_separator":
        several = tags if only else f"{tags}(?:{re.escape(value['separator'])}{tags})*"
        return f"(?:{several}){'' if least else '?'}{behind}"
    triggers = [one for one in value["triggers"] if any(tag["begin"].startswith(one) for tag in value["tags"])]
    started = f"{until([], [*triggers, *ends]).removesuffix('')}{tags}"
    text = until(ends, triggers)
    if least:
        return tags + (behind if only else f"(?:{started})*{text}")
    return f"(?:{started}{behind}|{text})" if only else f"(?:{started})*{text}"


GRAMMAR = 'root ::= "x" tail\ntail ::= "" | [a-c] tail'
TEXTS = st.sampled_from(["<a>", "<b>", "</a>", "</b>", ", ", "a", "xb", "<", "\n"])


def tags(content):
    begins = st.sampled_from(["<a>", "<a>f", "<b>", "<b"])
    ends = st.sampled_from(["</a>", "</b>", ">", "]"]) | st.just(["</a>", "]"])
    return st.builds(tag, begins, content, ends)


def formats():
    simple = st.one_of(
        st.builds(const, TEXTS),
        st.builds(lambda value: schema({"const": value}), st.sampled_from([1, "a", "<", None])),
        st.sampled_from([{"type": "regex", "pattern": one} for one in ("[a-c]+", "x?(?:/|y)*", "<[ab]*")]),
        st.just({"type": "grammar", "grammar": GRAMMAR}),
    )
    free = st.sampled_from([{"type": "any_text"}, {"type": "any_text", "excludes": ["b", "x"]}])
    flags = {"at_least_one": st.booleans(), "stop_after_first": st.booleans()}

    def larger(inner):
        several = st.lists(tags(inner), min_size=1, max_size=2)
        triggered = st.fixed_dictionaries(
            {"type": st.just("triggered_tags"), "triggers": st.just(["<a", "<b"]), "tags": several, **flags}
        )
        separated = st.fixed_dictionaries(
            {"type": st.just("tags_with_separator"), "separator": TEXTS, "tags": several, **flags}
        )
        ended = st.lists(st.builds(const, TEXTS) | tags(inner | free), min_size=2, max_size=3)
        sequence = ended.map(lambda parts: {"type": "sequence", "elements": parts})
        led = st.builds(lambda one, parts: {"type": "sequence", "elements": [one, *parts]}, free | triggered, ended)
        chosen = st.lists(inner, min_size=2, max_size=3).map(lambda parts: {"type": "or", "elements": parts})
        return st.one_of(tags(inner | free | triggered), sequence, led, chosen, separated)

    return st.recursive(simple, larger, max_leaves=4) | free


def samples(rng, value, ends=()):
    """A text that is probably one of the format."""
    pick = rng.choice(ends) if ends else ""
    match value.get("type", "tag"):
        case "const_string":
            return value["value"] + pick
        case "json_schema":
            return json.dumps(value["json_schema"]["const"]) + pick
        case "regex" | "grammar" | "any_text":
            return "".join(rng.choice(["a", "b", "x", "<", ""]) for _ in range(rng.randint(0, 3))) + pick
        case "or":
            return samples(rng, rng.choice(value["elements"]), ends)
        case "tag":
            own = value["end"] if isinstance(value["end"], list) else [value["end"]]
            return value["begin"] + samples(rng, value["content"], own) + pick
        case "sequence":
            return "".join(samples(rng, one) for one in value["elements"]) + pick
        case "triggered_tags":
            return "".join(rng.choice(["a", "", samples(rng, one)]) for one in value["tags"] * 2) + pick
    return value["separator"].join(samples(rng, rng.choice(value["tags"])) for _ in range(rng.randint(0, 2))) + pick


def are_apart(value):
    """Whether the begins of options differ. Free text takes the text of an option that may begin like it."""
    inner = [*value.get("elements", ()), *value.get("tags", ()), *([value["content"]] if "content" in value else ())]
    options = value.get("tags", value["elements"] if value.get("type") == "or" else [])
    begins = [one.get("begin") or one.get("value") or "" for one in options]
    differ = not any(a.startswith(b) for i, a in enumerate(begins) for j, b in enumerate(begins) if i != j)
    return differ and all(map(are_apart, inner))


@settings(max_examples=100, deadline=None)
@given(formats(), st.integers(0, 10**6))
def test_the_texts_of_a_format_are_those_of_its_pattern(value, seed):
    params = asked(value)
    try:
        check(params)
    except RequestError as error:
        assert "satisfies" in str(error) or "must not overlap" in str(error)
        assume(condition=False)
    rng, pattern = random.Random(seed), re.compile(pattern_of(value))
    for _ in range(5):
        text = samples(rng, value)
        if rng.random() < 0.3 and text:
            place = rng.randrange(len(text))
            text = text[:place] + rng.choice(["", "<", "a", text]) + text[place + 1 :]
        fits = bool(pattern.fullmatch(text))
        found = matches(params, text)
        assert found == fits if are_apart(value) else fits or not found, (text, pattern.pattern)


def test_parameters_of_qwen_have_no_quotes_around_texts():
    properties = {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "place": {
            "type": "object",
            "properties": {"x": {"const": 1}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "unit": {"enum": ["C", "F"]},
        "code": {"type": "string", "minLength": 2, "maxLength": 3},
        "more": {"$ref": "#/$defs/more"},
    }
    value = {"type": "object", "properties": properties, "required": ["city", "place"]}
    value["$defs"] = {"more": {"type": "array", "items": {"$ref": "#/$defs/item"}}, "item": {"type": "boolean"}}
    for content in (
        {"type": "qwen_xml_parameter", "json_schema": value},
        {"type": "json_schema", "json_schema": value, "style": "qwen_xml"},
    ):
        params = asked(tag("<function=f>", content, "</function>"))
        city, place = (
            '<parameter=city>\nParis <b> "Nord"\n</parameter>\n',
            '<parameter=place>\n{"x": 1}\n</parameter>\n',
        )
        more = "<parameter=unit>C</parameter><parameter=code>FRA</parameter><parameter=more>[true]</parameter>"
        for text in (f"\n{city}{place}", f"{city}<parameter=days>3</parameter>{place}{more}"):
            assert matches(params, f"<function=f>{text}</function>"), text
        wrong = [city, f"{place}{city}", f"{city}<parameter=days>three</parameter>{place}"]
        wrong += [f"{city}{place}<parameter=unit>K</parameter>", f"{city}{place}<parameter=code>FRANCE</parameter>"]
        for text in wrong:
            assert not matches(params, f"<function=f>{text}</function>"), text


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("kind", ["tag", "trigger", "sequence"])
def test_the_text_of_a_special_token_in_a_tag_is_that_token(fast_forward, kind):
    plain, name = vocabulary(), core().id_to_token(1)
    known = Vocabulary(plain.tokens, plain.end_ids, plain.special_ids, plain.encode, {1: name.encode()})
    call = tag(f"{name}a ", schema({"const": 7}), name)
    value = {
        "tag": call,
        "trigger": {"type": "triggered_tags", "triggers": [name], "tags": [call], "stop_after_first": True},
        "sequence": {"type": "sequence", "elements": [{"type": "any_text"}, call]},
    }[kind]
    expected = [*([] if kind == "tag" else known.encode(f"{name[:4]} hello")), 1, *known.encode("a 7"), 1]
    matcher = compile(asked(value), known).new_matcher(fast_forward=fast_forward)
    verdict = matcher.advance([])
    tokens = list(verdict.forced)
    while len(tokens) < len(expected):
        assert expected[len(tokens)] in allowed(matcher, known)
        tokens.append(expected[len(tokens)])
        verdict = matcher.advance(tokens[-1:])
        tokens += verdict.forced
    assert tokens == expected and verdict.is_over
    assert not matches(asked(tag("", {"type": "any_text"}, f"a{name}")), "a") and matches(
        asked(call), f"{name}a 7{name}"
    )
    with pytest.raises(RequestError, match="at the begin of"):
        compile(asked(tag("", {"type": "any_text"}, f"a{name}")), known)


@pytest.mark.parametrize("place", range(6))
def test_walks_by_masks_end_with_a_text_of_the_format(place):
    arguments = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    call = tag("<call>f(", schema({**arguments, "additionalProperties": False}), ")</call>")
    value = [
        {"type": "tags_with_separator", "tags": [call], "separator": "\n", "at_least_one": True},
        {
            "type": "triggered_tags",
            "triggers": ["<call>"],
            "tags": [call],
            "at_least_one": True,
            "stop_after_first": True,
        },
    ][place % 2]
    known = vocabulary()
    tokens, ended = walk(compile(asked(value), known), known, random.Random(place), limit=60)
    if ended:
        text = text_of(tokens, known).decode()
        assert re.fullmatch(r"(<call>f\(\{\s*\"a\"\s*:\s*-?\d+\s*\}\)</call>\n?)+", text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "format/type: unknown type None"),
        ("any_text", "format is an object with a type"),
        ({"type": "any_txt"}, "did you mean 'any_text'"),
        ({"type": "const_string", "text": "a"}, "format: unknown field 'text'"),
        ({"type": "const_string", "value": 1}, "format/value is a string"),
        ({"type": "sequence", "elements": []}, "format/elements is a list of 1 to 256"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, schema({})]}, "format/elements/0: behind free text"),
        (tag("a", {"type": "or", "elements": [const("a"), {"type": "x"}]}, "b"), "format/content/elements/1/type"),
        ({"type": "tag", "begin": "a"}, "format is an object with begin, content and end"),
        (schema({"not": 1}), "schema at #/not"),
        ({"type": "grammar", "grammar": "start: /a/"}, "format/grammar is EBNF"),
        ({"type": "grammar", "grammar": "root ::= missing"}, "format: grammar: there is no rule 'missing'"),
        ({"type": "regex", "pattern": "a("}, "structural_tag cannot be enforced"),
        ({"type": "regex", "pattern": "a" * 8193}, "format/pattern is a string of 1 to 8,192"),
        ({"type": "triggered_tags", "triggers": [], "tags": []}, "format/triggers is a list of 1 to 256 strings"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": [tag("a", const("a"), "b")]}, "tags/0/begin must start"),
        (
            tag("[", {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<a", const(""), ">")]}, "</a>"),
            "must not overlap",
        ),
        ({"type": "tags_with_separator", "tags": [tag("a", const(""), "")], "at_least_one": 1}, "at_least_one is true"),
        (
            {"type": "qwen_xml_parameter", "json_schema": {"properties": {"a": {"type": "string", "pattern": "a"}}}},
            "pattern of a text without quotes is not enforced",
        ),
        ({"type": "qwen_xml_parameter", "json_schema": {"type": "array"}}, "parameters need an object"),
        ({"type": "any_text", "excludes": 0}, "format is a list of 1 to 256 strings"),
        (
            tag("", {"type": "or", "elements": [const("a")] * 200}, [f"{i:03}" * 80 for i in range(200)]),
            "more than 2,097,152 characters",
        ),
        ({"type": "or", "elements": [{"type": "or", "elements": [const("a")] * 256}] * 5}, "more than 1,024 formats"),
    ],
)
def test_an_invalid_format_is_refused_by_its_place(value, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        check(asked(value))
