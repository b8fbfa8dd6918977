"""HTTP protocol of a connection, with limits on request heads, on clients that do not read, and on connections.

It uses h11, because uvicorn's faster parser accepts headers of any size. A client that sends the head of a request too
slowly gets 408, and its connection is closed. request_body.py limits bodies. Invalid HTTP gets an error object. Near
the limit of file descriptors, idle connections are closed, so that descriptors remain for the next engine.
"""

import asyncio
import resource
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
WRITE_SECONDS = 60.0  # for a client to read a full buffer
MAX_HEAD = 2**16  # bytes of a request before its body
MAX_DESCRIPTORS = 2**16  # file descriptors that the server asks for
RESERVED_DESCRIPTORS = 128  # file descriptors that are not for connections

_TOO_LONG = f"the head of the request is longer than {MAX_HEAD} bytes; send fewer or shorter headers"
_AMBIGUOUS = (
    "the request has a transfer-encoding beside a content-length, or with HTTP/1.0; send a content-length alone"
)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors to the hard limit, at most to MAX_DESCRIPTORS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class AmbiguousLength(h11.RemoteProtocolError):
    """A head from which two servers could read different lengths of the body (RFC 9112, 6.1 and 6.3)."""


class _Parser(h11.Connection):
    """h11's parser, which also refuses ambiguous lengths, and long heads that come in one piece."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See h11. Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            headers = dict(event.headers)
            if b"transfer-encoding" in headers and (b"content-length" in headers or event.http_version < b"1.1"):
                raise AmbiguousLength(_AMBIGUOUS)
            if len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers) > MAX_HEAD:
                raise h11.RemoteProtocolError(_TOO_LONG, error_status_hint=431)
        return event


class Connection(H11Protocol):
    """One connection, with timers for request heads and for a client that does not read."""

    def __init__(self, *args: Any, **more: Any) -> None:  # noqa: ANN401 (uvicorn's)
        super().__init__(*args, **more)
        self.conn = _Parser(h11.SERVER, MAX_HEAD)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._active_at = 0.0  # time of the last bytes from the client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Called by asyncio for a new connection."""
        super().connection_made(transport)
        self._active_at = self.loop.time()
        self._update_timer()
        if len(self.connections) > max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_DESCRIPTORS):
            self._close_idlest()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio for received bytes."""
        self._active_at = self.loop.time()
        super().data_received(data)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection is closed."""
        self._cancel_timer()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Called by asyncio when the client does not read as fast as the server writes."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Called by asyncio when the client has read."""
        self._cancel_write_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn in its handler of an exception of h11."""
        error = sys.exc_info()[1]
        hint = getattr(error, "error_status_hint", 400)
        message = _AMBIGUOUS if isinstance(error, AmbiguousLength) else "this is not valid HTTP/1.1"
        self._reject(hint, _TOO_LONG if hint == 431 else message)

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

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being received or answered."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and self.conn.their_state is h11.IDLE and not self.transport.is_closing()

    def _close_idlest(self) -> None:
        """Close the other connection that is idle for the longest time, first of those that never had a request.

        If no other is idle, this connection is closed.
        """
        others = self.connections - {self}
        idle = [one for one in others if isinstance(one, Connection) and one._is_idle]
        one = min(idle, key=lambda one: (one.cycle is not None, one._active_at), default=self)
        one.transport.close()

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
        log_config=None,  # records have the format of quire's own
        log_level="warning",
        access_log=False,
        lifespan="on",
    )
