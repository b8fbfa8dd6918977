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


class CallEnd(msgspec.Struct, frozen=True):
    """A tool call is complete. A call that was cut, and one whose arguments are no JSON object, have no such part."""

    index: int


Part = Content | Reasoning | CallBegin | CallArguments | CallEnd


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool call. arguments: a JSON object; if the call is not complete, what the model wrote of it."""

    name: str
    arguments: str
    complete: bool = True


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
    complete: set[int] = set()
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
            case CallEnd(index):
                complete.add(index)
    calls = [
        Call(name, "".join(pieces), index in complete)
        for index, (name, pieces) in enumerate(zip(names, arguments, strict=True))
    ]
    return Message("".join(content), "".join(reasoning) if reasoning else None, calls)
