"""Limits on the size, the duration and the JSON nesting of request bodies."""

import asyncio
import re

import numpy as np
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import BodyTimeout

MAX_BODY = 16 * 2**20  # bytes
BODY_SECONDS = 20.0  # for any body,
BYTES_PER_SECOND = 2**16  # and one second more for each so many bytes received
MAX_NESTING = 512  # levels of JSON; the limits of parsers differ between versions of Python


_ESCAPE = re.compile(rb"\\.", re.DOTALL)


class BodyLimit:
    """ASGI middleware. limit: bytes of a body."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app with a `receive` that checks the limits."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._app(scope, _LimitedBody(scope, receive, self._limit).receive, send)


class _LimitedBody:
    """The limits of one body. Its time starts with the first `receive`."""

    def __init__(self, scope: Scope, receive: Receive, limit: int) -> None:
        promised = Headers(scope=scope).get("content-length", "")
        self._content_length = int(promised) if promised.isascii() and promised.isdigit() and len(promised) < 20 else 0
        self._receive = receive
        self._limit = limit
        self._num_bytes = 0
        self._started_at: float | None = None
        self._complete = False
        self._nesting = Nesting()

    async def receive(self) -> Message:
        """ASGI's `receive`. Raises BodyTimeout after the time limit, HTTPException with 413 or 400 otherwise."""
        if self._complete:  # the next message is the disconnect, without a time limit
            return await self._receive()
        self._check()
        try:
            async with asyncio.timeout_at(self._end()):
                message = await self._receive()
        except TimeoutError:
            raise BodyTimeout(BODY_SECONDS) from None
        body = message.get("body", b"")
        self._num_bytes += len(body)
        self._check()
        if self._nesting.depth_after(body) > MAX_NESTING:
            raise HTTPException(400, f"the body's JSON is nested more than {MAX_NESTING} levels deep; send it flatter")
        self._complete = not message.get("more_body", False)
        return message

    def _end(self) -> float:
        if self._started_at is None:
            self._started_at = asyncio.get_running_loop().time()
        return self._started_at + BODY_SECONDS + self._num_bytes / BYTES_PER_SECOND

    def _check(self) -> None:
        if max(self._content_length, self._num_bytes) > self._limit:
            raise HTTPException(413, f"the body is longer than {self._limit} bytes; send less", {"connection": "close"})


class Nesting:
    """Nesting depth of the brackets of a JSON text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaping = False  # the last byte was a backslash that escapes the next one

    def depth_after(self, piece: bytes) -> int:
        """The greatest depth within the next piece. The time is linear in its length."""
        if self._escaping and piece:
            piece = b" " + piece[1:]
        plain = _ESCAPE.sub(b"  ", piece)
        self._escaping = plain.endswith(b"\\") if piece else self._escaping
        symbols = np.frombuffer(plain, np.uint8)
        quotes = np.cumsum(symbols == ord('"')) + self._in_string
        opening = (symbols == ord("[")) | (symbols == ord("{"))
        closing = (symbols == ord("]")) | (symbols == ord("}"))
        outside = quotes % 2 == 0
        depths = self._depth + np.cumsum(opening.astype(np.int64) * outside - closing.astype(np.int64) * outside)
        if len(symbols):
            self._in_string, self._depth = bool(quotes[-1] % 2), int(depths[-1])
        return int(depths.max(initial=self._depth))
