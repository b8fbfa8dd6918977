"""The incremental parser of generated messages."""

import json

from quire.chat.formats import ChatFormat
from quire.chat.parts import CallArguments, CallBegin, Content, Part, Reasoning
from quire.chat.tools import Toolbox


class MessageParser:
    """Splits the text of one generated message into parts. What was returned is never taken back.

    in_reasoning: whether the prompt ends inside of reasoning. forced: whether the output is constrained to be calls.
    drop: texts that are removed, such as end-of-turn tokens.
    """

    def __init__(
        self,
        format: ChatFormat,
        toolbox: Toolbox | None,
        *,
        in_reasoning: bool = False,
        forced: bool = False,
        drop: frozenset[str] = frozenset(),
    ) -> None:
        self.in_reasoning = in_reasoning
        self._tools = None if toolbox is None or toolbox.choice.mode == "none" else format.tools
        self._reasoning = format.reasoning
        self._text = ""
        self._num_calls = 0
        self.reasoning_end = 0

    def push(self, text: str) -> list[Part]:
        """The parts that this further text completes."""
        self._text += text
        return []

    def finish(self) -> list[Part]:
        """The rest, when the generation has ended."""
        parts: list[Part] = []
        text, self._text = self._text, ""
        if self._reasoning is not None:
            if text.lstrip().startswith(self._reasoning.begin):
                text, self.in_reasoning = text.lstrip()[len(self._reasoning.begin) :], True
            if self.in_reasoning:
                thought, end, text = text.partition(self._reasoning.end)
                self.in_reasoning = not end
                parts += [Reasoning(thought.strip())] if thought.strip() else []
        while self._tools is not None and self._tools.begin in text:
            before, _, text = text.partition(self._tools.begin)
            body, _, text = text.partition(self._tools.end)
            parts += [Content(before.strip())] if before.strip() else []
            call = json.loads(body)
            parts.append(CallBegin(self._num_calls, call["name"]))
            parts.append(CallArguments(self._num_calls, json.dumps(call["arguments"])))
            self._num_calls += 1
        return [*parts, Content(text.strip())] if text.strip() else parts
