"""Limits of JSON schemas: keywords, size and nesting.

They bound the time and the stack of a compilation. `check_bounds` takes a schema that `reader` has translated:
references point to "$defs" of the root.
"""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import lcm, prod

from quire.errors import RequestError

MAX_NODES = 20_000  # schemas, and values within constants
MAX_OPTIONAL = 1000  # properties of one object that are not required: a mask has all that may follow
MAX_TOTAL_NESTING = 512  # levels, summed over the root and all definitions
MAX_EXPANDED_NODES = 20_000  # nodes of a schema after references with other keywords beside them are expanded
MAX_PRODUCT = 6000  # combinations of alternatives in one place, times the nodes of the schema there
MAX_MULTIPLE = 10_000  # common multiple of all multipleOf, in units of the last decimal

_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_IN_PLACE = ("allOf", "anyOf", "oneOf")


def check_bounds(root: bool | dict[str, object], param: str) -> None:  # noqa: FBT001 (a schema may be true or false)
    """Raises RequestError for a schema that is too large to compile, or that has no finite instance."""
    if isinstance(root, bool):
        return
    definitions = root.get("$defs", {})
    assert isinstance(definitions, dict)
    schemas = [root, *definitions.values()]
    sizes = _Sizes(definitions, param)
    if sum(sizes.of(schema) for schema in schemas) > 2 * MAX_EXPANDED_NODES:
        raise sizes.too_large()
    if sum(map(_depth, schemas)) > MAX_TOTAL_NESTING:
        raise schema_error("#", f"definitions have more than {MAX_TOTAL_NESTING} levels of nesting in total", param)
    if lcm(*(multiple for schema in schemas for multiple in _multiples(schema)), 1) > MAX_MULTIPLE:
        why = f"a common multiple of at most {MAX_MULTIPLE:,}, counted in their last decimal"
        raise schema_error("#", f"all multipleOf of a schema must have {why}", param)
    _check_finite(root, definitions, param)
    combinations = _Combinations(definitions, sizes, param)
    for schema in schemas:
        _check_optional(schema, param)
        combinations.check(schema)


def schema_error(at: str, why: str, param: str) -> RequestError:
    """The error of a part of a schema. at: its JSON pointer."""
    return RequestError(f"schema at {at}: {why}", param)


class _Combinations:
    """Alternatives of allOf, anyOf and $ref in one place make a product: llguidance expands it."""

    def __init__(self, definitions: Mapping[str, object], sizes: "_Sizes", param: str) -> None:
        self._definitions = definitions
        self._sizes = sizes
        self._param = param
        self._known: dict[int, int] = {}  # by the id of a schema; 1 while it is counted

    def check(self, schema: object) -> None:
        """Raises RequestError if a schema or a part of it has too many combinations."""
        self._of(schema)
        if isinstance(schema, dict):
            for _, child in children(schema):
                if id(child) not in self._known:
                    self.check(child)

    def _of(self, schema: object) -> int:
        if not isinstance(schema, dict):
            return 1
        if id(schema) not in self._known:
            self._known[id(schema)] = 1
            factors = [self._of(one) for one in schema.get("allOf", ())]
            factors.append(sum(self._of(one) for one in schema.get("anyOf", ())))
            if "$ref" in schema:
                factors.append(self._of(self._definitions[schema["$ref"].removeprefix("#/$defs/")]))
            factors = [factor for factor in factors if factor > 1]
            if len(factors) > 1 and prod(factors) * self._sizes.of(schema) > MAX_PRODUCT:
                why = f"{prod(factors)} combinations of alternatives (anyOf, oneOf, if, dependencies) of this size"
                raise schema_error(getattr(schema, "at", "#"), f"{why} are too many; use fewer at once", self._param)
            self._known[id(schema)] = prod(factors)
        return self._known[id(schema)]


def _check_optional(schema: object, param: str) -> None:
    """Raises RequestError for an object with too many properties that are not required."""
    if not isinstance(schema, dict):
        return
    number = len(schema.get("properties", {}).keys() - set(schema.get("required", ())))
    if number > MAX_OPTIONAL:
        why = f"{number:,} properties are not required, more than {MAX_OPTIONAL:,} of one object; require some"
        raise schema_error(getattr(schema, "at", "#"), why, param)
    for _, child in children(schema):
        _check_optional(child, param)


def children(schema: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """(keyword, schema) of the direct subschemas, without "$defs"."""
    for key, value in schema.items():
        if key in ("properties", "patternProperties") and isinstance(value, dict):
            yield from ((key, one) for one in value.values())
        elif key in _LISTS and isinstance(value, list):
            yield from ((key, one) for one in value)
        elif key in ("items", "additionalProperties"):
            yield key, value


def _depth(schema: object) -> int:
    if not isinstance(schema, dict):
        return 1
    deepest = 0
    for _, child in children(schema):
        deepest = max(deepest, _depth(child))
    return 1 + deepest


def _multiples(schema: object) -> Iterator[int]:
    """Each multipleOf without its decimal point: 25 for 0.25; whole numbers are unchanged."""
    if isinstance(schema, dict):
        if "multipleOf" in schema:
            _, digits, exponent = Decimal(repr(schema["multipleOf"])).normalize().as_tuple()
            assert isinstance(exponent, int)
            yield int("".join(map(str, digits))) * 10 ** max(exponent, 0)
        for _, child in children(schema):
            yield from _multiples(child)


class _Sizes:
    """Sizes of schemas after the expansion of references that other keywords stand beside."""

    def __init__(self, definitions: Mapping[str, object], param: str) -> None:
        self._definitions = definitions
        self._param = param
        self._definition_sizes: dict[str, int] = {}
        self._expanding: set[str] = set()

    def too_large(self) -> RequestError:
        why = "use fewer references that have other keywords beside them"
        return schema_error("#", f"the schema is too large with its references expanded; {why}", self._param)

    def of(self, schema: object, *, is_joined: bool = False) -> int:
        if not isinstance(schema, dict):
            return 1
        size = 1 + len(schema.get("enum", ())) + len(schema.get("not", {}).get("enum", ()))
        is_joined = is_joined or len(schema.keys() - {"$defs"}) > 1 or len(schema.get("allOf", ())) > 1
        if "$ref" in schema and is_joined:
            size += self._of_definition(schema["$ref"].removeprefix("#/$defs/"), getattr(schema, "at", "#"))
        for key, child in children(schema):
            size += self.of(child, is_joined=is_joined and key in _IN_PLACE)
            if size > MAX_EXPANDED_NODES:
                raise self.too_large()
        return size

    def _of_definition(self, name: str, at: str) -> int:
        if name in self._expanding:
            why = "a recursive $ref has other keywords beside it; leave out the $ref or these keywords"
            raise schema_error(at, f"the schema is infinite: {why}", self._param)
        if name not in self._definition_sizes:
            self._expanding.add(name)
            self._definition_sizes[name] = self.of(self._definitions[name], is_joined=True)
            self._expanding.remove(name)
        return self._definition_sizes[name]


def _check_finite(root: dict[str, object], definitions: Mapping[str, object], param: str) -> None:
    """Raises RequestError if the root or a definition has no finite instance."""
    ending: set[str] = set()
    while True:
        more = {name for name, schema in definitions.items() if name not in ending and _can_end(schema, ending)}
        if not more:
            break
        ending |= more
    if len(ending) < len(definitions) or not _can_end(root, ending):
        raise schema_error("#", "no value satisfies the schema: a recursive $ref never ends", param)


def _can_end(schema: object, ending: set[str]) -> bool:
    """Whether a schema has a finite instance, judged by references and required parts. ending: definitions with one."""
    if not isinstance(schema, dict):
        return True  # compilation finds a schema without any instance
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in ending:
        return False
    for key in _IN_PLACE:
        parts = [_can_end(part, ending) for part in schema.get(key, ())]
        if parts and not (all(parts) if key == "allOf" else any(parts)):
            return False
    kinds = schema.get("type")
    if kinds == "object":
        properties = schema.get("properties", {})
        return all(_can_end(properties.get(name, True), ending) for name in schema.get("required", ()))
    if kinds == "array":
        first = schema.get("prefixItems", [])
        needed = schema.get("minItems", 0)
        is_short = needed <= len(first) or _can_end(schema.get("items", True), ending)
        return is_short and all(_can_end(item, ending) for item in first[:needed])
    return True


ENFORCED = frozenset(
    {
        *("type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf"),
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
        *("contains", "minContains", "maxContains", "uniqueItems"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    }
)

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "$vocabulary"),
        *("contentMediaType", "contentEncoding", "contentSchema"),
        *("discriminator", "externalDocs", "xml", "nullable"),  # of OpenAPI: redundant with oneOf, or no constraint
        *("then", "else", "$dynamicAnchor", "$recursiveAnchor"),  # parts of other keywords
    }
)

KNOWN = ENFORCED | ANNOTATIONS

TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})

DIALECTS = frozenset(
    {
        *(f"json-schema.org/draft/{year}/schema" for year in ("2020-12", "2019-09")),
        *(f"json-schema.org/draft-{number}/schema" for number in ("07", "06", "04")),
    }
)
