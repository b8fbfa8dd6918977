"""Streamed responses, client disconnects and time limits of requests."""

import asyncio
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from types import TracebackType
from typing import NamedTuple, TypeVar

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from quire.server.error_shapes import in_shape_of_route
from quire.server.errors import TimedOut, describe
from quire.server.held_answer import PIECE_BYTES, pieces
from quire.server.observability.request_record import record_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

# Further line ends of Unicode, at which some clients split a stream into lines: U+0085, U+2028, U+2029.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


class ClientGone(Exception):
    """The client has disconnected."""


def event(value: object, name: str | None = None) -> bytes:
    """One event with `value` as JSON. name: its type for dialects that have one.

    Raises UnicodeEncodeError for an unpaired surrogate.
    """
    begin = b"" if name is None else b"event: " + name.encode() + b"\n"
    return begin + b"data: " + _one_line(value) + b"\n\n"


def json_event(data: bytes) -> bytes:
    """One event with a value that is JSON already."""
    return b"data: " + _without_line_ends(data) + b"\n\n"


def named_event(value: Mapping[str, object]) -> bytes:
    """One event with `value` as JSON, named by its `type`."""
    return event(value, str(value["type"]))


def line(value: object) -> bytes:
    """One line with `value` as JSON. Raises UnicodeEncodeError for an unpaired surrogate."""
    return _one_line(value) + b"\n"


def _one_line(value: object) -> bytes:
    return _without_line_ends(msgspec.json.encode(value))


def _without_line_ends(data: bytes) -> bytes:
    if not data.isascii():
        for end, escaped in _LINE_ENDS:
            data = data.replace(end, escaped)
    return data


class StreamFormat(NamedTuple):
    """The format of a stream. end_with(error): the last bytes if an error ends it, from the route's error object."""

    media_type: str
    end_with: Callable[[Mapping[str, object]], bytes]


EVENTS = StreamFormat("text/event-stream", lambda error: event(error) + DONE)
NAMED_EVENTS = StreamFormat("text/event-stream", named_event)
LINES = StreamFormat("application/x-ndjson", line)


_PADDED_BYTES = 256


def padded(value: dict[str, object], name: str | None = None) -> dict[str, object]:
    """`value` with a random `obfuscation`, which makes the length of its event a multiple of 256 bytes.

    So the sizes of packets hardly reveal how long the text of each event is.
    """
    missing = -len(event({**value, "obfuscation": ""}, name)) % _PADDED_BYTES
    return {**value, "obfuscation": secrets.token_urlsafe(_PADDED_BYTES)[:missing]}


def padded_event(value: dict[str, object]) -> bytes:
    """One event with `padded` content."""
    return event(padded(value))


async def while_connected(receive: Receive, work: Callable[[], Coroutine[object, object, T]]) -> T:
    """The result of `work()`. If the client disconnects first, cancels it and raises ClientGone."""
    task = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


class PiecewiseResponse(Response):
    """A body whose parts are made as they are sent, in pieces that wait until the client has read those before.

    `close` is called at its end, also after an error or a disconnect.
    """

    def __init__(
        self,
        parts: AsyncIterable[bytes],
        close: Callable[[], None],
        media_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._parts = parts
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all parts, unless the client disconnects."""
        try:
            await while_connected(receive, partial(self._send, scope, send))
        except (ClientGone, OSError):
            pass
        finally:
            self._close()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send_parts(scope, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_parts(self, _scope: Scope, send: Send) -> None:
        async for data in self._parts:
            for piece in pieces(data) if len(data) > PIECE_BYTES else (data,):
                await send({"type": "http.response.body", "body": piece, "more_body": True})


class EventStream(PiecewiseResponse):
    """A streamed response. An error is its last event."""

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], stream_format: StreamFormat = EVENTS
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, close, stream_format.media_type, headers)
        self._format = stream_format

    async def _send_parts(self, scope: Scope, send: Send) -> None:
        try:
            await super()._send_parts(scope, send)
        except OSError:
            raise
        except Exception as error:  # the status is already sent, so the error is an event
            status, body = describe(error)
            record_error(scope, body)
            end = self._format.end_with(in_shape_of_route(scope["path"], status, body))
            await send({"type": "http.response.body", "body": end, "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class TimeLimit:
    """The time limit of a request, as an async context that can be entered repeatedly. Raises TimedOut.

    seconds: from construction; None: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else asyncio.get_running_loop().time() + seconds
        self._timeout: asyncio.Timeout

    async def __aenter__(self) -> None:
        if self._end is not None and asyncio.get_running_loop().time() >= self._end:
            raise self._error()
        self._timeout = asyncio.timeout_at(self._end)
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise self._error() from error

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """The result of `work`."""
        try:
            async with self:
                return await work
        finally:
            work.close()  # for work that was never started

    async def iterate(self, items: AsyncIterator[T]) -> AsyncIterator[T]:
        """The items until the limit. The time between items counts as well, also while none is requested."""
        if self._end is None:
            async for item in items:
                yield item
            return
        while True:
            try:
                async with self:
                    item = await anext(items)
            except StopAsyncIteration:
                return
            yield item

    def _error(self) -> TimedOut:
        return TimedOut(f"the request took longer than its timeout of {self._seconds:g} s; allow more, or request less")
