"""In-process client: sends requests to an ASGI app without a socket."""

import asyncio
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from quire.server.api_keys import Caller

LOCAL_ADDRESS = ("127.0.0.1", 0)


class Response(NamedTuple):
    """A complete response."""

    status: int
    headers: Headers
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes, caller: Caller | None = None) -> Response:
    """POST a JSON body and return the response. Cancellation aborts the request.

    caller: the sender, who needs no key; None lets the app find it out. Raises what the app raises before it has begun
    a response.
    """
    given = False
    status = 0
    headers = Headers()
    parts: list[bytes] = []

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()  # the client never disconnects
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], Headers(raw=message["headers"])
        else:
            parts.append(message.get("body", b""))

    try:
        await app(_scope(path, len(body), caller), receive, send)
    except Exception:  # starlette raises what it has answered, for the server's log; this app logs it
        if not status:
            raise
    return Response(status, headers, b"".join(parts))


def _scope(path: str, num_bytes: int, caller: Caller | None) -> dict[str, object]:
    headers = [
        (b"host", LOCAL_ADDRESS[0].encode()),
        (b"content-type", b"application/json"),
        (b"content-length", str(num_bytes).encode()),
    ]
    return {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"},
        **{"path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers},
        **{"client": LOCAL_ADDRESS, "server": LOCAL_ADDRESS, "state": {} if caller is None else {"caller": caller}},
    }
