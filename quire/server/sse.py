"""Server-sent events and clients that go away. Knows ASGI, and nothing of what is sent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import TypeVar

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import describe
from quire.server.observability.error_answer import note_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

# What else ends a line in Unicode, and so for clients that take a stream as lines of text: U+0085, U+2028, U+2029.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def event(value: object) -> bytes:
    """One event with a JSON value. Raises UnicodeEncodeError for an unpaired surrogate."""
    data = msgspec.json.encode(value)
    if not data.isascii():
        for end, escaped in _LINE_ENDS:
            data = data.replace(end, escaped)
    return b"data: " + data + b"\n\n"


async def while_connected(receive: Receive, work: Callable[[], Coroutine[object, object, T]]) -> T:
    """The result of `work()`, which is cancelled as soon as the client disconnects. Then raises ClientGone."""
    task = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


class EventStream(Response):
    """A stream of events. `close` is called at its end, whatever ends it."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until there are no more or the client is gone."""
        try:
            await while_connected(receive, partial(self._send, scope, send))
        except (ClientGone, OSError):
            pass
        finally:
            self._close()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except OSError:
            raise
        except Exception as error:  # the status is sent; an error can only be an event now
            _, body = describe(error)
            note_error(scope, body)
            await send({"type": "http.response.body", "body": event(body) + DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
