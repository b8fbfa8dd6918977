"""The output of a response as items, and the events of a stream that tell of each change.

Both come from one writer, so a stream's events give together what the response has.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Raw
from msgspec.json import encode

from quire.chat.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning
from quire.engine.outputs import LogprobRow
from quire.server.api.openai.logprobs import LogprobFormat
from quire.server.api.openai.responses_schema import encode_reasoning
from quire.server.api.openai.responses_tools import INPUT, ToolOrigin

Event = dict[str, Any]
_NUMBERED = "{}_{}{:05d}"  # id of an item: prefix, digits of the response's id, number


class _Kind(NamedTuple):
    """How an item of one kind is written.

    text_event: begin of the names of the text's events. part_event: the same for parts, empty without parts.
    place: the field with the part's index. part_type: of the part that has the text.
    """

    type: str
    prefix: str
    text_event: str
    part_event: str = ""
    place: str = ""
    part_type: str = ""


_MESSAGE = _Kind("message", "msg", "output_text", "content_part", "content_index", "output_text")
_REASONING = _Kind("reasoning", "rs", "reasoning_text", "content_part", "content_index", "reasoning_text")
_SUMMARY = _Kind("reasoning", "rs", "reasoning_summary_text", "reasoning_summary_part", "summary_index", "summary_text")
_CALL = _Kind("function_call", "fc", "function_call_arguments")
_CUSTOM_CALL = _Kind("custom_tool_call", "ctc", "custom_tool_call_input")
_CALLS = (_CALL, _CUSTOM_CALL)
_PREFIXES = {
    **{kind.type: kind.prefix for kind in (_MESSAGE, _REASONING, *_CALLS)},
    **{"function_call_output": "fco", "custom_tool_call_output": "ctco"},
}
_CUT_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?\Z")  # at the end of a JSON text that was cut
DELTA = ".delta"  # end of the types of events that carry text


def item_id(type: str, response_id: str, number: int) -> str:
    """The id of the `number`-th item of a response, its input included. It names the response: see `response_of`."""
    return _NUMBERED.format(_PREFIXES.get(type, "item"), response_id.partition("_")[2], number)


def response_of(item_id: str) -> str:
    """The id of the response that an item with such an id belongs to, if there is one."""
    return f"resp_{item_id.partition('_')[2][:-5]}"


@dataclass(slots=True)
class _OpenItem:
    """The item that is being written. fields: its own, besides id, type, status and text. complete: of a call."""

    kind: _Kind
    id: str
    place: int  # in the output
    fields: Mapping[str, Any]
    pieces: list[str] = field(default_factory=list)  # of its text
    logprobs: list[Raw] = field(default_factory=list)
    complete: bool = False


class ResponseWriter:
    """Writes one response.

    fields: those of the response that do not change. first_item: number of its input items, for ids. origins: of called
    functions, by their names.
    with_summary: write reasoning as a summary. with_encoded: add `encrypted_content` to reasoning.
    logprobs: None without logprobs.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        first_item: int,
        new_call_id: Callable[[int, str], str],
        origins: Mapping[str, ToolOrigin],
        *,
        with_summary: bool,
        with_encoded: bool,
        logprobs: LogprobFormat | None,
    ) -> None:
        self._fields = dict(fields)
        self._first_item = first_item
        self._new_call_id = new_call_id
        self._origins = origins
        self._reasoning = _SUMMARY if with_summary else _REASONING
        self._with_encoded = with_encoded
        self._logprobs = logprobs
        self._output: list[Mapping[str, Any]] = []  # complete items
        self._open: _OpenItem | None = None
        self._blanks: tuple[_Kind, list[str]] = (_MESSAGE, [])  # blank text, which begins an item only if more follows
        self._unwritten_rows: list[LogprobRow] = []  # of tokens whose text has not come yet
        self._num_events = 0

    @property
    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        status = "in_progress" if self._fields["status"] in ("queued", "in_progress") else "incomplete"
        unfinished = [] if self._open is None else [self._item(self._open, status)]
        return {**self._fields, "output": [*self._output, *unfinished]}

    @property
    def has_cut_call(self) -> bool:
        """Whether a call ended before it was complete. No call is open any more."""
        kinds = [kind.type for kind in _CALLS]
        return any(item["type"] in kinds and item["status"] == "incomplete" for item in self._output)

    @property
    def num_events(self) -> int:
        """Number of events so far."""
        return self._num_events

    def change(self, **fields: object) -> None:
        """Change fields of the response."""
        self._fields.update(fields)

    def begin(self) -> list[Event]:
        """The first events."""
        status = self._fields["status"]
        events = [self._lifecycle_event("created")]
        if status == "queued":
            events.append(self._lifecycle_event("queued"))
        self.change(status="in_progress")
        return [*events, self._lifecycle_event("in_progress")]

    @property
    def has_logprobs(self) -> bool:
        """Whether messages have logprobs."""
        return self._logprobs is not None

    def add(self, parts: Sequence[Part], rows: Sequence[LogprobRow] | None) -> list[Event]:
        """The events of the parts that one step adds. rows: logprobs of its tokens of content."""
        self._unwritten_rows += rows or ()
        events = [event for part in parts for event in self._add(part)]
        if any(not isinstance(part, Content) for part in parts):
            self._unwritten_rows.clear()  # of white space beside markup
        return events

    def close(self, *, complete: bool) -> list[Event]:
        """Close the last item. complete: whether the output ended by itself. There is one item at least."""
        status = "completed" if complete else "incomplete"
        events = list(self._close_item(status))
        if not self._output:
            kind, blanks = self._blanks
            events += self._open_item(_MESSAGE)
            events += self._write(_MESSAGE, "".join(blanks)) if kind is _MESSAGE and blanks else ()
            events += self._close_item(status)
        return events

    def last_event(self) -> Event:
        """The event of the status at the end: completed, incomplete or failed."""
        return self._lifecycle_event(self._fields["status"])

    def _add(self, part: Part) -> Iterator[Event]:
        match part:
            case Content(text):
                yield from self._add_text(_MESSAGE, text)
            case Reasoning(text):
                yield from self._add_text(self._reasoning, text)
            case CallBegin(index, name):
                yield from self._close_item("completed")
                origin = self._origins.get(name, ToolOrigin(name))
                place = {} if origin.namespace is None else {"namespace": origin.namespace}
                fields = {"call_id": self._new_call_id(index, name), "name": origin.name, **place}
                yield from self._open_item(_CUSTOM_CALL if origin.is_custom else _CALL, **fields)
            case CallArguments(_, text):
                assert self._open is not None, "a call is open while its arguments come"
                if self._open.kind is _CALL:
                    yield from self._write(_CALL, text)
                else:  # the text is within JSON, and written as a whole
                    self._open.pieces.append(text)
            case CallEnd():
                assert self._open is not None, "a call is open until another item follows"
                self._open.complete = True

    def _add_text(self, kind: _Kind, text: str) -> Iterator[Event]:
        """Text of a message or of reasoning. Blank text alone is neither, and begins no item behind another one."""
        if self._open is not None and self._open.kind is kind:
            yield from self._write(kind, text)
            return
        if self._blanks[0] is not kind:
            self._blanks = (kind, [])
        blanks = self._blanks[1]
        blanks.append(text)
        if text.strip():
            whole, is_first = "".join(blanks), self._open is None and not self._output
            yield from self._write(kind, whole if is_first else whole.lstrip())

    def _write(self, kind: _Kind, text: str) -> Iterator[Event]:
        """Write text into the open item, or into a new one if that is of another kind."""
        if self._open is None or self._open.kind is not kind:
            yield from self._close_item("completed")
            yield from self._open_item(kind)
        assert self._open is not None, "it was just opened"
        self._open.pieces.append(text)
        new = self._new_logprobs() if kind is _MESSAGE else []
        self._open.logprobs += new
        extra = {"logprobs": new} if kind is _MESSAGE else {}
        yield self._text_event(DELTA, self._open, delta=text, **extra)

    def _open_item(self, kind: _Kind, **fields: str) -> Iterator[Event]:
        place = len(self._output)
        id = item_id(kind.type, self._fields["id"], self._first_item + place)
        self._open = item = _OpenItem(kind, id, place, fields)
        self._blanks = (_MESSAGE, [])
        yield self._event(
            "response.output_item.added", output_index=place, item=self._item(item, "in_progress", is_new=True)
        )
        if kind.part_event:
            yield self._part_event(".added", item)

    def _close_item(self, status: str) -> Iterator[Event]:
        item, self._open = self._open, None
        if item is None:
            return
        if item.kind in _CALLS:
            status = "completed" if item.complete else "incomplete"
        if item.kind is _CUSTOM_CALL:
            item.pieces = [_input_of("".join(item.pieces))]
            yield self._text_event(DELTA, item, delta=item.pieces[0])
        if item.kind is _MESSAGE:
            item.logprobs += self._new_logprobs()
        text = "".join(item.pieces)
        if item.kind is _CALL:
            yield self._text_event(".done", item, arguments=text, name=item.fields["name"])
        elif item.kind is _CUSTOM_CALL:
            yield self._text_event(".done", item, input=text)
        else:
            extra = {"logprobs": item.logprobs} if item.kind is _MESSAGE else {}
            yield self._text_event(".done", item, text=text, **extra)
        if item.kind.part_event:
            yield self._part_event(".done", item)
        whole = self._item(item, status)
        self._output.append(whole)
        yield self._event("response.output_item.done", output_index=item.place, item=whole)

    def _item(self, item: _OpenItem, status: str, *, is_new: bool = False) -> dict[str, Any]:
        """The object of an item. is_new: without parts, which have events of their own."""
        head = {"id": item.id, "type": item.kind.type, "status": status, **item.fields}
        parts = [] if is_new else [self._part(item)]
        if item.kind in _CALLS:
            text = "" if is_new or (item.kind is _CUSTOM_CALL and item is self._open) else "".join(item.pieces)
            return {**head, "arguments" if item.kind is _CALL else INPUT: text}
        if item.kind is _MESSAGE:
            return {**head, "role": "assistant", "content": parts}
        encoded = encode_reasoning("".join(item.pieces)) if self._with_encoded and not is_new else None
        is_summary = item.kind is _SUMMARY
        return {
            **head,
            "summary": parts if is_summary else [],
            "content": [] if is_summary else parts,
            "encrypted_content": encoded,
        }

    def _part(self, item: _OpenItem) -> dict[str, object]:
        part: dict[str, object] = {"type": item.kind.part_type, "text": "".join(item.pieces)}
        return part if item.kind is not _MESSAGE else {**part, "annotations": [], "logprobs": list(item.logprobs)}

    def _new_logprobs(self) -> list[Raw]:
        """The logprobs of the tokens whose text is written now, as JSON, because several events have them."""
        rows, self._unwritten_rows = self._unwritten_rows, []
        described = None if self._logprobs is None else self._logprobs.chat(rows)
        return [] if described is None else [Raw(encode(one)) for one in described["content"]]  # type: ignore[attr-defined]  # a list

    def _text_event(self, end: str, item: _OpenItem, **fields: object) -> Event:
        return self._event(f"response.{item.kind.text_event}{end}", **self._position(item), **fields)

    def _part_event(self, end: str, item: _OpenItem) -> Event:
        return self._event(f"response.{item.kind.part_event}{end}", **self._position(item), part=self._part(item))

    def _position(self, item: _OpenItem) -> dict[str, object]:
        part = {item.kind.place: 0} if item.kind.place else {}
        return {"item_id": item.id, "output_index": item.place, **part}

    def _lifecycle_event(self, name: str) -> Event:
        return self._event(f"response.{name}", response=self.response)

    def _event(self, type: str, **fields: object) -> Event:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": type, "sequence_number": number, **fields}


def _input_of(arguments: str) -> str:
    """The input in the arguments of a custom tool's call; as much of the text as there is, if the call was cut."""
    for whole in (arguments, _CUT_ESCAPE.sub(r"\1", arguments) + '"}'):
        try:
            found = json.loads(whole)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and isinstance(found.get(INPUT), str):
            return str(found[INPUT]).encode("utf-8", "replace").decode()  # halves of surrogate pairs are no text
    return arguments


def response_usage(usage: Mapping[str, Any], *, with_cache: bool) -> dict[str, object]:
    """The usage of a response. usage: of a chat completion. with_cache: whether computed prompt tokens are cached."""
    computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    details = usage.get("completion_tokens_details", {})
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": computed if with_cache else 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }


def now() -> int:
    """Seconds since 1970, as responses have them."""
    return int(time.time())
