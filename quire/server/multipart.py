"""Incremental parser of multipart/form-data (RFC 7578), with bounds on everything but the content of files."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import unquote

from quire.errors import RequestError

MAX_HEADERS = 2**13  # bytes of one part's headers
MAX_PARTS = 64
MAX_FIELDS = 2**16  # bytes of all parts that are no files

_TYPE = re.compile(r"\s*multipart/form-data\s*(?=;)", re.IGNORECASE)
_DISPOSITION = re.compile(r"\s*form-data\s*(?=;)", re.IGNORECASE)
_PARAMETER = re.compile(r'\s*;\s*([\w-]+)(\*?)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))')
_BOUNDARY = re.compile(r"[0-9a-zA-Z'()+_,\-./:=? ]{0,69}[0-9a-zA-Z'()+_,\-./:=?]")  # RFC 2046, 5.1.1


class Part(NamedTuple):
    """One part of a form. filename: None for a part that is no file."""

    name: str
    filename: str | None


class MultipartParser:
    """Parser of one form, in time linear in its length."""

    def __init__(self, content_type: str) -> None:
        """content_type: the header's value. Raises RequestError if it is another type, or has no boundary."""
        boundary = _parameters(_TYPE, content_type).get("boundary", "")
        if not _BOUNDARY.fullmatch(boundary):
            raise RequestError("the body must be sent with content-type multipart/form-data and a boundary")
        self._delimiter = b"\r\n--" + boundary.encode()
        self._buffer = b"\r\n"  # no line ends before the first delimiter
        self._part: Part | None = None  # whose content comes next; None: a delimiter and headers
        self._num_parts = 0
        self._num_field_bytes = 0
        self._has_ended = False

    def push(self, data: bytes) -> Iterator[tuple[Part, bytes]]:
        """The pieces of content that this further data completes. The first piece of each part is empty.

        Raises RequestError for data that is no form, or is beyond a bound.
        """
        self._buffer += b"" if self._has_ended else data  # RFC 2046: what follows the form is to be ignored
        while not self._has_ended:
            if self._part is None:
                self._part = self._next_part()
                if self._part is None:
                    break
                yield self._part, b""
            content, found, _ = self._buffer.partition(self._delimiter)
            # without a delimiter, the end of the buffer may be the beginning of one
            num_ready = len(content) if found else max(0, len(content) - len(self._delimiter) + 1)
            part, content = self._part, content[:num_ready]
            self._buffer = self._buffer[num_ready:]
            if part.filename is None:
                self._count(part, content)
            if content:
                yield part, content
            if not found:
                break
            self._part = None

    def finish(self) -> None:
        """Raises RequestError if the form is incomplete."""
        if not self._has_ended:
            raise _invalid("it ends without the last boundary")

    def _next_part(self) -> Part | None:
        """The part that begins at the buffer's delimiter. None at the form's end, and while headers are incomplete."""
        size = len(self._delimiter)
        if not self._delimiter.startswith(self._buffer[:size]):
            raise _invalid("it does not begin with the boundary")
        after = self._buffer[size : size + 2]
        if len(after) < 2:
            return None
        if after == b"--":
            self._has_ended, self._buffer = True, b""
            return None
        if after != b"\r\n":
            raise _invalid("a boundary is followed by other text")
        headers, found, rest = self._buffer[size:].partition(b"\r\n\r\n")
        if len(headers) > MAX_HEADERS:
            raise _invalid(f"the headers of a part are longer than {MAX_HEADERS} bytes")
        if not found:
            return None
        self._buffer = rest
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _invalid(f"it has more than {MAX_PARTS} parts")
        return _part(headers)

    def _count(self, part: Part, content: bytes) -> None:
        self._num_field_bytes += len(content)
        if self._num_field_bytes > MAX_FIELDS:
            raise RequestError(
                f"the fields of the form are longer than {MAX_FIELDS} bytes; send content as a file, with a filename",
                part.name,
            )


def _part(headers: bytes) -> Part:
    for line in headers.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            parameters = _parameters(_DISPOSITION, value)
            if "name" in parameters:
                return Part(parameters["name"], parameters.get("filename"))
    raise _invalid("a part has no header `content-disposition: form-data` with a name")


def _parameters(begin: re.Pattern[str], value: str) -> Mapping[str, str]:
    """The parameters of a header's value behind `begin`; none if it begins otherwise."""
    found, parameters = begin.match(value), dict[str, str]()
    while found is not None:
        found = _PARAMETER.match(value, found.end())
        if found is not None:
            name, is_extended, quoted, plain = found.groups()
            text = plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            if is_extended:  # RFC 5987: charset'language'percent-encoded
                text = unquote(text.rpartition("'")[2])
            parameters[name.lower()] = text
    return parameters


def _invalid(reason: str) -> RequestError:
    return RequestError(f"the body is no valid multipart/form-data: {reason}")
