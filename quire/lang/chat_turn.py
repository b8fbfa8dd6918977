"""ChatTurn: API speculative execution where an endpoint only answers in whole turns. Knows texts, no endpoint.

All that the program appends to an assistant's turn is a pattern: fixed texts and gens, which end at their stops. One
call writes the turn, and is read by the pattern.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import RequestError
from quire.lang.api_speculation import Written, first_stop
from quire.lang.errors import GenerationFailed
from quire.lang.params import GenParams

_TRIES = 3  # where tokens are drawn: another try may fit


@dataclass
class Part:
    """A fixed text, or a gen."""

    text: str = ""
    name: str | None = None
    params: GenParams | None = None  # of a gen
    meta: dict[str, Any] | None = field(default=None)


class ChatTurn:
    """One assistant's turn. num_tokens: what may be written in it."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._parts: list[Part] = []

    @property
    def names(self) -> set[str]:
        """Variables that are known when it ends."""
        return {part.name for part in self._parts if part.name is not None}

    def fill(self, text: str) -> None:
        """The program wants this text here."""
        if self._parts and self._parts[-1].params is None:
            self._parts[-1].text += text
        elif text:
            self._parts.append(Part(text))

    def gen(self, name: str | None, params: GenParams) -> None:
        """The model is to write here. Raises RequestError for what one call cannot do."""
        if params.form is not None or params.n > 1:
            raise RequestError(
                "num_api_spec_tokens writes a chat turn in one call, without n, regex, json_schema, ebnf"
            )
        first = next((part.params for part in self._parts if part.params is not None), params)
        if _sampling(first) != _sampling(params):
            raise RequestError("the gens of a chat turn that is written in one call must sample in the same way")
        if self._parts and (before := self._parts[-1].params) is not None and not before.stop:
            raise RequestError(f"gen {self._parts[-1].name!r} needs a stop, since another gen follows in its turn")
        self._parts.append(Part(name=name, params=params))

    async def complete(self, call: Callable[[GenParams], Awaitable[Written]]) -> list[Part]:
        """The parts with their texts. Raises GenerationFailed where the model does not follow the pattern."""
        params = next((part.params for part in self._parts if part.params is not None), None)
        if params is None:
            return self._parts
        asked = replace(params, max_tokens=self._num_tokens, stop=self._end())
        for _ in range(_TRIES if params.temperature else 1):
            written = await call(asked)
            if (read := self._read(written.text)) is not None:
                return [
                    replace(part, text=text, meta=written.meta) for part, text in zip(self._parts, read, strict=True)
                ]
        raise GenerationFailed(
            f"the model's turn does not follow the program's: it wrote {written.text!r:.200}; show it the form in an "
            "example, or raise num_api_spec_tokens"
        )

    def _end(self) -> tuple[str, ...]:
        """Where the turn ends with a gen, its stops end the turn, unless they come up before."""
        last = self._parts[-1].params
        alone = sum(part.params is not None for part in self._parts) == 1
        return last.stop if last is not None and alone else ()

    def _read(self, text: str) -> list[str] | None:
        """The text of each part; None where it does not fit."""
        read: list[str] = []
        for place, part in enumerate(self._parts):
            if part.params is None:
                if not text.startswith(part.text):
                    return None
                read.append(part.text)
            elif (end := self._end_of(place, part.params, text)) is None:
                return None
            else:
                read.append(text[:end])
            text = text[len(read[-1]) :]
        return read

    def _end_of(self, place: int, params: GenParams, text: str) -> int | None:
        """Where a gen's text ends: at its stop, or with the turn; without a stop, before the fixed text behind it."""
        is_last = place == len(self._parts) - 1
        found = first_stop(text, params.stop)
        if found is not None:
            return found[0]
        if is_last:
            return len(text)
        if params.stop:
            return None
        behind = text.find(self._parts[place + 1].text)
        return None if behind < 0 else behind


def _sampling(params: GenParams) -> GenParams:
    return replace(params, max_tokens=0, stop=())
