"""Translation of regular JSON schemas to trees. Each keyword is enforced, or refused by name.

The texts are a subset of what the schema allows: properties are in the order of the schema and none is unnamed, each
character of a string with a pattern or format has one form, exponents have at most two digits.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from quire.errors import RequestError
from quire.structured_outputs.fsm.json_text import (
    ANY,
    CHARACTER,
    FORMATS,
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

AnySchema = Any  # a JSON value
Resolve = Callable[[AnySchema], AnySchema]  # follows a $ref


def are_disjoint(one: AnySchema, other: AnySchema, resolve: Resolve) -> bool:
    """Whether no value can match both, as shown by types, constants or a property that both require."""
    one, other = resolve(one), resolve(other)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return all(a != b for a, b in product(values, others))
    types = _type_names(one), _type_names(other)
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    if types != ({"object"}, {"object"}):
        return False
    common = set(one.get("required", ())) & set(other.get("required", ()))
    both = one.get("properties", {}), other.get("properties", {})
    return any(
        name in both[0] and name in both[1] and _are_properties_disjoint(both, name, resolve) for name in sorted(common)
    )


def _are_properties_disjoint(both: tuple[AnySchema, AnySchema], name: str, resolve: Resolve) -> bool:
    return are_disjoint(both[0][name], both[1][name], resolve)


def _values(schema: AnySchema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _type_names(schema: AnySchema) -> set[str]:
    """The types of a schema, with "number" for integers; empty if it has none."""
    values = _values(schema)
    if values is not None:
        return {type_of(value) for value in values}
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    return {"number" if name == "integer" else name for name in types}


def type_of(value: object) -> str:
    """JSON's name for the type of a value."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


Schema = dict[str, Any]

DEFAULT_BLANK = Repeat(Chars(((0x09, 0x0A), (0x20, 0x20))), 0, 1)  # at most one space, tab or new line
MAX_PROPERTIES = 512
_MAX_DIGITS = 30  # of a bound of integers

_ANNOTATIONS = {
    *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples"),
    *("deprecated", "readOnly", "writeOnly"),
}
_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum"},
    "boolean": set(),
    "null": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}


def schema_to_node(schema: object, whitespace: str | None) -> Node:
    """The tree of a schema. whitespace: a pattern; None: DEFAULT_BLANK; "": the separators of json.dumps.

    Raises RequestError.
    """
    if whitespace == "":
        return _Translator(schema, EMPTY, literal(" ")).node(schema, "")
    blank: Node = DEFAULT_BLANK
    if whitespace:
        blank = parse(whitespace, "whitespace_pattern")
        if not is_blank(blank):
            message = "whitespace_pattern may match only spaces, tabs and line breaks, such as [ \\t\\n\\r]*"
            raise RequestError(message, "whitespace_pattern")
    return _Translator(schema, blank, blank).node(schema, "")


class _Translator:
    """Translates subschemas. path: place of a subschema, for errors.

    blank: white space inside of brackets. space: white space after commas and colons.
    """

    def __init__(self, root: object, blank: Node, space: Node) -> None:
        self._root = root
        self._blank = blank
        self._space = space
        self._depth = 0
        self._in_progress: set[str] = set()  # references that are being translated
        self._translated: dict[str, Node] = {}
        self._type_translators: dict[str, Callable[[Schema, str], Node]] = {
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "boolean": lambda schema, path: choice([literal("true"), literal("false")]),
            "null": lambda schema, path: literal("null"),
            "array": self._array,
            "object": self._object,
        }

    def node(self, schema: object, path: str) -> Node:
        """The tree of one schema. Raises RequestError."""
        if not isinstance(schema, dict):
            raise _not_enforced(f"{schema!r} in place of a schema", path)
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise too_complex("levels of schemas and references", MAX_NESTING, "json")
        keywords = schema.keys() - _ANNOTATIONS
        for keyword, make in (
            ("$ref", self._reference),
            ("const", self._values),
            ("enum", self._values),
            ("anyOf", self._any_of),
            ("oneOf", self._any_of),
            ("allOf", self._all_of),
        ):
            if keyword in keywords:
                beside = {"type"} if make == self._values else set()
                _check_keywords(keywords, {keyword} | beside, path, f" beside {keyword!r}")
                node = make(schema, path)
                break
        else:
            node = self._typed(schema, keywords, path)
        self._depth -= 1
        return node

    def _typed(self, schema: Schema, keywords: set[str], path: str) -> Node:
        types = _types(schema, path)
        known = {keyword for name in types for keyword in _KEYWORDS[name]}
        _check_keywords(keywords, known | {"type"}, path, "")
        return choice([self._type_translators[name](schema, path) for name in types])

    def _reference(self, schema: Schema, path: str) -> Node:
        pointer = schema["$ref"]
        target = self._target(pointer, path)
        if pointer in self._in_progress:
            raise _not_enforced(f"the recursive $ref {pointer!r}", path)
        if pointer not in self._translated:
            self._in_progress.add(pointer)
            self._translated[pointer] = self.node(target, str(pointer).lstrip("#"))
            self._in_progress.remove(pointer)
        return self._translated[pointer]

    def _target(self, pointer: object, path: str) -> object:
        target: Any = self._root
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise _not_enforced(f"the $ref {pointer!r}, which is not within the schema", path)
        for name in pointer.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and len(name) < 9 and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, dict) and name in target:
                target = target[name]
            else:
                raise _invalid(f"the $ref {pointer!r} has no target in the schema", path)
        return target

    def _values(self, schema: Schema, path: str) -> Node:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list) or not values:
            raise _invalid("enum must be a list that is not empty", path)
        if "type" in schema:
            types = _types(schema, path)
            values = [value for value in values if _has_type(value, types)]
        return choice([self._value(value, path) for value in values])

    def _value(self, value: object, path: str) -> Node:
        blank = self._blank
        if isinstance(value, list | dict) and value:
            items = [self._value(item, path) for item in value] if isinstance(value, list) else self._pairs(value, path)
            opening, closing = "[]" if isinstance(value, list) else "{}"
            return chain([literal(opening), blank, *separated(items, self._space), blank, literal(closing)])
        try:
            return literal(scalar_to_json(value))
        except ValueError as error:
            raise _invalid(f"{value!r} is not a JSON value", path) from error

    def _pairs(self, value: Schema, path: str) -> list[Node]:
        return [
            chain([literal(scalar_to_json(name) + ":"), self._space, self._value(one, path)])
            for name, one in value.items()
        ]

    def _any_of(self, schema: Schema, path: str) -> Node:
        keyword = "anyOf" if "anyOf" in schema else "oneOf"
        options = schema[keyword]
        if not isinstance(options, list) or not options:
            raise _invalid(f"{keyword} must be a list that is not empty", path)
        nodes = [self.node(option, f"{path}/{keyword}/{i}") for i, option in enumerate(options)]
        if keyword == "oneOf" and not all(
            are_disjoint(one, other, self._resolved) for i, one in enumerate(options) for other in options[:i]
        ):
            raise _not_enforced("'oneOf' whose options may match the same value", path)
        return choice(nodes)

    def _resolved(self, schema: object) -> object:
        while isinstance(schema, dict) and "$ref" in schema:
            schema = self._target(schema["$ref"], "")  # translated before, so there is no cycle
        return schema

    def _all_of(self, schema: Schema, path: str) -> Node:
        options = schema["allOf"]
        if not isinstance(options, list) or len(options) != 1:
            raise _not_enforced("'allOf' of more than one schema", path)
        return self.node(options[0], f"{path}/allOf/0")

    def _string(self, schema: Schema, path: str) -> Node:
        given = sorted(schema.keys() & _KEYWORDS["string"])
        if len(given) > 1 and given != ["maxLength", "minLength"]:
            raise _not_enforced(f"{given[0]!r} together with {given[1]!r}", path)
        if "pattern" in schema:
            return quoted(json_escaped(_pattern(schema["pattern"], path)))
        if "format" in schema:
            name = schema["format"]
            if not isinstance(name, str) or name not in FORMATS:
                raise _not_enforced(f"the format {name!r}", path)
            return quoted(json_escaped(parse(FORMATS[name], "format")))
        least, most = _counts(schema, "minLength", "maxLength", path)
        return quoted(Repeat(CHARACTER, least, most))

    def _integer(self, schema: Schema, path: str) -> Node:
        bounds = {keyword: _number(schema[keyword], keyword, path) for keyword in schema.keys() & _KEYWORDS["integer"]}
        if not bounds:
            return INTEGER
        lows = [bounds.get("minimum"), _next(bounds.get("exclusiveMinimum"), 1)]
        highs = [bounds.get("maximum"), _next(bounds.get("exclusiveMaximum"), -1)]
        low = max((bound for bound in lows if bound is not None), default=None)
        high = min((bound for bound in highs if bound is not None), default=None)
        return integers(low, high)

    def _number(self, schema: Schema, path: str) -> Node:
        _check_keywords(schema.keys() & _KEYWORDS["integer"], {"minimum"}, path, " of non-integer numbers")
        if "minimum" not in schema:
            return NUMBER
        if schema["minimum"] != 0:
            raise _not_enforced("a 'minimum' other than 0 of non-integer numbers", path)
        return POSITIVE

    def _array(self, schema: Schema, path: str) -> Node:
        least, most = _counts(schema, "minItems", "maxItems", path)
        if "prefixItems" in schema:
            return self._tuple(schema, least, most, path)
        if "items" not in schema:
            raise _not_enforced("an array without 'items'", path)
        item = self.node(schema["items"], f"{path}/items")
        blank = self._blank
        if most == 0:
            return chain([literal("["), blank, literal("]")])
        separator = chain([literal(","), self._space])
        first = Repeat(chain([item, separator]), max(0, least - 1), max(0, least - 1))
        if most is None:
            items = chain([first, SeparatedList(item, separator), blank])
        else:
            more = Repeat(chain([separator, item]), 0, most - max(1, least))
            items = chain([first, item, more, blank])
        return chain([literal("["), blank, items if least else optional(items), literal("]")])

    def _tuple(self, schema: Schema, least: int, most: int | None, path: str) -> Node:
        prefix = schema["prefixItems"]
        if schema.get("items", False) is not False:
            raise _not_enforced("'items' other than false beside 'prefixItems'", path)
        if not isinstance(prefix, list) or not least <= len(prefix) <= (len(prefix) if most is None else most):
            raise _not_enforced("'prefixItems' whose number is outside of 'minItems' and 'maxItems'", path)
        items = [self.node(item, f"{path}/prefixItems/{i}") for i, item in enumerate(prefix)]
        blank = self._blank
        return chain([literal("["), blank, *separated(items, self._space), blank if items else EMPTY, literal("]")])

    def _object(self, schema: Schema, path: str) -> Node:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if schema.get("additionalProperties", False) is not False:
            raise _not_enforced("'additionalProperties' other than false", path)
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _invalid("properties must be an object, and required a list", path)
        if not properties and "additionalProperties" not in schema:
            raise _not_enforced("an object without 'properties'", path)
        if len(properties) > MAX_PROPERTIES:
            raise too_complex("properties of one object", MAX_PROPERTIES, "json")
        for name in required:
            if not isinstance(name, str) or name not in properties:
                raise _not_enforced(f"the required property {name!r} without a schema", path)
        return self._members(properties, set(required), path)

    def _members(self, properties: Schema, required: set[str], path: str) -> Node:
        """Members in their order. The first one in a text has no comma before it."""
        blank = self._blank
        members = [
            chain([literal(scalar_to_json(name) + ":"), self._space, self.node(schema, f"{path}/properties/{name}")])
            for name, schema in properties.items()
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


def _types(schema: Schema, path: str) -> list[str]:
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if types is None:
        raise _not_enforced("a schema that allows values of any type: give a 'type'", path)
    if not isinstance(types, list) or not types or not all(isinstance(t, str) and t in _KEYWORDS for t in types):
        raise _invalid(f"the type must be one or several of {', '.join(_KEYWORDS)}", path)
    return list(dict.fromkeys(types))


def _has_type(value: object, types: list[str]) -> bool:
    is_whole = isinstance(value, float) and value.is_integer()
    is_whole = is_whole or (isinstance(value, int) and not isinstance(value, bool))
    return type_of(value) in types or (is_whole and "integer" in types)


def _pattern(pattern: object, path: str) -> Node:
    """The tree of strings that contain a match of a pattern."""
    if not isinstance(pattern, str):
        raise _invalid("pattern must be text", path)
    try:
        return parse_search(pattern, "pattern", ANY)
    except RequestError as error:
        raise _invalid(str(error), path) from error


def _counts(schema: Schema, least: str, most: str, path: str) -> tuple[int, int | None]:
    for name in schema.keys() & {least, most}:
        if not isinstance(schema[name], int) or isinstance(schema[name], bool) or schema[name] < 0:
            raise _invalid(f"{name} must be a number, 0 or more", path)
    low, high = schema.get(least, 0), schema.get(most)
    if high is not None and low > high:
        raise _invalid(f"{least} is larger than {most}", path)
    return low, high


def _number(value: object, name: str, path: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 10**_MAX_DIGITS:
        raise _invalid(f"{name} must be a number of at most {_MAX_DIGITS} digits", path)
    return value


def _next(bound: float | None, step: int) -> float | None:
    """The nearest integer beyond an exclusive bound; step 1: above it, -1: below it."""
    if bound is None:
        return None
    return bound // 1 + 1 if step > 0 else -(-bound // 1) - 1


def _check_keywords(keywords: set[str], allowed: set[str], path: str, where: str) -> None:
    for keyword in sorted(keywords - allowed):
        raise _not_enforced(f"{keyword!r}{where}", path)


def _not_enforced(what: str, path: str) -> RequestError:
    place = f" at {path}" if path else ""
    return RequestError(f"the fsm backend does not enforce {what}{place}: use the llguidance backend", "json")


def _invalid(what: str, path: str) -> RequestError:
    place = f" at {path}" if path else ""
    return RequestError(f"json: {what}{place}", "json")
