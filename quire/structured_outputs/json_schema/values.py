"""The keywords of JSON schema that have values, not schemas: checked, and within what a backend enforces exactly."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from quire.errors import RequestError, nearest
from quire.structured import MAX_LITERAL
from quire.structured_outputs.json_schema.bounds import MAX_NODES
from quire.structured_outputs.json_schema.json_formats import FORMATS
from quire.structured_outputs.json_schema.json_keywords import TYPES
from quire.structured_outputs.json_schema.json_patterns import strict_pattern

MAX_PROPERTIES = 512  # of one object
_MAX_WHOLE = 2**53  # beyond it neighbouring whole numbers are the same float
_MIN_FRACTION = 1e-9
_MAX_AMOUNT = 2**31 - 1
_MAX_PATTERNS = 8192  # characters of all patterns
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")  # characters that JSON can write by number alone

Out = dict[str, object]


class Values:
    """Reads values, and counts what must not be too much. `at` is where one stands, for errors."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._num_nodes = 0
        self._num_characters = 0

    def refusal(self, at: str, why: str) -> RequestError:
        """To be raised."""
        return RequestError(f"schema at {at}: {why}", self._param)

    def count(self, at: str) -> None:
        """One more schema, or value within a constant."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise self.refusal(at, f"more than {MAX_NODES:,} parts; make the schema smaller")

    def read(self, key: str, argument: object, at: str, out: Out) -> None:
        """Put one keyword of VALUES into a schema."""
        VALUES[key](self, key, argument, at, out)

    def pattern(self, pattern: object, at: str) -> str:
        """A pattern in a backend's syntax."""
        if not isinstance(pattern, str):
            raise self.refusal(at, "a pattern is a string")
        self._num_characters += len(pattern)
        if self._num_characters > _MAX_PATTERNS:
            raise self.refusal(at, f"more than {_MAX_PATTERNS:,} characters of patterns")
        try:
            return strict_pattern(pattern)
        except ValueError as error:
            raise self.refusal(at, f"pattern: {error}") from error

    def text(self, text: str, at: str) -> None:
        """A name or a constant has to be one that is written in one way, and not too long."""
        if len(text) > MAX_LITERAL:
            raise self.refusal(at, f"a text must have at most {MAX_LITERAL:,} characters, not {len(text):,}")
        if _CONTROL.search(text):
            raise self.refusal(at, "control characters other than \\b, \\f, \\n, \\r and \\t are not written")

    def _pattern(self, key: str, argument: object, at: str, out: Out) -> None:
        out[key] = self.pattern(argument, at)

    def _format(self, key: str, argument: object, at: str, out: Out) -> None:
        if not isinstance(argument, str) or argument not in FORMATS:
            known = ", ".join(sorted(FORMATS))
            raise self.refusal(at, f"format {argument!r:.100} is not enforced; leave it out, or use one of {known}")
        out[key] = FORMATS[argument]

    def _types(self, key: str, argument: object, at: str, out: Out) -> None:
        names = [argument] if isinstance(argument, str) else argument
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise self.refusal(at, "type is a name or a list of names")
        for name in names:
            if name not in TYPES:
                raise self.refusal(at, f"unknown type {name!r:.100}{nearest(name, sorted(TYPES))}")
        out[key] = names[0] if len(names) == 1 else names

    def _const(self, key: str, argument: object, at: str, out: Out) -> None:
        self._constant(argument, at)
        out[key] = argument

    def _enum(self, key: str, argument: object, at: str, out: Out) -> None:
        if not isinstance(argument, list) or not argument:
            raise self.refusal(at, "enum is a list of values, at least one")
        for index, one in enumerate(argument):
            self._constant(one, f"{at}/{index}")
        out[key] = argument

    def _constant(self, value: object, at: str) -> None:
        if isinstance(value, str):
            self.text(value, at)
        elif isinstance(value, list):
            for index, one in enumerate(value):
                self.count(at)
                self._constant(one, f"{at}/{index}")
        elif isinstance(value, dict):
            for name, one in value.items():
                self.count(at)
                self.text(name, at)
                self._constant(one, f"{at}/{escaped(name)}")
        elif value is not None and not isinstance(value, bool):
            self._number(value, at)

    def _number(self, value: object, at: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(at, "must be a number")
        if not abs(value) <= _MAX_WHOLE:
            raise self.refusal(at, "numbers beyond 2**53 are not exact; use smaller ones")
        if 0 < abs(value) < _MIN_FRACTION:
            raise self.refusal(at, f"numbers closer to zero than {_MIN_FRACTION:g} are not enforced")
        return value

    def _bound(self, key: str, argument: object, at: str, out: Out) -> None:
        if not isinstance(argument, bool):
            out[key] = self._number(argument, at)
        elif not key.startswith("exclusive"):
            raise self.refusal(at, "must be a number")
        elif argument:  # draft 4: it says how the other bound is meant
            out[key] = True

    def _multiple(self, key: str, argument: object, at: str, out: Out) -> None:
        if self._number(argument, at) <= 0:
            raise self.refusal(at, "must be above 0")
        out[key] = argument

    def _amount(self, key: str, argument: object, at: str, out: Out) -> None:
        value = self._number(argument, at)
        if value < 0 or value != int(value):
            raise self.refusal(at, "must be a whole number, 0 or more")
        if value <= _MAX_AMOUNT:
            out[key] = int(value)
        elif key.startswith("min"):
            raise self.refusal(at, f"must be at most {_MAX_AMOUNT:,}")

    def _required(self, key: str, argument: object, at: str, out: Out) -> None:
        if not isinstance(argument, list) or not all(isinstance(name, str) for name in argument):
            raise self.refusal(at, "required is a list of names")
        if len(argument) > MAX_PROPERTIES:
            raise self.refusal(at, f"more than {MAX_PROPERTIES} names")
        for name in argument:
            self.text(name, at)
        out[key] = list(dict.fromkeys(argument))


def escaped(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


VALUES: Mapping[str, Callable[[Values, str, object, str, Out], None]] = MappingProxyType(
    {
        "type": Values._types,
        "const": Values._const,
        "enum": Values._enum,
        "multipleOf": Values._multiple,
        "pattern": Values._pattern,
        "format": Values._format,
        "required": Values._required,
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), Values._bound),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), Values._amount),
        **dict.fromkeys(("minProperties", "maxProperties"), Values._amount),
    }
)
