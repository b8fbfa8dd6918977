"""Metrics: what Prometheus reads, by vLLM's names. Counts what the front end sees of requests and of HTTP.

Each app has registries of its own. Names get their prefix when they are read.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from quire.config import CacheConfig
from quire.engine.outputs import RequestMetrics
from quire.params import SamplingParams
from quire.server.observability.engine_figures import ENGINE, LABELS, EngineFigures
from quire.server.observability.request_record import Record
from quire.supervisor.health import Health

# upper bounds of buckets, seconds; vLLM's, and some below, as small models are faster than those
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE_REQUEST = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_CHECK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_COUNT = (1.0, 2.0, 5.0, 10.0, 20.0)

_ENDS = ("stop", "length", "abort", "error")
_REJECTIONS = ("queue_full", "deadline_unreachable", "rate_limit_exceeded")
_CHECKS = ("ok", "bad", "slow")
_CODE = re.compile(r"[a-z_]{1,64}\Z")


class Ended(NamedTuple):
    """A prompt that nothing more comes of, and what came."""

    metrics: RequestMetrics
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: Sequence[int] = ()  # of each of its sequences
    params: SamplingParams | None = None  # None for one that was embedded


class Metrics:
    """Counts what routes observe, and reads the rest from the engine's figures when asked."""

    def __init__(
        self, model_name: str, health: Callable[[], Health], *, cache: CacheConfig, max_model_len: int
    ) -> None:
        self._registry = CollectorRegistry()
        self._plain = CollectorRegistry()  # names that all sorts of servers have, which get no prefix
        self._names = (model_name, ENGINE)
        tokens = _one_two_five(max_model_len)
        self._success = self._counter("request_success", "Sequences that ended.", "finished_reason", _ENDS)
        self._refused = self._counter("requests_refused", "Requests answered with an error.", "reason")
        self._rejected = self._counter(
            "admission_rejections", "Requests refused as too much is asked for.", "reason", _REJECTIONS
        )
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency_seconds", "From token to token.", _BETWEEN_TOKENS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Of one prompt, on average after the first.", _BETWEEN_TOKENS
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to the end.", _WHOLE_REQUEST)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to admission.", _WHOLE_REQUEST)
        self._prefill = self._histogram("request_prefill_time_seconds", "Admission to first token.", _WHOLE_REQUEST)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.", _WHOLE_REQUEST)
        self._inference = self._histogram("request_inference_time_seconds", "Admission to last token.", _WHOLE_REQUEST)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of one prompt.", tokens)
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Of one prompt, those whose KV was not there.", tokens
        )
        self._generated = self._histogram("request_generation_tokens", "Tokens of one sequence.", tokens)
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest sequence of a prompt.", tokens
        )
        self._n = self._histogram("request_params_n", "The parameter n.", _COUNT)
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "The parameter max_tokens, where it was given.", tokens
        )
        self._checks = self._counter("grammar_checks", "Forms of outputs that were checked.", "result", _CHECKS)
        self._check_seconds = self._histogram("grammar_check_seconds", "Of one such check.", _CHECK)
        self._lost = Counter("access_log_lines_lost", "Lines not written.", LABELS, registry=self._registry).labels(
            *self._names
        )
        self._requests = Counter(
            "http_requests", "HTTP requests.", ("method", "status", "handler"), registry=self._plain
        )
        self._durations = Histogram(
            "http_request_duration_seconds",
            "From its headers to the end of its answer.",
            ("method", "handler"),
            buckets=_WHOLE_REQUEST,
            registry=self._plain,
        )
        self._registry.register(EngineFigures(model_name, health, cache))

    def tokens_came(self, metrics: RequestMetrics, before: float | None, now: float, num_tokens: int) -> None:
        """A sequence got tokens. `before`: when its last ones came; None for the first, with which others may come."""
        if before is None:
            self._first_token.observe(now - metrics.arrival_time)
            return
        for _ in range(num_tokens):
            self._between.observe((now - before) / num_tokens)

    def sequence_ended(self, reason: str) -> None:
        """A sequence ended for this reason."""
        self._success.labels(*self._names, reason).inc()

    def request_ended(self, ended: Ended, now: float) -> None:
        """A prompt is done with, `now` where not all of its sequences came to their end."""
        self._whole.observe((ended.metrics.finished_time or now) - ended.metrics.arrival_time)
        self._prompt.observe(ended.num_prompt_tokens)
        self._computed.observe(ended.num_prompt_tokens - ended.num_cached_tokens)
        if ended.params is None:
            return
        self._n.observe(ended.params.n)
        if ended.params.max_tokens is not None:
            self._max_tokens.observe(ended.params.max_tokens)
        for num_tokens in ended.num_output_tokens:
            self._generated.observe(num_tokens)
        longest = max(ended.num_output_tokens, default=0)
        self._longest.observe(longest)
        self._observe_phases(ended.metrics, longest)

    def answered(self, record: Record) -> None:
        """An HTTP request was answered: a sink of records."""
        handler = record.route or "none"
        self._requests.labels(record.method, f"{record.status // 100}xx" if record.status else "none", handler).inc()
        self._durations.labels(record.method, handler).observe(record.seconds)
        reason = _reason(record)
        if reason is not None:
            self._refused.labels(*self._names, reason).inc()
        if reason in _REJECTIONS:
            self._rejected.labels(*self._names, reason).inc()

    def form_checked(self, result: str, seconds: float) -> None:
        """A schema, pattern or grammar was checked: one of _CHECKS."""
        self._checks.labels(*self._names, result).inc()
        self._check_seconds.observe(seconds)

    def log_lines_lost(self, num_lines: int) -> None:
        """The access log could not write so many lines."""
        self._lost.inc(num_lines)

    def page(self, prefix: str) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(_Prefixed(self._registry, prefix)) + generate_latest(self._plain)

    def _observe_phases(self, metrics: RequestMetrics, longest: int) -> None:
        first, last, queued = metrics.first_token_time, metrics.last_token_time, metrics.queue_seconds
        if first is None or last is None:
            return
        if longest > 1:
            self._per_token.observe((last - first) / (longest - 1))
        if queued is None:  # beams are told at the end, and not when they began
            return
        admitted = metrics.arrival_time + queued
        self._queue.observe(queued)
        self._prefill.observe(max(0.0, first - admitted))
        self._decode.observe(last - first)
        self._inference.observe(max(0.0, last - admitted))

    def _counter(self, name: str, text: str, label: str, values: Sequence[str] = ()) -> Counter:
        """values: of the label, told from the start: the first of what comes out of nothing is in no rate."""
        counter = Counter(name, text, (*LABELS, label), registry=self._registry)
        for value in values:
            counter.labels(*self._names, value)
        return counter

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self._registry).labels(*self._names)


class _Prefixed(Collector):
    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self._registry = registry
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            named = Metric(self._prefix + family.name, family.documentation, family.type)
            named.samples = [sample._replace(name=self._prefix + sample.name) for sample in family.samples]
            yield named


def _reason(record: Record) -> str | None:
    """Why a request was refused: one of a few words. None for one that was answered, or whose client has gone."""
    if record.status < 400 or record.status == 499:
        return None
    if record.status == 500:  # whose code is a number of its own
        return "internal_error"
    return record.error if record.error and _CODE.match(record.error) else f"http_{record.status}"


def _one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, ... up to `most`."""
    bounds = [float(digit * 10**power) for power in range(len(str(most))) for digit in (1, 2, 5)]
    return [bound for bound in bounds if bound <= most]
