"""Expressions that a program appends to its state. They are plain data; `interpreter.py` executes them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.errors import RequestError
from quire.lang.select import ChoicesSamplingMethod
from quire.params import is_unicode

Role = Literal["system", "user", "assistant"]


class Expr:
    """Base class of all expressions. The sum of expressions, or of an expression and a string, is a Sequence."""

    def __add__(self, other: object) -> "Sequence":
        return Sequence((*self.flat(), *expression(other).flat()))

    def __radd__(self, other: object) -> "Sequence":
        return Sequence((*expression(other).flat(), *self.flat()))

    def flat(self) -> Iterator["Expr"]:
        """The expressions in order, with sequences flattened."""
        yield self

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that the expression sets."""
        return ()


@dataclass(frozen=True, slots=True)
class Text(Expr):
    """Fixed text."""

    text: str


@dataclass(frozen=True, slots=True)
class Sequence(Expr):
    """Expressions in order. `parts` contains no Sequence."""

    parts: tuple[Expr, ...]

    def flat(self) -> Iterator[Expr]:
        """The parts."""
        yield from self.parts


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Text that the model generates. overrides: fields of GenParams that override the defaults of the run."""

    name: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def variables(self) -> tuple[str, ...]:
        """The name, if there is one."""
        return () if self.name is None else (self.name,)


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """The choice that `method` ranks first. adapter: None: that of the run's defaults."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesSamplingMethod
    adapter: str | None = None

    @property
    def variables(self) -> tuple[str, ...]:
        """The name, if there is one."""
        return () if self.name is None else (self.name,)


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """Begin of a turn."""

    role: Role


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """End of a turn."""

    role: Role


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    """Begin of the text that becomes the variable `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    """End of the text that becomes the variable `name`."""

    name: str

    @property
    def variables(self) -> tuple[str, ...]:
        """The name."""
        return (self.name,)


@dataclass(frozen=True, slots=True)
class Assign(Expr):
    """Sets a variable to a value."""

    name: str
    value: object

    @property
    def variables(self) -> tuple[str, ...]:
        """The name."""
        return (self.name,)


@dataclass(frozen=True, slots=True)
class Reasoning(Expr):
    """Moves the reasoning out of the latest output, which is the variable `name`, into another variable."""

    name: str

    @property
    def variables(self) -> tuple[str, ...]:
        """The answer and the reasoning."""
        return (self.name, f"{self.name}_reasoning_content")


def expression(value: object) -> Expr:
    """An expression unchanged, or a string as Text. Raises RequestError for other types and for lone surrogates."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        if not is_unicode(value):
            raise RequestError("appended text must be Unicode, without lone surrogates")
        return Text(value)
    raise RequestError(f"append text or an expression such as gen(...), not {type(value).__name__}")
