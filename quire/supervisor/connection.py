"""The front end's side of the socket to the engine, on the event loop."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from quire.supervisor import protocol
from quire.supervisor.protocol import BadFrame, EngineMessage, FrameReader

_MESSAGES_PER_TURN = 4  # of the event loop: each takes a millisecond or more with many requests


class Connection(asyncio.Protocol):
    """Calls on_message(message) per message, on_lost(self, why) once at the end. why: error of an invalid message."""

    def __init__(
        self, on_message: Callable[[EngineMessage], None], on_lost: Callable[["Connection", Exception | None], None]
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = FrameReader()
        self._messages: Iterator[bytes] = iter(())  # read, not handled yet
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self.first_message = asyncio.Event()  # set by the first message, or the end of the connection

    def send(self, command: Any) -> None:  # noqa: ANN401  (one of Commands)
        """Send a command, in one write with the others of this event loop turn. Raises BadFrame for an invalid one."""
        message = protocol.encode_frame([command])  # one message each, as all together may be longer than MAX_FRAME
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(message)

    def close(self) -> None:
        """Close the connection after the unsent commands are written."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        if self._unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport  # type: ignore[assignment]  # of a stream; some loops do not subclass Transport

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._messages = self._frames.feed(data)
        self._handle_messages()

    def connection_lost(self, _exc: Exception | None) -> None:
        """Called by the event loop. The error is ignored: it means only that the other end is closed."""
        while self._handle_message():
            pass
        self._end(None)

    def _handle_messages(self) -> None:
        """Handle messages that were read. After some, the event loop gets a turn for new requests before the others."""
        assert self._transport is not None
        for _ in range(_MESSAGES_PER_TURN):
            if not self._handle_message():
                if not self._transport.is_closing():
                    self._transport.resume_reading()
                return
        self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._handle_messages)

    def _handle_message(self) -> bool:
        """Handle the next message that was read. Returns whether there was one."""
        try:
            message = next(self._messages, None)
            if message is not None:
                self.first_message.set()
                self._on_message(protocol.decode_message(message))
        except BadFrame as error:
            assert self._transport is not None
            self._messages = iter(())
            self._transport.abort()
            self._end(error)
            return False
        return message is not None

    def _end(self, why: Exception | None) -> None:
        self.first_message.set()
        lost, self._on_lost = self._on_lost, _ignore
        lost(self, why)


def _ignore(_connection: Connection, _why: Exception | None) -> None:
    """Replaces the callback `on_lost` after its only call."""
