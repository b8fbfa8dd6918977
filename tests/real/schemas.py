"""Fifty JSON schemas: records as applications ask for them, each with the task of a request."""

_STRING, _INTEGER, _NUMBER, _BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))
_SHORT = {"type": "string", "minLength": 1, "maxLength": 12}


def _object(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _array(items, low, high):
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def _pattern(text):
    return {"type": "string", "pattern": text}


def _bounded(low, high, kind="integer"):
    return {"type": kind, "minimum": low, "maximum": high}


_POINT = _object(x=_bounded(-99, 99), y=_bounded(-99, 99))
_COLOURS = {"enum": ["red", "green", "blue"]}
_DATE = _pattern("^(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])$")
_FIELDS = {
    "short string": _SHORT,
    "integer": _bounded(0, 150),
    "number": _bounded(-1, 1, "number"),
    "boolean": _BOOLEAN,
    "null or string": {"anyOf": [{"type": "null"}, _SHORT]},
    "enum of strings": _COLOURS,
    "enum of kinds": {"enum": [1, "one", None, True, 1.5]},
    "constant": {"const": {"version": 2}},
    "digits": _pattern("^[0-9]{5}$"),
    "code": _pattern("^[A-Z]{2}-[0-9]{3}(/[a-z])?$"),
    "date": _DATE,
    "clock": _pattern("^([01][0-9]|2[0-3]):[0-5][0-9]$"),
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "open interval": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "point": _POINT,
    "array of strings": _array(_SHORT, 1, 3),
    "array of integers": _array(_bounded(1, 9), 3, 3),
    "array of records": _array(_POINT, 1, 2),
    "array of arrays": _array(_array(_bounded(0, 1), 2, 2), 2, 2),
    "tuple": {"type": "array", "prefixItems": [_SHORT, _BOOLEAN], "items": False, "minItems": 2},
}

_NESTED = _object(name=_SHORT, at=_POINT, tags=_array(_COLOURS, 0, 2))
_TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": _bounded(0, 9), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        },
        "leaf": _object(value=_bounded(0, 9)),
    },
    "$ref": "#/$defs/node",
}
_CARD = _object(kind={"const": "card"}, number=_pattern("^[0-9]{4}$"))
_CASH = _object(kind={"const": "cash"}, currency={"enum": ["EUR", "USD"]})
_OPTIONAL = {
    "type": "object",
    "properties": {"id": _bounded(1, 9), "note": _SHORT, "done": _BOOLEAN},
    "required": ["id"],
    "additionalProperties": False,
}

SCHEMAS = {
    **{f"{name} alone": schema for name, schema in _FIELDS.items()},
    **{f"{name} in a record": _object(id=_bounded(1, 999), value=schema) for name, schema in _FIELDS.items()},
    "nested": _NESTED,
    "nested twice": _object(first=_NESTED, last=_object(inner=_NESTED)),
    "reference": _TREE,
    "alternatives": {"anyOf": [_CARD, _CASH]},
    "alternatives in an array": _array({"anyOf": [_CARD, _CASH]}, 1, 2),
    "optional keys": _OPTIONAL,
    "map of integers": {
        "type": "object",
        "additionalProperties": _bounded(0, 9),
        "minProperties": 1,
        "maxProperties": 2,
    },
    "many keys": _object(**{f"key_{i}": _BOOLEAN for i in range(12)}),
    "person": _object(name=_SHORT, born=_DATE, email=_pattern("^[a-z]{2,8}@[a-z]{2,8}\\.(com|org)$"), vip=_BOOLEAN),
    "order": _object(order=_pattern("^A[0-9]{6}$"), items=_array(_object(sku=_SHORT, count=_bounded(1, 9)), 1, 2)),
}
