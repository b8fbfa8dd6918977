"""Typed access to the fields of a config.json, with errors that name the field.

A `ConfigField` is a reference to a field. Families are defined with ConfigFields.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from quire.errors import ModelError, nearest

T = TypeVar("T")
N = TypeVar("N", int, float)
_MOST = 1e30  # larger numbers are refused
_MOST_INTEGER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ConfigField:
    """Reference to a field of config.json by one of its `names`, with default and range."""

    names: tuple[str, ...]  # spellings of one field: if several are present, their values must be equal
    kind: type
    default: Any  # None: the field is required
    value_map: Mapping[Any, object] | None = None  # maps the field's value to the result, which may contain Reads
    null: Any = None  # value of a field that is present and null; None: the default
    power: float = 1.0  # exponent applied to a number
    least: int = 1  # of an integer
    most: int = _MOST_INTEGER
    is_each: bool = False  # whether an integer may also be a list of it, one for each layer
    letters: str = ""  # two letters if an integer n may also be spelled as n - 1 times the first and the second
    is_first: bool = False  # whether the first present one of `names` counts, whatever the others are
    allows_auto: bool = False  # whether "auto" means the default


# These functions return a ConfigField in the place of a value, so their return type is Any.


def integer(
    *names: str,
    default: int | None = None,
    null: int | None = None,
    least: int = 1,
    most: int = _MOST_INTEGER,
    is_each: bool = False,
    letters: str = "",
    is_first: bool = False,
    allows_auto: bool = False,
) -> Any:  # noqa: ANN401
    """An integer from `least` to `most`; `is_each`: also [8, 8] for 8; with letters "LG" also "LLLG" for 4."""
    return ConfigField(
        names,
        int,
        default,
        null=null,
        least=least,
        most=most,
        is_each=is_each,
        letters=letters,
        is_first=is_first,
        allows_auto=allows_auto,
    )


def number(*names: str, default: float | None = None, null: float | None = None, power: float = 1.0) -> Any:  # noqa: ANN401
    """A positive, finite number."""
    return ConfigField(names, float, default, null=null, power=power)


def flag(*names: str, default: bool = False, value_map: Mapping[bool, object] | None = None) -> Any:  # noqa: ANN401
    """A bool, mapped by `value_map` if given."""
    return ConfigField(names, bool, default, value_map)


def choice(*names: str, default: str | int | bool, value_map: Mapping[Any, object]) -> Any:  # noqa: ANN401
    """A value mapped by `value_map`. A value that is not in it is an error."""
    kinds = {type(value) for value in value_map}
    return ConfigField(names, kinds.pop() if len(kinds) == 1 else object, default, value_map)


def integers(*names: str) -> Any:  # noqa: ANN401
    """A list of integers; empty if it is missing."""
    return ConfigField(names, list, [])


def strings(*names: str) -> Any:  # noqa: ANN401
    """A list of strings; empty if it is missing."""
    return ConfigField(names, tuple, [])


def mapping(name: str) -> Any:  # noqa: ANN401
    """An object; empty if it is missing."""
    return ConfigField((name,), dict, {})


def names_read(value: object) -> frozenset[str]:
    """The names of all fields to which a value with ConfigFields refers, also within dataclasses and value maps."""
    if isinstance(value, ConfigField):
        return frozenset(value.names).union(*(names_read(one) for one in (value.value_map or {}).values()))
    if is_dataclass(value) and not isinstance(value, type):
        return frozenset().union(*(names_read(getattr(value, field.name)) for field in fields(value)))
    return frozenset()


class Fields:
    """The fields of one config.json. Methods raise ModelError with the field's name."""

    def __init__(self, values: Mapping[str, object], path: Path) -> None:
        self.values = values
        self.path = path

    def error(self, message: str) -> ModelError:
        """A ModelError with the model's path in front."""
        return ModelError(f"{self.path}: {message}")

    def name_of(self, field: object) -> str:
        """The spelling of a ConfigField that config.json has."""
        return self._present(field.names) if isinstance(field, ConfigField) else ""

    def kinds_of_layers(self, name: str, kinds: Sequence[object], known: Sequence[str], num_layers: int) -> list[str]:
        """The kinds of layers that the field `name` lists. Raises ModelError unless each layer has a known one."""
        found = [kind for kind in kinds if isinstance(kind, str) and kind in known]
        if len(found) == len(kinds) == num_layers:
            return found
        wrong = next((kind for kind in kinds if kind not in known), None)
        what = f"it has {len(kinds)}" if wrong is None else f"not {wrong!r:.80}{nearest(str(wrong), known)}"
        raise self.error(f"{name} must have one of {', '.join(known)} for each of {num_layers} layers, {what}")

    def within(self, name: str) -> "Fields":
        """The fields of the object `name`; empty if it is missing or null."""
        return Fields(self.optional(name, dict, {}), self.path)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of positive, finite numbers; empty if it is missing or null."""
        values = self.optional(name, list, [])
        return tuple(Fields({name: value}, self.path).number(name) for value in values)

    def optional(self, name: str, kind: type[T], default: T) -> T:
        """The field, or `default` if it is missing or null."""
        value = self.values.get(name)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and abs(value) < _MOST:
            value = float(value)
        if not isinstance(value, kind) or (kind not in (bool, object) and isinstance(value, bool)):
            raise self.error(f"{name} must be of type {kind.__name__}, not {value!r:.80}")
        return value

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST_INTEGER) -> int:
        """The first present field of `names`, an integer. An error if none is, and there is no default."""
        name = self._present(names)
        if self.values.get(name) is None:
            return self._default(name, default)
        value = self.optional(name, int, 0)
        if value < least:
            raise self.error(f"{name} must be at least {least}, not {value}")
        if value > most:
            raise self.error(f"{name} must be at most {most}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """The first present field of `names`, a positive number. An error if none is, and there is no default."""
        name = self._present(names)
        value = self.values.get(name)
        if value is None:
            return self._default(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
            raise self.error(f"{name} must be a positive number, not {value!r:.80}")
        return float(value)

    def resolve(self, value: T) -> T:
        """Replace a ConfigField by its value, also within dataclass fields. Other values are returned unchanged."""
        if isinstance(value, ConfigField):
            found: T = self.resolve(self._read(value))
            return found
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: self.resolve(getattr(value, f.name)) for f in fields(value)})
        return value

    def _default(self, name: str, default: N | None) -> N:
        if default is None:
            raise self.error(f"{name} is missing")
        return default

    def _read(self, read: ConfigField) -> Any:  # noqa: ANN401
        name = self._present(read.names)
        if not read.is_first and len(read.names) > 1:
            self._refuse_differences(read)
        if read.null is not None and name in self.values and self.values[name] is None:
            return read.null
        if read.kind is float:
            return self.number(*read.names, default=read.default) ** read.power
        if read.is_each and isinstance(each := self.values.get(name), list):
            if len(set(map(repr, each))) != 1:
                raise self.error(f"{name} must be the same for all layers, not {each!r:.80}")
            return Fields({name: each[0]}, self.path).integer(name, least=read.least, most=read.most)
        if read.letters and isinstance(spelled := self.values.get(name), str):
            return self._length(name, spelled, read.letters)
        if read.kind is int and read.value_map is None:
            these = Fields({}, self.path) if read.allows_auto and self.values.get(name) == "auto" else self
            return these.integer(*read.names, default=read.default, least=read.least, most=read.most)
        if read.kind is list:
            return self._all_of(name, int, "integers")
        if read.kind is tuple:
            return self._all_of(name, str, "strings")
        value = self.optional(name, read.kind, read.default)
        if read.value_map is None:
            return value
        if not isinstance(value, Hashable) or value not in read.value_map:
            known = [*map(str, read.value_map)]
            hint = f"{nearest(str(value), known)}; supported: {', '.join(known)}"
            raise self.error(f"{name} = {value!r:.80} is not supported{hint}")
        return read.value_map[value]

    def _refuse_differences(self, read: ConfigField) -> None:
        """Raise ModelError if two spellings of a field have different values."""
        found = {
            name: self._read(replace(read, names=(name,))) for name in read.names if self.values.get(name) is not None
        }
        first = next(iter(found), "")
        for name, value in found.items():
            if value != found[first]:
                raise self.error(
                    f"{first} = {self.values[first]!r:.80} and {name} = {self.values[name]!r:.80} are two names of one "
                    "field with different values; remove the wrong one"
                )

    def _length(self, name: str, spelled: str, letters: str) -> int:
        if spelled != letters[0] * (len(spelled) - 1) + letters[1]:
            raise self.error(f"{name} must be a number, or {letters[0]}s and a last {letters[1]}, not {spelled!r:.80}")
        return len(spelled)

    def _all_of(self, name: str, kind: type[T], called: str) -> tuple[T, ...]:
        values = self.optional(name, list, [])
        found = tuple(value for value in values if isinstance(value, kind) and not isinstance(value, bool))
        if len(found) < len(values):
            raise self.error(f"{name} must be a list of {called}, not {values!r:.80}")
        return found

    def _present(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if self.values.get(name) is not None), names[0])
