"""Trees of the regular ones among translated JSON schemas. Each keyword is enforced, or refused by name.

The texts are a subset of what the schema allows: properties are in the order of the schema and none is unnamed, each
character of a string with a pattern or format has one form, exponents have at most two digits.
"""

from collections.abc import Callable
from typing import Any

from quire.errors import RequestError
from quire.structured_outputs.fsm.json_text import (
    ANY,
    CHARACTER,
    INTEGER,
    NUMBER,
    POSITIVE,
    integers,
    is_blank,
    json_escaped,
    quoted,
    scalar_to_json,
    separated,
)
from quire.structured_outputs.fsm.nodes import (
    EMPTY,
    MAX_NESTING,
    Chars,
    Node,
    Repeat,
    SeparatedList,
    chain,
    choice,
    literal,
    optional,
    too_complex,
)
from quire.structured_outputs.fsm.regex import parse, parse_search
from quire.structured_outputs.json_schema.bounds import schema_error
from quire.structured_outputs.json_schema.logic import FRACTION, Part, Schema, type_of
from quire.structured_outputs.json_schema.values import FORMATS, escaped

DEFAULT_BLANK = Repeat(Chars(((0x09, 0x0A), (0x20, 0x20))), 0, 1)  # at most one space, tab or new line
_LARGE_FORMATS = {"email", "hostname"}  # their automata have too many states
_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum"},
    "boolean": set(),
    "null": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}


def schema_to_node(schema: Schema, whitespace: str | None) -> Node:
    """The tree of a translated schema. whitespace: a pattern; None: DEFAULT_BLANK; "": the separators of json.dumps.

    Raises RequestError.
    """
    if whitespace == "":
        return _Translator(schema, EMPTY, literal(" ")).node(schema, "#")
    if whitespace is None:
        return _Translator(schema, DEFAULT_BLANK, DEFAULT_BLANK).node(schema, "#")
    blank = parse(whitespace, "whitespace_pattern")
    if not is_blank(blank):
        message = "whitespace_pattern may match only spaces, tabs and line breaks, such as [ \\t\\n\\r]*"
        raise RequestError(message, "whitespace_pattern")
    return _Translator(schema, blank, blank).node(schema, "#")


class _Translator:
    """Translates subschemas. place: where a subschema stands, if it is true or false and does not know it itself.

    blank: white space inside of brackets. space: white space after commas and colons.
    """

    def __init__(self, root: Schema, blank: Node, space: Node) -> None:
        self._definitions: Any = root.get("$defs", {}) if isinstance(root, Part) else {}
        self._blank = blank
        self._space = space
        self._depth = 0
        self._in_progress: set[str] = set()  # references that are being translated
        self._translated: dict[str, Node] = {}
        self._type_translators: dict[str, Callable[[Part], Node]] = {
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "boolean": lambda schema: choice([literal("true"), literal("false")]),
            "null": lambda schema: literal("null"),
            "array": self._array,
            "object": self._object,
        }

    def node(self, schema: Schema, place: str) -> Node:
        """The tree of one schema. Raises RequestError."""
        if isinstance(schema, bool):
            if schema:
                raise _not_enforced("a schema that allows values of any type: give a 'type'", place)
            return Chars(())
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise too_complex("levels of schemas and references", MAX_NESTING, "json")
        schema = _with_bounds(schema)
        keywords = schema.keys() - {"$defs"}
        for keyword, make in (
            ("$ref", self._reference),
            ("enum", self._values),
            ("anyOf", self._any_of),
            ("allOf", self._all_of),
        ):
            if keyword in keywords:
                beside = {"type"} if make == self._values else set()
                _check_keywords(keywords, {keyword} | beside, schema, f" beside {keyword!r}")
                node = make(schema)
                break
        else:
            node = self._typed(schema, keywords)
        self._depth -= 1
        return node

    def _typed(self, schema: Part, keywords: set[str]) -> Node:
        if "type" not in schema:
            known = set().union(*_KEYWORDS.values())
            _check_keywords(keywords, known, schema, "")
            raise _not_enforced("a schema that allows values of any type: give a 'type'", schema.at)
        types = _types(schema)
        if FRACTION in types:
            raise _not_enforced("numbers that are no integers", schema.at)
        known = {keyword for name in types for keyword in _KEYWORDS[name]}
        _check_keywords(keywords, known | {"type"}, schema, "")
        return choice([self._type_translators[name](schema) for name in types])

    def _reference(self, schema: Part) -> Node:
        name = str(schema["$ref"]).removeprefix("#/$defs/")
        if name in self._in_progress:
            raise _not_enforced("a recursive $ref", schema.at)
        if name not in self._translated:
            self._in_progress.add(name)
            self._translated[name] = self.node(self._definitions[name], schema.at)
            self._in_progress.remove(name)
        return self._translated[name]

    def _values(self, schema: Part) -> Node:
        values: Any = schema["enum"]
        if "type" in schema:
            values = [value for value in values if _has_type(value, _types(schema))]
        return choice([self._value(value) for value in values])

    def _value(self, value: object) -> Node:
        blank = self._blank
        if isinstance(value, list | dict) and value:
            items = [self._value(item) for item in value] if isinstance(value, list) else self._pairs(value)
            opening, closing = "[]" if isinstance(value, list) else "{}"
            return chain([literal(opening), blank, *separated(items, self._space), blank, literal(closing)])
        return literal(scalar_to_json(value))

    def _pairs(self, value: dict[str, object]) -> list[Node]:
        return [
            chain([literal(scalar_to_json(name) + ":"), self._space, self._value(one)]) for name, one in value.items()
        ]

    def _any_of(self, schema: Part) -> Node:
        options: Any = schema["anyOf"]
        return choice([self.node(option, schema.at) for option in options])

    def _all_of(self, schema: Part) -> Node:
        options: Any = schema["allOf"]
        if len(options) != 1:
            raise _not_enforced("'allOf' of more than one schema", schema.at)
        return self.node(options[0], schema.at)

    def _string(self, schema: Part) -> Node:
        given = sorted(schema.keys() & _KEYWORDS["string"])
        if len(given) > 1 and given != ["maxLength", "minLength"]:
            raise _not_enforced(f"{given[0]!r} together with {given[1]!r}", schema.at)
        if "pattern" in schema:
            return quoted(json_escaped(_pattern(schema)))
        if "format" in schema:
            if schema["format"] in _LARGE_FORMATS:
                raise _not_enforced(f"the format {schema['format']!r}", schema.at)
            return quoted(json_escaped(parse(FORMATS[str(schema["format"])])))
        least, most = _counts(schema, "minLength", "maxLength")
        return quoted(Repeat(CHARACTER, least, most))

    def _integer(self, schema: Part) -> Node:
        bounds: Any = {keyword: schema[keyword] for keyword in schema.keys() & _KEYWORDS["integer"]}
        if not bounds:
            return INTEGER
        lows = [bounds.get("minimum"), _next(bounds.get("exclusiveMinimum"), 1)]
        highs = [bounds.get("maximum"), _next(bounds.get("exclusiveMaximum"), -1)]
        low = max((bound for bound in lows if bound is not None), default=None)
        high = min((bound for bound in highs if bound is not None), default=None)
        return integers(low, high)

    def _number(self, schema: Part) -> Node:
        _check_keywords(schema.keys() & _KEYWORDS["integer"], {"minimum"}, schema, " of non-integer numbers")
        if "minimum" not in schema:
            return NUMBER
        if schema["minimum"] != 0:
            raise _not_enforced("a 'minimum' other than 0 of non-integer numbers", schema.at)
        return POSITIVE

    def _array(self, schema: Part) -> Node:
        least, most = _counts(schema, "minItems", "maxItems")
        if "prefixItems" in schema:
            return self._tuple(schema, least, most)
        if "items" not in schema:
            raise _not_enforced("an array without 'items'", schema.at)
        blank = self._blank
        if most == 0:
            return chain([literal("["), blank, literal("]")])
        item = self.node(schema["items"], schema.at)
        separator = chain([literal(","), self._space])
        first = Repeat(chain([item, separator]), max(0, least - 1), max(0, least - 1))
        if most is None:
            items = chain([first, SeparatedList(item, separator), blank])
        else:
            more = Repeat(chain([separator, item]), 0, most - max(1, least))
            items = chain([first, item, more, blank])
        return chain([literal("["), blank, items if least else optional(items), literal("]")])

    def _tuple(self, schema: Part, least: int, most: int | None) -> Node:
        prefix: Any = schema["prefixItems"]
        if schema.get("items", False) is not False:
            raise _not_enforced("'items' other than false beside 'prefixItems'", schema.at)
        if not least <= len(prefix) <= (len(prefix) if most is None else most):
            raise _not_enforced("'prefixItems' whose number is outside of 'minItems' and 'maxItems'", schema.at)
        items = [self.node(item, schema.at) for item in prefix]
        blank = self._blank
        listed = separated(items, self._space)
        return chain([literal("["), blank, *listed, blank if items else EMPTY, literal("]")])

    def _object(self, schema: Part) -> Node:
        properties: Any = schema.get("properties", {})
        required: Any = schema.get("required", [])
        if schema.get("additionalProperties", False) is not False:
            raise _not_enforced("'additionalProperties' other than false", schema.at)
        if not properties and "additionalProperties" not in schema:
            raise _not_enforced("an object without 'properties'", schema.at)
        for name in required:
            if name not in properties:
                raise _not_enforced(f"the required property {name!r} without a schema", schema.at)
        return self._members({name: one for name, one in properties.items() if one is not False}, set(required), schema)

    def _members(self, properties: dict[str, Schema], required: set[str], schema: Part) -> Node:
        """Members in their order. The first one in a text has no comma before it."""
        blank = self._blank
        if not required <= properties.keys():
            return Chars(())
        members = [
            chain(
                [
                    literal(scalar_to_json(name) + ":"),
                    self._space,
                    self.node(one, f"{schema.at}/properties/{escaped(name)}"),
                ]
            )
            for name, one in properties.items()
        ]
        following = [chain([literal(","), self._space, member]) for member in members]
        rest = [one if name in required else optional(one) for name, one in zip(properties, following, strict=True)]
        options: list[Node] = []
        for i, name in enumerate(properties):
            options.append(chain([members[i], *rest[i + 1 :], blank]))
            if name in required:
                break
        else:
            options.append(EMPTY)
        return chain([literal("{"), blank, choice(options), literal("}")])


def _with_bounds(schema: Part) -> Part:
    """The schema with the bounds of integer formats, which stand in its allOf."""
    parts: Any = schema.get("allOf", [])
    out = Part(schema.at, schema)
    for part in parts:
        if not isinstance(part, Part) or part.keys() != {"minimum", "maximum"}:
            return schema
        for key, choose in (("minimum", max), ("maximum", min)):
            out[key] = choose(part[key], out.get(key, part[key]))
    out.pop("allOf", None)
    return out


def _types(schema: Part) -> list[str]:
    types: Any = schema["type"]
    return [types] if isinstance(types, str) else list(dict.fromkeys(types))


def _has_type(value: object, types: list[str]) -> bool:
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _pattern(schema: Part) -> Node:
    """The tree of strings that contain a match of a pattern."""
    try:
        return parse_search(str(schema["pattern"]), "pattern", ANY)
    except RequestError as error:
        raise schema_error(f"{schema.at}/pattern", str(error), "json") from error


def _counts(schema: Part, least: str, most: str) -> tuple[int, int | None]:
    low, high = schema.get(least, 0), schema.get(most)
    assert isinstance(low, int)
    assert high is None or isinstance(high, int)
    if high is not None and low > high:
        raise schema_error(schema.at, f"{least} is larger than {most}", "json")
    return low, high


def _next(bound: float | None, step: int) -> float | None:
    """The nearest integer beyond an exclusive bound; step 1: above it, -1: below it."""
    if bound is None:
        return None
    return bound // 1 + 1 if step > 0 else -(-bound // 1) - 1


def _check_keywords(keywords: set[str], allowed: set[str], schema: Part, where: str) -> None:
    for keyword in sorted(keywords - allowed):
        raise _not_enforced(f"{keyword!r}{where}", schema.at)


def _not_enforced(what: str, at: str) -> RequestError:
    return schema_error(at, f"the fsm backend does not enforce {what}: use the llguidance backend", "json")
