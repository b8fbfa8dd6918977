"""What programs append to their state: expressions that add up. Plain data; knows nothing of how they are executed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.errors import RequestError
from quire.lang.select import ChoicesSamplingMethod
from quire.params import is_unicode

Role = Literal["system", "user", "assistant"]


class Expr:
    """Something that can be appended to a state. Strings and expressions add up to sequences of expressions."""

    def __add__(self, other: object) -> "Sequence":
        return Sequence((*self.flat(), *expression(other).flat()))

    def __radd__(self, other: object) -> "Sequence":
        return Sequence((*expression(other).flat(), *self.flat()))

    def flat(self) -> Iterator["Expr"]:
        """The expressions that it stands for, none of them a sequence."""
        yield self

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables that it sets."""
        return ()


@dataclass(frozen=True, slots=True)
class Text(Expr):
    """Text of the program itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Sequence(Expr):
    """One after the other."""

    parts: tuple[Expr, ...]

    def flat(self) -> Iterator[Expr]:
        """Its parts, which are flat already."""
        yield from self.parts


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """What the model writes. said: fields of GenParams in which it differs from the program's defaults."""

    name: str | None = None
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def variables(self) -> tuple[str, ...]:
        """Its name."""
        return () if self.name is None else (self.name,)


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """The one of the choices that the model finds best."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesSamplingMethod

    @property
    def variables(self) -> tuple[str, ...]:
        """Its name."""
        return () if self.name is None else (self.name,)


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """A turn begins."""

    role: Role


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """A turn ends."""

    role: Role


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    """From here on, all text is in the variable."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    """Up to here."""

    name: str

    @property
    def variables(self) -> tuple[str, ...]:
        """Its name."""
        return (self.name,)


@dataclass(frozen=True, slots=True)
class Assign(Expr):
    """A variable that the program sets itself."""

    name: str
    value: object

    @property
    def variables(self) -> tuple[str, ...]:
        """Its name."""
        return (self.name,)


@dataclass(frozen=True, slots=True)
class Reasoning(Expr):
    """Takes what the model thought out of its latest answer, which is the variable `name`."""

    name: str

    @property
    def variables(self) -> tuple[str, ...]:
        """The answer that is left, and the thought."""
        return (self.name, f"{self.name}_reasoning_content")


def expression(value: object) -> Expr:
    """A string as an expression. Raises RequestError for what is neither, and for what is no Unicode text."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        if not is_unicode(value):
            raise RequestError("append Unicode text, without lone surrogates")
        return Text(value)
    raise RequestError(f"append text or an expression such as gen(...), not {type(value).__name__}")
