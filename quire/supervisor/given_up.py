"""GivenUp: requests that ended one engine after the other, should they come again. Knows requests only."""

from hashlib import sha256

from quire.core import codec
from quire.engine.inputs import NewRequest

_REMEMBERED = 256  # the newest


class GivenUp:
    """What was asked by requests that are not tried again, whoever asks it."""

    def __init__(self) -> None:
        self._contents: dict[bytes, None] = {}

    def __contains__(self, request: NewRequest) -> bool:
        return bool(self._contents) and _content(request) in self._contents

    def add(self, request: NewRequest) -> None:
        """One more."""
        self._contents[_content(request)] = None
        if len(self._contents) > _REMEMBERED:
            del self._contents[next(iter(self._contents))]


def _content(request: NewRequest) -> bytes:
    """A digest of what is asked, and not of who asks, when, or what is known of the answer."""
    asked = request._replace(request_id="", params=request.params.changed(seed=None), known=(), resumed=False)
    return sha256(codec.encode(asked)).digest()
