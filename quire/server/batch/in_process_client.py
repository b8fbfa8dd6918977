"""In-process client: sends requests to an ASGI app without a socket."""

import asyncio
from typing import NamedTuple

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from quire.server.api_keys import Caller
from quire.server.errors import error_object

MAX_ANSWER = 2**25  # bytes
_TOO_LONG = error_object(
    400,
    f"the answer to this line has more than {MAX_ANSWER:,} bytes; lower n, max_tokens, logprobs or prompts",
    code="answer_too_long",
)
LOCAL_ADDRESS = ("127.0.0.1", 0)


class Response(NamedTuple):
    """A complete response."""

    status: int
    headers: Headers
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes, caller: Caller | None = None) -> Response:
    """POST a JSON body and return the response; in place of one with more than MAX_ANSWER bytes, one with an error.

    Cancellation aborts the request.

    caller: the sender, who needs no key; None lets the app find it out. Raises what the app raises before it has begun
    a response.
    """
    given = False
    status = 0
    headers = Headers()
    parts: list[bytes] = []
    num_bytes = 0

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()  # the client never disconnects
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers, num_bytes
        if message["type"] == "http.response.start":
            status, headers = message["status"], Headers(raw=message["headers"])
            return
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > MAX_ANSWER:
            parts.clear()
            raise OSError("the answer is too long")  # as if the client had left

    try:
        await app(_scope(path, len(body), caller), receive, send)
    except Exception:  # starlette raises what it has answered, for the server's log; this app logs it
        if not status:
            raise
    if num_bytes > MAX_ANSWER:
        return Response(400, Headers(), msgspec.json.encode(_TOO_LONG))
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
