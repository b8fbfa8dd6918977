"""The texts that a chat template puts around turns, found by rendering marks."""

from collections.abc import Sequence
from typing import Protocol

from quire.errors import QuireError, RequestError
from quire.lang.backends.backend import RoleTexts
from quire.lang.state_text import Message


class Render(Protocol):
    """A chat template. add_generation_prompt: whether to open the assistant's turn after the messages."""

    async def __call__(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as text. Raises RequestError."""


class TemplateRoles:
    """The texts around a turn, given the roles of all turns so far. Cached per sequence of roles.

    A template's output may depend on all turns. So it is rendered with all of them, each with a mark as its text. The
    texts are cut out of the output after the mark of the turn before the last.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._cache: dict[tuple[str, ...], RoleTexts] = {}

    async def texts(self, roles: tuple[str, ...]) -> RoleTexts:
        """The texts around the last of these turns. Raises RequestError if the template refuses such a turn."""
        if roles not in self._cache:
            try:
                self._cache[roles] = await self._texts(roles)
            except QuireError:
                if len(roles) == 1:
                    raise
                self._cache[roles] = await self.texts(roles[-1:])  # as for a first turn
        return self._cache[roles]

    async def _texts(self, roles: tuple[str, ...]) -> RoleTexts:
        before = roles[:-1]
        written = await self._suffix(before)
        if roles[-1] == "assistant":
            opening = await self._render(_marked_messages(before), add_generation_prompt=True) if before else ""
            opening = _text_after(opening, before)
        if roles[-1] != "assistant" or not opening.startswith(written):
            opening = _text_after(await self._render_turns(roles), before, upto=roles)
        return RoleTexts(opening.removeprefix(written), await self._suffix(roles))

    async def _render_turns(self, roles: tuple[str, ...]) -> str:
        """The rendered turns. A user's turn follows if the template renders a last system turn only with one."""
        try:
            text = await self._render(_marked_messages(roles), add_generation_prompt=False)
        except QuireError:
            if roles[-1] != "system":
                raise
            text = ""
        if roles[-1] != "system" or _mark(len(roles) - 1) in text:
            return text
        return await self._render(_marked_messages((*roles, "user")), add_generation_prompt=False)

    async def _suffix(self, roles: tuple[str, ...]) -> str:
        """The text after the last of these turns, whatever the next role.

        Empty if the template renders a last system turn only together with the next turn.
        """
        if not roles:
            return ""
        try:
            return _text_after(await self._render(_marked_messages(roles), add_generation_prompt=False), roles)
        except QuireError:
            if roles[-1] == "system":
                return ""
            raise


def plain_texts(roles: tuple[str, ...]) -> RoleTexts:
    """The texts for backends without a chat template: "ROLE: " and a newline."""
    return RoleTexts(f"{roles[-1].upper()}: ", "\n")


def _mark(place: int) -> str:
    return f"\U000f5ec0{place}\U000f5ec1"  # private-use characters, which no template contains


def _marked_messages(roles: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": _mark(place)} for place, role in enumerate(roles)]


def _text_after(text: str, roles: Sequence[str], *, upto: Sequence[str] = ()) -> str:
    """The part of a rendered text after the mark of the last of `roles`, and before that of the last of `upto`."""
    begin = 0
    if roles:
        mark = _mark(len(roles) - 1)
        begin = text.find(mark) + len(mark)
        if begin < len(mark):
            raise RequestError(f"the chat template does not render the content of role {roles[-1]}")
    end = text.find(_mark(len(upto) - 1)) if upto else len(text)
    if end < begin:
        raise RequestError(f"the chat template does not render the content of role {upto[-1]}")
    return text[begin:end]
