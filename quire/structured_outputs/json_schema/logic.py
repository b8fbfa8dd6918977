"""Negation, contradiction and combination of translated schemas.

Negations are exact: a schema that is narrower than the user's schema has none. A contradiction is reported only if no
value can satisfy the schemas. It is found by types, constants, bounds, and properties that are required.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from json import dumps
from types import MappingProxyType
from typing import Any

MAX_COMBINATIONS = 256  # alternatives that the alternatives of one schema make together
_MAX_STEPS = 25_000  # parts that are compared or negated for one schema of a user
_MAX_TEXT_TESTS = 100  # of patterns and formats against each other
_MAX_DEPTH = 8  # of properties within properties


class Part(dict[str, Any]):
    """A translated schema. at: JSON pointer of its origin in the user's schema.

    is_narrowed: the part allows less than its origin. evaluates: its properties and items count as evaluated, for
    unevaluatedProperties and unevaluatedItems.
    """

    __slots__ = ("at", "evaluates", "is_narrowed")

    def __init__(
        self, at: str, keywords: Mapping[str, object] = MappingProxyType({}), *, is_narrowed: bool = False
    ) -> None:
        super().__init__(keywords)
        self.at = at
        self.is_narrowed = is_narrowed
        self.evaluates = True

    def without_annotations(self) -> "Part":
        """The same part, which does not count for unevaluatedProperties and unevaluatedItems."""
        self.evaluates = False
        return self


Schema = bool | Part
Resolve = Callable[[object], Schema]  # the target of a $ref; true if it is not known yet


class CannotNegate(Exception):
    """A part of a schema has no negation that quire can enforce. at: JSON pointer of the part."""

    def __init__(self, at: str) -> None:
        super().__init__(at)
        self.at = at


class TooManyCombinations(Exception):
    """Alternatives have more than MAX_COMBINATIONS combinations."""


TYPES = ("null", "boolean", "object", "array", "number", "string")  # "number" with integers
FRACTION = "fraction"  # in translated schemas: numbers that are no integers. No backend enforces it
ATOMS = {*TYPES, "integer", FRACTION} - {"number"}
# (type, keyword of the least, keyword of the most)
_COUNTS = (
    ("string", "minLength", "maxLength"),
    ("array", "minItems", "maxItems"),
    ("object", "minProperties", "maxProperties"),
)
_TYPE_OF_KEYWORD = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "integer"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "required"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties"), "object"),
}
_BOUNDS = {  # of numbers -> the keyword of its negation
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}


def _negated_bound(at: str, key: str, argument: object) -> Iterator[Part]:
    assert isinstance(argument, int | float) or key not in _BOUNDS
    if key in _BOUNDS:
        yield Part(at, {"type": "number", _BOUNDS[key]: argument})
        return
    for kind, least, most in _COUNTS:
        if key == least and isinstance(argument, int):
            if argument > 0:
                yield Part(at, {"type": kind, most: argument - 1})
            return
        if key == most and isinstance(argument, int) and (kind != "object" or not argument):  # names can repeat
            yield Part(at, {"type": kind, least: argument + 1})
            return
    raise CannotNegate(f"{at}/{key}")


class Logic:
    """Negations, contradictions and combinations for one schema of a user. The number of steps is bounded."""

    def __init__(self, resolve: Resolve, outline: Resolve, is_empty: Callable[[Part], bool]) -> None:
        """outline: a part of the target of a $ref that `resolve` does not know yet. is_empty: whether no text satisfies
        a schema of strings.
        """
        self._resolve = resolve
        self._outline = outline
        self._is_empty = is_empty
        self._known_empty: dict[str, bool] = {}
        self._known_keys: dict[int, tuple[list[object], dict[str, object]]] = {}
        self._is_wide = False  # without what only quire asks for: narrowed parts and formats
        self._num_steps = 0
        self._followed: list[object] = []  # references from a negation to the part that is being negated

    def negations(self, schema: Schema) -> list[Schema]:
        """Alternatives: a value satisfies one of them if and only if it violates the schema. Raises CannotNegate."""
        if isinstance(schema, bool):
            return [] if schema else [True]
        self._num_steps += 1
        if schema.is_narrowed or self._num_steps > _MAX_STEPS:
            raise CannotNegate(schema.at)
        found: list[Schema] = []
        types = common_types([schema])
        has_typed_values = "enum" in schema and all(atom_of(value) in types for value in schema["enum"])
        for key, argument in schema.items():
            if key != "type" or not has_typed_values:  # a value of another type is none of the constants
                found += self._negations(schema.at, key, argument)
        return found

    def some_negations(self, schema: Schema, names: Iterable[str]) -> tuple[list[Schema], bool]:
        """Alternatives that all violate the schema, and whether each value that violates it satisfies one of them.

        names: properties that a schema beside it names.
        """
        with suppress(CannotNegate):
            return self.negations(schema), True
        found: list[Part] = []
        for part in self.conjuncts([schema]) or []:
            if part.is_narrowed:
                continue
            for key, argument in part.items():
                if key not in ("allOf", "$ref"):
                    with suppress(CannotNegate):
                        found += (one for one in self._negations(part.at, key, argument) if isinstance(one, Part))
            found += self._violations(part, names)
        for one in found:
            one.is_narrowed = True
        return list(found), False

    def _violations(self, part: Part, names: Iterable[str]) -> Iterator[Part]:
        """Objects with a property that a closed object does not have, and arrays whose first item is not valid."""
        if part.get("additionalProperties") is False and not part.get("patternProperties"):
            known = part.get("properties", {})
            assert isinstance(known, dict)
            yield from (Part(part.at, {"type": "object", "required": [name]}) for name in names if name not in known)
        if "items" in part:
            prefix = [True] * len(_list(part, "prefixItems"))
            with suppress(CannotNegate):
                other = self.negated(part["items"])
                keywords = {"type": "array", "prefixItems": [*prefix, other], "minItems": len(prefix) + 1}
                yield Part(part.at, keywords).without_annotations()

    def negated(self, schema: Schema) -> Schema:
        """The negation as one schema. Raises CannotNegate."""
        found = self.negations(schema)
        if not found or True in found:
            return bool(found)
        assert isinstance(schema, Part)
        return found[0] if len(found) == 1 else Part(schema.at, {"anyOf": found})

    def _negations(self, at: str, key: str, argument: Any) -> Iterator[Schema]:  # noqa: ANN401, C901 (a table over JSON)
        match key, argument:
            case "type", _:
                others = type_names(ATOMS - _atoms(argument))
                if others:
                    yield Part(at, {"type": others})
            case "enum", _:
                yield Part(at, {"not": {"enum": argument}})
            case "not", {"enum": values}:
                yield Part(at, {"enum": values})
            case "required", [*names]:
                for name in names:
                    yield Part(at, {"type": "object", "properties": {name: False}}).without_annotations()
            case "properties", {}:
                for name, one in argument.items():
                    other = self.negated(one)
                    if other is not False:
                        keywords: dict[str, object] = {
                            "type": "object",
                            "properties": {name: other},
                            "required": [name],
                        }
                        yield Part(at, keywords).without_annotations()
            case "prefixItems", [*items]:
                for place, one in enumerate(items):
                    other = self.negated(one)
                    if other is not False:
                        prefix = [*([True] * place), other]
                        keywords = {"type": "array", "prefixItems": prefix, "minItems": place + 1}
                        yield Part(at, keywords).without_annotations()
            case "allOf", [*parts]:
                for one in parts:
                    yield from self.negations(one)
            case "anyOf", [*parts]:
                negated = [self.negated(one) for one in parts]
                if False not in negated:
                    yield Part(at, {"allOf": negated})
            case "$ref", _:
                target = self._resolve(argument)
                if target is True or argument in self._followed:  # it may be recursive
                    raise CannotNegate(f"{at}/$ref")
                self._followed.append(argument)
                yield from self.negations(target)
                self._followed.pop()
            case (("items" | "additionalProperties"), True):
                return
            case _:
                yield from _negated_bound(at, key, argument)

    def are_disjoint(self, one: Schema, other: Schema) -> bool:
        """Whether it is certain that no value satisfies both of the user's schemas, for any validator of formats."""
        self._is_wide = True
        found = any(self._contradict([one, other], 0, num_levels) for num_levels in (1, 2, 3))
        self._is_wide = False
        return found

    def accepts_all(self, schema: Schema, kind: str) -> bool:
        """Whether it is certain that all values of a type satisfy the schema. kind: one of ATOMS."""
        parts = self.conjuncts([schema])
        if parts is None:
            return False
        number = "integer" if kind == FRACTION else ""
        return kind in common_types(parts) and all(
            self._resolve(argument) is not True
            if key == "$ref"
            else key in ("type", "allOf") or _TYPE_OF_KEYWORD.get(key, number or kind) != (number or kind)
            for part in parts
            for key, argument in part.items()
        )

    def combinations(self, base: Schema, factors: Sequence[Sequence[Schema]]) -> list[list[Schema]]:
        """One alternative of each factor, in all ways that do not contradict each other or the base.

        Raises TooManyCombinations for several factors.
        """
        found: list[list[Schema]] = [[]]
        for alternatives in factors:
            found = [
                [*chosen, one]
                for chosen in found
                for one in alternatives
                if one is not False and not self._contradict([base, *chosen, one], 0)
            ]
            if len(found) > MAX_COMBINATIONS and len(factors) > 1:
                raise TooManyCombinations
        return found

    def _contradict(self, schemas: Sequence[Schema], depth: int, num_levels: int = 1) -> bool:
        """Whether it is certain that no value satisfies all schemas. num_levels: of alternatives that count at once."""
        parts = self.conjuncts(schemas)
        if parts is None:
            return True
        self._num_steps += len(parts)
        if depth > _MAX_DEPTH or self._num_steps > _MAX_STEPS:
            return False
        types = common_types(parts)
        if not types:
            return True
        if self._has_no_value(parts, types):
            return True
        if _are_bounds_empty(parts, types):
            return True
        if types == {"string"} and self._is_without_text(parts):
            return True
        if types == {"object"} and self._do_members_contradict(parts, depth, num_levels):
            return True
        groups = [part for part in parts if "anyOf" in part] if num_levels else []
        return any(self._are_all_contradicted(part, parts, depth, num_levels - 1) for part in groups)

    def _has_no_value(self, parts: Sequence[Part], types: Set[str]) -> bool:
        """Whether the parts have constants, and none of them satisfies all parts."""
        lists = [self._keys(values) for part in parts if (values := _values(part)) is not None]
        if not lists:
            return False
        common = set(lists[0]).intersection(*lists)
        for part in parts:
            excluded = part.get("not")
            if isinstance(excluded, dict):
                common.difference_update(self._keys(excluded["enum"]))
        return not any(_may_fit(lists[0][key], parts, types) for key in common)

    def _keys(self, values: list[object]) -> dict[str, object]:
        """The values by `value_key`. They are kept, so that the id of a list stays its own."""
        if id(values) not in self._known_keys:
            self._num_steps += len(values)
            self._known_keys[id(values)] = values, {value_key(value): value for value in values}
        return self._known_keys[id(values)][1]

    def _is_without_text(self, parts: Sequence[Part]) -> bool:
        keys = {"enum", "not", "pattern", "minLength", "maxLength", "" if self._is_wide else "format"}
        plain = [Part(part.at, {key: part[key] for key in sorted(part.keys() & keys)}) for part in parts]
        plain = [part for part in plain if part]
        if len(plain) < 2 or not any({"pattern", "format"} & part.keys() for part in plain):
            return False
        key = dumps(plain)
        if key not in self._known_empty:
            self._known_empty[key] = len(self._known_empty) < _MAX_TEXT_TESTS and self._is_empty(
                Part("#", {"type": "string", "allOf": plain})
            )
        return self._known_empty[key]

    def _are_all_contradicted(self, part: Part, parts: Sequence[Part], depth: int, num_levels: int) -> bool:
        """Whether the parts contradict each alternative of a part."""
        alternatives = part["anyOf"]
        assert isinstance(alternatives, list)
        plain = Part(part.at, {key: value for key, value in part.items() if key != "anyOf"})
        others = [plain, *(one for one in parts if one is not part)]
        return all(self._contradict([*others, one], depth + 1, num_levels) for one in alternatives)

    def _do_members_contradict(self, parts: Sequence[Part], depth: int, num_levels: int) -> bool:
        names = dict.fromkeys(name for part in parts for name in _list(part, "required"))
        members = ([_property(part, name) for part in parts] for name in names)
        return any(
            self._contradict([one for one in found if one is not True], depth + 1, num_levels) for found in members
        )

    def conjuncts(self, schemas: Iterable[Schema]) -> list[Part] | None:
        """The schemas with the parts of their allOf and the targets of their $ref. None if one of them is false."""
        found: list[Part] = []
        waiting = list(schemas)
        seen: set[object] = set()
        while waiting:
            one = waiting.pop()
            if one is False:
                return None
            if one is True or (self._is_wide and one.is_narrowed):
                continue
            found.append(one)
            waiting += _list(one, "allOf")
            if "$ref" in one and one["$ref"] not in seen:
                seen.add(one["$ref"])
                target = self._resolve(one["$ref"])
                waiting.append(self._outline(one["$ref"]) if target is True else target)
        return found


def _list(part: Part, key: str) -> list:  # type: ignore[type-arg]  # of schemas, or of names
    value = part.get(key, [])
    assert isinstance(value, list)
    return value


def type_names(atoms: Set[str]) -> list[str]:
    """The types of JSON schema for "integer", "fraction" and others, sorted."""
    is_number = {"integer", FRACTION} <= atoms
    return sorted(atoms - {"integer", FRACTION} | {"number"} if is_number else atoms)


def _atoms(types: object) -> set[str]:
    names = {types} if isinstance(types, str) else set(types)  # type: ignore[call-overload]
    return names - {"number"} | {"integer", FRACTION} if "number" in names else names


def common_types(parts: Iterable[Part]) -> set[str]:
    """The types that all parts allow, with "integer" and "fraction" instead of "number"."""
    types = set(ATOMS)
    for part in parts:
        if "type" in part:
            types &= _atoms(part["type"])
    return types


def type_of(value: object) -> str:
    """JSON's name for the type of a value; "integer" for whole numbers."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = {str: "string", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def atom_of(value: object) -> str:
    """The type of a value, one of ATOMS."""
    return FRACTION if type_of(value) == "number" else type_of(value)


def _values(part: Part) -> list[object] | None:
    return _list(part, "enum") if "enum" in part else None


def value_key(value: object) -> str:
    """Equal for values that are equal in JSON: 1 and 1.0, but not 1 and true."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list):
        return f"[{','.join(map(value_key, value))}]"
    if isinstance(value, dict):
        members = ",".join(f"{dumps(name)}:{value_key(value[name])}" for name in sorted(value))
        return f"{{{members}}}"
    return dumps(value)


def _may_fit(value: object, parts: Sequence[Part], types: Set[str]) -> bool:
    """False if the value certainly has another type, size or other properties than the parts ask for."""
    kind = atom_of(value)
    if kind not in types:
        return False
    constant: dict[str, object] = {}
    if isinstance(value, int | float) and not isinstance(value, bool):
        constant = {"minimum": value, "maximum": value}
    elif isinstance(value, str | list | dict):
        least, most = next((least, most) for one, least, most in _COUNTS if one == kind)
        constant = {least: len(value), most: len(value)}
    if isinstance(value, dict) and any(name not in value for part in parts for name in _list(part, "required")):
        return False
    return not _are_bounds_empty([*parts, Part("#", constant)], {kind})


def _are_bounds_empty(parts: Sequence[Part], types: set[str]) -> bool:
    for kind, least, most in _COUNTS:
        if types == {kind}:
            return _most(parts, least) > -_most(parts, most, sign=-1)
    if types <= {"integer", FRACTION}:
        low, high = _most(parts, "minimum"), -_most(parts, "maximum", sign=-1)
        above, below = _most(parts, "exclusiveMinimum"), -_most(parts, "exclusiveMaximum", sign=-1)
        return low > high or above >= below or above >= high or low >= below
    return False


def _most(parts: Iterable[Part], key: str, sign: int = 1) -> float:
    values = (part[key] for part in parts if key in part)
    return max((sign * value for value in values if isinstance(value, int | float)), default=float("-inf"))


def _property(part: Part, name: str) -> Schema:
    """The schema that a part has for a property; true if a pattern could apply to its name."""
    properties = part.get("properties", {})
    assert isinstance(properties, dict)
    if name in properties:
        return properties[name]  # type: ignore[no-any-return]
    if part.get("patternProperties"):
        return True
    more = part.get("additionalProperties", True)
    assert isinstance(more, bool | Part)
    return more
