"""Tracing: spans received by a local collector, over OTLP and HTTP."""

import gzip
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from multi_tenant_server import run_site
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from quire.errors import ConfigError
from quire.server.observability import middleware, tracing
from quire.server.observability.middleware import check_observers
from quire.server.options import ServerOptions

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    def __init__(self, url):
        self.url = url
        self.spans = []
        self.resources = []
        self.paths = set()

    def take(self, path, body):
        self.paths.add(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes_of(resource.resource))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


@contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers["content-encoding"] == "gzip"
            got.take(self.path, gzip.decompress(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        got = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield got
        server.shutdown()
        thread.join()


def attributes_of(holder):
    def plain(value):
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {one.key: plain(one.value) for one in holder.attributes}


def test_each_request_is_a_span(monkeypatch):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "false")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "another")
    with collector() as got, run_site("ann", options=ServerOptions(otlp_endpoint=got.url)) as site:
        key = {"authorization": f"Bearer {site.keys['ann']}"}
        traced = {**key, "traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "job"}
        unwanted = {**key, "traceparent": f"00-{TRACE}-{PARENT}-00"}
        body = {"messages": [{"role": "user", "content": "Osterhase"}], "max_tokens": 3, "ignore_eos": True, "n": 2}
        begin = time.time_ns()
        for headers in (traced, unwanted, {**key, "traceparent": "nonsense"}):
            answer = httpx.post(f"{site.url}/v1/chat/completions", json={**body, "seed": 5}, headers=headers)
            assert answer.status_code == 200
        end = time.time_ns()
        httpx.get(f"{site.url}/live")
        assert httpx.post(f"{site.url}/v1/completions", json={"prompt": "x", "max_tokens": -2}, headers=key).is_error
    # the server sends waiting spans when it ends
    assert got.paths == {"/v1/traces"}
    assert got.resources[0]["service.name"] == "quire"
    child, root, refused = got.spans
    assert (child.trace_id.hex(), child.parent_span_id.hex()) == (TRACE, PARENT)
    assert (root.parent_span_id, refused.parent_span_id) == (b"", b"")
    assert child.kind == Span.SpanKind.SPAN_KIND_SERVER
    assert child.name == "chat quire-demo"
    assert begin - 1e9 < child.start_time_unix_nano < child.end_time_unix_nano < end + 1e9
    attributes = attributes_of(child)
    latency = {
        name: attributes.pop(f"gen_ai.latency.{name}") for name in ("e2e", "time_to_first_token", "time_in_queue")
    }
    assert 0 <= latency["time_in_queue"] < latency["time_to_first_token"] < latency["e2e"]
    assert attributes.pop("gen_ai.response.id").startswith("chatcmpl-job-")
    assert attributes.pop("gen_ai.usage.input_tokens") > 0
    assert attributes.pop("gen_ai.request.temperature") >= 0
    optional = {"gen_ai.request.top_p", "gen_ai.request.top_k", "gen_ai.usage.cache_read.input_tokens"}
    assert {name: value for name, value in attributes.items() if name not in optional} == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "client.address": "127.0.0.1",
        "quire.request_id": "job",
        "quire.tenant": "ann",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "quire-demo",
        "gen_ai.response.model": "quire-demo",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 5,
    }
    assert attributes_of(refused)["error.type"] == "invalid_value"
    assert refused.status.code == Status.StatusCode.STATUS_CODE_UNSET, "what a client does wrong is no error of ours"
    everything = b"".join(span.SerializeToString() for span in got.spans)
    assert b"Osterhase" not in everything
    assert site.keys["ann"].encode() not in everything


def test_an_unreachable_trace_collector_delays_neither_requests_nor_shutdown(monkeypatch):
    monkeypatch.setattr(tracing, "_TIMEOUT", 0.2)
    monkeypatch.setattr(tracing, "_CLOSE_SECONDS", 0.5)

    def seconds(options):
        """Of a request and of the shutdown."""
        with run_site(options=options) as site:
            begin = time.monotonic()
            assert site.post(None, "/v1/completions", prompt="x", max_tokens=1).status_code == 200
            answered = time.monotonic()
        return answered - begin, time.monotonic() - answered

    without = seconds(ServerOptions())
    request, shutdown = seconds(ServerOptions(otlp_endpoint="http://127.0.0.1:9"))
    assert request < 2 + 5 * without[0]
    assert shutdown < 5 + 5 * without[1]


def test_a_missing_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("quire.server.observability.tracing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[otel\]'"):
        check_observers(ServerOptions(otlp_endpoint="http://127.0.0.1:4318"))


def test_without_an_endpoint_the_extra_is_not_needed(monkeypatch):
    monkeypatch.setattr(middleware, "import_late", lambda name: pytest.fail(f"{name} was imported"))
    check_observers(ServerOptions())


@pytest.mark.parametrize("endpoint", ["", "collector:4318", "ftp://x", "http://", "http://x:99999", "http://[x"])
def test_an_endpoint_must_be_a_url(endpoint):
    with pytest.raises(ConfigError, match="otlp_endpoint must be a URL"):
        check_observers(ServerOptions(otlp_endpoint=endpoint))


def test_the_path_of_otlp_is_added_where_none_is_given():
    assert tracing.traces_url("http://c:4318") == tracing.traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert tracing.traces_url("https://c/api/otlp") == "https://c/api/otlp"
