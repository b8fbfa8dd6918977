"""Connection: the front end's end of the socket, on its event loop. Knows messages, not what they mean."""

import asyncio
from collections.abc import Callable
from typing import Any

from quire.supervisor import protocol
from quire.supervisor.protocol import BadFrame, Frames, News


class Connection(asyncio.Protocol):
    """hear(news) is called for each message, lost(self, why) once when it ends; `why` says what was nonsense."""

    def __init__(self, hear: Callable[[News], None], lost: Callable[["Connection", Exception | None], None]) -> None:
        self._hear = hear
        self._lost = lost
        self._frames = Frames()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self.heard = asyncio.Event()  # something came, or never will

    def send(self, command: Any) -> None:  # noqa: ANN401  (one of Commands)
        """Send a command, with all others of this turn of the event loop. Raises BadFrame for one that cannot be."""
        message = protocol.packed([command])  # each alone: together they may be longer than one may be
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(message)

    def close(self) -> None:
        """End it, once all is sent."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        if self._unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport  # type: ignore[assignment]  # a stream's; not all event loops derive it so

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        try:
            for message in self._frames.feed(data):
                self.heard.set()
                self._hear(protocol.news_of(message))
        except BadFrame as error:
            assert self._transport is not None
            self._transport.abort()
            self._end(error)

    def connection_lost(self, _exc: Exception | None) -> None:
        """Called by the event loop. However a socket of one's own ends, it says only that the other end is gone."""
        self._end(None)

    def _end(self, why: Exception | None) -> None:
        self.heard.set()
        lost, self._lost = self._lost, _ignore
        lost(self, why)


def _ignore(_connection: Connection, _why: Exception | None) -> None:
    """It has been told before."""
