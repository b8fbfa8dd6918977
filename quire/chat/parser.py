"""The incremental parser of generated messages: text in pieces to content, reasoning and tool calls."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from quire.chat.arguments import (
    Write,
    begins_keyword_arguments,
    is_json_object,
    json_string,
    json_value,
    keyword_arguments,
    quoted_value,
    tagged_arguments,
)
from quire.chat.formats import (
    SPECIAL_TOKEN,
    CallForm,
    ChatFormat,
    JsonCall,
    NamedCall,
    QuotedArguments,
    ReasoningFormat,
    TaggedArguments,
    ToolFormat,
)
from quire.chat.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning
from quire.chat.reader import MAX_HELD, Markers, Reader, Reading
from quire.chat.tools import MAX_NAME, Toolbox

MAX_SPACE = 1024  # characters of white space that are held back, because they are dropped if markup follows
_MAX_AFTER_NAME = 64  # characters between the name of a call and `name_end`
_MAX_KEY = 256  # characters of a key beside the name and the arguments
_SPACES = " \n\r\t"
_QUOTES = frozenset("`'\"\u2018\u201c")
_NAME = re.compile(r"[a-zA-Z0-9_.-]*")
_AFTER_NAME = re.compile(r"[^{\n]?")
_BEFORE_END = re.compile(r"[ \n\r\t}]*")  # white space, and braces that the model has closed once too often


class MessageParser:
    """Splits the text of one generated message into parts. What was returned is never taken back.

    The division of the text into pieces has no effect on the message. The work is linear in the length of the text.
    in_reasoning: whether the prompt ends within reasoning; later, whether the text so far does. forced: whether the
    output is constrained to be calls. drop: texts that are removed from content and reasoning, such as end-of-turn
    tokens, and tags of calls where there is no call. ended_reasoning: where reasoning that has ended began and ended,
    tags included, as numbers of characters before. apart: the same of all that is no content, in its order: reasoning,
    groups of calls, dropped texts.

    White space beside markup is dropped: around calls, around reasoning, and before the first content behind either.
    An end tag of reasoning that has not begun is dropped, too: the text before it was returned, and stays content.
    Markup that turns out to be no call is content. It is held back until then, up to MAX_HELD characters.
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
        self.in_reasoning = in_reasoning and format.reasoning is not None
        self._forced = forced
        self._schemas = {tool.name: tool.parameters for tool in toolbox.tools} if toolbox else {}
        may_call = toolbox is not None and toolbox.choice.mode != "none"
        self._markup = _markup(format.tools if may_call else None, format.reasoning, drop)
        self._reader = Reader()
        self._parts = _Parts(is_parallel=toolbox is None or toolbox.parallel)
        self._content = _Prose(self._parts, Content)
        self._reasoning = _Prose(self._parts, Reasoning)
        self._num_open_tags = 0  # begin tags of reasoning that are content, and whose end tag has not come
        self.ended_reasoning: list[tuple[int, int]] = []
        self.apart: list[tuple[int, int]] = []
        self._reasoning_start = 0
        self._call_start: int | None = None  # where a group of calls begins that is being read
        self._machine = self._message()
        next(self._machine)

    @property
    def open_reasoning(self) -> tuple[int, int] | None:
        """Where reasoning that has not ended began, and the end of the text so far."""
        return (self._reasoning_start, self._reader.num_fed) if self.in_reasoning else None

    @property
    def num_decided(self) -> int:
        """Number of characters about which is known whether they are content. Text in open reasoning is not counted."""
        if self.in_reasoning:
            return self._reasoning_start
        return self._reader.num_read if self._call_start is None else self._call_start

    def push(self, text: str) -> list[Part]:
        """The parts that this further text completes."""
        self._reader.feed(text)
        next(self._machine, None)
        return self._parts.take()

    def finish(self) -> list[Part]:
        """The parts of the rest, when the generation has ended. A call that was cut keeps the arguments that came."""
        self._reader.ended = True
        next(self._machine, None)
        self._reasoning.flush()
        self._content.flush()
        return self._parts.take()

    def _message(self) -> Reading[None]:
        markup, content = self._markup, self._content
        if self.in_reasoning:
            yield from self._reason(frozenset(markup.ends.values()), 0)
        while True:
            text, marker = yield from self._reader.until(markup.outside)
            content.add(text)
            if not marker:
                if not text:
                    return
            elif marker in markup.forms:
                self._call_start = self._reader.num_read - len(marker)
                if (yield from self._calls(marker)):
                    self.apart.append((self._call_start, self._reader.num_read))
                self._call_start = None
            elif marker in markup.ends and content.is_at_edge:
                yield from self._reason(frozenset({markup.ends[marker]}), self._reader.num_read - len(marker))
            elif marker in markup.dropped or (marker in markup.strays and not self._is_content(marker)):
                content.drop_space()
                self._leave_out(marker)
            elif marker in markup.drop:
                self._leave_out(marker)
            else:
                self._num_open_tags += marker in markup.ends
                content.add(marker)

    def _leave_out(self, marker: str) -> None:
        """Note that the text just read, a marker, is no content."""
        self.apart.append((self._reader.num_read - len(marker), self._reader.num_read))

    def _is_content(self, end: str) -> bool:
        """Whether an end tag is content: it belongs to a begin tag that is content, or is quoted."""
        if self._num_open_tags:
            self._num_open_tags -= 1
            return True
        return self._content.is_quoting

    def _reason(self, ends: frozenset[str], start: int) -> Reading[None]:
        """Reads reasoning from behind its beginning, which is at `start`, up to one of the texts `ends`."""
        self.in_reasoning, self._reasoning_start = True, start
        self._reasoning.open()
        while True:
            text, marker = yield from self._reader.until(self._markup.inside)
            self._reasoning.add(text)
            if marker in ends:
                self._reasoning.drop_space()
                self._content.drop_space()
                self.in_reasoning = False
                self.ended_reasoning.append((start, self._reader.num_read))
                self.apart.append(self.ended_reasoning[-1])
                return
            is_repeated_begin = marker in self._markup.ends and self._reasoning.is_at_edge
            if marker and not is_repeated_begin and marker not in self._markup.drop:
                self._reasoning.add(marker)
            elif not marker and not text:
                return

    def _calls(self, marker: str) -> Reading[bool]:
        """Reads a group of calls from behind its first text. Returns False if that text is content."""
        reader = self._reader
        reader.hold(len(marker))
        num_read = len(marker)
        for form, num_consumed in self._markup.forms[marker]:
            if _is_bare(form) and not self._content.is_at_line_start:
                continue
            reader.rewind(num_consumed)
            if (yield from self._group(form)):
                return True
            num_read = max(num_read, reader.num_held)
        text = reader.take_held(num_read)
        if self._forced and reader.ended:  # the beginning of a call, cut before its name was complete
            return True
        start, drop = reader.num_read - num_read, self._markup.drop_pattern
        self.apart += [(start + found.start(), start + found.end()) for found in drop.finditer(text)]
        self._content.add(drop.sub("", text))
        return False

    def _group(self, form: CallForm) -> Reading[bool]:
        """Reads calls from behind the beginning of a group. Returns False if there is none; the text is then held."""
        reader = self._reader
        yield from reader.space()
        opened = yield from reader.literal(form.open.strip())
        if not opened and not isinstance(form.call, JsonCall):
            return False
        yield from reader.space()
        if not (yield from self._call(form)):
            return False
        while form.has_many and (yield from self._next_call(form)):
            pass
        for end in (form.close.strip(), form.end.strip()):
            yield from self._optional(end)
        return True

    def _next_call(self, form: CallForm) -> Reading[bool]:
        reader, separator = self._reader, form.separator.strip()
        reader.hold()
        yield from reader.space()
        if (yield from reader.literal(separator)):
            yield from reader.space()
            if (yield from self._call(form)):
                return True
        reader.take_held(0)
        return False

    def _optional(self, end: str) -> Reading[None]:
        """Consumes a text, and white space before it, if it is next."""
        if not end:
            return
        reader = self._reader
        reader.hold()
        yield from reader.run(_BEFORE_END, MAX_HELD)
        is_next = yield from reader.literal(end)
        if not is_next and reader.is_cut_within(end):
            is_next, reader.at = True, reader.stop
        reader.take_held(reader.num_held if is_next else 0)

    def _call(self, form: CallForm) -> Reading[bool]:
        """Reads one call. Returns False if it is none; the text is then held."""
        if isinstance(form.call, JsonCall):
            return (yield from self._json_call(form, form.call))
        return (yield from self._named_call(form, form.call))

    def _begin(self, form: CallForm, name: str) -> bool:
        """Begins a call. Returns False if the text is no call, because the form needs the name of a tool."""
        if (form.needs_tool or _is_bare(form)) and name not in self._schemas:
            return False
        self._reader.release()
        self._content.drop_space()
        self._parts.begin_call(name)
        return True

    def _named_call(self, form: CallForm, call: NamedCall) -> Reading[bool]:
        reader = self._reader
        if not (yield from reader.literal(call.begin)):
            return False
        if call.name_prefix:
            yield from reader.literal(call.name_prefix)
        name = yield from reader.run(_NAME, MAX_NAME + 1)
        if not 0 < len(name) <= MAX_NAME or not (yield from self._name_end(call)):
            return False
        if not (yield from self._has_arguments(form, call)) or not self._begin(form, name):
            return False
        write = self._parts.add_arguments
        if call.arguments == "python":
            is_complete = yield from keyword_arguments(reader, write)
        elif isinstance(call.arguments, TaggedArguments):
            ends, schema = _ends(form, call), self._schemas.get(name, {})
            is_complete = yield from tagged_arguments(reader, call.arguments, ends, schema, write)
        else:
            yield from reader.space()
            if (yield from reader.peek()) == "{":
                quote = "" if call.arguments == "json" else call.arguments.quote
                is_complete = yield from (quoted_value(reader, quote, write) if quote else json_value(reader, write))
            elif is_complete := not reader.ended:
                write("{}")
        if is_complete:
            self._parts.end_call()
        if call.arguments == "json" or isinstance(call.arguments, QuotedArguments):
            yield from self._optional(call.end.strip())
        return True

    def _name_end(self, call: NamedCall) -> Reading[bool]:
        """Consumes the text between name and arguments. Returns False if it is another text."""
        reader, end = self._reader, call.name_end.strip()
        if not call.after_name:
            num_held = reader.num_held
            yield from reader.space()
            # Without a text behind it, a name at the end of the text may be incomplete.
            is_complete = bool(end) or reader.num_held > num_held or bool((yield from reader.peek()))
            return is_complete and (yield from reader.literal(end))
        next_call = SPECIAL_TOKEN.search(call.begin)
        for _ in range(_MAX_AFTER_NAME + 1):
            if (yield from reader.literal(end)):
                return True
            if next_call and (yield from reader.literal(next_call[0])):
                reader.at -= len(next_call[0])
                return False
            if not (yield from reader.run(_AFTER_NAME, 1)):
                break
        return False

    def _has_arguments(self, form: CallForm, call: NamedCall) -> Reading[bool]:
        """Whether arguments follow, or the end of the call, or no text because the output was cut."""
        reader = self._reader
        num_held = reader.num_held
        yield from reader.space()
        if call.arguments == "python":
            found = yield from begins_keyword_arguments(reader)
            found = found or (reader.ended and reader.at == reader.stop)
        else:
            begin = call.arguments.key_begin if isinstance(call.arguments, TaggedArguments) else "{"
            found = False
            for text in (begin, *_ends(form, call)):
                found = found or (yield from reader.literal(text)) or reader.is_cut_within(text)
        reader.rewind(num_held)
        return found

    def _json_call(self, form: CallForm, call: JsonCall) -> Reading[bool]:
        reader, read = self._reader, _JsonCallRead()
        if not (yield from reader.literal("{")):
            return False
        depth = 1
        while depth:
            yield from reader.space()
            if (yield from reader.literal("}")):
                depth -= 1
            elif not (yield from reader.literal(",")):
                key = yield from json_string(reader, _MAX_KEY)
                yield from reader.space()
                if key is None or not (yield from reader.literal(":")):
                    break
                yield from reader.space()
                if key == "function" and (yield from reader.literal("{")):  # OpenAI's form of a call
                    depth += 1
                elif not (yield from self._member(form, call, key, read)):
                    break
        if read.has_begun or read.name is None or (depth and not reader.ended):
            return read.has_begun
        if depth:  # cut before its arguments
            return self._begin(form, read.name)
        if _is_bare(form) or not self._begin(form, read.name):
            return False
        self._parts.add_arguments("{}")
        self._parts.end_call()
        return True

    def _member(self, form: CallForm, call: JsonCall, key: str, read: "_JsonCallRead") -> Reading[bool]:
        """Reads the value of one key of a call. Returns False if the text is no call, or ends."""
        reader = self._reader
        if read.name is None and (key in call.names or key == "function"):
            name = yield from json_string(reader, MAX_NAME)
            if not name or not _NAME.fullmatch(name):
                return False
            read.name = name
            if read.arguments:
                read.has_begun = self._begin(form, name)
                if read.has_begun:
                    self._parts.add_arguments("".join(read.arguments))
                    self._parts.end_call()
            return read.has_begun or not read.arguments
        if key not in call.arguments or read.has_begun or read.arguments:
            return (yield from json_value(reader, _ignore))
        if (yield from reader.peek()) not in tuple('{"n'):
            return False
        if read.name is None:
            return (yield from _json_arguments(reader, read.arguments.append))
        read.has_begun = self._begin(form, read.name)
        if not read.has_begun or not (yield from _json_arguments(reader, self._parts.add_arguments)):
            return False
        self._parts.end_call()
        return True


@dataclass(slots=True)
class _JsonCallRead:
    """What was read of a JsonCall. arguments: those that stand before the name."""

    name: str | None = None
    arguments: list[str] = field(default_factory=list)
    has_begun: bool = False


def _json_arguments(reader: Reader, write: Write) -> Reading[bool]:
    """Reads arguments: an object, or an object as a string, or null."""
    if (yield from reader.peek()) == "{":
        return (yield from json_value(reader, write))
    pieces: list[str] = []
    if not (yield from json_value(reader, pieces.append)):
        return False
    try:
        value = json.loads("".join(pieces))
    except ValueError:
        return False
    write(value or "{}")
    return True


def _ignore(_text: str) -> None:
    pass


def _is_bare(form: CallForm) -> bool:
    """Whether calls have no markup of their own."""
    return not form.begin and (isinstance(form.call, JsonCall) or not form.call.begin)


def _ends(form: CallForm, call: NamedCall) -> tuple[str, ...]:
    return tuple(end for end in (call.end.strip(), form.end.strip()) if end)


@dataclass(frozen=True, slots=True)
class _Markup:
    """The markup that a parser looks for.

    outside, inside: of reasoning. forms: by the text with which they begin, with the number of characters of it that
    belong to the group and not to its first call. ends: of reasoning, by its beginning. strays: those ends that are
    markup outside of reasoning, too; words (`Here is my response:`) are not. dropped: outside of reasoning, with white
    space. drop: the caller's.
    """

    outside: Markers
    inside: Markers
    forms: Mapping[str, tuple[tuple[CallForm, int], ...]]
    ends: Mapping[str, str]
    strays: frozenset[str]
    dropped: frozenset[str]
    drop: frozenset[str]
    drop_pattern: re.Pattern[str]


@lru_cache(maxsize=64)
def _markup(tools: ToolFormat | None, reasoning: ReasoningFormat | None, drop: frozenset[str]) -> _Markup:
    forms: dict[str, tuple[tuple[CallForm, int], ...]] = {}
    for form in tools.forms if tools else ():
        group, call = form.begin.strip(), getattr(form.call, "begin", "")
        bare = "" if group or call else form.open or "{"
        for begin, num_consumed in ((group, len(group)), (call, 0), (bare, 0)):
            if begin:
                forms[begin] = (*forms.get(begin, ()), (form, num_consumed))
    ends = dict(reasoning.tags) if reasoning else {}
    dropped = frozenset[str]().union(*(one.dropped for one in (tools, reasoning) if one))
    strays = frozenset(end for end in ends.values() if SPECIAL_TOKEN.fullmatch(end))
    return _Markup(
        outside=Markers({*forms, *ends, *strays, *dropped, *drop}),
        inside=Markers({*ends, *ends.values(), *drop}),
        forms=forms,
        ends=ends,
        strays=strays,
        dropped=dropped,
        drop=drop,
        drop_pattern=re.compile("|".join(map(re.escape, sorted(drop))) or "(?!)"),
    )


class _Parts:
    """Collects parts; neighbouring texts of one kind become one part. Without is_parallel, later calls are dropped."""

    def __init__(self, *, is_parallel: bool) -> None:
        self._is_parallel = is_parallel
        self._num_calls = 0
        self._arguments: list[str] = []  # of the last call
        self._parts: list[Part] = []
        self._kind: type[Part] = Content
        self._pieces: list[str] = []  # of the part that is not complete

    def add(self, kind: type[Part], text: str) -> None:
        """Add text of one kind; arguments belong to the last call."""
        if kind is not self._kind:
            self._complete()
            self._kind = kind
        self._pieces.append(text)

    def begin_call(self, name: str) -> None:
        """Begin the next call."""
        self._complete()
        if self._is_parallel or self._num_calls == 0:
            self._parts.append(CallBegin(self._num_calls, name))
        self._num_calls += 1
        self._arguments = []

    def add_arguments(self, text: str) -> None:
        """Add a piece of the arguments of the last call."""
        if self._is_parallel or self._num_calls == 1:
            self.add(CallArguments, text)
            self._arguments.append(text)

    def end_call(self) -> None:
        """The last call has all of its arguments. It is complete if they are a JSON object."""
        self._complete()
        if (self._is_parallel or self._num_calls == 1) and is_json_object("".join(self._arguments)):
            self._parts.append(CallEnd(self._num_calls - 1))

    def take(self) -> list[Part]:
        """The parts so far, which are removed."""
        self._complete()
        parts, self._parts = self._parts, []
        return parts

    def _complete(self) -> None:
        text = "".join(self._pieces)
        if not text:
            return
        self._pieces.clear()
        if self._kind is CallArguments:
            self._parts.append(CallArguments(self._num_calls - 1, text))
        else:
            self._parts.append(Content(text) if self._kind is Content else Reasoning(text))


class _Prose:
    """Text of one kind with its white space: what is at the end is held back, and dropped if markup follows."""

    def __init__(self, parts: _Parts, kind: type[Part]) -> None:
        self._parts = parts
        self._kind = kind
        self._space = ""  # held back
        self._lead: str | None = None  # replaces white space before the next text
        self._has_text = False
        self._last = ""  # character that was written
        self.is_at_edge = True  # at the beginning, or directly behind markup

    @property
    def is_at_line_start(self) -> bool:
        """Whether the next character begins a line, or is the first one."""
        return not self._has_text or "\n" in self._space

    @property
    def is_quoting(self) -> bool:
        """Whether the text ends with a quotation mark or a back quote."""
        return not self._space and self._last in _QUOTES

    def open(self) -> None:
        """Begin another text of this kind. It begins in a new line."""
        self.is_at_edge, self._space = True, ""
        self._lead = "\n" if self._has_text else ""

    def add(self, text: str) -> None:
        """Add text."""
        if self._lead is not None:
            text = text.lstrip(_SPACES)
            if not text:
                return
            text, self._lead = self._lead + text, None
        body = text.rstrip(_SPACES)
        if body:
            self._write(self._space + body)
            self._space = text[len(body) :]
        else:
            self._space += text
        if len(self._space) > MAX_SPACE:
            self._write(self._space[:-MAX_SPACE])
            self._space = self._space[-MAX_SPACE:]

    def drop_space(self) -> None:
        """Markup follows: drop the white space before it, and behind it if there was no text."""
        self.is_at_edge, self._space = True, ""
        if not self._has_text:
            self._lead = ""

    def flush(self) -> None:
        """The text has ended."""
        if not self.is_at_edge or not self._has_text:
            self._write(self._space)
        self._space = ""

    def _write(self, text: str) -> None:
        self._has_text, self.is_at_edge = True, False
        self._last = text[-1:]
        self._parts.add(self._kind, text)
