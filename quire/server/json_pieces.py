"""JSON of large values in pieces of bounded size. Their elements are made as they are written.

A thread that encodes a large value in one call holds the GIL, and so the event loop, for as long as the call takes.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from msgspec import Raw
from msgspec.json import Encoder, encode

T = TypeVar("T")

PIECE = 2**17  # bytes, and one element more
_PLACE = b"\x00"  # of a list within the JSON around it, which has no such byte


class OnThread(Protocol):
    """Runs a function on a thread."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """The result of `work`."""


class JsonList:
    """A list whose elements are made while it is written, once. They contain no JsonList."""

    def __init__(self, elements: Iterable[object]) -> None:
        self._elements = elements

    def pieces(self) -> Iterator[bytes]:
        """The elements as JSON, with commas between them."""
        between = b""
        for element in self._elements:
            yield between + encode(element)
            between = b","


def json_pieces(value: object) -> Iterator[bytes]:
    """The JSON of a value with JsonLists, in pieces. Without them it is one piece.

    Raises UnicodeEncodeError for an unpaired surrogate.
    """
    lists: list[JsonList] = []

    def place(found: object) -> Raw:
        if not isinstance(found, JsonList):
            raise NotImplementedError(f"{type(found).__name__} is no JSON")
        lists.append(found)
        return Raw(b"[" + _PLACE + b"]")

    frame = Encoder(enc_hook=place).encode(value)
    if not lists:
        yield frame
        return
    yield from _joined(_filled(frame.split(_PLACE), lists))


def json_bytes(value: object) -> bytes:
    """The JSON of a value with JsonLists."""
    return b"".join(json_pieces(value))


def _filled(frame: list[bytes], lists: list[JsonList]) -> Iterator[bytes]:
    for begin, one in zip(frame, lists, strict=False):  # the frame has one part more
        yield begin
        yield from one.pieces()
    yield frame[-1]


def _joined(parts: Iterable[bytes]) -> Iterator[bytes]:
    pending: list[bytes] = []
    size = 0
    for part in parts:
        pending.append(part)
        size += len(part)
        if size >= PIECE:
            yield b"".join(pending)
            pending, size = [], 0
    if pending:
        yield b"".join(pending)


class PieceReader:
    """Pieces of a body, each of which is made on a thread when it is asked for.

    make: returns the pieces. on_thread: runs a function on a thread.
    """

    def __init__(self, make: Callable[[], Iterator[bytes]], on_thread: OnThread) -> None:
        self._make = make
        self._on_thread = on_thread
        self._pieces: Iterator[bytes] = iter(())
        self._first: bytes | None = None

    async def begin(self) -> None:
        """Make the first piece. Raises what making it raises."""

        def begin() -> bytes | None:
            self._pieces = self._make()
            return next(self._pieces, None)

        self._first = await self._on_thread(begin)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        piece, self._first = self._first, None
        while piece is not None:
            yield piece
            piece = await self._on_thread(lambda: next(self._pieces, None))
