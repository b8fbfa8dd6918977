"""Drain: a server that will end takes no new work, and says so. Knows ASGI messages, and what is still open.

The server listens until its end, as a proxy can pass a refusal with 503 on to another instance, while a connection that
is reset may have done something. So probes see the truth, too: `/ready` is 503 from the first moment. What asks
for work has its body read first, and thrown away: to close a connection on which something is unread resets
it, and the client would never see the 503.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import Draining, response_to
from quire.server.middleware.rate_limit import asks_for_work

_READ_SECONDS = 2.0  # for the body of a request that is refused


class Drain:
    """Whether the server is about to end, and how many requests it accepted before that and still answers."""

    def __init__(self) -> None:
        self.begun = False
        self.num_open = 0

    def begin(self) -> None:
        """From now on, nothing is accepted. May be called from a signal handler."""
        self.begun = True

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While an accepted request is answered."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


class DrainGate:
    """ASGI middleware that refuses work once the drain has begun."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or answer 503."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif not self._drain.begun:
            with self._drain.answering():
                await self._app(scope, receive, send)
        elif asks_for_work(scope):
            await _throw_away(receive)
            await response_to(Draining())(scope, receive, send)
        else:
            await self._app(scope, receive, _last(send))


def _last(send: Send) -> Send:
    """What is answered now is the last answer of its connection."""

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        await send(message)

    return tell


async def _throw_away(receive: Receive) -> None:
    try:
        async with asyncio.timeout(_READ_SECONDS):
            while (await receive()).get("more_body"):
                pass
    except TimeoutError:
        pass
