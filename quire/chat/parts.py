"""The parts of a generated message: visible text, reasoning, tool calls."""

from collections.abc import Iterable

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Visible text."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's reasoning."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A tool call begins. index: 0 for the first call of the message. name: of the tool, complete."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A further piece of a call's arguments. The pieces of a complete call are one JSON object."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments


class Call(msgspec.Struct, frozen=True):
    """A whole tool call. arguments: JSON text; if the generation was cut, its beginning."""

    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """A whole message. reasoning: None if there is none."""

    content: str
    reasoning: str | None
    calls: list[Call]


def message_of(parts: Iterable[Part]) -> Message:
    """The message that all its parts give together."""
    content: list[str] = []
    reasoning: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegin(_, name):
                names.append(name)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    calls = [Call(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True)]
    return Message("".join(content), "".join(reasoning) if reasoning else None, calls)
