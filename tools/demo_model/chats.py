"""A chat as plain data, and its rendering into the exact text that the model reads and writes.

The rendering is a list of segments, because training weighs answers and prompts differently; joined, it
is what the model's chat template makes of the same messages (a test compares the two).
"""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

Message = dict[str, Any]  # as in the OpenAI API
Tool = dict[str, Any]

END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages in order, and the tools that they may call. Every assistant turn follows from what is before it."""

    messages: list[Message]
    tools: list[Tool] | None = None


class Segment(NamedTuple):
    """A stretch of rendered text. Answers are what the model is to write, end of turn included."""

    text: str
    is_answer: bool


def system(content: str) -> Message:
    """What the chat begins with."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """A question."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """An answer."""
    return {"role": "assistant", "content": content}


def tool_call(name: str, arguments: dict[str, object]) -> Message:
    """An answer that calls a tool and says nothing."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def tool_result(result: dict[str, object]) -> Message:
    """What the tool replied."""
    return {"role": "tool", "content": json.dumps(result)}


def segments(chat: Chat) -> list[Segment]:
    """The whole chat as text, in order."""
    has_system = chat.messages[0]["role"] == "system"
    head = chat.messages[0]["content"] if has_system else ""
    rendered = []
    if head or chat.tools:
        rendered.append(Segment(_turn("system", _with_tools(head, chat.tools)), is_answer=False))
    for message in chat.messages[has_system:]:
        if message["role"] == "assistant":
            rendered.append(Segment("<|im_start|>assistant\n", is_answer=False))
            rendered.append(Segment(answer_text(message) + END_OF_TURN, is_answer=True))
            rendered.append(Segment("\n", is_answer=False))
        elif message["role"] == "tool":
            reply = f"<tool_response>\n{message['content']}\n</tool_response>"
            rendered.append(Segment(_turn("user", reply), is_answer=False))
        else:
            rendered.append(Segment(_turn(message["role"], message["content"]), is_answer=False))
    return rendered


def answer_text(message: Message) -> str:
    """What the model writes for an assistant message, up to the end of its turn."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    written = [
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"])}}}\n</tool_call>'
        for call in calls
    ]
    return "".join([message["content"], *written])


def _turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}{END_OF_TURN}\n"


def _with_tools(head: str, tools: list[Tool] | None) -> str:
    if not tools:
        return head
    return "\n".join(([head] if head else []) + ["Tools:"] + [json.dumps(tool) for tool in tools])
