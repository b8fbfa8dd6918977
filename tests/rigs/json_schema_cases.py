"""JSON schemas for tests: a few per keyword, and random combinations."""

import random
from collections.abc import Iterator

from quire.structured_outputs.json_schema.values import FORMATS

Schema = dict[str, object]

INTEGER: Schema = {"type": "integer"}
STRING: Schema = {"type": "string"}
POINT: Schema = {
    "type": "object",
    "properties": {"x": INTEGER, "y": INTEGER},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def by_keyword() -> Iterator[tuple[str, Schema]]:
    """Schemas, each with the keyword that it tests."""
    yield from _types()
    yield from _numbers()
    yield from _strings()
    yield from _arrays()
    yield from _objects()
    yield from _joined()
    yield from _references()
    yield from _conditions()
    yield from _closed()


def _types() -> Iterator[tuple[str, Schema]]:
    for name in ("null", "boolean", "integer", "number", "string", "array", "object"):
        yield "type", {"type": name}
    yield "type", {"type": ["string", "null"]}
    yield "type", {"type": ["integer", "array"], "items": {"type": "boolean"}, "minimum": 3}
    constants = (None, True, 0, -3, 2**53, 1.5, 0.1, -2.25e-5, 1e10, "", "a b", 'q"\\/\n\t', "é😀\u2028", [], {})
    for value in (*constants, [1, [2]], {"a": {"b": []}}, {"x y": None, 'q"': 1}):
        yield "const", {"const": value}
    yield "enum", {"enum": ["red", "green", "blue"]}
    yield "enum", {"enum": [1, "1", None, [1], {"a": 1}, 1.5]}
    yield "enum", {"type": "string", "enum": ["a", "ab", "abc", 5]}
    yield "enum", {"enum": [f"word number {i}" for i in range(300)]}
    yield "enum", {"enum": list(range(-50, 400, 7))}


def _numbers() -> Iterator[tuple[str, Schema]]:
    for kind in ("integer", "number"):
        for low, high in ((0, 10), (-5, 5), (-1000, -17), (3, 3), (0, 2**53), (99, 1234567), (-1, 0)):
            yield "minimum", {"type": kind, "minimum": low, "maximum": high}
        for low, high in ((0, 2), (-7, 130), (99, 1001)):
            yield "exclusiveMinimum", {"type": kind, "exclusiveMinimum": low, "exclusiveMaximum": high}
        yield "minimum", {"type": kind, "minimum": 17}
        yield "maximum", {"type": kind, "maximum": -3}
        yield "exclusiveMaximum", {"type": kind, "exclusiveMaximum": 0, "minimum": -12, "maximum": 5}
        yield "exclusiveMinimum", {"type": kind, "exclusiveMinimum": 5}
        for multiple in (2, 7, 10, 125):
            yield "multipleOf", {"type": kind, "multipleOf": multiple}
        yield "multipleOf", {"type": kind, "multipleOf": 3, "minimum": -20, "maximum": 40}
    for low, high in ((0.5, 1.5), (-0.001, 0.001), (1.25, 1.250001), (-123.456, 0.0), (0.1, 1e6)):
        yield "minimum", {"type": "number", "minimum": low, "maximum": high}
        yield "exclusiveMaximum", {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    for multiple in (0.1, 0.01, 0.25, 2.5):
        yield "multipleOf", {"type": "number", "multipleOf": multiple}
    yield "minimum", {"type": "integer", "minimum": 0.5, "maximum": 3.5}
    yield "maximum", {"maximum": 5}
    yield (
        "exclusiveMinimum",
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 3,
            "exclusiveMinimum": True,
        },
    )


def _strings() -> Iterator[tuple[str, Schema]]:
    for low, high in ((0, 0), (1, 1), (2, 5), (10, 12), (0, 3), (7, 1000)):
        yield "maxLength", {"type": "string", "minLength": low, "maxLength": high}
    yield "minLength", {"type": "string", "minLength": 6}
    patterns = (
        "^[a-z]+$",
        "^a|[b-z0-9]$",
        "[aeiou][a-z]?",
        "^(foo|ba[rz]){2,3}$",
        r"^\d{3}-\d{4}$",
        r"^\w{1,3}@\w{1,3}\.com$",
        "^[^x]*$",
        "^$",
    )
    more = (
        r"^\s*$",
        r"^\S+$",
        r"^[^\s\d]+$",
        '^[^"]*$',
        r'^[^"\\]+$',
        r"^\W{2}$",
        "^(a|b)*a(a|b){3}$",
        "x.y",
        r"^[\"\\]+$",
        "^é+$",
        "(^a|b)c$",
        r"^\/[\/\-]\.$",
        "[0-9]$",
    )
    for pattern in (*patterns, *more):
        yield "pattern", {"type": "string", "pattern": pattern}
    yield "pattern", {"type": "string", "pattern": "^[ab]*$", "minLength": 3, "maxLength": 6}
    yield "pattern", {"pattern": "^a"}
    for name in sorted(FORMATS):
        yield "format", {"type": "string", "format": name}
        yield "format", {"type": "object", "properties": {"at": {"type": "string", "format": name}}, "required": ["at"]}
    yield "format", {"type": "string", "format": "uuid", "pattern": "^0"}
    yield "format", {"type": "string", "format": "date", "pattern": "^20", "allOf": [{"pattern": "9$"}]}


def _arrays() -> Iterator[tuple[str, Schema]]:
    for items in (INTEGER, STRING, POINT, {"enum": [1, 2]}, True):
        yield "items", {"type": "array", "items": items}
    yield "items", {"type": "array", "items": False}
    for low, high in ((0, 0), (1, 1), (2, 3), (5, 5), (0, 20)):
        yield "minItems", {"type": "array", "items": INTEGER, "minItems": low, "maxItems": high}
    yield "maxItems", {"type": "array", "maxItems": 2}
    yield "minItems", {"items": {"const": 1}, "minItems": 2}
    yield "prefixItems", {"type": "array", "prefixItems": [INTEGER, STRING]}
    yield "prefixItems", {"type": "array", "prefixItems": [INTEGER, STRING], "items": False, "minItems": 1}
    yield "prefixItems", {"type": "array", "items": {"type": "null"}, "prefixItems": [INTEGER], "minItems": 3}
    yield "prefixItems", {"type": "array", "prefixItems": [INTEGER, False], "minItems": 1}
    old = "http://json-schema.org/draft-07/schema#"
    yield "additionalItems", {"$schema": old, "type": "array", "items": [INTEGER], "additionalItems": STRING}
    yield "additionalItems", {"$schema": old, "type": "array", "items": [INTEGER], "additionalItems": False}
    yield "additionalItems", {"$schema": old, "type": "array", "items": INTEGER, "additionalItems": False}


def _objects() -> Iterator[tuple[str, Schema]]:
    ab: Schema = {"a": INTEGER, "b": STRING}
    for required in ([], ["a"], ["b", "a"], ["c"]):
        for more in (True, False, {"type": "boolean"}):
            if more is not False or "c" not in required:
                fields = {"properties": ab, "required": required, "additionalProperties": more}
                yield "properties", {"type": "object", **fields}
    yield "properties", {"properties": {"a": {"type": "null"}}}
    yield "properties", {"type": "object", "properties": {'q"\\é\n': INTEGER, "$id": STRING, "a/b~": INTEGER}}
    yield "properties", {"type": "object", "properties": {"no": False, "yes": True}, "required": ["yes"]}
    yield "required", {"type": "object", "required": ["z", "y"]}
    yield "required", {"required": ["a"]}
    yield "additionalProperties", {"type": "object", "additionalProperties": INTEGER}
    yield "additionalProperties", {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": STRING}
    yield "additionalProperties", {"type": "object", "properties": {"a\n": INTEGER}, "additionalProperties": STRING}
    yield "patternProperties", {"type": "object", "patternProperties": {"^n_": INTEGER, "^s_": STRING}}
    closed = {"type": "object", "additionalProperties": False}
    yield "patternProperties", {**closed, "patternProperties": {"^[a-c]$": INTEGER}}
    yield "patternProperties", {**closed, "properties": {"aa": {"minimum": 5}}, "patternProperties": {"^a": INTEGER}}
    yield "patternProperties", {"type": "object", "patternProperties": {"^x": False}, "additionalProperties": INTEGER}
    yield "minProperties", {"type": "object", "minProperties": 1}
    yield "minProperties", {**closed, "properties": ab, "minProperties": 1}
    yield "minProperties", {"type": "object", "required": ["a", "b"], "minProperties": 3}
    yield "minProperties", {**closed, "properties": ab, "required": ["a", "b"], "minProperties": 2}
    yield "maxProperties", {"type": "object", "maxProperties": 2}
    yield "maxProperties", {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 3}
    yield "maxProperties", {**closed, "properties": ab, "maxProperties": 1}
    yield "maxProperties", {"type": "object", "properties": ab, "required": ["a", "b"], "maxProperties": 3}


def _joined() -> Iterator[tuple[str, Schema]]:
    yield "anyOf", {"anyOf": [INTEGER, STRING]}
    yield "anyOf", {"anyOf": [POINT, {"type": "array", "items": INTEGER}], "maxItems": 2}
    yield "anyOf", {"type": "string", "anyOf": [{"minLength": 5}, {"pattern": "^a"}]}
    yield "anyOf", {"type": "object", "properties": {"a": INTEGER}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    yield "oneOf", {"oneOf": [INTEGER, STRING, {"type": "null"}]}
    yield "oneOf", {"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "array"}]}
    kinds = [_kind("cat", {"lives": INTEGER}), _kind("dog", {"barks": {"type": "boolean"}})]
    yield "oneOf", {"oneOf": kinds}
    definitions = {"Cat": kinds[0], "Dog": kinds[1]}
    discriminator = {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}}
    branches = [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]
    yield "oneOf", {"oneOf": branches, "discriminator": discriminator, "$defs": definitions}
    yield "allOf", {"allOf": [{"minimum": 3}, {"maximum": 9}, INTEGER]}
    yield "allOf", {"allOf": [{"type": "object", "properties": {"a": INTEGER}}, {"properties": {"b": STRING}}]}
    yield "allOf", {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 6}]}
    yield "allOf", {"allOf": [{"required": ["a"]}, POINT | {"additionalProperties": INTEGER}]}
    yield "allOf", {"allOf": [{"prefixItems": [INTEGER]}, {"items": {"minimum": 4, "type": "number"}, "minItems": 2}]}
    yield "allOf", {"allOf": [{"multipleOf": 4}, {"multipleOf": 6}, {"type": "integer", "minimum": 1}]}
    yield "allOf", {"allOf": [{"anyOf": [INTEGER, STRING]}, {"anyOf": [STRING, {"type": "null"}]}]}


def _kind(name: str, properties: Schema) -> Schema:
    kind = {"const": name, "title": "Kind", "type": "string"}
    return {"type": "object", "properties": {"kind": kind, **properties}, "required": ["kind", *properties]}


def _references() -> Iterator[tuple[str, Schema]]:
    tree = {"type": "object", "properties": {"v": INTEGER, "next": {"$ref": "#"}}, "required": ["v"]}
    yield "$ref", tree | {"additionalProperties": False}
    node = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    yield "$ref", {"$ref": "#/$defs/node", "$defs": {"node": node}}
    yield "$ref", {"properties": {"a": {"$ref": "#/definitions/p"}}, "required": ["a"], "definitions": {"p": POINT}}
    yield "$ref", {"properties": {"a": POINT, "b": {"$ref": "#/properties/a/properties/x"}}, "required": ["b"]}
    yield "$ref", {"$defs": {"a/b~c d": INTEGER}, "items": {"$ref": "#/$defs/a~1b~0c%20d"}, "type": "array"}
    yield "$ref", {"$ref": "#/$defs/s", "minLength": 2, "$defs": {"s": {"type": "string", "maxLength": 4}}}
    yield "$ref", {"prefixItems": [INTEGER], "items": {"$ref": "#/prefixItems/0"}, "type": "array"}
    yield "$ref", {"$id": "http://a.test/s", "$ref": "http://a.test/s#/$defs/i", "$defs": {"i": INTEGER}}
    yield "$dynamicRef", tree | {"$dynamicAnchor": "t", "properties": {"v": INTEGER, "next": {"$dynamicRef": "#t"}}}
    recursive = {"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveAnchor": True}
    yield "$recursiveRef", recursive | tree | {"properties": {"v": INTEGER, "next": {"$recursiveRef": "#"}}}
    yield "$ref", {"items": {"$ref": "#name"}, "type": "array", "$defs": {"x": INTEGER | {"$anchor": "name"}}}
    even = {"type": "array", "prefixItems": [{"$ref": "#/$defs/odd"}], "items": False}
    odd = {"anyOf": [{"type": "null"}, {"type": "array", "prefixItems": [{"$ref": "#/$defs/even"}], "items": False}]}
    yield "$ref", {"$ref": "#/$defs/even", "$defs": {"even": even, "odd": odd}}


def _conditions() -> Iterator[tuple[str, Schema]]:
    for value in ("a", "", "abc", "é\n", 3, 1.5, True, None, [], {}):
        yield "not", {"not": {"const": value}}
    yield "not", {"type": "string", "maxLength": 3, "not": {"enum": ["a", "ab", "abc", "b", ""]}}
    yield "not", {"type": "integer", "not": {"enum": [0, 1, 5, -7]}, "minimum": -9, "maximum": 9}
    yield "not", {"not": {"type": ["object", "array", "number"]}}
    yield "not", {"type": "object", "not": {"required": ["a", "b"]}, "properties": {"a": INTEGER, "b": INTEGER}}
    yield "not", {**POINT, "not": {"properties": {"x": {"minimum": 5}}}}
    yield "not", {"type": "array", "items": INTEGER, "not": {"anyOf": [{"maxItems": 1}, {"minItems": 4}]}}
    yield "not", {"type": "string", "not": {"minLength": 3}}
    yield "not", {"type": "array", "not": {"prefixItems": [{"type": "string"}, True]}, "minItems": 1, "maxItems": 2}
    kind, value = {"enum": ["n", "s", "x"]}, {"type": ["string", "integer"]}
    asked: Schema = {"type": "object", "properties": {"kind": kind, "v": value}, "required": ["kind", "v"]}
    rules: list[Schema] = [
        {"if": {"properties": {"kind": {"const": one}}}, "then": {"properties": {"v": then}}}
        for one, then in (("n", INTEGER), ("s", STRING), ("x", {"const": 1}))
    ]
    yield "if", asked | {"allOf": rules}
    yield "if", asked | rules[0] | {"else": {"properties": {"v": {"type": "string"}}}}
    yield (
        "if",
        {"type": ["integer", "string"], "if": {"type": "string"}, "then": {"maxLength": 2}, "else": {"minimum": 3}},
    )
    yield (
        "if",
        {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}, "additionalProperties": INTEGER},
    )
    three: Schema = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER}}
    yield "dependentRequired", three | {"dependentRequired": {"a": ["b"], "b": ["c"]}, "additionalProperties": False}
    yield "dependentRequired", {"type": ["object", "null"], "dependentRequired": {"a": ["b"]}}
    yield "dependentSchemas", three | {"dependentSchemas": {"a": {"properties": {"b": {"minimum": 7}}}, "c": False}}
    old: Schema = {"$schema": "http://json-schema.org/draft-07/schema#"}
    yield "dependencies", old | three | {"dependencies": {"a": ["b"], "c": {"required": ["a"]}}}
    for names in ({"pattern": "^[a-c]+$"}, {"enum": ["a", "bc"]}, {"maxLength": 2}, {"minLength": 1, "type": "string"}):
        yield "propertyNames", {"type": "object", "propertyNames": names, "additionalProperties": INTEGER}
    yield "propertyNames", three | {"propertyNames": {"pattern": "^[ax]"}}
    for options in ([{"required": ["a"]}, {"required": ["b"]}], [{"maxProperties": 0}, {"required": ["c"]}]):
        yield "oneOf", three | {"oneOf": options, "additionalProperties": False}
    yield "oneOf", {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 6}]}
    yield "oneOf", {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}, {"type": "null"}]}
    yield "oneOf", {"oneOf": [POINT, {"type": "object", "properties": {"z": INTEGER}, "required": ["z"]}]}


def _closed() -> Iterator[tuple[str, Schema]]:
    for items in ({"enum": ["a", "b", "c"]}, {"type": "boolean"}, {"enum": list("abcdefgh")}, {"enum": [1, 1.0, True]}):
        yield "uniqueItems", {"type": "array", "items": items, "uniqueItems": True}
    yield (
        "uniqueItems",
        {"type": "array", "items": {"$ref": "#/$defs/e"}, "uniqueItems": True, "minItems": 2}
        | {"$defs": {"e": {"enum": [f"value {i}" for i in range(15)], "type": "string"}}},
    )
    yield "uniqueItems", {"type": ["array", "null"], "maxItems": 1, "uniqueItems": True}
    yield "contains", {"type": "array", "contains": INTEGER, "items": {"type": ["integer", "null"]}}
    yield "minContains", {"type": "array", "contains": {"const": 1}, "minContains": 2, "maxItems": 4}
    yield "minContains", {"type": "array", "contains": {"const": 1}, "minContains": 0, "maxItems": 2}
    yield "maxContains", {"type": "array", "contains": {"const": 1}, "maxContains": 2, "items": {"enum": [1, 2]}}
    ab: Schema = {"a": INTEGER, "b": STRING}
    whole: Schema = {"type": "object", "unevaluatedProperties": False}
    yield "unevaluatedProperties", whole | {"properties": ab, "allOf": [{"properties": {"c": INTEGER}}]}
    yield (
        "unevaluatedProperties",
        whole | {"anyOf": [{"properties": {"c": INTEGER}, "required": ["c"]}, {"properties": ab}]},
    )
    yield "unevaluatedProperties", {"type": "object", "properties": ab, "unevaluatedProperties": INTEGER}
    yield "unevaluatedProperties", whole | {"$ref": "#/$defs/p", "$defs": {"p": {"properties": ab}}}
    yield "unevaluatedItems", {"type": "array", "prefixItems": [INTEGER, STRING], "unevaluatedItems": False}


def at_random(rng: random.Random, depth: int = 3) -> Schema:
    """A random schema. Most of them can be enforced."""
    makers = [_number, _string, _constant] + [_array, _object, _either] * (depth > 0)
    schema = rng.choice(makers)(rng, depth)
    if rng.random() < 0.2:
        schema = schema | {"title": "A title", "description": "what it is", "default": None, "x-note": [1]}
    return schema


def _number(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": rng.choice(["integer", "number"])}
    low = rng.choice([rng.randint(-1000, 1000), round(rng.uniform(-50, 50), rng.randint(0, 3))])
    high = low + rng.choice([1, 9, 250, 12345])
    schema |= rng.choice([{}, {"minimum": low}, {"exclusiveMinimum": low}])
    schema |= rng.choice([{}, {"maximum": high}, {"exclusiveMaximum": high + 1}])
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.choice([1, 5, 0.5])
    return schema


def _string(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    choice = rng.random()
    if choice < 0.3:
        low = rng.randint(0, 5)
        schema |= {"minLength": low, "maxLength": low + rng.randint(0, 9)}
    elif choice < 0.6:
        parts = ["[a-f]+", "(x|yz)", r"\d{2,4}", "é?", '[^a-z"]', "-", "(ab){1,2}", r"\.", "[A-Z_]*"]
        schema["pattern"] = "^" + "".join(rng.choice(parts) for _ in range(rng.randint(1, 4))) + "$"
    elif choice < 0.8:
        schema["format"] = rng.choice(sorted(FORMATS))
    return schema


def _constant(rng: random.Random, depth: int) -> Schema:
    values = ["a", "long text with words", 1, 2.5, None, True, [1, "b"], {"k": 0}, "né", -7]
    return rng.choice([{"const": rng.choice(values)}, {"enum": rng.sample(values, rng.randint(1, 5))}])


def _array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": at_random(rng, depth - 1)}
    if rng.random() < 0.4:
        schema["prefixItems"] = [at_random(rng, depth - 1) for _ in range(rng.randint(1, 2))]
    low = rng.randint(0, 2)
    return schema | rng.choice([{}, {"minItems": low}, {"minItems": low, "maxItems": low + rng.randint(0, 3)}])


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "a b", "é", "list", "x1", "x2", "value"], rng.randint(0, 4))
    properties = {name: at_random(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    schema["additionalProperties"] = rng.choice([False, False, True, at_random(rng, 0)])
    if rng.random() < 0.2:
        schema["patternProperties"] = {"^zz": at_random(rng, 0)}
    return schema


def _either(rng: random.Random, depth: int) -> Schema:
    parts = [at_random(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return rng.choice([{"anyOf": parts}, {"allOf": parts[:1]}, {"oneOf": [{"type": "null"}, *parts[:1]]}])


def conditional_at_random(rng: random.Random, depth: int = 2) -> Schema:
    """A random schema with a condition, exclusive alternatives or a keyword that depends on others."""

    def part() -> Schema:
        return conditional_at_random(rng, depth - 1) if depth and rng.random() < 0.35 else _plain(rng, 1)

    beside = _plain(rng, 1) if rng.random() < 0.5 else {}
    names = rng.choice([{"enum": ["a", "b"]}, {"pattern": "^[ab]"}, {"maxLength": 1}, {"not": {"enum": ["a"]}}])
    return rng.choice(
        [
            lambda: {**beside, "not": part()},
            lambda: {**beside, "oneOf": [part() for _ in range(rng.randint(2, 4))]},
            lambda: {**beside, "oneOf": [part(), part()]},
            lambda: {**beside, "if": part(), "then": part(), "else": part()},
            lambda: {**beside, "if": part(), "then": part()},
            lambda: {**beside, "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": part()}},
            lambda: {"allOf": [part(), part()], "anyOf": [part(), part()]},
            lambda: {**beside, "anyOf": [part(), part()], "unevaluatedProperties": False},
            lambda: {"type": "object", **beside, "propertyNames": names},
            lambda: {"type": "array", "contains": part(), "uniqueItems": True, "items": {"enum": ["a", 1, None]}},
        ]
    )()


def _plain(rng: random.Random, depth: int) -> Schema:
    closed: Schema = {"additionalProperties": False} if rng.random() < 0.4 else {}
    properties = {name: _plain(rng, depth - 1) if depth else INTEGER for name in rng.sample("abc", 2)}
    kinds = ["string", "integer", "number", "null", "object", "array", "boolean"]
    return rng.choice(
        [
            {"type": rng.choice(kinds)},
            {"type": ["string", "integer", "object"]},
            {"enum": rng.sample(["a", "b", "ab", 1, 2, 2.5, None, True, [], {}, [1]], rng.randint(1, 3))},
            {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(1, 4)},
            {"minimum": rng.randint(-3, 3)},
            {"type": "integer", "maximum": rng.randint(-3, 5)},
            {"required": rng.sample("abc", rng.randint(1, 2))},
            {"type": "object", "properties": properties, "required": rng.sample("abc", 1), **closed},
            {"properties": properties},
            {"type": "array", "items": rng.choice([INTEGER, STRING]), "minItems": rng.randint(0, 2)},
            {"type": "string", "pattern": rng.choice(["^a", "b$", "^[ab]*$"])},
        ]
    )
