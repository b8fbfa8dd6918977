"""HTTP protocol of a connection, with limits on the size and the duration of request heads.

It uses h11, because uvicorn's faster parser accepts headers of any size. A client that sends the head of a request too
slowly gets 408, and its connection is closed. body_limit.py limits bodies. Invalid HTTP gets an error object.
"""

import asyncio
import sys
from typing import Any

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.server.errors import error_object
from quire.server.options import ServerOptions

HEAD_SECONDS = 20.0  # for the head of a request
KEEP_ALIVE_SECONDS = (
    75  # between requests; longer than in proxies, so that none sends a request while the server closes
)
MAX_HEAD = 2**16  # bytes of a request before its body

_TOO_LONG = f"the head of the request is longer than {MAX_HEAD} bytes; send fewer or shorter headers"


class Connection(H11Protocol):
    """One connection, with a timer for request heads."""

    def __init__(self, *args: Any, **more: Any) -> None:  # noqa: ANN401 (uvicorn's)
        super().__init__(*args, **more)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Called by asyncio for a new connection."""
        super().connection_made(transport)
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio for received bytes."""
        super().data_received(data)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection is closed."""
        self._cancel_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn in its handler of an exception of h11."""
        hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
        self._reject(hint, _TOO_LONG if hint == 431 else "this is not valid HTTP/1.1")

    def _update_timer(self) -> None:
        """Start or stop the timer. It runs while a head, or the body of an answered request, is being received."""
        answered = self.cycle is not None and self.cycle.response_complete
        if self.transport.is_closing() or not (self.conn.their_state is h11.IDLE or answered):
            self._cancel_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_timeout)

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_timeout(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._reject(408, f"the head of the request took longer than {HEAD_SECONDS:g} s; send it faster")
        else:
            self.transport.close()

    def _reject(self, status: int, message: str) -> None:
        """Send an error object unless a response has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error_object(status, message))
            length = str(len(body)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def http_config(app: ASGIApp, options: ServerOptions = ServerOptions()) -> uvicorn.Config:  # noqa: B008 (it is frozen)
    """The configuration of uvicorn. Headers of proxies about the client are ignored. WebSockets are off."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        ssl_ciphers=None,  # the default of `ssl`; that of an older uvicorn is TLS 1.0
        proxy_headers=False,
        server_header=False,
        log_level="warning",
        access_log=False,
        lifespan="on",
    )
