"""Frames: messages of bounded length in a stream of bytes. Knows lengths, not what is in them."""

import socket
import struct
from collections.abc import Iterator

from quire.errors import QuireError

MAX_FRAME = 2**28  # bytes: a body of 16 MiB has fewer than 2**24 tokens, and what is told of them is bounded as well
_LENGTH = struct.Struct("<I")
_AT_ONCE = 2**16


class BadFrame(QuireError):
    """The other side broke the rules of the connection, which cannot be used any more."""


def frame(data: bytes) -> bytes:
    """A message as it travels. Raises BadFrame for one that is too long."""
    if len(data) > MAX_FRAME:
        raise BadFrame(f"a message of {len(data):,} bytes is longer than the {MAX_FRAME:,} that are allowed")
    return _LENGTH.pack(len(data)) + data


def received(connection: socket.socket) -> bytes | None:
    """The next message, and not a byte of those behind it; None where the other side has gone. Raises BadFrame."""
    head = _exactly(connection, _LENGTH.size)
    return None if head is None else _exactly(connection, _announced(head))


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        more = connection.recv(min(size - len(data), _AT_ONCE))
        if not more:
            return None
        data += more
    return bytes(data)


def _announced(data: bytes | bytearray, at: int = 0) -> int:
    length: int = _LENGTH.unpack_from(data, at)[0]
    if length > MAX_FRAME:
        raise BadFrame(f"a message announces {length:,} bytes, more than the {MAX_FRAME:,} that are allowed")
    return length


class Frames:
    """Takes bytes as they come, and gives whole messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete now. Raises BadFrame for one that announces too many bytes."""
        self._bytes += data
        at = 0
        while len(self._bytes) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _announced(self._bytes, at)
            if len(self._bytes) < end:
                break
            yield bytes(self._bytes[at + _LENGTH.size : end])
            at = end
        del self._bytes[:at]
