"""Reads the fields of a config.json with their types checked, and says by name what is wrong with one.

A `Read` is a value that config.json has to give: the table of families is written with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from quire.errors import ModelError

T = TypeVar("T")
N = TypeVar("N", int, float)
_MOST = 1e30  # no number of a config.json is larger
_MOST_INTEGER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Read:
    """A field of config.json by its names, the first that is there; what it is if none is, and what its values mean."""

    names: tuple[str, ...]
    kind: type
    default: Any  # None: it has to be there
    means: Mapping[Any, object] | None = None  # whose values may be Reads themselves
    null: Any = None  # what it is if it is there and null, where that is not the default
    power: float = 1.0  # that a number is raised to
    least: int = 1  # of an integer
    most: int = _MOST_INTEGER


# What these return stands where the value will be, so they claim to be of any type.


def integer(
    *names: str, default: int | None = None, null: int | None = None, least: int = 1, most: int = _MOST_INTEGER
) -> Any:  # noqa: ANN401
    """An integer, positive unless `least` says otherwise."""
    return Read(names, int, default, null=null, least=least, most=most)


def number(*names: str, default: float | None = None, null: float | None = None, power: float = 1.0) -> Any:  # noqa: ANN401
    """A positive, finite number."""
    return Read(names, float, default, null=null, power=power)


def flag(*names: str, default: bool = False, means: Mapping[bool, object] | None = None) -> Any:  # noqa: ANN401
    """True or false, or what that means."""
    return Read(names, bool, default, means)


def choice(*names: str, default: str | int, means: Mapping[Any, object]) -> Any:  # noqa: ANN401
    """One of the values that `means` has; others are refused."""
    return Read(names, type(default), default, means)


def integers(*names: str) -> Any:  # noqa: ANN401
    """A list of integers, empty where it is missing."""
    return Read(names, list, [])


class Fields:
    """The values of one config.json."""

    def __init__(self, values: Mapping[str, object], place: Path) -> None:
        self.values = values
        self.place = place

    def error(self, message: str) -> ModelError:
        """An error that says which model it is about."""
        return ModelError(f"{self.place}: {message}")

    def within(self, name: str) -> "Fields":
        """The fields of the object `name`; none where it is missing or null."""
        return Fields(self.optional(name, dict, {}), self.place)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of positive, finite numbers."""
        values = self.optional(name, list, [])
        return tuple(Fields({name: value}, self.place).number(name) for value in values)

    def optional(self, name: str, kind: type[T], default: T) -> T:
        """The field, or `default` where it is missing or null."""
        value = self.values.get(name)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and abs(value) < _MOST:
            value = float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise self.error(f"{name} must be of type {kind.__name__}, not {value!r:.80}")
        return value

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST_INTEGER) -> int:
        """An integer; an error where it is missing and has no default."""
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
        """A positive, finite number; an error where it is missing and has no default."""
        name = self._present(names)
        value = self.values.get(name)
        if value is None:
            return self._default(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
            raise self.error(f"{name} must be a positive number, not {value!r:.80}")
        return float(value)

    def resolve(self, value: T) -> T:
        """A Read becomes its value, a dataclass one whose Reads have become theirs; all else stays."""
        if isinstance(value, Read):
            found: T = self.resolve(self._read(value))
            return found
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: self.resolve(getattr(value, f.name)) for f in fields(value)})
        return value

    def _default(self, name: str, default: N | None) -> N:
        if default is None:
            raise self.error(f"{name} is missing")
        return default

    def _read(self, read: Read) -> Any:  # noqa: ANN401
        name = self._present(read.names)
        if read.null is not None and name in self.values and self.values[name] is None:
            return read.null
        if read.kind is float:
            return self.number(*read.names, default=read.default) ** read.power
        if read.kind is int and read.means is None:
            return self.integer(*read.names, default=read.default, least=read.least, most=read.most)
        value = self.optional(name, read.kind, read.default)
        if read.kind is list:
            return self._integers(name, value)
        if read.means is None:
            return value
        if value not in read.means:
            raise self.error(f"{name} = {value!r:.80} is not supported; quire would compute something else")
        return read.means[value]

    def _integers(self, name: str, values: list[object]) -> tuple[int, ...]:
        found = tuple(value for value in values if isinstance(value, int) and not isinstance(value, bool))
        if len(found) < len(values):
            raise self.error(f"{name} must be a list of integers, not {values!r:.80}")
        return found

    def _present(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if self.values.get(name) is not None), names[0])
