"""Whether two schemas can have a value in common: what `oneOf` needs to know, as far as it is plain to see."""

from collections.abc import Callable
from itertools import product
from typing import Any

Schema = Any  # what JSON has
Resolve = Callable[[Schema], Schema]  # follows a $ref


def are_apart(one: Schema, other: Schema, resolve: Resolve) -> bool:
    """Whether no value fits both, for sure: by type, by value, or by a property that both require."""
    one, other = resolve(one), resolve(other)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return all(a != b for a, b in product(values, others))
    types = _types(one), _types(other)
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    if types != ({"object"}, {"object"}):
        return False
    common = set(one.get("required", ())) & set(other.get("required", ()))
    both = one.get("properties", {}), other.get("properties", {})
    return any(name in both[0] and name in both[1] and _differ(both, name, resolve) for name in sorted(common))


def _differ(both: tuple[Schema, Schema], name: str, resolve: Resolve) -> bool:
    return are_apart(both[0][name], both[1][name], resolve)


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: Schema) -> set[str]:
    """Integers are numbers here. Nothing where it is not said."""
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
