"""What must come out of a message that a scripted model says: an oracle that knows of which parts the message is made.

It is independent of quire's parser. A part is text of one channel, so no text is searched for tags. The tokens are the
bytes of the parts, or whole tags, so a cut behind any number of tokens leaves a known beginning of each part.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Channel = Literal["markup", "reasoning", "content", "call", "arguments"]
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_TAG = re.compile("|".join(map(re.escape, TAGS)))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a message. text: of the channel "call": markup that begins a call. name: of its tool.

    shows_tags: whether tags that are special tokens are visible text.
    """

    channel: Channel
    text: str
    name: str = ""
    shows_tags: bool = False


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a message before its end token. regex: a literal text that a pattern matches."""

    text: str = ""
    regex: str = ""
    token: str = ""
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """A message as far as it was said. parts: those of the script, with the text that is visible.

    tokens: texts of the generated tokens, without the end token. cause: what ended it; "complete": the constraint.
    """

    parts: tuple[Part, ...]
    tokens: tuple[str, ...]
    cause: Literal["end", "complete", "text", "regex", "token", "length"]

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) + (self.cause == "end")

    def text(self, *channels: Channel) -> str:
        """The visible text of these channels."""
        return "".join(part.text for part in self.parts if part.channel in channels)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The texts of the content, apart where a call is between them. White space before a call is no content."""
        texts = [""]
        for part in self.parts:
            if part.channel == "call":
                texts[-1] = texts[-1].rstrip()
                texts.append("")
            elif part.channel == "content":
                texts[-1] += part.text
        return tuple(text for text in texts if text)

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """Name and arguments of each call that began."""
        begun = [part.name for part in self.parts if part.channel == "call"]
        return tuple(zip(begun, (part.text for part in self.parts if part.channel == "arguments"), strict=False))

    @property
    def has_cut_call(self) -> bool:
        """Whether the message ends within the arguments of a call."""
        return self.parts[-1].channel == "arguments"


def tokens_of(text: str, *, whole_tags: bool) -> list[str]:
    """The texts of the tokens of an ASCII text."""
    if not whole_tags:
        return list(text)
    between, tags = _TAG.split(text), _TAG.findall(text)
    tokens = list(between[0])
    for tag, behind in zip(tags, between[1:], strict=True):
        tokens += [tag, *behind]
    return tokens


def say(parts: Iterable[Part], stops: Stops, *, whole_tags: bool) -> Said:
    """The message that a model says which would say all parts. Stop strings are not searched in reasoning.

    The cause "complete" is not among the results: only a constraint that allows no further token ends so.
    """
    said: list[Part] = []
    tokens: list[str] = []
    for part in parts:
        visible = ""
        searched = part.channel in ("content", "arguments")
        for token in tokens_of(part.text, whole_tags=whole_tags):
            if stops.max_tokens is not None and len(tokens) == stops.max_tokens:
                return Said((*said, replace(part, text=visible)), tuple(tokens), "length")
            tokens.append(token)
            if stops.token and token == stops.token:
                return Said((*said, replace(part, text=visible)), tuple(tokens), "token")
            visible += "" if token in TAGS and whole_tags and not part.shows_tags else token
            for cause, text in (("text", stops.text), ("regex", stops.regex)):
                if searched and text and visible.endswith(text):
                    kept = visible.removesuffix(text) if cause == "text" else visible
                    return Said((*said, replace(part, text=kept)), tuple(tokens), cause)
        said.append(replace(part, text=visible))
    if stops.max_tokens is not None and len(tokens) == stops.max_tokens:
        return Said(tuple(said), tuple(tokens), "length")
    return Said(tuple(said), tuple(tokens), "end")


def middle(parts: Sequence[Part], channel: Channel, *, whole_tags: bool) -> int:
    """The number of tokens up to the middle of the last part of a channel."""
    place = max(place for place, part in enumerate(parts) if part.channel == channel)
    before = "".join(part.text for part in parts[:place])
    half = len(tokens_of(parts[place].text, whole_tags=whole_tags)) // 2
    return len(tokens_of(before, whole_tags=whole_tags)) + half
