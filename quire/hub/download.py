"""Download of one large file over HTTP, resumed after an interruption or in a later process.

huggingface_hub discards a partial file when it stops, which costs hours for files of many gigabytes.
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
_ATTEMPTS = 5  # attempts in a row without new bytes, after which the download fails
_PAUSE = 0.25  # seconds before the next attempt, doubled for each attempt in a row without new bytes
_READ_BYTES = 1 << 20  # bytes per read of an existing partial file
_RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})  # statuses that are retried


def fetch(
    url: str, target: Path, *, size: int, sha256: str, headers: Mapping[str, str], on_progress: Callable[[int], None]
) -> None:
    """Write the file at `url` to `target`, and continue a partial file that is there.

    size: bytes. on_progress: called with the number of bytes in `target`. Raises ModelError if size or `sha256` do not
    match (and deletes the file), httpx2.HTTPError after _ATTEMPTS attempts without new bytes, OSError.
    """
    with target.open("a+b") as file:
        partial = _Partial(file)
        on_progress(partial.size)
        failed = 0
        while partial.size < size:
            before = partial.size
            try:
                _receive(url, headers, partial, on_progress)
                if partial.size < size:
                    raise httpx2.ReadError("the connection ended early")
            except (httpx2.TransportError, httpx2.HTTPStatusError) as error:
                if isinstance(error, httpx2.HTTPStatusError) and error.response.status_code not in _RETRIED_STATUSES:
                    raise
                failed = failed + 1 if partial.size <= before else 0
                if failed == _ATTEMPTS:
                    raise
                time.sleep(_PAUSE * 2**failed)
    if (partial.size, partial.digest()) != (size, sha256):
        target.unlink()
        raise ModelError(f"the download from {url} is not the file that the repository lists; try again")


class _Partial:
    """A partial file with its size and running SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sum = hashlib.sha256()
        self.size = 0
        file.seek(0)
        while piece := file.read(_READ_BYTES):
            self._sum.update(piece)
            self.size += len(piece)

    def append(self, piece: bytes) -> None:
        """Append bytes."""
        self._file.write(piece)
        self._sum.update(piece)
        self.size += len(piece)

    def clear(self) -> None:
        """Delete the content."""
        self._file.truncate(0)
        self._sum = hashlib.sha256()
        self.size = 0

    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal."""
        return self._sum.hexdigest()


def _receive(url: str, headers: Mapping[str, str], partial: _Partial, on_progress: Callable[[int], None]) -> None:
    """Request the missing bytes once, and append them until the response ends."""
    wanted = {**headers, "Accept-Encoding": "identity", "Range": f"bytes={partial.size}-"}
    with get_session().stream("GET", url, headers=wanted, timeout=TIMEOUT, follow_redirects=True) as response:
        response.raise_for_status()
        if response.status_code != 206:  # the server ignores Range and sends the whole file
            partial.clear()
        for piece in response.iter_bytes():
            partial.append(piece)
            on_progress(partial.size)
