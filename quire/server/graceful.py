"""GracefulServer: uvicorn, but nobody is cut off at its end. Knows signals and open connections, no routes."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn

LAST_WORDS = 2.0  # seconds in which clients must have read how their streams ended
_POLL = 0.05  # seconds


class GracefulServer(uvicorn.Server):
    """Runs until a signal. Then open answers have `grace` seconds; a second signal ends that time.

    ready() is called once requests are accepted. close() ends whatever still answers, with words of its own:
    uvicorn would cancel it, and clients would see a broken connection.
    """

    def __init__(
        self, config: uvicorn.Config, *, ready: Callable[[], None], close: Callable[[], Awaitable[None]], grace: float
    ) -> None:
        super().__init__(config)
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
        self._hurry = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and end."""
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        await ending

    async def _end(self) -> None:
        await self._idle(self._grace, may_hurry=True)
        await self._close()
        await self._idle(LAST_WORDS, may_hurry=False)
        for connection in list(self.server_state.connections):  # a client that reads or sends no more
            if connection.transport is not None:
                connection.transport.abort()

    async def _idle(self, seconds: float, *, may_hurry: bool) -> None:
        """Wait until nothing is being answered, at most this long."""
        end = time.monotonic() + seconds
        while self.server_state.tasks and time.monotonic() < end and not (may_hurry and self._hurry):
            await asyncio.sleep(_POLL)
