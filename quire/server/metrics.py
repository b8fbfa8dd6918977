"""Metrics: what Prometheus reads. Names as vLLM's with the prefix `quire:`. Each app has a registry of its own."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.engine.engine import EngineStats
from quire.engine.outputs import RequestMetrics

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 40.96, 163.84)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_WHOLE_REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_LABELS = ("model_name",)

# name, help, kind, value
_FROM_ENGINE: tuple[tuple[str, str, type[Metric], Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Sequences that run.", GaugeMetricFamily, lambda s: s.num_running),
    ("num_requests_waiting", "Sequences that wait.", GaugeMetricFamily, lambda s: s.num_waiting),
    (
        "kv_cache_usage_perc",
        "Share of KV blocks in use; 1 is all.",
        GaugeMetricFamily,
        lambda s: s.kv_blocks_used / max(1, s.kv_blocks_total),
    ),
    ("kv_blocks_cached", "KV blocks kept for prompts to come.", GaugeMetricFamily, lambda s: s.kv_blocks_cached),
    (
        "cpu_cache_usage_perc",
        "Share of the host pool's blocks in use; 1 is all.",
        GaugeMetricFamily,
        lambda s: s.host_blocks_used / max(1, s.host_blocks_total),
    ),
    ("last_step_seconds", "Duration of the last step.", GaugeMetricFamily, lambda s: s.last_step_seconds),
    ("prompt_tokens", "Prompt tokens accepted.", CounterMetricFamily, lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated.", CounterMetricFamily, lambda s: s.generation_tokens),
    ("num_preemptions", "Sequences preempted.", CounterMetricFamily, lambda s: s.num_preemptions),
    (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix index.",
        CounterMetricFamily,
        lambda s: s.prefix_query_tokens,
    ),
    ("prefix_cache_hits", "Those whose KV was there.", CounterMetricFamily, lambda s: s.prefix_hit_tokens),
    ("kv_blocks_evicted", "KV blocks given up for others.", CounterMetricFamily, lambda s: s.kv_blocks_evicted),
    ("kv_tokens_copied", "Tokens whose KV was copied.", CounterMetricFamily, lambda s: s.kv_tokens_copied),
    (
        "kv_blocks_swapped_out",
        "KV blocks copied to the host.",
        CounterMetricFamily,
        lambda s: s.num_swapped_out_blocks,
    ),
    ("kv_blocks_swapped_in", "Copied back from it.", CounterMetricFamily, lambda s: s.num_swapped_in_blocks),
    (
        "admissions_slowed",
        "Times that preemptions were too many, and sequences were let in more slowly.",
        CounterMetricFamily,
        lambda s: s.num_admissions_slowed,
    ),
    ("iterations", "Steps run.", CounterMetricFamily, lambda s: s.num_steps),
    ("iterations_failed", "Steps that failed.", CounterMetricFamily, lambda s: s.failed_steps),
)


class Metrics:
    """Counts what routes observe, and reads the rest from the engine's figures when asked."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        self._success = Counter(
            "quire:request_success", "Sequences finished.", (*_LABELS, "finished_reason"), registry=self._registry
        )
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency_seconds", "From token to token.", _BETWEEN_TOKENS)
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to the end.", _WHOLE_REQUEST)
        self._registry.register(_EngineFigures(model_name, stats))

    def tokens_came(self, metrics: RequestMetrics, before: float | None, now: float, num_tokens: int) -> None:
        """A sequence got tokens. `before`: when its last ones came; None for the first, with which others may come."""
        if before is None:
            self._first_token.observe(now - metrics.arrival_time)
            return
        for _ in range(num_tokens):
            self._between.observe((now - before) / num_tokens)

    def sequence_ended(self, reason: str) -> None:
        """A sequence ended for this reason."""
        self._success.labels(self._model, reason).inc()

    def request_ended(self, metrics: RequestMetrics, now: float) -> None:
        """A request ended, `now` where not all of its sequences came to their end."""
        self._whole.observe((metrics.finished_time or now) - metrics.arrival_time)

    def page(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"quire:{name}", text, _LABELS, buckets=buckets, registry=self._registry)
        return histogram.labels(self._model)


class _EngineFigures(Collector):
    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._model = model_name
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, kind, value in _FROM_ENGINE:
            family = kind(f"quire:{name}", text, labels=_LABELS)  # type: ignore[call-arg]  # gauge and counter agree on these
            family.add_metric((self._model,), value(stats))  # type: ignore[attr-defined]
            yield family
