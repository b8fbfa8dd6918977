"""Watch: follows each HTTP request from its headers to the end of its answer. Knows ASGI; what is told, sinks know.

It stands before everything else, so that each answer has a request id and each request its line, whoever answers it.
"""

import logging
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import response_to
from quire.server.observability.request_ids import HEADER, accepted, new_id
from quire.server.observability.request_record import Record, note

log = logging.getLogger(__name__)

Sink = Callable[[Record], None]  # called once, when an answer has ended


class Watch:
    """ASGI middleware. sinks: must be quick, as streams wait for them."""

    def __init__(self, app: ASGIApp, sinks: Sequence[Sink]) -> None:
        self._app = app
        self._sinks = sinks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on. What the app raises is answered here, if nothing has been, so that it is watched, too."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = accepted(Headers(scope=scope).get(HEADER))
        record = Record(given, new_id(), scope, time.time(), time.monotonic())
        note(scope, record)

        async def watched(message: Message) -> None:
            _look_at(message, record)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if record.status:
                record.error = "broken"
                raise
            await response_to(error)(scope, receive, watched)
        finally:
            record.ended = time.monotonic()
            self._tell(record)

    def _tell(self, record: Record) -> None:
        if record.status >= 500 and record.status != 503:  # which is no failure, but the truth for as long as it holds
            log.error("request %s was answered with %d (%s)", record.id, record.status, record.error)
        for sink in self._sinks:
            try:
                sink(record)
            except Exception:  # who only watches must not be the end of what is watched
                log.exception("request %s could not be told about", record.id)


def _look_at(message: Message, record: Record) -> None:
    if message["type"] == "http.response.start":
        record.status = message["status"]
        message.setdefault("headers", [])
        MutableHeaders(scope=message)[HEADER] = record.id
    elif message["type"] == "http.response.body":
        body = message.get("body", b"")
        if body and record.first_byte is None:
            record.first_byte = time.monotonic()
        record.num_bytes += len(body)
        record.complete = not message.get("more_body", False)
