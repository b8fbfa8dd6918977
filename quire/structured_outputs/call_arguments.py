"""Lark grammars of a tool's arguments that are not written as JSON.

They are written between tags, as Python keyword arguments, or as an object with quotes of its own. The grammars allow a
part of what the schema allows: only named properties, in the order of the schema. Alternatives of the properties
(anyOf) are written one by one. Between tags, a string is written without quotes and escapes. A value that may be a
string or something else is no list, object or number with bounds there.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from quire.errors import RequestError
from quire.structured_outputs.json_schema.bounds import schema_error
from quire.structured_outputs.json_schema.guidance import strict_pattern
from quire.structured_outputs.json_schema.logic import (
    ATOMS,
    TYPES,
    Part,
    Schema,
    common_types,
    type_names,
    type_of,
)
from quire.structured_outputs.json_schema.values import FORMATS

_PARAM = "grammar"
_MAX_FIRST = 64  # optional properties with which Python arguments may begin if none is required
_MAX_REFERENCES = 16  # of a property, one behind the other
_ANY_TEXT = "/(?s:.*)/"
_ANY_NAME = "/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"
_MAX_ALTERNATIVES = 32  # of the properties of the arguments,
_MAX_SCHEMAS = 512  # and schemas that these consist of
_ROOT = {"type", "properties", "required", "additionalProperties", "$defs", "allOf", "anyOf", "$ref"}
_NUMBER_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_COMMA = ' "," '
_BARE_NAME = re.compile(r"[^:,{}\[\]<\"'\n]+")
_OF_OTHERS = {*_NUMBER_BOUNDS, "minLength", "maxLength", "pattern", "format"}  # than objects
_OF_OTHERS |= {"items", "prefixItems", "minItems", "maxItems"}
_CONSTANTS = {True: '"True"', False: '"False"', None: '"None"'}
# Texts between tags that are read as a value of another type, if the property may have this type.
_NUMBER = r"\s*[-+]?\.?[0-9][-+0-9a-zA-Z_.]*\s*"
_READ_AS = {
    "null": r"\s*(?:null|None)\s*",
    "boolean": r"\s*(?:true|false|True|False)\s*",
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": r"(?s:\s*[\[(].*)",
    "object": r"(?s:\s*\{.*)",
}


@dataclass(frozen=True, slots=True)
class Tags:
    """Texts around the name and the value of a property."""

    key_begin: str
    key_end: str
    value_begin: str
    value_end: str

    @classmethod
    def read(cls, value: Mapping[object, object]) -> "Tags":
        """The tags of a JSON object. Raises RequestError."""
        texts = {name: value.get(name) for name in cls.__slots__}
        if not all(isinstance(text, str) and (text.strip() or name == "value_begin") for name, text in texts.items()):
            raise RequestError(f"%tagged needs a schema and the texts {', '.join(texts)}", _PARAM)
        return cls(**{name: str(text) for name, text in texts.items()})


@dataclass(frozen=True, slots=True)
class _Property:
    name: str
    schema: Schema
    at: str
    is_required: bool
    definitions: Mapping[str, Schema]

    def leaves(self) -> list[Schema]:
        """The alternatives of the schema."""
        return list(_leaves(self.schema, self.definitions, 0))


class ArgumentGrammars:
    """Writes arguments as parts of a rule. translate_schema: returns a schema in the format of llguidance.

    definitions: rules and terminals to which the parts refer. The methods raise RequestError that names the place in
    the schema of what cannot be written.
    """

    def __init__(self, translate_schema: Callable[[Schema], object]) -> None:
        self._translate_schema = translate_schema
        self._names: dict[tuple[str, str], str] = {}  # of the definitions
        self._num_names = 0
        self.definitions: list[str] = []

    def tagged(self, schema: Schema, tags: Tags) -> str:
        """Arguments between tags."""
        alternatives = _alternatives(schema)
        if alternatives is None:
            name, key_end = self.terminal(_ANY_NAME), _quoted(tags.key_end + tags.value_begin)
            return f"({_quoted(tags.key_begin)} {name} {key_end} {self._ended([_text([], tags.value_end)], tags)})*"
        return _either(self._tagged_properties(properties, tags) for properties in alternatives)

    def _tagged_properties(self, properties: Sequence[_Property], tags: Tags) -> str:
        written = []
        for one in properties:
            if tags.key_end.strip() in one.name or not one.name.strip():
                raise schema_error(one.at, f"in this format a name cannot have {tags.key_end.strip()!r}", _PARAM)
            begin = _quoted(tags.key_begin + one.name + tags.key_end + tags.value_begin)
            written.append(f"{begin} {self._tagged_value(one, tags)}")
            written[-1] = written[-1] if one.is_required else f"({written[-1]})?"
        return " ".join(written) or '""'

    def keywords(self, schema: Schema) -> str:
        """Keyword arguments of a Python call."""
        alternatives = _alternatives(schema)
        if alternatives is None:
            value = " | ".join([self.json(Part("#"), {}), *_CONSTANTS.values()])
            one = f'{self.terminal(_ANY_NAME)} "=" ({value})'
            return f'({one} (", " {one})*)?'
        return _either(map(self._keyword_arguments, alternatives))

    def _keyword_arguments(self, properties: Sequence[_Property]) -> str:
        return _listed([(self._python_argument(one), one.is_required) for one in properties], ", ")

    def _python_argument(self, one: _Property) -> str:
        if not one.name.isidentifier():
            raise schema_error(one.at, "in this format a name must be a Python identifier", _PARAM)
        return self.rule(f"{_quoted(one.name + '=')} ({' | '.join(self._python_values(one))})")

    def quoted(self, schema: Schema, quote: Sequence[str | int]) -> str:
        """Arguments as an object in which keys have no quotes, and strings stand between two texts `quote`.

        quote: as texts and ids of special tokens.
        """
        definitions = schema.get("$defs", {}) if isinstance(schema, Part) else {}
        return _QuotedValues(self, quote, definitions).write(schema)

    def _tagged_value(self, one: _Property, tags: Tags) -> str:
        """A value and the tag behind it."""
        leaves = one.leaves()
        types = {name for leaf in leaves for name in _types(leaf)}
        if "string" not in types:
            return f"{self.json(one.schema, one.definitions)} {_quoted(tags.value_end)}"
        others = [_READ_AS[name] for name in types if name in _READ_AS]
        written = [text for leaf in leaves for text in _texts(leaf, one.at, tags, others)]
        if not written:
            raise schema_error(one.at, "in this format no text satisfies the schema", _PARAM)
        return self._ended(written, tags)

    def _python_values(self, one: _Property) -> Iterator[str]:
        """Alternatives of a Python literal. Within lists and dicts, constants are written as in JSON."""
        for leaf in one.leaves():
            keywords = leaf if isinstance(leaf, Part) else {}
            types = _types(leaf, TYPES)
            given = keywords.get("enum", [True, False, None])
            for value, constant in _CONSTANTS.items():
                if type_of(value) in types and any(value is other for other in given):
                    yield constant
            others = [name for name in types if name not in ("boolean", "null")]
            if "enum" in keywords:
                values = [value for value in given if not isinstance(value, bool | None)]
                if values:
                    yield self.json(Part(one.at, {"enum": values}), {})
            elif others:
                yield self.json(Part(one.at, {**keywords, "type": others}), one.definitions)

    def json(self, schema: Schema, definitions: Mapping[str, Schema]) -> str:
        """A value in JSON."""
        if isinstance(schema, Part) and definitions:
            schema = Part(schema.at, {**schema, "$defs": definitions})
        return f"%json {json.dumps(self._translate_schema(schema))} "

    def _ended(self, texts: list[str], tags: Tags) -> str:
        """One of these texts, and the tag behind it: one terminal, because a terminal takes all text that it can."""
        return self.terminal(f"({' | '.join(texts)}) {_quoted(tags.value_end)}")

    def terminal(self, expression: str) -> str:
        """The name of a terminal."""
        return self._defined("ARGUMENT", expression)

    def rule(self, expression: str) -> str:
        """The name of a rule."""
        return self._defined("argument", expression)

    def new_name(self, prefix: str = "argument") -> str:
        """A name for a rule that the caller adds to the definitions."""
        self._num_names += 1
        return f"{prefix}_{self._num_names}"

    def _defined(self, prefix: str, expression: str) -> str:
        """The name of a rule or terminal. Equal ones have one name."""
        if (prefix, expression) not in self._names:
            name = self._names[prefix, expression] = self.new_name(prefix)
            self.definitions.append(f"{name}: {expression}")
        return self._names[prefix, expression]


class _QuotedValues:
    """Writes values of `ArgumentGrammars.quoted`. definitions: targets of the references in the schema."""

    def __init__(
        self, grammars: ArgumentGrammars, quote: Sequence[str | int], definitions: Mapping[str, Schema]
    ) -> None:
        self._grammars = grammars
        self._definitions = definitions
        self._quote = written_parts(quote)
        self._end = quote[0] if len(quote) == 1 and isinstance(quote[0], str) else ""  # a quote that is text
        self._references: dict[str, str] = {}  # names of rules; "" is the one of any value
        self._pending: list[str] = []  # references whose rules are not written
        self._atoms_of: dict[str, set[str]] = {}  # by reference

    def write(self, schema: Schema) -> str:
        """An object of the schema. Adds the rules to which it refers."""
        written = self._mapping(schema)
        while self._pending:
            reference = self._pending.pop()
            expression = self._value(self._target(reference)) if reference else self._of_types(Part("#"))
            self._grammars.definitions.append(f"{self._references[reference]}: {expression}")
        return written

    def _target(self, reference: str) -> Schema:
        return self._definitions[reference.removeprefix("#/$defs/")]

    def _mapping(self, schema: Schema) -> str:
        """An object, as alternatives."""
        part = schema if isinstance(schema, Part) else Part("#")
        own = {key: value for key, value in part.items() if key not in _OF_OTHERS}
        alternatives = _alternatives(schema and Part(part.at, {**own, "$defs": self._definitions}))
        if alternatives is not None:
            return " | ".join(f'"{{" {self._members(properties)} "}}"' for properties in alternatives)
        if part.keys() & {"allOf", "anyOf", "$ref"}:
            why = "in this format objects without named properties cannot be composed; name the properties"
            raise schema_error(part.at, why, _PARAM)
        member = f'{self._grammars.terminal(_ANY_NAME)} ":" {self._rule(part.get("additionalProperties", True))}'
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _members(self, properties: Sequence[_Property]) -> str:
        for one in properties:
            if not _BARE_NAME.fullmatch(one.name) or one.name != one.name.strip():
                raise schema_error(one.at, "in this format a name cannot have brackets, quotes, ',' or ':'", _PARAM)
        rules = [(f"{_quoted(one.name + ':')} {self._rule(one.schema)}", one.is_required) for one in properties]
        return _listed(rules, ",")

    def _rule(self, schema: Schema) -> str:
        """The name of the rule of a value."""
        reference: str = schema["$ref"] if isinstance(schema, Part) and schema.keys() == {"$ref"} else ""
        if isinstance(schema, Part) and schema and not reference:
            return self._grammars.rule(self._value(schema))
        if reference not in self._references:
            self._references[reference] = self._grammars.new_name()
            self._pending.append(reference)
        return self._references[reference]

    def _value(self, schema: Schema) -> str:
        """A value, as alternatives."""
        if not isinstance(schema, Part):
            return self._rule(schema)
        match schema:
            case {"enum": [*values]}:
                written = [self._constant(value) for value in values if not self._end or self._end not in str(value)]
                if not written:
                    raise schema_error(schema.at, "in this format no text satisfies the schema", _PARAM)
                return " | ".join(written)
            case {"allOf": [one]} if len(schema) == 1:
                return self._rule(one)
            case {"anyOf": [*options]} if len(schema) == 1:
                return " | ".join(map(self._rule, options))
        return self._of_types(schema)

    def _of_types(self, part: Part) -> str:
        written = [self._of_type(part, name) for name in type_names(self._atoms(part))]
        if not written:
            raise schema_error(part.at, "in this format no value satisfies the schema", _PARAM)
        return " | ".join(written)

    def _atoms(self, schema: Schema, depth: int = 0) -> set[str]:
        """The types that a value may have, as far as the schemas that it consists of name types."""
        if not isinstance(schema, Part) or depth > _MAX_REFERENCES:
            return set(ATOMS)
        parts = [self._atoms(one, depth) for one in schema.get("allOf", ())]
        if "anyOf" in schema:
            parts.append(set().union(*(self._atoms(one, depth) for one in schema["anyOf"])))
        if "$ref" in schema:
            parts.append(self._atoms_of_target(schema["$ref"], depth + 1))
        return common_types([schema]).intersection(*parts)

    def _atoms_of_target(self, reference: str, depth: int) -> set[str]:
        if reference not in self._atoms_of:
            self._atoms_of[reference] = set(ATOMS)  # for a target that refers to itself
            self._atoms_of[reference] = self._atoms(self._target(reference), depth)
        return self._atoms_of[reference]

    def _of_type(self, part: Part, name: str) -> str:
        match name:
            case "string":
                return self._string(list(_conditions(part, part.at)))
            case "array":
                return f'"[" {self._items(part)} "]"'
            case "object":
                return self._mapping(part)
        definitions = self._definitions if part.keys() & {"allOf", "anyOf", "$ref"} else {}
        return self._grammars.json(Part(part.at, {**part, "type": name}), definitions)

    def _string(self, conditions: list[str]) -> str:
        if not self._end:
            text = self._grammars.terminal(" & ".join([_ANY_TEXT, *conditions]))
            return f"{self._quote} {text} {self._quote}"
        return f"{self._quote} {self._grammars.terminal(f'{_text(conditions, self._end)} {self._quote}')}"

    def _constant(self, value: Any) -> str:  # noqa: ANN401 (JSON)
        """A value of an enum."""
        if isinstance(value, str):
            return f"{self._quote} {_quoted(value)} {self._quote}"
        if isinstance(value, list):
            return f'"[" {_COMMA.join(map(self._constant, value))} "]"'
        if isinstance(value, dict):
            members = (f"{_quoted(key + ':')} {self._constant(one)}" for key, one in value.items())
            return f'"{{" {_COMMA.join(members)} "}}"'
        return _quoted(json.dumps(value))

    def _items(self, part: Part) -> str:
        """The items of an array."""
        other = part.keys() & {"allOf", "anyOf", "not", "$ref"}
        if other:
            why = f"in this format {min(other)!r} beside an array cannot be enforced; leave it out"
            raise schema_error(part.at, why, _PARAM)
        first, rest = part.get("prefixItems", []), part.get("items", True)
        least, most = part.get("minItems", 0), part.get("maxItems")
        if rest is False:
            most = len(first) if most is None else min(most, len(first))
        written = ""
        if first and (most is None or most > len(first)):
            written = _more(self._rule(rest), least - len(first), most and most - len(first))
        elif not first and most != 0:
            item = self._rule(rest)
            written = f"{item} {_more(item, least - 1, most and most - 1)}"
            written = written if least else f"({written})?"
        for place, one in reversed(list(enumerate(first[:most]))):
            written = " ".join(['","'] * bool(place) + [self._rule(one), written])
            written = written if place < least else f"({written})?"
        return written


def _more(item: str, least: int, most: int | None) -> str:
    """Further items of an array. most: None for any number."""
    return "" if most == 0 else f'("," {item}){{{max(least, 0)},{"" if most is None else most}}}'


def written_parts(parts: Sequence[str | int]) -> str:
    """Texts and ids of special tokens as a part of a rule. Text between special tokens is one terminal."""
    return " ".join(f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in parts)


def _listed(rules: Sequence[tuple[str, bool]], separator: str) -> str:
    """Rules in their order with a separator between them. A rule that is not required may be left out."""
    between = _quoted(separator)
    first = next((place for place, (_, is_required) in enumerate(rules) if is_required), None)
    later = [f"{between} {rule}" if is_required else f"({between} {rule})?" for rule, is_required in rules]
    if first is not None:
        return " ".join([*(f"({rule} {between})?" for rule, _ in rules[:first]), rules[first][0], *later[first + 1 :]])
    firsts = [" ".join([rule, *later[place + 1 :]]) for place, (rule, _) in enumerate(rules[:_MAX_FIRST])]
    return f"({' | '.join(firsts)})?" if firsts else '""'


def _alternatives(schema: Schema) -> list[list[_Property]] | None:
    """The properties of the arguments, in each alternative; None if the schema names none and allows any."""
    definitions: Mapping[str, Schema] = schema.get("$defs", {}) if isinstance(schema, Part) else {}
    found = []
    for parts in _Combinations(definitions).of(schema):
        merged = _merged(parts, definitions)
        if merged is None:
            continue
        if not any(part.get("properties") or part.get("additionalProperties") is False for part in parts):
            return None
        found.append(merged)
    if not found:
        raise schema_error("#", "no arguments satisfy the schema", _PARAM)
    return found


class _Combinations:
    """Combines the schemas that a schema of arguments consists of. definitions: those that it refers to."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._num_schemas = 0

    def of(self, schema: Schema) -> list[list[Part]]:
        """Alternatives: schemas that all hold, of which only the properties and what concerns them is left to read."""
        self._num_schemas += 1
        if not isinstance(schema, Part):
            return [[]] if schema else []
        other = next((key for key in schema if key not in _ROOT), None)
        if other is not None:
            why = f"in this format {other!r} beside the properties cannot be enforced; leave it out"
            raise schema_error(schema.at, why, _PARAM)
        choices: list[Sequence[Schema]] = [[one] for one in schema.get("allOf", ())]
        if "$ref" in schema:
            choices.append([self._definitions[schema["$ref"].removeprefix("#/$defs/")]])
        if "anyOf" in schema:
            choices.append(schema["anyOf"])
        found = [[schema]]
        for options in choices:
            if self._num_schemas + len(options) > _MAX_SCHEMAS:
                raise self._too_many(schema)
            behind = [one for option in options for one in self.of(option)]
            if len(found) * len(behind) > _MAX_ALTERNATIVES:
                raise self._too_many(schema)
            found = [[*before, *one] for before in found for one in behind]
        return found

    def _too_many(self, schema: Part) -> RequestError:
        why = f"in this format more than {_MAX_ALTERNATIVES} alternatives of the properties cannot be enforced"
        return schema_error(schema.at, f"{why}; use fewer", _PARAM)


def _merged(parts: Sequence[Part], definitions: Mapping[str, Schema]) -> list[_Property] | None:
    """The properties that all parts allow; None if no arguments satisfy them."""
    if not all("object" in _types(part, TYPES) for part in parts):
        return None
    required = dict.fromkeys(name for part in parts for name in part.get("required", ()))
    places = {name: part.at for part in reversed(parts) for name in part.get("properties", {})}
    missing = next((name for name in required if name not in places), None)
    if missing is not None:
        raise schema_error(parts[0].at, f"in this format the required {missing!r:.80} must be in properties", _PARAM)
    found = []
    for name in dict.fromkeys(name for part in parts for name in part.get("properties", {})):
        at = f"{places[name]}/properties/{name}"
        one = _both(
            [part.get("properties", {}).get(name, part.get("additionalProperties", True)) for part in parts], at
        )
        if one is False and name in required:
            return None
        if one is not False:
            found.append(_Property(name, one, getattr(one, "at", at), name in required, definitions))
    return found


def _both(schemas: Sequence[Schema], at: str) -> Schema:
    """One schema in place of those of one property. Raises RequestError if they cannot be merged."""
    merged: Schema = True
    for one in schemas:
        if one is False:
            return False
        if isinstance(one, Part) and one != merged:
            merged = _merged_pair(merged, one, at) if isinstance(merged, Part) else one
        if merged is False:
            return False
    return merged


def _merged_pair(first: Part, second: Part, at: str) -> Schema:
    both = {**first, **second}
    is_one = all(first[key] == second[key] for key in (first.keys() & second.keys()) - {"enum"})
    if not is_one or ("enum" in both and both.keys() - {"enum", "not", "type"}):
        why = "in this format two descriptions of one property cannot be enforced; use one"
        raise schema_error(at, why, _PARAM)
    if "enum" not in both:
        return Part(first.at, both)
    types = _types(Part(at, {key: both[key] for key in both.keys() & {"type"}}), TYPES)
    excluded = {json.dumps(value) for value in both.get("not", {}).get("enum", ())}
    given = [schema["enum"] for schema in (first, second) if "enum" in schema]
    common = set.intersection(*({json.dumps(value) for value in values} for values in given)) - excluded
    left = [value for value in given[0] if json.dumps(value) in common and _is_of(value, types)]
    return Part(first.at, {"enum": left}) if left else False


def _is_of(value: object, types: Sequence[str]) -> bool:
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _either(options: Iterable[str]) -> str:
    written = list(dict.fromkeys(options))
    return written[0] if len(written) == 1 else " | ".join(f"({one})" for one in written)


def _resolved(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """The target of a schema that is only a reference, or only one schema of allOf."""
    for _ in range(_MAX_REFERENCES):
        match schema:
            case {"$ref": str(reference), **others} if not others.keys() - {"$defs"}:
                schema = definitions[reference.removeprefix("#/$defs/")]
            case {"allOf": [one], **others} if not others.keys() - {"$defs"}:
                schema = one
    return schema


def _leaves(schema: Schema, definitions: Mapping[str, Schema], depth: int) -> Iterator[Schema]:
    """The alternatives of a schema, with references followed."""
    schema = _resolved(schema, definitions)
    if isinstance(schema, Part) and schema.keys() == {"anyOf"} and depth < _MAX_REFERENCES:
        for one in schema["anyOf"]:
            yield from _leaves(one, definitions, depth + 1)
    else:
        yield schema


def _types(leaf: Schema, unnamed: Sequence[str] = ("string",)) -> Sequence[str]:
    """The types that a leaf names; `unnamed` if it names none."""
    if not isinstance(leaf, Part):
        return unnamed
    if "enum" in leaf:
        return [type_of(value) for value in leaf["enum"]]
    types: str | list[str] = leaf.get("type", unnamed)
    return [types] if isinstance(types, str) else types


def _texts(leaf: Schema, at: str, tags: Tags, others: list[str]) -> Iterator[str]:
    """Alternatives of one leaf of a property that may be a string, as parts of a terminal; no lists and objects.

    others: patterns of the texts that are read as a value of another type.
    """
    keywords = leaf if isinstance(leaf, Part) else {}
    types = _types(leaf)
    if "enum" in keywords:
        for value in keywords["enum"]:
            text = value if isinstance(value, str) else json.dumps(value)
            is_read_so = not isinstance(value, str) or not any(re.fullmatch(other, text) for other in others)
            if is_read_so and tags.value_end.strip() not in text and not isinstance(value, list | dict):
                yield _quoted(text)
        return
    if "string" in types:
        yield _text([*_conditions(leaf, at), *(f"~{_regex(other)}" for other in others)], tags.value_end)
    if "null" in types:
        yield '"null"'
    if "boolean" in types:
        yield '"true" | "false"'
    if not keywords.keys() & _NUMBER_BOUNDS and {"integer", "number"} & set(types):
        yield "/-?(?:0|[1-9][0-9]{0,14})/" if "number" not in types else r"/-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,9})?/"


def _text(conditions: list[str], end: str) -> str:
    """A text that meets the conditions and does not have the text `end`."""
    ended = "~" + _regex(f"(?s:.*){re.escape(end.strip())}(?s:.*)")
    return f"({' & '.join([_ANY_TEXT, *conditions, ended])})"


def _conditions(leaf: Schema, at: str) -> Iterator[str]:
    """What a leaf asks of strings, as patterns of Lark for whole texts."""
    if not isinstance(leaf, Part):
        return
    least, most = leaf.get("minLength", 0), leaf.get("maxLength", "")
    if least or most != "":
        yield f"/(?s:.{{{least},{most}}})/"
    for key, argument in leaf.items():
        match key:
            case "pattern":
                try:
                    yield _regex(_found_in_text(argument))
                except ValueError as error:
                    raise schema_error(f"{leaf.at}/pattern", f"pattern: {error}", _PARAM) from error
            case "format":
                yield _regex(FORMATS[argument].removeprefix("^").removesuffix("$"))
            case "not":
                yield from (f"~{_regex(re.escape(one))}" for one in argument["enum"] if isinstance(one, str))
            case "allOf":
                for one in argument:
                    yield from _conditions(one, at)
            case "anyOf":
                texts = [one for one in argument if "string" in _types(one)]
                yield "(" + " | ".join(f"({' & '.join([_ANY_TEXT, *_conditions(one, at)])})" for one in texts) + ")"
            case "$ref" | "enum":
                raise schema_error(at, f"in this format {key!r} beside other keywords is not enforced", _PARAM)


def _found_in_text(pattern: str) -> str:
    """A pattern of the whole texts in which `pattern` is found. Raises ValueError if it cannot be written."""
    pieces = re.findall(r"\[\^?(?:[^\]\\]|\\.)*\]|\\.|.", pattern, re.DOTALL)
    begins, ends = pieces[:1] == ["^"], pieces[-1:] == ["$"]
    inner = pieces[begins : len(pieces) - ends]
    depths = accumulate({"(": 1, ")": -1}.get(piece, 0) for piece in inner)
    has_options = any(piece == "|" and depth == 0 for piece, depth in zip(inner, depths, strict=True))
    if {"^", "$"} & set(inner) or ((begins or ends) and has_options):
        raise ValueError("in this format ^ and $ are supported only around the whole pattern")
    middle = f"(?:{strict_pattern(''.join(inner))})"
    return ("" if begins else "(?s:.*)") + middle + ("" if ends else "(?s:.*)")


def _regex(pattern: str) -> str:
    """A pattern in Lark's syntax."""
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    escaped = re.sub(r"\\.|/|\n", lambda found: escapes.get(found[0], found[0]), pattern, flags=re.DOTALL)
    return f"/{escaped}/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
