"""Graceful shutdown: drain and end of the server.

During the drain the server continues to listen. A proxy can send a request to another instance after a 503, but not
after a reset connection, as the request may have been processed. Probes are answered: `/ready` is 503 from the first
moment. The body of a rejected request is read and discarded before the 503, because closing a connection with unread
data resets it, and the client would not see the answer.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import Draining, response_to
from quire.server.middleware.rate_limit import has_unsafe_method

_READ_SECONDS = 2.0  # for bodies, once the drain has begun


class Drain:
    """Whether the drain has begun, and the number of accepted requests that are still open.

    A request is accepted when its whole body has been received. num_receiving: requests whose body is incomplete.
    """

    def __init__(self) -> None:
        self.begun = False
        self.num_open = 0
        self.num_receiving = 0

    def begin(self) -> None:
        """Begin the drain. Can be called from a signal handler."""
        self.begun = True

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Context manager that counts an accepted request as open."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    @contextmanager
    def receiving_body(self) -> Iterator[None]:
        """Context manager that counts a request as one whose body is incomplete."""
        self.num_receiving += 1
        try:
            yield
        finally:
            self.num_receiving -= 1


class DrainMiddleware:
    """ASGI middleware that rejects new requests with 503 during the drain, except GET, HEAD and OPTIONS."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, or answer 503."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif not self._drain.begun:
            with ExitStack() as stack:
                await self._app(scope, self._accepting(stack, scope, receive), send)
        elif has_unsafe_method(scope):
            await _discard_body(receive)
            await response_to(Draining())(scope, receive, send)
        else:
            await self._app(scope, receive, _with_connection_close(send))

    def _accepting(self, stack: ExitStack, scope: Scope, receive: Receive) -> Receive:
        """A `receive` that counts the request as open once its body is complete; at once if it should have none."""
        if not has_unsafe_method(scope):
            stack.enter_context(self._drain.open_request())
            return receive
        receiving = stack.enter_context(ExitStack())
        receiving.enter_context(self._drain.receiving_body())
        is_complete = False

        async def counting() -> Message:
            nonlocal is_complete
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False) and not is_complete:
                is_complete = True
                stack.enter_context(self._drain.open_request())
                receiving.close()
            return message

        return counting


def _with_connection_close(send: Send) -> Send:
    """A `send` that adds `connection: close` to the response."""

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        await send(message)

    return tell


async def _discard_body(receive: Receive) -> None:
    try:
        async with asyncio.timeout(_READ_SECONDS):
            while (await receive()).get("more_body"):
                pass
    except TimeoutError:
        pass


CLOSE_SECONDS = 2.0  # seconds for clients to read the last events of streams, and again to close connections
LAST_ACCEPT_SECONDS = 0.1  # seconds to answer connections that were just accepted
_POLL = 0.05  # seconds


class GracefulServer(uvicorn.Server):
    """A uvicorn server that drains after a signal, or when it has failed.

    ready(): called when requests are accepted. each_tick(): called several times a second. has_failed(): whether no
    request can be served any more. close(): called when none is open, or after `drain_timeout` seconds; it ends open
    requests with an error. uvicorn would cancel them, and clients would see a broken connection.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        drain: Drain,
        ready: Callable[[], None],
        each_tick: Callable[[], None],
        has_failed: Callable[[], bool],
        close: Callable[[], Awaitable[None]],
        drain_timeout: float,
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._ready = ready
        self._each_tick = each_tick
        self._has_failed = has_failed
        self._close = close
        self._drain_timeout = drain_timeout
        self._skip_drain = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve, and call `ready`."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the drain, the second ends it. uvicorn would raise the signal again at its end."""
        self._skip_drain = self._drain.begun
        self._drain.begin()
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Called several times a second. Returns whether the main loop ends."""
        self._each_tick()
        return await super().on_tick(counter) or self._has_failed()

    async def main_loop(self) -> None:
        """Serve until a signal or a failure, then drain. Connections are accepted during both."""
        await super().main_loop()
        self._drain.begin()
        await self._wait_until(lambda: self._skip_drain or not self._drain.num_receiving, _READ_SECONDS)
        await self._wait_until(lambda: self._skip_drain or not self._drain.num_open, self._drain_timeout)
        await self._close()
        await self._wait_until(lambda: not self._drain.num_open, CLOSE_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and close all connections."""
        for server in self.servers:
            server.close()
        await asyncio.sleep(LAST_ACCEPT_SECONDS)
        cutting = asyncio.create_task(self._abort_connections())
        await super().shutdown(sockets)
        cutting.cancel()

    async def _abort_connections(self) -> None:
        """Abort connections that are still open after CLOSE_SECONDS, because the client no longer reads or sends."""
        await self._wait_until(lambda: not self.server_state.connections, CLOSE_SECONDS)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            await asyncio.sleep(_POLL)
