"""One large file over HTTP, into a place where a download that was cut off, or ended with its process, goes on.

huggingface_hub forgets what it has of a file when it stops; with files of many gigabytes that is hours lost.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import httpx2
from huggingface_hub import get_session

from quire.errors import ModelError

TIMEOUT = 10.0  # seconds without an answer or a byte
_ATTEMPTS = 5  # in a row that bring nothing
_PAUSE = 0.25  # seconds before the second attempt, doubled before each further one
_PIECE = 1 << 20  # bytes read at a time of what is there already
_PASSING = frozenset({408, 429, 500, 502, 503, 504})  # statuses of servers that may recover


def fetch(
    url: str, target: Path, *, size: int, sha256: str, headers: Mapping[str, str], arrived: Callable[[int], None]
) -> None:
    """Write the file at `url` to `target`, going on from what is there from before.

    size: bytes. arrived: called with the number of bytes that are there. Raises ModelError where they are not
    those of `sha256` (and deletes them); httpx2.HTTPError after attempts that brought nothing; OSError.
    """
    with target.open("a+b") as file:
        partial = _Partial(file)
        arrived(partial.size)
        failed = 0
        while partial.size < size:
            before = partial.size
            try:
                _receive(url, headers, partial, arrived)
                if partial.size < size:
                    raise httpx2.ReadError("the connection ended early")
            except (httpx2.TransportError, httpx2.HTTPStatusError) as error:
                if isinstance(error, httpx2.HTTPStatusError) and error.response.status_code not in _PASSING:
                    raise
                failed = failed + 1 if partial.size <= before else 0
                if failed == _ATTEMPTS:
                    raise
                time.sleep(_PAUSE * 2**failed)
    if (partial.size, partial.digest()) != (size, sha256):
        target.unlink()
        raise ModelError(f"what came from {url} is not the file that is listed there; try again")


class _Partial:
    """A file that grows, and the digest of what is in it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sum = hashlib.sha256()
        self.size = 0
        file.seek(0)
        while piece := file.read(_PIECE):
            self._sum.update(piece)
            self.size += len(piece)

    def append(self, piece: bytes) -> None:
        """Add bytes at the end."""
        self._file.write(piece)
        self._sum.update(piece)
        self.size += len(piece)

    def clear(self) -> None:
        """Begin anew."""
        self._file.truncate(0)
        self._sum = hashlib.sha256()
        self.size = 0

    def digest(self) -> str:
        """SHA-256 of the whole, in hexadecimal."""
        return self._sum.hexdigest()


def _receive(url: str, headers: Mapping[str, str], partial: _Partial, arrived: Callable[[int], None]) -> None:
    """One request for what is missing, as far as it goes."""
    wanted = {**headers, "Accept-Encoding": "identity", "Range": f"bytes={partial.size}-"}
    with get_session().stream("GET", url, headers=wanted, timeout=TIMEOUT, follow_redirects=True) as response:
        response.raise_for_status()
        if response.status_code != 206:  # the server sends everything
            partial.clear()
        for piece in response.iter_bytes():
            partial.append(piece)
            arrived(partial.size)
