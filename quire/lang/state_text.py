"""Scene: what a state has written so far: text, variables, turns. Plain data of one stream."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from quire.lang.expressions import Role

Message = dict[str, str]  # role, content


class Cut(NamedTuple):
    """Characters that were taken out of what was there: of a variable, or of all text (None)."""

    name: str | None
    begin: int
    length: int

    def moved(self, place: int) -> int:
        """Where a place of the text is now."""
        return place if place <= self.begin else max(self.begin, place - self.length)


class Prompt(NamedTuple):
    """What a backend continues: all of the text, and the same as a conversation.

    messages: the turns that have ended. role, turn: of the one that has not, if there is one.
    """

    text: str
    messages: tuple[Message, ...] = ()
    role: Role | None = None
    turn: str = ""


@dataclass
class Scene:
    """The text is kept in pieces while it grows; forks share what is joined.

    One thread writes. Others may read meanwhile: what they see is complete up to some piece.
    """

    variables: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    role: Role | None = None
    turn_start: int = 0  # characters before the open turn's own text
    fork_start: int = 0  # characters that were there when it was forked
    scopes: list[tuple[str, int]] = field(default_factory=list)  # characters before each
    pieces: list[str] = field(default_factory=list)
    length: int = 0  # characters
    cuts: list[Cut] = field(default_factory=list)  # in the order in which they were made

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)

    def write(self, text: str) -> None:
        """Append a text."""
        if text:
            self.pieces.append(text)
            self.length += len(text)

    def cut(self, begin: int, length: int) -> None:
        """Take characters out."""
        text = self.text
        self.pieces, self.length = [text[:begin] + text[begin + length :]], self.length - length
        self.cuts.append(Cut(None, begin, length))

    def end_scope(self, name: str) -> str:
        """The text since the last scope of that name began."""
        place = max(i for i, (own, _) in enumerate(self.scopes) if own == name)
        return self.text[self.scopes.pop(place)[1] :]

    @property
    def turn(self) -> str:
        """The text of the open turn."""
        return "" if self.role is None else self.text[self.turn_start :]

    def prompt(self) -> Prompt:
        """For a backend."""
        self.pieces = [self.text]
        return Prompt(self.text, tuple(self.messages), self.role, self.turn)

    def forked(self) -> "Scene":
        """A copy that goes on by itself."""
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
