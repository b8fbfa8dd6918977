"""Strict translation of a JSON schema: each keyword is enforced, is an annotation, or causes a RequestError.

The result is a schema in one dialect (2020-12), without annotations, with formats as patterns, and with references to
"$defs" only.
"""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from urllib.parse import unquote

from quire.errors import nearest
from quire.params import check_unicode
from quire.structured_outputs.json_schema.bounds import ANNOTATIONS, DIALECTS, ENFORCED, KNOWN, REFUSED, check_bounds
from quire.structured_outputs.json_schema.values import MAX_PROPERTIES, VALUES, Out, Values, escaped

Schema = bool | dict[str, object]

_MAX_DEPTH = 96  # of subschemas, with the references of oneOf branches expanded


def read_schema(text: str, param: str, *, closed: bool = False) -> Schema:
    """The translation of the schema in `text`.

    closed: objects that name properties have no others, unless they set additionalProperties.
    Raises RequestError with the JSON pointer of a part that cannot be enforced or is invalid, or if it is too large.
    """
    value = json.loads(text)
    check_unicode(param, json.dumps(value, ensure_ascii=False))
    schema = _Reader(value, Values(param), closed=closed).read()
    check_bounds(schema, param)
    return schema


class _Reader:
    def __init__(self, root: object, values: Values, *, closed: bool) -> None:
        self._root = root
        self._values = values
        self._error = values.error
        self._closed = closed
        self._pointers: list[str] = []  # JSON pointers of definitions
        self._names: dict[str, str] = {}  # JSON pointer of a definition -> its name
        self._expanding: list[str] = []  # JSON pointers of references that are being expanded

    def read(self) -> Schema:
        """The translated root with the definitions that it references."""
        self._check_dialect()
        schema = self._schema(self._root, "#", 0)
        definitions: dict[str, object] = {}
        for place in self._pointers:  # grows: definitions reference others
            definitions[self._names[place]] = self._schema(self._resolve(place, place), place, 0)
        if isinstance(schema, dict) and definitions:
            schema["$defs"] = definitions
        return schema

    def _check_dialect(self) -> None:
        dialect = self._root.get("$schema") if isinstance(self._root, dict) else None
        if dialect is None:
            return
        if not isinstance(dialect, str) or dialect.rstrip("#").split("://")[-1] not in DIALECTS:
            raise self._error("#/$schema", f"unknown dialect {dialect!r:.100}; use 2020-12 or leave it out")

    def _schema(self, value: object, at: str, depth: int) -> Schema:
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise self._error(at, "a schema is an object, true or false")
        if depth > _MAX_DEPTH:
            raise self._error(at, "references are nested too deeply")
        self._values.count_node(at)
        out: Out = {}
        for key, argument in value.items():
            self._keyword(key, argument, f"{at}/{escaped(key)}", depth, out)
        self._normalize(value, at, out)
        return out

    def _keyword(self, key: str, argument: object, at: str, depth: int, out: Out) -> None:
        if key in VALUES:
            self._values.read(key, argument, at, out)
        elif key in _SUBSCHEMAS:
            _SUBSCHEMAS[key](self, key, argument, at, depth, out)
        elif key in ("$id", "id") and at.count("/") > 1 and not str(argument).startswith("#"):
            raise self._error(at, "a subschema cannot have its own $id; leave it out")
        elif key == "uniqueItems" and argument is False:
            return
        elif key in REFUSED:
            raise self._error(at, f"{key!r} is not enforced: {REFUSED[key]}")
        elif key not in ANNOTATIONS and not key.startswith("x-"):
            raise self._error(at, f"unknown keyword {key!r:.100}{nearest(key, sorted(KNOWN))}")

    def _one(self, key: str, argument: object, at: str, depth: int, out: Out) -> None:
        out[key] = self._schema(argument, at, depth + 1)

    def _several(self, key: str, argument: object, at: str, depth: int, out: Out) -> None:
        if not isinstance(argument, list) or not argument:
            raise self._error(at, f"{key} is a list of schemas, at least one")
        read = self._branch if key == "oneOf" else self._schema
        out[key] = [read(one, f"{at}/{index}", depth + 1) for index, one in enumerate(argument)]

    def _branch(self, value: object, at: str, depth: int) -> Schema:
        """A branch of oneOf. References are expanded, because backends must see that branches exclude each other."""
        if not isinstance(value, dict) or value.keys() - ANNOTATIONS != {"$ref"}:
            return self._schema(value, at, depth)
        place = self._pointer(value["$ref"], f"{at}/$ref")
        if place in self._expanding:
            return self._schema(value, at, depth)
        self._expanding.append(place)
        schema = self._branch(self._resolve(place, at), place, depth + 1)
        self._expanding.pop()
        return schema

    def _named(self, key: str, argument: object, at: str, depth: int, out: Out) -> None:
        if not isinstance(argument, dict):
            raise self._error(at, f"{key} is an object of schemas")
        if len(argument) > MAX_PROPERTIES:
            raise self._error(at, f"more than {MAX_PROPERTIES} properties")
        schemas: dict[str, Schema] = {}
        for name, one in argument.items():
            place = f"{at}/{escaped(name)}"
            if key == "properties":
                self._values.check_text(name, place)
                schemas[name] = self._schema(one, place, depth + 1)
            else:
                schemas[self._values.pattern(name, place)] = self._schema(one, place, depth + 1)
        out[key] = schemas

    def _items(self, key: str, argument: object, at: str, depth: int, out: Out) -> None:
        if not isinstance(argument, list):
            self._one(key, argument, at, depth, out)
        elif argument:  # before 2020-12
            self._several("prefixItems", argument, at, depth, out)

    def _reference(self, key: str, argument: object, at: str, depth: int, out: Out) -> None:
        place = self._pointer(argument, at)
        if place not in self._names:
            self._resolve(place, at)
            self._names[place] = f"d{len(self._pointers)}"
            self._pointers.append(place)
        out[key] = f"#/$defs/{self._names[place]}"

    def _pointer(self, reference: object, at: str) -> str:
        """The JSON pointer of a reference."""
        if not isinstance(reference, str):
            raise self._error(at, "$ref is a string")
        root = self._root if isinstance(self._root, dict) else {}
        base = root.get("$id", root.get("id"))
        if isinstance(base, str) and base and reference.startswith(base.rstrip("#") + "#"):
            reference = reference[len(base.rstrip("#")) :]
        if reference not in ("#", "#/") and not reference.startswith("#/"):
            raise self._error(at, f"only references within the schema, such as '#/$defs/name', not {reference!r:.100}")
        return "#" if reference == "#/" else reference

    def _resolve(self, place: str, at: str) -> object:
        value: object = self._root
        for step in place.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and len(name) < 9 and int(name) < len(value):
                value = value[int(name)]
            else:
                raise self._error(at, f"the schema has nothing at {place!r:.100}")
        return value

    def _normalize(self, value: Mapping[str, object], at: str, out: Out) -> None:
        """Convert keywords of older drafts and `format` to 2020-12, close objects, and check minProperties."""
        for side in ("Minimum", "Maximum"):
            if out.get(f"exclusive{side}") is True:
                bound = out.pop(side.lower(), None)
                out.pop(f"exclusive{side}")
                if bound is not None:
                    out[f"exclusive{side}"] = bound
        if "additionalItems" in out:
            more = out.pop("additionalItems")
            if isinstance(value.get("items"), list):
                out["items"] = more
        if "format" in out:
            pattern = out.pop("format")
            if "pattern" in out:
                branches = out.get("allOf", [])
                assert isinstance(branches, list)
                out["allOf"] = [*branches, {"pattern": pattern}]
            else:
                out["pattern"] = pattern
        if self._closed and {"properties", "patternProperties"} & out.keys():
            out.setdefault("additionalProperties", False)
        self._check_min_properties(at, out)

    def _check_min_properties(self, at: str, out: Out) -> None:
        """Refuse minProperties above the required names plus one in an open object: additional names can repeat."""
        fewest, required = out.get("minProperties", 0), out.get("required", [])
        assert isinstance(fewest, int)
        assert isinstance(required, list)
        is_open = out.get("additionalProperties") is not False or out.get("patternProperties")
        if is_open and fewest > len(required) + 1:
            why = "more properties than are required by name, and one, are not enforced; require them by name"
            raise self._error(f"{at}/minProperties", why)


_SUBSCHEMAS: Mapping[str, Callable[[_Reader, str, object, str, int, Out], None]] = MappingProxyType(
    {
        "$ref": _Reader._reference,
        "items": _Reader._items,
        **dict.fromkeys(("additionalItems", "additionalProperties"), _Reader._one),
        **dict.fromkeys(("properties", "patternProperties"), _Reader._named),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _Reader._several),
    }
)
assert VALUES.keys() | _SUBSCHEMAS.keys() == ENFORCED
