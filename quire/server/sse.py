"""Server-sent events and clients that go away. Knows ASGI, and nothing of what is sent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import TypeVar

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import describe

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def event(value: object) -> bytes:
    """One event with a JSON value."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client disconnects. Then raises ClientGone."""
    task = asyncio.ensure_future(work)
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
    """A stream of events. `close` is called at its end, whatever ends it. headers: beside those of all streams."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], headers: Mapping[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until there are no more or the client is gone."""
        try:
            await while_connected(receive, self._send(send))
        except (ClientGone, OSError):
            pass
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except OSError:
            raise
        except Exception as error:  # the status is sent; an error can only be an event now
            _, body = describe(error)
            await send({"type": "http.response.body", "body": event(body) + DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
