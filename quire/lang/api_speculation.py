"""API speculative execution on text: what an endpoint wrote past a stop is kept, and used where the program goes on
in the same way. Knows texts and parameters, no endpoint.

The method is that of the SGLang paper (section 3, "API speculative execution"). A text is taken from the surplus only
where a call without speculation would have ended there too: a stop string, or the model's end, within max_tokens.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from quire.errors import RequestError
from quire.lang.errors import GenerationFailed
from quire.lang.params import GenParams


class Written(NamedTuple):
    """All that one call wrote."""

    text: str
    meta: dict[str, Any]


Call = Callable[[GenParams], Awaitable[Written]]


class Surplus:
    """What is left of the last call. num_tokens: what a call asks for at least; None never asks for more."""

    def __init__(self, num_tokens: int | None) -> None:
        self._num_tokens = num_tokens
        self._params: GenParams | None = None  # under which it was written, without stops and limits
        self._text = ""
        self._offsets: list[int] | None = None  # of its tokens, in characters; None where the endpoint does not tell
        self._most = 0  # tokens that it has at most
        self._ended = False  # the model ended behind it
        self._may_tell = True

    def helps(self, params: GenParams) -> bool:
        """Whether these parameters mean the same when a text is written in one call as in several."""
        said = _without_bounds(params)
        plain = _without_bounds(
            GenParams(temperature=said.temperature, top_p=said.top_p, top_k=said.top_k, min_p=said.min_p)
        )
        return self._num_tokens is not None and said == plain

    def drop(self) -> None:
        """The text goes on otherwise."""
        self._text, self._params = "", None

    def fill(self, text: str) -> None:
        """The program writes this itself: what is left goes on behind it, if it begins with it."""
        if text and self._text.startswith(text):
            self._consume(len(text))
        elif text:
            self.drop()

    async def generate(self, params: GenParams, call: Call) -> Written:
        """What the program takes of what is left of the last call, or of a new one."""
        if self._params == _without_bounds(params) and (taken := self._take(params, fresh=False)) is not None:
            self._consume(len(taken))
            return Written(taken, {"speculated": True})
        meta = await self._call(params, call)
        taken = self._take(params, fresh=True)
        if taken is None:  # nobody can tell where a call for max_tokens would have ended
            self.drop()
            return await call(params)
        meta = {**meta, "finish_reason": self._reason(taken, params) or meta.get("finish_reason")}
        self._consume(len(taken))
        return Written(taken, meta)

    def _reason(self, taken: str, params: GenParams) -> dict[str, object] | None:
        """Why a call for that much would have ended; None where it is all that the call wrote."""
        stop = first_stop(self._text, params.stop)
        if stop is not None and stop[0] == len(taken):
            return {"type": "stop", "matched": self._text[stop[0] : stop[1]]}
        return {"type": "length", "length": params.max_tokens} if len(taken) < len(self._text) else None

    async def _call(self, params: GenParams, call: Call) -> dict[str, Any]:
        most = max(params.max_tokens, self._num_tokens or 0)
        asked = replace(params, max_tokens=most, stop=())
        written = await self._with_offsets(asked, call) if most > params.max_tokens else await call(asked)
        self._params = _without_bounds(params)
        self._text = written.text
        self._offsets = written.meta.get("token_offsets")
        self._most = min(most, written.meta.get("completion_tokens", most))
        self._ended = finish_type(written.meta) == "stop"
        return written.meta

    async def _with_offsets(self, asked: GenParams, call: Call) -> Written:
        """Many endpoints tell where tokens begin along with logprobs; one that refuses those is not asked again."""
        if self._may_tell:
            try:
                return await call(replace(asked, return_logprob=True))
            except RequestError:
                self._may_tell = False
        return await call(asked)

    def _take(self, params: GenParams, *, fresh: bool) -> str | None:
        """Of what is left, what a call would have written; None where that cannot be told.

        fresh: nothing has been taken of it, so that it is as long as any call could be.
        """
        stop = first_stop(self._text, params.stop)
        if stop is not None and self._within(stop[1], params.max_tokens):
            return self._text[: stop[0]]
        if self._offsets is not None and len(self._offsets) > params.max_tokens:
            return self._text[: self._offsets[params.max_tokens]]
        has_all = self._offsets is not None or self._most <= params.max_tokens
        return self._text if has_all and stop is None and (self._ended or fresh) else None

    def _within(self, length: int, max_tokens: int) -> bool:
        """Whether so many characters are certainly written with so many tokens: none is shorter than a byte."""
        if self._offsets is not None:
            return len(self._offsets) <= max_tokens or length <= self._offsets[max_tokens]
        return self._most <= max_tokens or len(self._text[:length].encode()) <= max_tokens

    def _consume(self, length: int) -> None:
        self._text = self._text[length:]
        if self._offsets is not None:
            self._offsets = [offset - length for offset in self._offsets if offset >= length]


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Where the stop string that is complete first begins and ends."""
    found = [(begin + len(stop), begin) for stop in stops if (begin := text.find(stop)) >= 0]
    if not found:
        return None
    end, begin = min(found)
    return begin, end


def finish_type(meta: Mapping[str, Any]) -> str | None:
    """Why a sequence ended: "stop", "length", ..."""
    reason = meta.get("finish_reason")
    return reason.get("type") if isinstance(reason, dict) else reason


def _without_bounds(params: GenParams) -> GenParams:
    return replace(params, max_tokens=0, stop=())


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
