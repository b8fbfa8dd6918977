"""What a chat template writes around turns, found by rendering marks. Knows templates as functions, no model."""

from collections.abc import Sequence
from typing import Protocol

from quire.errors import QuireError, RequestError
from quire.lang.backends.backend import RoleTexts
from quire.lang.state_text import Message


class Render(Protocol):
    """A template. begun: whether the assistant's turn is begun behind the messages."""

    async def __call__(self, messages: list[Message], *, begun: bool) -> str:
        """The conversation as text. Raises RequestError."""


class TemplateRoles:
    """The texts around turns, by who spoke before. They are asked for once.

    What a template writes may depend on all turns: it is rendered with them, each with a mark for its text, and
    only what stands behind the mark before the last one is looked at.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[tuple[str, ...], RoleTexts] = {}

    async def texts(self, roles: tuple[str, ...]) -> RoleTexts:
        """Of the last of these turns. Raises RequestError where the template takes no such turn."""
        if roles not in self._known:
            try:
                self._known[roles] = await self._texts(roles)
            except QuireError:
                if len(roles) == 1:
                    raise
                self._known[roles] = await self.texts(roles[-1:])  # as if nobody had spoken before
        return self._known[roles]

    async def _texts(self, roles: tuple[str, ...]) -> RoleTexts:
        before = roles[:-1]
        written = await self._closing(before)
        if roles[-1] == "assistant":
            opening = await self._render(_marked(before), begun=True) if before else ""
            opening = _behind(opening, before)
        if roles[-1] != "assistant" or not opening.startswith(written):
            opening = _behind(await self._shown(roles), before, upto=roles)
        return RoleTexts(opening.removeprefix(written), await self._closing(roles))

    async def _shown(self, roles: tuple[str, ...]) -> str:
        """The turns, and the user's behind them where the template writes the last one only with that."""
        try:
            text = await self._render(_marked(roles), begun=False)
        except QuireError:
            if roles[-1] != "system":
                raise
            text = ""
        if roles[-1] != "system" or _mark(len(roles) - 1) in text:
            return text
        return await self._render(_marked((*roles, "user")), begun=False)

    async def _closing(self, roles: tuple[str, ...]) -> str:
        """What is written behind the last of these turns, whoever speaks next.

        Nothing where the template writes that turn only together with the next one.
        """
        if not roles:
            return ""
        try:
            return _behind(await self._render(_marked(roles), begun=False), roles)
        except QuireError:
            if roles[-1] == "system":
                return ""
            raise


def plain_texts(roles: tuple[str, ...]) -> RoleTexts:
    """For who has no template."""
    return RoleTexts(f"{roles[-1].upper()}: ", "\n")


def _mark(place: int) -> str:
    return f"\U000f5ec0{place}\U000f5ec1"  # for private use: no template has it


def _marked(roles: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": _mark(place)} for place, role in enumerate(roles)]


def _behind(text: str, roles: Sequence[str], *, upto: Sequence[str] = ()) -> str:
    """What is rendered behind the last of these turns, and before the last of `upto`."""
    begin = 0
    if roles:
        mark = _mark(len(roles) - 1)
        begin = text.find(mark) + len(mark)
        if begin < len(mark):
            raise RequestError(f"the chat template does not show what the {roles[-1]} says")
    end = text.find(_mark(len(upto) - 1)) if upto else len(text)
    if end < begin:
        raise RequestError(f"the chat template does not show what the {upto[-1]} says")
    return text[begin:end]
