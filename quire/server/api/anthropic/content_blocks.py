"""Content blocks of a message, from the parts that the parser of the model's output gives."""

import hashlib
import json
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Sequence

from quire.chat.parts import CallArguments, CallBegin, Content, Part, Reasoning

Event = dict[str, object]


class ContentBlocks:
    """Events of the content blocks of one message: one block for each run of parts of the same kind.

    A block behind another one does not begin with white space, which stands there beside markup.
    with_thinking: whether thinking blocks have their text.
    """

    def __init__(self, new_call_id: Callable[[int, str], str], *, with_thinking: bool) -> None:
        self._new_call_id = new_call_id
        self._with_thinking = with_thinking
        self._num_blocks = 0
        self._open = ""  # type of the block that is not complete; "" if there is none
        self._signed = hashlib.sha256()  # of the open thinking block

    def events(self, parts: Sequence[Part]) -> Iterator[Event]:
        """The events of further parts."""
        for part in parts:
            match part:
                case Content(text):
                    text = self._begun("text", text)
                    if not text:
                        continue
                    yield from self._within("text", {"text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case Reasoning(text):
                    text = self._begun("thinking", text)
                    if not text:
                        continue
                    yield from self._within("thinking", {"thinking": "", "signature": ""})
                    self._signed.update(text.encode())
                    if self._with_thinking:
                        yield self._delta({"type": "thinking_delta", "thinking": text})
                case CallBegin(index, name):
                    yield from self.close()
                    yield from self._within(
                        "tool_use", {"id": self._new_call_id(index, name), "name": name, "input": {}}
                    )
                case CallArguments(_, text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[Event]:
        """The events that complete the last block."""
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta(
                {"type": "signature_delta", "signature": urlsafe_b64encode(self._signed.digest()).decode()}
            )
            self._signed = hashlib.sha256()
        yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._open = ""

    def _begun(self, kind: str, text: str) -> str:
        """The text as it is within a block of this kind. A new block behind another one begins without white space."""
        return text if self._open == kind or not self._num_blocks else text.lstrip()

    def _within(self, kind: str, begin: Event) -> Iterator[Event]:
        """Events after which a block of this kind is open."""
        if self._open == kind:
            return
        yield from self.close()
        self._open = kind
        self._num_blocks += 1
        block = {"type": kind, **begin}
        yield {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}


def whole_blocks(parts: Sequence[Part], blocks: ContentBlocks) -> list[Event]:
    """The blocks of a whole message. The input of a call that was cut is empty."""
    found: list[Event] = []
    pieces: list[str] = []
    for event in (*blocks.events(parts), *blocks.close()):
        match event:
            case {"type": "content_block_start", "content_block": dict(block)}:
                found.append(block)
                pieces = []
            case {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": signature}}:
                found[-1]["signature"] = signature
            case {"type": "content_block_delta", "delta": dict(delta)}:
                pieces.append(next(str(value) for name, value in delta.items() if name != "type"))
            case _:
                _complete(found[-1], "".join(pieces))
    return found


def _complete(block: Event, text: str) -> None:
    if block["type"] != "tool_use":
        block[str(block["type"])] = text
        return
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return
    block["input"] = given if isinstance(given, dict) else {}
