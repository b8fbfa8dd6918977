"""Observability middleware: fills the record of each HTTP request and passes it to the sinks.

It is the outermost middleware, so that every response has a request id and every request is recorded.
"""

import logging
import time
from collections.abc import Callable, Sequence
from types import ModuleType

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import ConfigError
from quire.preload import import_late
from quire.server.errors import response_to
from quire.server.observability.access_log import AccessLog, check_path
from quire.server.observability.metrics import Metrics
from quire.server.observability.request_record import (
    IGNORED_HEADER,
    REQUEST_ID_HEADER,
    RequestRecord,
    new_id,
    remove_record,
    store_record,
    valid_client_id,
)
from quire.server.options import ServerOptions

log = logging.getLogger(__name__)

Sink = Callable[[RequestRecord], None]  # called once per request, after its response has ended


class ObservabilityMiddleware:
    """ASGI middleware. sinks: must be fast, as they run on the event loop."""

    def __init__(self, app: ASGIApp, sinks: Sequence[Sink]) -> None:
        self._app = app
        self._sinks = sinks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app and record the response. Answers exceptions here if no response has begun."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = valid_client_id(Headers(scope=scope).get(REQUEST_ID_HEADER))
        record = RequestRecord(given, new_id(), scope, time.time(), time.monotonic())
        store_record(scope, record)

        async def watched(message: Message) -> None:
            _record_message(message, record)
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
            self._notify_sinks(record)
            remove_record(scope)

    def _notify_sinks(self, record: RequestRecord) -> None:
        if record.status >= 500 and record.status != 503:  # 503 is a state of the server, not a failure
            log.error("request %s was answered with %d (%s)", record.id, record.status, record.error)
        for sink in self._sinks:
            try:
                sink(record)
            except Exception:  # a failed sink must not fail the request
                log.exception("failed to write the record of request %s", record.id)


def _record_message(message: Message, record: RequestRecord) -> None:
    if message["type"] == "http.response.start":
        record.status = message["status"]
        message.setdefault("headers", [])
        headers = MutableHeaders(scope=message)
        headers[REQUEST_ID_HEADER] = record.id
        if record.ignored:
            headers[IGNORED_HEADER] = ", ".join(record.ignored)
    elif message["type"] == "http.response.body":
        body = message.get("body", b"")
        if body and record.first_byte is None:
            record.first_byte = time.monotonic()
        record.num_bytes += len(body)
        record.complete = not message.get("more_body", False)


class Observers:
    """The sinks that the options enable. Must be closed.

    Raises ConfigError for an unwritable access log, a missing extra or an endpoint that is no URL.
    """

    def __init__(self, options: ServerOptions, metrics: Metrics) -> None:
        self.sinks: list[Sink] = [metrics.observe_http_request]
        self._closes: list[Callable[[], None]] = []
        if options.otlp_endpoint is not None:
            tracing = _tracing()
            tracer = tracing.Tracing(tracing.otlp_exporter(options.otlp_endpoint))
            self.sinks.append(tracer)
            self._closes.append(tracer.close)
        if options.access_log is not None:
            access_log = AccessLog(options.access_log, metrics.count_lost_log_lines, with_content=options.log_prompts)
            self.sinks.append(access_log)
            self._closes.append(access_log.close)

    def close(self) -> None:
        """Write pending lines and export pending spans. Takes some seconds at most."""
        for close in self._closes:
            close()


def check_observers(options: ServerOptions) -> None:
    """Raises ConfigError for invalid options, before the model is loaded. Creates the file of the access log."""
    if options.log_prompts and options.access_log is None:
        raise ConfigError("log_prompts needs a log to write to; set access_log, too")
    if options.otlp_endpoint is not None:
        _tracing().traces_url(options.otlp_endpoint)
    if options.access_log is not None:
        check_path(options.access_log)


def _tracing() -> ModuleType:
    """The module `tracing`. Raises ConfigError if its extra is not installed."""
    try:
        return import_late("quire.server.observability.tracing")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError(
            "otlp_endpoint needs OpenTelemetry, which is an extra: pip install -e '.[otel]' in a checkout of quire, or "
            "leave it out"
        ) from error
