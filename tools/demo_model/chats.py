"""Chats as plain data and their rendering to text.

The rendering is a list of segments, because answers and prompts have different loss weights. The joined segments equal
the output of the model's chat template (a test compares the two).
"""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

Message = dict[str, Any]  # as in the OpenAI API
Tool = dict[str, Any]

END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages in order, and the tools that they may call. Each assistant turn follows from the turns before it."""

    messages: list[Message]
    tools: list[Tool] | None = None


class Segment(NamedTuple):
    """A part of a rendered chat. is_answer: the model writes it; it includes the end of the turn."""

    text: str
    is_answer: bool


def system(content: str) -> Message:
    """A system prompt."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": content}


def tool_call(name: str, arguments: dict[str, object]) -> Message:
    """An assistant message with a tool call and no content."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def tool_result(result: dict[str, object]) -> Message:
    """The message with a tool's result."""
    return {"role": "tool", "content": json.dumps(result)}


def segments(chat: Chat) -> list[Segment]:
    """The segments of a chat, in order."""
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
    """The text of an assistant message, without the end of its turn."""
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
