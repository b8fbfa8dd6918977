"""Strict translation of a JSON schema: each keyword is enforced, is an annotation, or causes a RequestError.

The result is a schema in one dialect (2020-12), without annotations, and with references to "$defs" only. It has the
keywords of `ENFORCED`, and `not` of an enum. Other keywords are rewritten: conditions and exclusive alternatives become
anyOf, so that a backend has no negation to enforce. Each part knows its place in the user's schema.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from urllib.parse import unquote

from quire.errors import nearest
from quire.params import StructuredOutputsParams, check_unicode
from quire.structured_outputs.json_schema.bounds import DIALECTS, ENFORCED, KNOWN, check_bounds
from quire.structured_outputs.json_schema.guidance import is_empty
from quire.structured_outputs.json_schema.logic import (
    ATOMS,
    TYPES,
    CannotNegate,
    Logic,
    Part,
    Schema,
    TooManyCombinations,
    type_names,
)
from quire.structured_outputs.json_schema.unique import unique_arrays
from quire.structured_outputs.json_schema.values import (
    FORMATS,
    INTEGER_FORMATS,
    MAX_PROPERTIES,
    VALUES,
    Values,
    escaped,
)

_MAX_COMBINATIONS = 1024  # of all alternatives of a schema
_MAX_OPTIONAL = 32  # properties of an object that must have one of them
_MAX_DEPTH = 96  # of subschemas, with the references that are followed


def read_schema(text: str, param: str, options: StructuredOutputsParams) -> Schema:
    """The translation of the schema in `text`. param: the field of the request, for errors.

    options: with disable_additional_properties, objects that name properties have no others, unless they set
    additionalProperties. With unknown_keywords "refuse", keywords and formats that JSON schema lacks are errors.
    Raises RequestError with the JSON pointer of a part that cannot be enforced or is invalid, or if it is too large.
    """
    value = json.loads(text)
    check_unicode(param, json.dumps(value, ensure_ascii=False))
    values = Values(param, refuse_unknown=options.unknown_keywords == "refuse")
    schema = _Reader(value, values, closed=options.disable_additional_properties).read()
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
        self._definitions: dict[str, Schema | None] = {}  # by JSON pointer; None: in progress
        self._anchors: dict[str, str] | None = None  # name -> JSON pointer
        self._num_combinations = 0
        self._has_own_base = False  # references are relative to the $id of a subschema
        self._is_ref_alone = False  # keywords beside a $ref have no effect, before 2019-09
        self._depth = 0
        self._logic = Logic(self._target, self._outline, is_empty)

    def read(self) -> Schema:
        """The translated root with the definitions that it references."""
        self._check_dialect()
        schema = self._schema(self._root, "#")
        definitions: dict[str, object] = {}
        for place in self._pointers:  # grows: definitions reference others
            definitions[self._names[place]] = self._definition(place)
        if isinstance(schema, dict) and definitions:
            schema["$defs"] = definitions
        return schema

    def _check_dialect(self) -> None:
        dialect = self._root.get("$schema") if isinstance(self._root, dict) else None
        if dialect is None:
            return
        if not isinstance(dialect, str) or dialect.rstrip("#").split("://")[-1] not in DIALECTS:
            raise self._error("#/$schema", f"unknown dialect {dialect!r:.100}; use 2020-12 or leave it out")
        self._is_ref_alone = "/draft-0" in dialect

    def _schema(self, value: object, at: str) -> Schema:
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise self._error(at, "a schema is an object, true or false")
        if self._depth > _MAX_DEPTH:
            raise self._error(at, "references are nested too deeply")
        self._values.count_node(at)
        self._depth += 1
        outer, self._has_own_base = self._has_own_base, self._has_own_base or (at != "#" and _has_id(value))
        if self._is_ref_alone and "$ref" in value:
            value = {key: value[key] for key in ("$ref", "definitions") if key in value}
        out = Part(at)
        for key, argument in value.items():
            self._keyword(key, argument, f"{at}/{escaped(key)}", out)
        self._normalize(value, at, out)
        schema = self._with_conditions(value, at, out)
        self._depth -= 1
        self._has_own_base = outer
        return schema

    def _keyword(self, key: str, argument: object, at: str, out: Part) -> None:
        if key in VALUES:
            self._values.read(key, argument, at, out)
        elif key in _SUBSCHEMAS:
            _SUBSCHEMAS[key](self, key, argument, at, out)
        elif key not in KNOWN and not key.startswith("x-"):
            self._values.ignore(at, f"unknown keyword {key!r:.100}{nearest(key, sorted(KNOWN))}")

    def _one(self, key: str, argument: object, at: str, out: Part) -> None:
        out[key] = self._schema(argument, at)

    def _several(self, key: str, argument: object, at: str, out: Part) -> None:
        if not isinstance(argument, list) or not argument:
            raise self._error(at, f"{key} is a list of schemas, at least one")
        out[key] = [self._schema(one, f"{at}/{index}") for index, one in enumerate(argument)]

    def _named(self, key: str, argument: object, at: str, out: Part) -> None:
        if not isinstance(argument, dict):
            raise self._error(at, f"{key} is an object of schemas")
        if len(argument) > MAX_PROPERTIES:
            raise self._error(at, f"more than {MAX_PROPERTIES:,} properties")
        for name in argument:
            place = f"{at}/{escaped(name)}"
            if key == "patternProperties":
                self._values.count_pattern(name, place)
            else:
                self._values.check_text(name, place)
        out[key] = {name: self._schema(one, f"{at}/{escaped(name)}") for name, one in argument.items()}

    def _items(self, key: str, argument: object, at: str, out: Part) -> None:
        if not isinstance(argument, list):
            self._one(key, argument, at, out)
        elif argument:  # before 2020-12
            self._several("prefixItems", argument, at, out)

    def _reference(self, key: str, argument: object, at: str, out: Part) -> None:
        place = self._pointer(argument, at)
        if place not in self._names:
            self._resolve(place, at)
            self._names[place] = f"d{len(self._pointers)}"
            self._pointers.append(place)
        translated = f"#/$defs/{self._names[place]}"
        if "$ref" in out:
            _conjoin(out, Part(at, {"$ref": translated}))
        else:
            out["$ref"] = translated

    def _pointer(self, reference: object, at: str) -> str:
        """The JSON pointer of a reference."""
        if not isinstance(reference, str):
            raise self._error(at, "$ref is a string")
        if self._has_own_base:
            raise self._error(at, "a subschema with its own $id cannot have a $ref; leave out the $id")
        root = self._root if isinstance(self._root, dict) else {}
        base = root.get("$id", root.get("id"))
        if (
            isinstance(base, str)
            and base
            and reference.partition("#")[0] in (base.rstrip("#"), base.rpartition("/")[2])
        ):
            reference = f"#{reference.partition('#')[2]}"
        if reference in ("", "#", "#/"):
            return "#"
        if reference.startswith("#/"):
            return reference
        if self._anchors is None:
            self._anchors = dict(_anchors(self._root, "#"))
        if reference not in self._anchors:
            raise self._error(at, f"only references within the schema, such as '#/$defs/name', not {reference!r:.100}")
        return self._anchors[reference]

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

    def _definition(self, place: str) -> Schema:
        """The translation of a definition; true while it is in progress."""
        if place not in self._definitions:
            self._definitions[place] = None
            outer, self._has_own_base = self._has_own_base, self._is_within_id(place)
            self._definitions[place] = self._schema(self._resolve(place, place), place)
            self._has_own_base = outer
        found = self._definitions[place]
        return True if found is None else found

    def _is_within_id(self, place: str) -> bool:
        steps = place.split("/")
        return any(_has_id(self._resolve("/".join(steps[:last]), place)) for last in range(2, len(steps)))

    def _target(self, reference: object) -> Schema:
        """The target of a translated reference; true while it is in progress."""
        return self._definition(self._place(reference))

    def _place(self, reference: object) -> str:
        return self._pointers[int(str(reference).removeprefix("#/$defs/d"))]

    def _outline(self, reference: object) -> Schema:
        """A part of what the target of a translated reference asks for: types, constants and names."""
        place = self._place(reference)
        value = self._resolve(place, place)
        out = _outline(value, place)
        if isinstance(value, dict) and isinstance(value.get("properties"), dict):
            out["properties"] = {name: _outline(one, place) for name, one in value["properties"].items()}
        return out

    def _normalize(self, value: Mapping[str, object], at: str, out: Part) -> None:
        """Convert keywords of older drafts to 2020-12, integer formats to ranges, and close objects."""
        if "const" in out:
            constant = {"enum": [out.pop("const")]}
            if "enum" in out:
                _conjoin(out, Part(at, constant))
            else:
                out.update(constant)
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
        if out.get("format") in INTEGER_FORMATS:
            low, high = INTEGER_FORMATS[str(out.pop("format"))]
            _conjoin(out, Part(f"{at}/format", {"minimum": low, "maximum": high}, is_narrowed=True))
        if self._closed and {"properties", "patternProperties"} & out.keys():
            out.setdefault("additionalProperties", False)

    def _with_conditions(self, value: Mapping[str, object], at: str, out: Part) -> Schema:
        """The schema with all keywords that need alternatives rewritten."""
        factors: list[list[Schema]] = []
        for key in value:
            if key in _CONDITIONS:
                try:
                    factors += _CONDITIONS[key](self, value, f"{at}/{key}", out)
                except CannotNegate as error:
                    why = f"{error.at} has no negation that can be enforced; use anyOf of the allowed cases"
                    raise self._error(f"{at}/{key}", f"{key!r} is not enforced: {why}") from error
        factors += self._min_properties(at, out)
        if out.get("maxProperties") == 0:
            del out["maxProperties"]
            _conjoin(out, Part(at, {"additionalProperties": False}).without_annotations())
        if not self._combine(at, out, factors):
            return False
        self._close_unevaluated(value, at, out)
        return out

    def _combine(self, at: str, out: Part, factors: list[list[Schema]]) -> bool:
        """Make one anyOf of the factors and of the anyOf in the schema and in its allOf. False if nothing is left."""
        sources = [out, *(one for one in _list(out, "allOf") if isinstance(one, Part))]
        given = [source for source in sources if "anyOf" in source]
        if not factors and len(given) < 2:
            return True
        factors = [*(_list(source, "anyOf") for source in given), *factors]
        for source in given:
            del source["anyOf"]
            out.is_narrowed |= source.is_narrowed
        if "allOf" in out:
            out["allOf"] = [one for one in _list(out, "allOf") if one != {}]
        found = self._combinations(at, out, factors)
        if found != [[]]:
            out["anyOf"] = [_joined(at, one) for one in found]
        return bool(found)

    def _combinations(self, at: str, out: Schema, factors: list[list[Schema]]) -> list[list[Schema]]:
        try:
            found = self._logic.combinations(out, factors)
        except TooManyCombinations:
            found = [[]] * (_MAX_COMBINATIONS + 1)
        self._num_combinations += len(found) if len(factors) > 1 else 0
        if self._num_combinations > _MAX_COMBINATIONS:
            why = f"more than {_MAX_COMBINATIONS} combinations of alternatives (anyOf, oneOf, if, dependencies)"
            raise self._error(at, f"{why}; use fewer that hold at once")
        return found

    def _condition(self, value: object, at: str) -> Schema:
        """A schema that is a condition: disable_additional_properties does not apply to it."""
        closed, self._closed = self._closed, False
        schema = self._schema(value, at)
        self._closed = closed
        return schema

    def _not(self, value: Mapping[str, object], at: str, out: Part) -> list[list[Schema]]:
        schema = self._condition(value["not"], at)
        return [self._logic.negations(schema)]

    def _if(self, value: Mapping[str, object], at: str, out: Part) -> list[list[Schema]]:
        base = at.removesuffix("/if")
        sides = [self._schema(value[key], f"{base}/{key}") if key in value else True for key in ("then", "else")]
        if sides == [True, True]:
            return []
        condition = self._condition(value["if"], at)
        others = [_joined(at, [one, sides[1]]) for one in self._logic.negations(condition)]
        return [[_joined(at, [condition, sides[0]]), *others]]

    def _one_of(self, value: Mapping[str, object], at: str, out: Part) -> list[list[Schema]]:
        """Alternatives that exclude each other are an anyOf. Others are joined with the negations of those beside."""
        branches = _list(out, "oneOf")
        del out["oneOf"]
        both = {kind for kind in ATOMS if sum(self._logic.accepts_all(one, kind) for one in branches) > 1}
        if both:  # more than one branch accepts all values of these types
            _conjoin(out, Part(at, {"type": type_names(ATOMS - both)}))
        branches = [one for one in branches if one is not False and not self._logic.are_disjoint(out, one)]
        common: list[list[Schema]] = [[] for _ in branches]
        for place, one in enumerate(branches):
            for before in range(place):
                if not self._logic.are_disjoint(one, _joined(at, [out, branches[before]])):
                    common[place].append(branches[before])
                    common[before].append(one)
        found: list[Schema] = []
        for one, others in zip(branches, common, strict=True):
            parts = self._logic.conjuncts([out, one]) or []
            names = dict.fromkeys(name for part in parts for name in _properties(part))
            negations = [self._logic.some_negations(other, names) for other in others]
            chosen = self._combinations(at, _joined(at, [out, one]), [factor for factor, _ in negations])
            if not chosen and not all(is_exact for _, is_exact in negations):
                why = "the branches cannot be proven to exclude each other; use anyOf"
                raise self._error(at, f"{why}, or give them a property with different constants")
            found += (_joined(at, [one, *alternatives]) for alternatives in chosen)
        return [found]

    def _dependent(self, value: Mapping[str, object], at: str, out: Part) -> list[list[Schema]]:
        """dependentRequired, dependentSchemas, and dependencies of older drafts, which are either."""
        argument = value[at.rpartition("/")[2]]
        if not isinstance(argument, dict):
            raise self._error(at, "must be an object")
        factors: list[list[Schema]] = []
        for name, needed in argument.items():
            place = f"{at}/{escaped(name)}"
            self._values.check_text(name, place)
            given = Part(place, {"required": [name], "type": "object"})
            if isinstance(needed, list):
                self._values.read("required", [name, *needed], place, given)
                schema: Schema = True
            else:
                schema = self._schema(needed, place)
            if needed not in ([], True, {}):
                factors.append([Part(place, {"properties": {name: False}}), _joined(place, [given, schema])])
        return factors

    def _property_names(self, value: Mapping[str, object], at: str, out: Part) -> list[list[Schema]]:
        schema = self._condition(value["propertyNames"], at)
        while isinstance(schema, Part) and schema.keys() == {"$ref"}:
            schema = self._target(schema["$ref"])
        if isinstance(schema, bool):
            return [] if schema else [[Part(at, {"maxProperties": 0})]]
        keys = schema.keys() - ({"type"} if schema.get("type") == "string" else set())
        if not keys:
            return []
        if keys == {"enum"}:
            keywords = {"properties": dict.fromkeys(_texts(schema["enum"]), True), "additionalProperties": False}
            return [[Part(at, keywords).without_annotations()]]
        if keys == {"not"}:
            keywords = {"properties": dict.fromkeys(_texts(schema["not"]), False)}
            return [[Part(at, keywords).without_annotations()]]
        if out.get("patternProperties"):
            raise self._error(at, "'propertyNames' beside 'patternProperties' is not enforced; use one of them")
        pattern = self._name_pattern(schema)
        if pattern is None:
            why = "of a single pattern, format, enum, const, or of lengths is enforced"
            raise self._error(at, f"only 'propertyNames' {why}; use patternProperties and additionalProperties: false")
        keywords = {"patternProperties": {pattern: True}, "additionalProperties": False}
        return [[Part(at, keywords).without_annotations()]]

    def _name_pattern(self, schema: Schema) -> str | None:
        """A pattern of the texts that satisfy a schema; None if the schema is not one of those that have one."""
        if not isinstance(schema, Part):
            return None
        keys = schema.keys() - ({"type"} if schema.get("type") == "string" else set())
        if keys == {"$ref"}:
            return self._name_pattern(self._target(schema["$ref"]))
        if keys == {"anyOf"}:
            patterns = [self._name_pattern(one) for one in _list(schema, "anyOf")]
            return None if None in patterns else "|".join(f"(?:{one})" for one in patterns)
        if keys == {"enum"}:
            return f"^(?:{'|'.join(map(_literal_pattern, _texts(schema['enum'])))})$"
        if keys == {"pattern"}:
            return str(schema["pattern"])
        if keys == {"format"}:
            return FORMATS[str(schema["format"])]
        if keys <= {"minLength", "maxLength"}:
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            return rf"^(?:.|[\n\r\u2028\u2029]){{{least},{most}}}$"
        return None

    def _contains(self, value: Mapping[str, object], at: str, out: Part) -> list[list[Schema]]:
        """The items that `contains` asks for come first. maxContains allows no others of this kind."""
        schema = self._condition(value["contains"], at)
        least, most = out.pop("minContains", 1), out.pop("maxContains", None)
        assert isinstance(least, int)
        if least > MAX_PROPERTIES:
            raise self._error(at, f"more than {MAX_PROPERTIES} items; use a smaller minContains")
        part = Part(at, {"prefixItems": [schema] * least, "minItems": least}, is_narrowed=True)
        if most is not None:
            assert isinstance(most, int)
            if least > most:
                return [[Part(at, {"type": [name for name in TYPES if name != "array"]})]]
            part["items"] = self._logic.negated(schema)
        if not least:
            del part["prefixItems"], part["minItems"]
        return [[part.without_annotations()]] if part else []

    def _unique_items(self, value: Mapping[str, object], at: str, out: Part) -> list[list[Schema]]:
        if not out.pop("uniqueItems", False):
            return []
        found = unique_arrays(out, at, self._target)
        if found is None:
            why = "only arrays of a few known values can be kept free of repetitions: items of enum, const or boolean"
            raise self._error(at, f"'uniqueItems' is not enforced: {why}; leave it out, and items may repeat")
        items = out.get("items")
        while isinstance(items, Part) and items.keys() == {"$ref"}:
            items = self._target(items["$ref"])
        if len(found) == 1 and isinstance(found[0], Part) and "enum" not in out and isinstance(items, Part):
            if found[0].is_narrowed:
                _conjoin(out, found[0])
            else:
                out |= found[0]
            if items.keys() <= {"enum", "type"}:  # the arrays have no other items
                for key in ("items", "minItems", "maxItems"):
                    out.pop(key, None)
            return []
        return [found] if found != [True] else []

    def _close_unevaluated(self, value: Mapping[str, object], at: str, out: Part) -> None:
        """Close each alternative for the properties and items that neither it nor the schema around it names."""
        for key, more in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            rest = out.pop(key, True)
            if rest is True:
                continue
            plain = Part(at, {name: one for name, one in out.items() if name != "anyOf"})
            closed: list[Schema] = []
            waiting: list[tuple[Schema, set[int]]] = [(one, set()) for one in _list(out, "anyOf") or [True]]
            for one, chosen in waiting:  # grows: alternatives within alternatives. chosen: ids of their lists
                parts = self._logic.conjuncts([plain, one]) or []
                if any("$ref" in part and self._target(part["$ref"]) is True for part in parts):
                    raise self._error(f"{at}/{key}", f"{key!r} beside a recursive $ref is not enforced; leave one out")
                groups = {id(part["anyOf"]): _list(part, "anyOf") for part in parts if "anyOf" in part}
                inner = [groups[which] for which in groups.keys() - chosen]
                if not inner:
                    closed.append(_joined(at, [one, _closing(parts, more, rest, f"{at}/{key}")]))
                    continue
                for more_chosen in self._combinations(at, _joined(at, [plain, one]), [[True], *inner]):
                    waiting.append((_joined(at, [one, *more_chosen]), chosen | groups.keys()))
            out["anyOf"] = closed

    def _min_properties(self, at: str, out: Part) -> list[list[Schema]]:
        """Alternatives for one property more than are required by name, in an open object.

        Raises RequestError if more are needed: additional names can repeat.
        """
        fewest, required = out.get("minProperties", 0), out.get("required", [])
        is_open = out.get("additionalProperties") is not False or out.get("patternProperties")
        if not is_open or fewest <= len(required):
            return []
        if fewest > len(required) + 1:
            why = "more properties than are required by name, and one, are not enforced; require them by name"
            raise self._error(f"{at}/minProperties", why)
        optional = [name for name, one in _properties(out).items() if name not in required and one is not False]
        if not optional or len(optional) > _MAX_OPTIONAL or "maxProperties" in out:
            return []
        del out["minProperties"]
        absent = Part(at, {"properties": dict.fromkeys(optional, False), "minProperties": fewest, "required": required})
        return [[*(Part(at, {"required": [name]}) for name in optional), absent.without_annotations()]]


def _has_id(value: object) -> bool:
    """Whether references in a subschema are relative to its own URI."""
    names = [value.get("$id"), value.get("id")] if isinstance(value, dict) else []
    return any(isinstance(name, str) and not name.startswith("#") for name in names)


def _outline(value: object, at: str) -> Part:
    out = Part(at)
    if isinstance(value, dict):
        names, required, values = value.get("type"), value.get("required"), value.get("enum")
        if isinstance(names, str) and names in TYPES:
            out["type"] = names
        if isinstance(required, list) and all(isinstance(name, str) for name in required):
            out["required"] = required
        if "const" in value or isinstance(values, list):
            out["enum"] = [value["const"]] if "const" in value else values
        if value.get("additionalProperties") is False:
            out["additionalProperties"] = False
        if value.get("patternProperties"):
            out["patternProperties"] = {"": True}
    return out


def _anchors(value: object, at: str) -> Iterable[tuple[str, str]]:
    """("#name", JSON pointer) of the anchors of a schema."""
    if isinstance(value, dict):
        for key in ("$anchor", "$dynamicAnchor", "$id", "id"):
            name = value.get(key)
            if isinstance(name, str) and (name.startswith("#") == (key in ("$id", "id"))):
                yield "#" + name.removeprefix("#"), at
        for key, one in value.items():
            yield from _anchors(one, f"{at}/{escaped(key)}") if key not in ("enum", "const") else ()
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _anchors(one, f"{at}/{index}")


def _list(out: Part, key: str) -> list[Schema]:
    value = out.get(key, [])
    assert isinstance(value, list)
    return value


def _properties(part: Part) -> dict[str, Schema]:
    properties = part.get("properties", {})
    assert isinstance(properties, dict)
    return properties


def _texts(values: object) -> list[str]:
    values = values["enum"] if isinstance(values, dict) else values
    assert isinstance(values, list)
    return [value for value in values if isinstance(value, str)]


def _literal_pattern(text: str) -> str:
    """A pattern that matches one text."""
    return "".join(one if one.isalnum() or ord(one) > 0xFFFF else f"\\u{ord(one):04x}" for one in text)


def _conjoin(out: Part, other: Schema) -> None:
    out["allOf"] = [*_list(out, "allOf"), other]


def _joined(at: str, schemas: Sequence[Schema]) -> Schema:
    """A schema that all of these are."""
    if False in schemas:
        return False
    parts = [one for one in schemas if one is not True and one]
    if len(parts) < 2:
        return parts[0] if parts else True
    return Part(at, {"allOf": parts})


def _closing(parts: Sequence[Part], more: str, rest: object, at: str) -> Schema:
    """A schema that gives all properties or items that the parts do not name the schema `rest`."""
    parts = [part for part in parts if part.evaluates]
    if any(more in part for part in parts):
        return True
    if more == "items":
        length = max((len(_list(part, "prefixItems")) for part in parts), default=0)
        prefix = {"prefixItems": [True] * length} if length else {}
        return Part(at, {**prefix, "items": rest}, is_narrowed=True)
    named: dict[str, dict[str, Schema]] = {"properties": {}, "patternProperties": {}}
    for key, names in named.items():
        for part in parts:
            names.update(dict.fromkeys(part.get(key, {}), True))
    return Part(at, {**named, more: rest}, is_narrowed=True)


_SUBSCHEMAS: Mapping[str, Callable[[_Reader, str, object, str, Part], None]] = MappingProxyType(
    {
        **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), _Reader._reference),
        "items": _Reader._items,
        **dict.fromkeys(("additionalItems", "additionalProperties"), _Reader._one),
        **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), _Reader._one),
        **dict.fromkeys(("properties", "patternProperties"), _Reader._named),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _Reader._several),
    }
)
_CONDITIONS: Mapping[str, Callable[[_Reader, Mapping[str, object], str, Part], list[list[Schema]]]] = MappingProxyType(
    {
        "not": _Reader._not,
        "if": _Reader._if,
        "oneOf": _Reader._one_of,
        "contains": _Reader._contains,
        "uniqueItems": _Reader._unique_items,
        "propertyNames": _Reader._property_names,
        **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), _Reader._dependent),
    }
)
assert VALUES.keys() | _SUBSCHEMAS.keys() | _CONDITIONS.keys() == ENFORCED
