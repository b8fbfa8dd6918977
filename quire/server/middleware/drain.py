"""Drain: a server that will end takes no new work, and says so. Knows ASGI messages, and what is still open.

The server listens until its end, as a proxy can pass a refusal with 503 on to another instance, while a connection that
is reset may have done something. So probes see the truth, too: `/ready` is 503 from the first moment. What asks
for work has its body read first, and thrown away: to close a connection on which something is unread resets
it, and the client would never see the 503.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
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


LAST_WORDS = 2.0  # seconds in which clients must have read how their streams ended
LAST_CALL = 0.1  # seconds in which those who have just connected are answered
_POLL = 0.05  # seconds


class GracefulServer(uvicorn.Server):
    """Runs until a signal, and then until what it accepted is done.

    ready() is called once requests are accepted. close() ends whatever still answers, with words of its own:
    uvicorn would cancel it, and clients would see a broken connection.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        drain: Drain,
        ready: Callable[[], None],
        close: Callable[[], Awaitable[None]],
        grace: float,
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._ready = ready
        self._close = close
        self._grace = grace
        self._hurry = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came. It is the end, not a failure, so that uvicorn need not raise it once more."""
        self._hurry = self._drain.begun
        self._drain.begin()
        self.should_exit = True

    async def main_loop(self) -> None:
        """Serve until a signal, then drain; all this time connections are accepted."""
        await super().main_loop()
        self._drain.begin()
        await self._until(lambda: self._hurry or not self._drain.num_open, self._grace)
        await self._close()
        await self._until(lambda: not self._drain.num_open, LAST_WORDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and end."""
        for server in self.servers:
            server.close()
        await asyncio.sleep(LAST_CALL)
        cutting = asyncio.create_task(self._cut_off())
        await super().shutdown(sockets)
        cutting.cancel()

    async def _cut_off(self) -> None:
        """Who has not read the end of an answer by now, or not sent that of a request, never will."""
        await self._until(lambda: not self.server_state.connections, LAST_WORDS)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            await asyncio.sleep(_POLL)
