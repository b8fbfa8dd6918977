"""Text, variables and turns of one state."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from quire.lang.expressions import Role

Message = dict[str, str]  # role, content


class Cut(NamedTuple):
    """Characters that were removed from a variable, or from the text (name None)."""

    name: str | None
    begin: int
    length: int

    def moved(self, place: int) -> int:
        """The position after the cut of what was at `place` before."""
        return place if place <= self.begin else max(self.begin, place - self.length)


class Prompt(NamedTuple):
    """The prompt of a call: the text so far, and the same as a conversation.

    messages: the turns that have ended. role, turn: role and text of the open turn, if there is one.
    """

    text: str
    messages: tuple[Message, ...] = ()
    role: Role | None = None
    turn: str = ""


@dataclass
class StateText:
    """Text, variables and turns. The text is a list of pieces while it grows, and forks share the joined string.

    One thread writes. Other threads may read meanwhile, and see all pieces up to some point.
    """

    variables: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    role: Role | None = None
    turn_start: int = 0  # characters before the text of the open turn
    fork_start: int = 0  # characters of the text at the time of the fork
    scopes: list[tuple[str, int]] = field(default_factory=list)  # open var_scopes: name, characters before it
    pieces: list[str] = field(default_factory=list)
    length: int = 0  # characters
    cuts: list[Cut] = field(default_factory=list)  # in the order in which they were made

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)

    def write(self, text: str) -> None:
        """Append text."""
        if text:
            self.pieces.append(text)
            self.length += len(text)

    def cut(self, begin: int, length: int) -> None:
        """Remove characters, and record the cut."""
        text = self.text
        self.pieces, self.length = [text[:begin] + text[begin + length :]], self.length - length
        self.cuts.append(Cut(None, begin, length))

    def end_scope(self, name: str) -> str:
        """Close the last open scope of that name and return its text."""
        place = max(i for i, (own, _) in enumerate(self.scopes) if own == name)
        return self.text[self.scopes.pop(place)[1] :]

    @property
    def turn(self) -> str:
        """The text of the open turn."""
        return "" if self.role is None else self.text[self.turn_start :]

    def prompt(self) -> Prompt:
        """The prompt of a call. Joins the pieces."""
        self.pieces = [self.text]
        return Prompt(self.text, tuple(self.messages), self.role, self.turn)

    def fork(self) -> "StateText":
        """An independent copy for a fork."""
        return replace(
            self,
            variables=dict(self.variables),
            meta=dict(self.meta),
            messages=list(self.messages),
            scopes=list(self.scopes),
            cuts=list(self.cuts),
            pieces=[self.text],
            fork_start=self.length,
        )
