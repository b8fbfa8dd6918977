"""The line format of OpenAI's batch files, for requests and results."""

import codecs
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, get_args
from uuid import uuid4

import msgspec
from msgspec import Meta

from quire.server.batch.in_process_client import Response
from quire.server.request_body import MAX_BODY

MAX_LINE = MAX_BODY + 2**16  # bytes

_MAX_REASON = 300  # characters

READ_SIZE = 2**18  # bytes of a file that are read at once

Url = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/score",
    "/v1/rerank",
    "/v1/classify",
]
CustomId = Annotated[str, Meta(min_length=1, max_length=512)]


class Task(NamedTuple):
    """A request. number: line number, from 1. body: the JSON bytes of the line."""

    number: int
    custom_id: str
    url: str
    body: bytes


class BadLine(NamedTuple):
    """A line that is no valid request, with the reason. custom_id: None if it could not be parsed."""

    number: int
    custom_id: str | None
    code: str
    message: str


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: CustomId
    method: Literal["POST"]
    url: Url
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: CustomId | None = None


class _Unanswered(msgspec.Struct):
    """Fields of a body that ask for another answer than one whole result."""

    stream: object = None
    background: object = None


class _ResultError(msgspec.Struct):
    """The error of a result; `line` is set for an invalid input line."""

    line: int | None = None


class ResultLine(msgspec.Struct):
    """The fields of a result that a resumed batch needs."""

    custom_id: str | None
    error: _ResultError | None


_SHOWN = ", ".join(get_args(Url))
_LINE_DECODER = msgspec.json.Decoder(_Line)
_CUSTOM_ID_DECODER = msgspec.json.Decoder(_Named)
_UNANSWERED_DECODER = msgspec.json.Decoder(_Unanswered)
RESULT_DECODER = msgspec.json.Decoder(ResultLine)


class LineSplitter:
    """Splits the content of a batch file, which comes in pieces, into lines with their numbers, from 1.

    Blank lines are left out. Longer lines are cut to MAX_LINE + 1 bytes.
    """

    def __init__(self) -> None:
        self._number = 1
        self._pieces: list[bytes] = []  # of the incomplete line
        self._num_bytes = 0  # of them

    def push(self, data: bytes) -> list[tuple[int, bytes]]:
        """The lines that this further piece completes."""
        *ends, rest = data.split(b"\n")
        lines = []
        for end in ends:
            self._add(end)
            lines += self._next()
        self._add(rest)
        return lines

    def finish(self) -> list[tuple[int, bytes]]:
        """The last line if it has no newline."""
        return self._next()

    def _add(self, piece: bytes) -> None:
        piece = piece[: MAX_LINE + 1 - self._num_bytes]
        self._pieces.append(piece)
        self._num_bytes += len(piece)

    def _next(self) -> list[tuple[int, bytes]]:
        number, line = self._number, b"".join(self._pieces)
        self._pieces, self._num_bytes = [], 0
        self._number += 1
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        return [] if text.isspace() or not text else [(number, text)]


class TaskReader:
    """Reads the requests of a batch file, whose content comes in pieces."""

    def __init__(self) -> None:
        self._lines = LineSplitter()
        self._custom_ids: set[str] = set()

    def push(self, data: bytes) -> list[Task | BadLine]:
        """The requests that this further piece completes."""
        return self._parsed(self._lines.push(data))

    def finish(self) -> list[Task | BadLine]:
        """The last request if its line has no newline."""
        return self._parsed(self._lines.finish())

    def _parsed(self, lines: Sequence[tuple[int, bytes]]) -> list[Task | BadLine]:
        return [self._distinct(parse(number, line)) for number, line in lines]

    def _distinct(self, found: Task | BadLine) -> Task | BadLine:
        """The same, or the BadLine for a custom_id that an earlier line has."""
        if found.custom_id in self._custom_ids:
            message = f"the custom_id {found.custom_id!r} is that of an earlier line; each line needs a different one"
            return BadLine(found.number, found.custom_id, "duplicate_custom_id", message)
        if found.custom_id is not None:
            self._custom_ids.add(found.custom_id)
        return found


def parse(number: int, line: bytes) -> Task | BadLine:
    """Parse a line of requests."""
    if len(line) > MAX_LINE:
        return BadLine(number, None, "line_too_long", f"the line is longer than {MAX_LINE} bytes; send less in it")
    try:
        found = _LINE_DECODER.decode(line)
        body = bytes(found.body)
        asked = _UNANSWERED_DECODER.decode(body) if body.startswith(b"{") else _Unanswered()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)[:_MAX_REASON]  # which may quote the line
        message = f"not a batch request ({why}); it needs custom_id, method (POST), url (one of {_SHOWN}) and body"
        return BadLine(number, _name(line), "invalid_line", message)
    if not all(value in (None, False) for value in (asked.stream, asked.background)):
        return BadLine(
            number, found.custom_id, "invalid_line", "results of a batch are whole; leave out stream and background"
        )
    return Task(number, found.custom_id, found.url, body)


def result_line(found: Task | BadLine, answer: Response | None) -> bytes:
    """A line of results with its newline. answer: None for a BadLine."""
    id = f"batch_req_{uuid4().hex}"
    record: dict[str, object] = {"id": id, "custom_id": found.custom_id, "response": None, "error": None}
    if isinstance(found, BadLine):
        record["error"] = {"code": found.code, "message": found.message, "line": found.number}
    elif answer is not None:
        body = msgspec.Raw(msgspec.json.format(answer.body, indent=-1))  # one line
        record["response"] = {
            "status_code": answer.status,
            "request_id": answer.headers.get("x-request-id", id),
            "body": body,
        }
    return msgspec.json.encode(record) + b"\n"


def _name(line: bytes) -> str | None:
    try:
        return _CUSTOM_ID_DECODER.decode(line).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
