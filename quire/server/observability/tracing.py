"""OpenTelemetry tracing: one span per request, with gen_ai.* attributes. Needs the extra `otel`.

A span is created from the request record after the request has ended, so that tracing costs nothing during generation.
The SDK's settings are set here and not taken from the environment, except for OTEL_EXPORTER_OTLP_HEADERS, because
headers for the collector are secrets.
"""

from collections.abc import Iterator
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers

from quire import __version__
from quire.errors import ConfigError
from quire.server.observability.request_record import RequestRecord, RequestStats

SERVICE = "quire"
_TRACES = "/v1/traces"  # the path of OTLP
_PROBES = frozenset({"/live", "/ready", "/health", "/health_generate", "/metrics"})  # polled by machines, not traced
_MAX_QUEUE_SIZE = 2048  # spans; more are dropped
_BATCH = 512
_DELAY = 1.0  # seconds between batches
_TIMEOUT = 5.0  # seconds for one batch
_CLOSE_SECONDS = 5.0


class Tracing:
    """A sink of request records. exporter: called on a thread of the SDK."""

    def __init__(self, exporter: SpanExporter) -> None:
        limits = SpanLimits(max_span_attributes=64, max_events=8, max_links=8, max_span_attribute_length=512)
        resource = Resource({"service.name": SERVICE, "service.version": __version__})
        sampler = ParentBased(ALWAYS_ON)
        self._provider = TracerProvider(sampler, resource, shutdown_on_exit=False, span_limits=limits)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, _MAX_QUEUE_SIZE, _DELAY * 1e3, _BATCH, _TIMEOUT * 1e3)
        )
        self._tracer = self._provider.get_tracer(SERVICE, __version__)
        self._context = TraceContextTextMapPropagator()

    def __call__(self, record: RequestRecord) -> None:
        """Export the span of an ended request. The header `traceparent` sets its parent and whether it is sampled."""
        if record.route in _PROBES:
            return
        headers = Headers(scope=record.scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        stats = record.get_stats(False) if record.get_stats else None  # noqa: FBT003
        span = self._tracer.start_span(
            _name(record),
            self._context.extract(carrier),
            SpanKind.SERVER,
            {name: value for name, value in _attributes(record, stats) if value is not None},
            start_time=round(record.arrival_time * 1e9),
        )
        if record.status >= 500 or not record.status:
            span.set_status(Status(StatusCode.ERROR))
        span.end(round((record.arrival_time + record.seconds) * 1e9))

    def close(self) -> None:
        """Export pending spans, within _CLOSE_SECONDS, and shut down."""
        self._provider.force_flush(round(_CLOSE_SECONDS * 1e3))
        self._provider.shutdown()


def otlp_exporter(endpoint: str) -> SpanExporter:
    """An exporter of spans to a collector. Raises ConfigError for an invalid URL."""
    session = requests.Session()
    session.trust_env = False  # ignores proxies and .netrc of the environment
    return OTLPSpanExporter(traces_url(endpoint), timeout=_TIMEOUT, compression=Compression.Gzip, session=session)


def traces_url(endpoint: str) -> str:
    """The URL of the collector: OTLP's path is added to a URL without a path. Raises ConfigError for an invalid URL."""
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"otlp_endpoint must be a URL such as http://127.0.0.1:4318, not {endpoint!r:.200}")
    return endpoint.rstrip("/") + _TRACES if parts.path in ("", "/") else endpoint


def _name(record: RequestRecord) -> str:
    """The name of a span by OpenTelemetry's conventions: operation and model, else method and route."""
    return f"{record.operation} {record.model}" if record.operation else f"{record.method} {record.route or ''}".strip()


def _attributes(record: RequestRecord, stats: RequestStats | None) -> Iterator[tuple[str, AttributeValue | None]]:
    client = record.scope.get("client")
    yield "http.request.method", record.method
    yield "http.route", record.route
    yield "http.response.status_code", record.status or None
    yield "client.address", client[0] if client else None
    yield "error.type", record.error if record.status >= 400 else None
    yield "quire.request_id", record.id
    yield "quire.tenant", record.tenant or None
    if record.operation:
        yield "gen_ai.operation.name", record.operation
        yield "gen_ai.provider.name", SERVICE
        yield "gen_ai.request.model", record.model
        yield "gen_ai.response.id", record.answer_id
    if stats is not None:
        yield "gen_ai.response.model", record.model
        yield "gen_ai.response.finish_reasons", stats.finish_reasons
        yield "gen_ai.usage.input_tokens", stats.num_prompt_tokens
        yield "gen_ai.usage.output_tokens", stats.num_output_tokens
        yield "gen_ai.usage.cache_read.input_tokens", stats.num_cached_tokens
        yield "gen_ai.latency.time_to_first_token", stats.first_token_seconds
        yield "gen_ai.latency.time_in_queue", stats.queue_seconds
        yield "gen_ai.latency.e2e", record.seconds
        yield from _parameters(stats)


def _parameters(stats: RequestStats) -> Iterator[tuple[str, AttributeValue | None]]:
    params = stats.params
    if params is None:
        return
    yield "gen_ai.request.choice.count", params.n
    yield "gen_ai.request.max_tokens", params.max_tokens
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    yield "gen_ai.request.top_k", params.top_k if params.top_k > 0 else None
    yield "gen_ai.request.frequency_penalty", params.frequency_penalty
    yield "gen_ai.request.presence_penalty", params.presence_penalty
    yield "gen_ai.request.seed", params.seed
