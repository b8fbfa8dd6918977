"""Reads the transcripts: outputs of models as their families' templates write them, with the messages that they are."""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from quire.chat.formats import REASONING_FORMATS, TOOL_FORMATS, ChatFormat
from quire.chat.parser import MessageParser
from quire.chat.parts import Message, message_of
from quire.chat.tools import toolbox

FOLDER = Path(__file__).parents[1] / "chat" / "transcripts"
TOOLS = yaml.safe_load((FOLDER / "tools.yaml").read_text(encoding="utf-8"))
TOOLBOX = toolbox(TOOLS)


@dataclass(frozen=True)
class Transcript:
    """One output. begun: whether the prompt ends within reasoning. calls: name -> arguments, or the text that was cut."""

    id: str
    format: ChatFormat
    text: str
    content: str
    reasoning: str | None
    calls: list
    begun: bool

    def is_read_as(self, message):
        """Whether a message is what was written."""
        calls = [(call.name, call.arguments) for call in message.calls]
        expected = [pair for call in self.calls for pair in call.items()]
        return (message.content, message.reasoning) == (self.content, self.reasoning) and same_calls(calls, expected)

    def parse(self, pieces, toolbox=TOOLBOX):
        """The message in these pieces of the text."""
        return parse(self.format, pieces, toolbox, in_reasoning=self.begun)


def same_calls(calls, expected):
    """Whether calls have these names and arguments: values, or text that is no JSON."""
    return len(calls) == len(expected) and all(
        name == other and (text == value if isinstance(value, str) else strict(json.loads(text)) == strict(value))
        for (name, text), (other, value) in zip(calls, expected, strict=True)
    )


def strict(value):
    """A value that equals another one only if all types are the same."""
    if isinstance(value, dict):
        return {key: strict(one) for key, one in value.items()}
    return [strict(one) for one in value] if isinstance(value, list) else (type(value), value)


def parts_of(format, pieces, toolbox=TOOLBOX, **options):
    """All parts of a message that comes in pieces."""
    parser = MessageParser(format, toolbox, **options)
    return [part for piece in pieces for part in parser.push(piece)] + parser.finish()


def parse(format, pieces, toolbox=TOOLBOX, **options) -> Message:
    """A message that comes in pieces."""
    return message_of(parts_of(format, pieces, toolbox, **options))


def chat_format(tools=None, reasoning=None):
    """The format with these parsers' names."""
    return ChatFormat(TOOL_FORMATS[tools] if tools else None, REASONING_FORMATS[reasoning] if reasoning else None, "")


def _read(path):
    file = yaml.safe_load(path.read_text(encoding="utf-8"))
    for case in file.pop("cases"):
        values = {**file, **case}
        yield Transcript(
            f"{path.stem}: {case['name']}",
            chat_format(values.get("tool_parser"), values.get("reasoning_parser")),
            case["text"],
            case.get("content", ""),
            case.get("reasoning"),
            case.get("calls", []),
            case.get("begun", False),
        )


TRANSCRIPTS = [one for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "tools" for one in _read(path)]
