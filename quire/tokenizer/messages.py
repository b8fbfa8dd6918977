"""Conversion of a caller's messages to the form that chat templates expect."""

import json
from collections.abc import Callable, Mapping, Sequence

from quire.errors import RequestError

MAX_MESSAGES = 16384
MAX_DEPTH = 32
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names for reasoning, preferred first
_SCALARS = frozenset({bool, str, int, float})
_TEXT_PARTS = ("text", "input_text", "output_text")

Message = Mapping[str, object]


class NoContent(str):
    """The content of a message that has none: an empty text, which templates' `is none` accepts as well.

    Templates that test for it see none. Templates that print the content without a test print nothing.
    """

    __slots__ = ()


def plain_messages(
    messages: Sequence[Message], reads_parts: Callable[[str], bool] = lambda _role: False
) -> list[dict[str, object]]:
    """A copy without keys that are None, with content as strings and arguments of tool calls as objects.

    reads_parts: whether the template reads text parts of messages of a role itself; they are joined by newlines if not.
    Raises RequestError for invalid messages and for content that is no text.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"at most {MAX_MESSAGES} messages", "messages")
    return [_plain_message(message, reads_parts) for message in messages]


def plain_json(value: object, name: str, depth: int = 0) -> object:
    """A copy of dicts, lists, strings, numbers, booleans and None. Raises RequestError for other types."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{name} is nested more than {MAX_DEPTH} levels deep", name)
    if value is None or type(value) in _SCALARS:
        return value
    if isinstance(value, str | int | float):  # of a subclass
        return next(kind(value) for kind in (str, int, float) if isinstance(value, kind))
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"the keys of objects in {name} must be strings", name)
        return {str(key): plain_json(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, name, depth + 1) for item in value]
    raise RequestError(f"{name} must be made of plain JSON values, not {type(value).__name__}", name)


def _plain_message(message: Message, reads_parts: Callable[[str], bool]) -> dict[str, object]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise RequestError("each message must be an object with a role and content", "messages")
    plain = {str(key): plain_json(value, "messages") for key, value in message.items() if value is not None}
    calls = plain.pop("tool_calls", None)
    if calls:  # an empty list is like none: templates test whether the key exists
        plain["tool_calls"] = _tool_calls(calls)
    elif "content" not in plain and role != "assistant":
        raise RequestError(f"a message of role {role!r:.40} needs content", "messages")
    plain["content"] = _content(plain.get("content"), role, reads_parts)
    return _with_reasoning(plain)


def _with_reasoning(plain: dict[str, object]) -> dict[str, object]:
    """The message with its reasoning as `thinking` and `reasoning_content`, the names that templates read."""
    thought = next((plain[name] for name in REASONING_FIELDS if plain.get(name) is not None), None)
    return plain if thought is None else {"thinking": thought, **plain, "reasoning_content": thought}


def joined_reasoning(message: dict[str, object]) -> dict[str, object]:
    """A plain message whose content is at the end of its reasoning, if it has both beside calls. Nothing is lost."""
    content, thought = message["content"], message.get("thinking")
    if not content or not thought or not isinstance(content, str) or "tool_calls" not in message:
        return message
    known = [name for name in REASONING_FIELDS if name in message]
    return {**message, **dict.fromkeys(known, f"{thought}\n\n{content}"), "content": NoContent()}


def _content(content: object, role: str, reads_parts: Callable[[str], bool]) -> str | list[dict[str, object]]:
    if content is None:
        return NoContent()
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("the content of a message must be a string or a list of text parts", "messages")
    parts = [_part(part) for part in content]
    return parts if reads_parts(role) else "\n".join(str(part["text"]) for part in parts)


def _part(part: object) -> dict[str, object]:
    """A text part with the type "text"."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if not isinstance(part, dict) or kind not in _TEXT_PARTS:
        raise RequestError(f"content parts of type {kind!r:.40} are not supported yet, only text", "messages")
    if not isinstance(text, str):
        raise RequestError("a text part needs a text", "messages")
    return {**{name: value for name, value in part.items() if value is not None}, "type": "text"}


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
