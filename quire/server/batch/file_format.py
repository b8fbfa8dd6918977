"""The line format of OpenAI's batch files, for requests and results."""

import codecs
from collections.abc import Iterator
from typing import Annotated, BinaryIO, Literal, NamedTuple, get_args
from uuid import uuid4

import msgspec
from msgspec import Meta

from quire.server.batch.in_process_client import Response
from quire.server.request_body import MAX_BODY

MAX_LINE = MAX_BODY + 2**16  # bytes

Url = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
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


class _Streamed(msgspec.Struct):
    stream: object = None


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
_STREAM_DECODER = msgspec.json.Decoder(_Streamed)
RESULT_DECODER = msgspec.json.Decoder(ResultLine)


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank. Longer lines are cut to MAX_LINE + 1 bytes."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(2**20)):
            pass
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not text.isspace() and text:
            yield number, text


def parse(number: int, line: bytes) -> Task | BadLine:
    """Parse a line of requests."""
    if len(line) > MAX_LINE:
        return BadLine(number, None, "line_too_long", f"the line is longer than {MAX_LINE} bytes; send less in it")
    try:
        found = _LINE_DECODER.decode(line)
        body = bytes(found.body)
        streamed = body.startswith(b"{") and _STREAM_DECODER.decode(body).stream not in (None, False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = f"not a batch request ({error}); it needs custom_id, method (POST), url (one of {_SHOWN}) and body"
        return BadLine(number, _name(line), "invalid_line", message)
    if streamed:
        return BadLine(number, found.custom_id, "invalid_line", "results of a batch are not streamed; leave out stream")
    return Task(number, found.custom_id, found.url, body)


def duplicate_line(found: Task | BadLine) -> BadLine:
    """The BadLine for a custom_id that an earlier line has."""
    message = f"the custom_id {found.custom_id!r} is that of an earlier line; each line needs a different one"
    return BadLine(found.number, found.custom_id, "duplicate_custom_id", message)


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
