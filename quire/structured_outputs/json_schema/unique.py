"""Arrays without repetitions, from items with few known values."""

from collections.abc import Callable
from itertools import combinations, permutations
from math import comb, perm

from quire.structured_outputs.json_schema.logic import TYPES, Part, Resolve, Schema, atom_of, common_types, value_key

_MAX_ARRAYS = 256


def unique_arrays(out: Part, at: str, resolve: Resolve) -> list[Schema] | None:
    """Alternatives that allow no array with equal items, for a schema `out`; None if there are too many arrays.

    If not all orders of the items fit, the arrays have the order of the known values. If not all numbers of items fit,
    the arrays have few items.
    """
    types = out.get("type", list(TYPES))
    others = [name for name in ([types] if isinstance(types, str) else types) if name != "array"]
    least, most = out.get("minItems", 0), out.get("maxItems", float("inf"))
    assert isinstance(least, int)
    assert isinstance(most, int | float)
    if others == types or most <= 1:
        return [True]
    items = out.get("items", True)
    assert isinstance(items, bool | Part)
    values = None if out.get("prefixItems") else _values(items, resolve)
    if values is None:
        return None
    distinct = list({value_key(value): value for value in values}.values())
    last = int(min(most, len(distinct)))
    longest = _longest(perm, len(distinct), least, last)
    is_narrowed = longest < last
    if is_narrowed:
        longest = _longest(comb, len(distinct), least, last)
    if longest < min(last, max(least, 2)):
        return None
    lengths = range(least, longest + 1)
    if is_narrowed:
        arrays = [list(one) for length in lengths for one in combinations(distinct, length)]
    else:
        arrays = [list(one) for length in lengths for one in permutations(distinct, length)]
    found: list[Schema] = [Part(at, {"type": others})] if others else []
    return [*found, Part(at, {"enum": arrays}, is_narrowed=is_narrowed)] if arrays else found


def _longest(count: Callable[[int, int], int], num_values: int, least: int, most: int) -> int:
    """The largest length, up to `most`, so that at most _MAX_ARRAYS arrays are at least `least` long and not longer."""
    total, length = 0, least
    while length <= most and (total := total + count(num_values, length)) <= _MAX_ARRAYS:
        length += 1
    return length - 1


def _values(schema: Schema, resolve: Resolve) -> list[object] | None:
    """All values that a schema may allow; None if they are not known."""
    if isinstance(schema, bool):
        return None if schema else []
    types = common_types([schema])
    for key, argument in schema.items():
        match key, argument:
            case "enum", [*values]:
                return [value for value in values if atom_of(value) in types]
            case "type", ("boolean" | ["boolean"]):
                return [False, True]
            case "$ref", _:
                return _values(resolve(argument), resolve)
            case "anyOf", [*parts]:
                lists = [_values(one, resolve) for one in parts]
                return None if None in lists else [value for one in lists for value in one or ()]
    return None
