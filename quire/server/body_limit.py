"""BodyLimit: no request body is longer than this. Knows ASGI messages only."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 16 * 2**20  # bytes


class BodyLimit:
    """ASGI middleware that refuses to receive more than `limit` bytes."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, counting."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        promised = Headers(scope=scope).get("content-length", "")
        num_bytes = int(promised) if promised.isascii() and promised.isdigit() and len(promised) < 20 else 0

        async def counted() -> Message:
            nonlocal num_bytes
            if num_bytes > self._limit:
                raise self._too_large()
            message = await receive()
            if not promised:
                num_bytes += len(message.get("body", b""))
            if num_bytes > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is longer than {self._limit} bytes; send less", {"connection": "close"})
