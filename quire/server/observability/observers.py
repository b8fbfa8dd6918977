"""Observers: what the options of a server ask to be told of its requests, and where to."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from quire.errors import ConfigError
from quire.server.observability.access_log import AccessLog, check_path
from quire.server.observability.metrics import Metrics
from quire.server.observability.middleware import Sink
from quire.server.options import ServerOptions


class Observers:
    """The sinks of records. Close them. Raises ConfigError for a log that cannot be written, an extra that is missing,
    or an endpoint that is no URL.
    """

    def __init__(self, options: ServerOptions, metrics: Metrics) -> None:
        self.sinks: list[Sink] = [metrics.answered]
        self._closes: list[Callable[[], None]] = []
        if options.otlp_endpoint is not None:
            tracing = _tracing()
            tracer = tracing.Tracing(tracing.otlp_exporter(options.otlp_endpoint))
            self.sinks.append(tracer)
            self._closes.append(tracer.close)
        if options.access_log is not None:
            access_log = AccessLog(options.access_log, metrics.log_lines_lost, with_content=options.log_prompts)
            self.sinks.append(access_log)
            self._closes.append(access_log.close)

    def close(self) -> None:
        """Write and send what waits; it takes some seconds at most."""
        for close in self._closes:
            close()


def check_observers(options: ServerOptions) -> None:
    """Raises ConfigError for what would fail later, when the model is loaded. Makes the file of the access log."""
    if options.log_prompts and options.access_log is None:
        raise ConfigError("log_prompts needs a log to write to: give access_log, too")
    if options.otlp_endpoint is not None:
        _tracing().url_of(options.otlp_endpoint)
    if options.access_log is not None:
        check_path(options.access_log)


def _tracing() -> ModuleType:
    """The module that needs the extra. Raises ConfigError where it is not installed."""
    try:
        return import_module("quire.server.observability.tracing")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError(
            "otlp_endpoint needs OpenTelemetry, which is an extra: pip install 'quire[otel]', or leave it out"
        ) from error
