"""Conversion of a caller's messages to the form that chat templates expect."""

import json
from collections.abc import Mapping, Sequence

from quire.errors import RequestError

MAX_MESSAGES = 16384
MAX_DEPTH = 32
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names for reasoning, preferred first
_TEXT_PARTS = ("text", "input_text", "output_text")

Message = Mapping[str, object]


def plain_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """A copy with content as strings and arguments of tool calls as objects.

    Raises RequestError for invalid messages and for content that is no text.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"at most {MAX_MESSAGES} messages", "messages")
    return [_plain_message(message) for message in messages]


def plain_json(value: object, name: str, depth: int = 0) -> object:
    """A copy of dicts, lists, strings, numbers, booleans and None. Raises RequestError for other types."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{name} is nested more than {MAX_DEPTH} levels deep", name)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | int | float):
        return next(kind(value) for kind in (str, int, float) if isinstance(value, kind))
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"the keys of objects in {name} must be strings", name)
        return {str(key): plain_json(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, name, depth + 1) for item in value]
    raise RequestError(f"{name} must be made of plain JSON values, not {type(value).__name__}", name)


def _plain_message(message: Message) -> dict[str, object]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("each message must be an object with a role and content", "messages")
    plain = {str(key): plain_json(value, "messages") for key, value in message.items()}
    plain["content"] = _text(plain.get("content"))
    if plain.get("tool_calls"):
        plain["tool_calls"] = _tool_calls(plain["tool_calls"])
    elif plain["content"] is None and plain["role"] != "assistant":
        raise RequestError(f"a message of role {plain['role']!r:.40} needs content", "messages")
    return _with_reasoning(plain)


def _with_reasoning(plain: dict[str, object]) -> dict[str, object]:
    """The message with its reasoning as `thinking` and `reasoning_content`, the names that templates read."""
    thought = next((plain[name] for name in REASONING_FIELDS if plain.get(name) is not None), None)
    return plain if thought is None else {"thinking": thought, **plain, "reasoning_content": thought}


def _text(content: object) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("the content of a message must be a string or a list of text parts", "messages")
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise RequestError(f"content parts of type {kind!r:.40} are not supported yet, only text", "messages")
    if not isinstance(text, str):
        raise RequestError("a text part needs a text", "messages")
    return text


def _tool_calls(calls: object) -> list[dict[str, object]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RequestError("tool_calls must be a list of objects", "messages")
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, object]) -> dict[str, object]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestError("a tool call needs a function with name and arguments", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = function["arguments"]  # a model's arguments may be no JSON; templates accept text too
    return {**call, "function": {**function, "arguments": arguments}}
