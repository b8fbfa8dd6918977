"""API speculation: text that an endpoint generated past a stop is kept, and used if the program continues with it.

The method is from the SGLang paper (section 3, "API speculative execution"). Kept text is used only up to a place
where a call without speculation would have ended too: a stop string, or the model's end, within max_tokens.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from quire.errors import RequestError
from quire.lang.errors import GenerationFailed
from quire.lang.params import GenParams


class Completion(NamedTuple):
    """The whole output of one call."""

    text: str
    meta: dict[str, Any]


Call = Callable[[GenParams], Awaitable[Completion]]


class SpeculatedText:
    """Unused text of the last call. num_tokens: the least max_tokens of a call; None turns speculation off."""

    def __init__(self, num_tokens: int | None) -> None:
        self._num_tokens = num_tokens
        self._params: GenParams | None = None  # of the last call, without stop and max_tokens
        self._text = ""
        self._offsets: list[int] | None = None  # of its tokens, in characters; None if unknown
        self._max_num_tokens = 0  # upper bound of its number of tokens
        self._ended = False  # whether the model ended at its end
        self._request_offsets = True

    def supports(self, params: GenParams) -> bool:
        """Whether speculation is on and supports these parameters.

        Only stop, max_tokens, temperature, top_p, top_k and min_p may differ from their defaults.
        """
        unbounded = _without_bounds(params)
        plain = _without_bounds(
            GenParams(
                temperature=unbounded.temperature, top_p=unbounded.top_p, top_k=unbounded.top_k, min_p=unbounded.min_p
            )
        )
        return self._num_tokens is not None and unbounded == plain

    def clear(self) -> None:
        """Discard the unused text."""
        self._text, self._params = "", None

    def fill(self, text: str) -> None:
        """Record text that the program appended. The unused text is kept only if it begins with `text`."""
        if text and self._text.startswith(text):
            self._consume(len(text))
        elif text:
            self.clear()

    async def generate(self, params: GenParams, call: Call) -> Completion:
        """The output of one gen: from the unused text if that is possible, else from a new call."""
        if self._params == _without_bounds(params) and (taken := self._usable_text(params, fresh=False)) is not None:
            self._consume(len(taken))
            return Completion(taken, {"speculated": True})
        meta = await self._call(params, call)
        taken = self._usable_text(params, fresh=True)
        if taken is None:  # it is unknown where a call for max_tokens would have ended
            self.clear()
            return await call(params)
        meta = {**meta, "finish_reason": self._finish_reason(taken, params) or meta.get("finish_reason")}
        self._consume(len(taken))
        return Completion(taken, meta)

    def _finish_reason(self, taken: str, params: GenParams) -> dict[str, object] | None:
        """The finish_reason of a call that ends after `taken`; None if `taken` is the whole output."""
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
        self._max_num_tokens = min(most, written.meta.get("completion_tokens", most))
        self._ended = finish_type(written.meta) == "stop"
        return written.meta

    async def _with_offsets(self, asked: GenParams, call: Call) -> Completion:
        """Call with logprobs, as many endpoints return token offsets with them. After a RequestError, never again."""
        if self._request_offsets:
            try:
                return await call(replace(asked, return_logprob=True))
            except RequestError:
                self._request_offsets = False
        return await call(asked)

    def _usable_text(self, params: GenParams, *, fresh: bool) -> str | None:
        """The part of the unused text that a call without speculation would have returned; None if that is unknown.

        fresh: whether the text is the whole output of a call, so that no other call would be longer.
        """
        stop = first_stop(self._text, params.stop)
        if stop is not None and self._fits_max_tokens(stop[1], params.max_tokens):
            return self._text[: stop[0]]
        if self._offsets is not None and len(self._offsets) > params.max_tokens:
            return self._text[: self._offsets[params.max_tokens]]
        has_all = self._offsets is not None or self._max_num_tokens <= params.max_tokens
        return self._text if has_all and stop is None and (self._ended or fresh) else None

    def _fits_max_tokens(self, length: int, max_tokens: int) -> bool:
        """Whether the first `length` characters certainly have at most `max_tokens` tokens.

        Without token offsets this assumes that a token has at least one byte.
        """
        if self._offsets is not None:
            return len(self._offsets) <= max_tokens or length <= self._offsets[max_tokens]
        return self._max_num_tokens <= max_tokens or len(self._text[:length].encode()) <= max_tokens

    def _consume(self, length: int) -> None:
        self._text = self._text[length:]
        if self._offsets is not None:
            self._offsets = [offset - length for offset in self._offsets if offset >= length]


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Begin and end of the stop string whose match ends first; None if there is no match."""
    found = [(begin + len(stop), begin) for stop in stops if (begin := text.find(stop)) >= 0]
    if not found:
        return None
    end, begin = min(found)
    return begin, end


def finish_type(meta: Mapping[str, Any]) -> str | None:
    """The type of the finish_reason: "stop", "length", ...; None if the sequence has not ended."""
    reason = meta.get("finish_reason")
    return reason.get("type") if isinstance(reason, dict) else reason


def _without_bounds(params: GenParams) -> GenParams:
    return replace(params, max_tokens=0, stop=())


_MAX_ATTEMPTS = 3  # calls per turn if tokens are sampled: another output may match the pattern


@dataclass
class Part:
    """One part of a chat turn: fixed text, or a gen."""

    text: str = ""
    name: str | None = None
    params: GenParams | None = None  # of a gen
    meta: dict[str, Any] | None = field(default=None)


class ChatTurn:
    """An assistant's turn that is generated in one call. num_tokens: max_tokens of that call."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._parts: list[Part] = []

    @property
    def names(self) -> set[str]:
        """Variables that are set when the turn ends."""
        return {part.name for part in self._parts if part.name is not None}

    def fill(self, text: str) -> None:
        """Append fixed text."""
        if self._parts and self._parts[-1].params is None:
            self._parts[-1].text += text
        elif text:
            self._parts.append(Part(text))

    def gen(self, name: str | None, params: GenParams) -> None:
        """Append a gen. Raises RequestError if one call cannot generate it."""
        if params.constraint is not None or params.n > 1:
            raise RequestError(
                "num_api_spec_tokens generates a chat turn in one call, without n, regex, json_schema, ebnf"
            )
        first = next((part.params for part in self._parts if part.params is not None), params)
        if _sampling(first) != _sampling(params):
            raise RequestError(
                "the gens of a chat turn that is generated in one call must have equal sampling parameters"
            )
        if self._parts and (before := self._parts[-1].params) is not None and not before.stop:
            raise RequestError(f"gen {self._parts[-1].name!r} needs a stop, because another gen follows in its turn")
        self._parts.append(Part(name=name, params=params))

    async def complete(self, call: Callable[[GenParams], Awaitable[Completion]]) -> list[Part]:
        """The parts with their texts. Raises GenerationFailed if the output does not match the parts."""
        params = next((part.params for part in self._parts if part.params is not None), None)
        if params is None:
            return self._parts
        asked = replace(params, max_tokens=self._num_tokens, stop=self._stop_strings())
        for _ in range(_MAX_ATTEMPTS if params.temperature else 1):
            written = await call(asked)
            if (read := self._match_parts(written.text)) is not None:
                return [
                    replace(part, text=text, meta=written.meta) for part, text in zip(self._parts, read, strict=True)
                ]
        raise GenerationFailed(
            f"the model's turn does not follow the program's: it wrote {written.text!r:.200}; show the format in an "
            "example, or raise num_api_spec_tokens"
        )

    def _stop_strings(self) -> tuple[str, ...]:
        """Stop strings of the call: those of the last part if it is the turn's only gen, else none.

        None either if one could end the call within the fixed text, which the model writes in this call, too.
        """
        last = self._parts[-1].params
        alone = sum(part.params is not None for part in self._parts) == 1
        fixed = "".join(part.text for part in self._parts)
        return (
            last.stop if last is not None and alone and not any(_begins_in(fixed, stop) for stop in last.stop) else ()
        )

    def _match_parts(self, text: str) -> list[str] | None:
        """The text of each part; None if `text` does not match the parts."""
        read: list[str] = []
        for place, part in enumerate(self._parts):
            if part.params is None:
                if not text.startswith(part.text):
                    return None
                read.append(part.text)
            elif (end := self._gen_end(place, part.params, text)) is None:
                return None
            else:
                read.append(text[:end])
            text = text[len(read[-1]) :]
        return read

    def _gen_end(self, place: int, params: GenParams, text: str) -> int | None:
        """End of the gen at index `place`: its stop, the end of the turn, or without a stop the next fixed text.

        None if that is not found.
        """
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


def _begins_in(text: str, stop: str) -> bool:
    """Whether `stop` is in the text, or may begin at its end."""
    return stop in text or any(text.endswith(stop[:length]) for length in range(1, len(stop)))


def _sampling(params: GenParams) -> GenParams:
    return replace(params, max_tokens=0, stop=())
