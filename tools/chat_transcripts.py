"""Reads the transcripts: outputs of models as their families' templates write them, with the messages that they are."""

import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.chat.formats import REASONING_FORMATS, TOOL_FORMATS, ChatFormat
from quire.chat.parser import MessageParser
from quire.chat.parts import Message, Part, message_of
from quire.chat.tools import Toolbox, toolbox

FOLDER = Path(__file__).parents[1] / "tests" / "chat" / "transcripts"
TOOLS = json.loads((FOLDER / "tools.json").read_text(encoding="utf-8"))
TOOLBOX = toolbox(TOOLS)


@dataclass(frozen=True)
class Transcript:
    """One output. begun: whether the prompt ends within reasoning. calls: (name, arguments), as JSON or cut."""

    id: str
    format: ChatFormat
    text: str
    content: str
    reasoning: str | None
    calls: list[tuple[str, str]]
    begun: bool

    def is_read_as(self, message: Message) -> bool:
        """Whether a message is what was written."""
        calls = [(call.name, call.arguments) for call in message.calls]
        return (message.content, message.reasoning) == (self.content, self.reasoning) and same_calls(calls, self.calls)

    def parse(self, pieces: Sequence[str]) -> Message:
        """The message in these pieces of the text."""
        return parse(self.format, pieces, in_reasoning=self.begun)


def same_calls(calls: Sequence[tuple[str, str]], expected: Sequence[tuple[str, str]]) -> bool:
    """Whether calls have the same names, and arguments of the same value, or the same text if they are no JSON."""
    return len(calls) == len(expected) and all(
        name == other and value_of(text) == value_of(other_text)
        for (name, text), (other, other_text) in zip(calls, expected, strict=True)
    )


def value_of(text: str) -> object:
    """The value of JSON text; other text as it is."""
    try:
        return strict(json.loads(text))
    except ValueError:
        return text


def strict(value: object) -> object:
    """A value that equals another one only if all types are the same."""
    if isinstance(value, dict):
        return {key: strict(one) for key, one in value.items()}
    return [strict(one) for one in value] if isinstance(value, list) else (type(value), value)


def parts_of(
    format: ChatFormat, pieces: Sequence[str], toolbox: Toolbox | None = TOOLBOX, **options: bool | frozenset[str]
) -> list[Part]:
    """All parts of a message that comes in pieces."""
    parser = MessageParser(format, toolbox, **options)
    return [part for piece in pieces for part in parser.push(piece)] + parser.finish()


def parse(
    format: ChatFormat, pieces: Sequence[str], toolbox: Toolbox | None = TOOLBOX, **options: bool | frozenset[str]
) -> Message:
    """A message that comes in pieces."""
    return message_of(parts_of(format, pieces, toolbox, **options))


def chat_format(tools: str | None = None, reasoning: str | None = None) -> ChatFormat:
    """The format with these parsers' names."""
    return ChatFormat(TOOL_FORMATS[tools] if tools else None, REASONING_FORMATS[reasoning] if reasoning else None, "")


def _read(path: Path) -> Iterator[Transcript]:
    file = tomllib.loads(path.read_text(encoding="utf-8"))
    for case in file.pop("cases"):
        values = {**file, **case}
        yield Transcript(
            f"{path.stem}: {case['name']}",
            chat_format(values.get("tool_parser"), values.get("reasoning_parser")),
            case["text"],
            case.get("content", ""),
            case.get("reasoning"),
            [(name, text) for name, _, text in (call.partition(" ") for call in case.get("calls", []))],
            case.get("begun", False),
        )


TRANSCRIPTS = [one for path in sorted(FOLDER.glob("*.toml")) for one in _read(path)]
