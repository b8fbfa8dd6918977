"""GracefulServer: uvicorn, but nobody is cut off at its end. Knows signals and open connections, no routes.

The first signal begins the drain (drain.py): work is refused with 503, probes are answered, and what was accepted
goes on, for `grace` seconds at most. Only then does the server stop listening. A second signal ends that time at once.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn

from quire.server.middleware.drain import Drain

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
