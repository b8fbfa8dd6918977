"""Engine figures: what the engine says about itself, for Prometheus. Read when somebody asks."""

from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.config import CacheConfig
from quire.engine.engine import BOUNDS, EngineStats
from quire.supervisor.health import Health, State

LABELS = ("model_name", "engine")
ENGINE = "0"  # there is one
_CAPACITY = frozenset({"tokens", "rows", "memory"})  # causes of waiting that more room would end

# name, help, value
_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Sequences that run.", lambda s: s.num_running),
    ("num_requests_waiting", "Sequences that wait.", lambda s: s.num_waiting),
    (
        "kv_cache_usage_perc",
        "Share of KV blocks in use; 1 is all.",
        lambda s: s.kv_blocks_used / max(1, s.kv_blocks_total),
    ),
    ("kv_blocks_cached", "KV blocks kept for prompts to come.", lambda s: s.kv_blocks_cached),
    (
        "cpu_cache_usage_perc",
        "Share of the host pool's blocks in use; 1 is all.",
        lambda s: s.host_blocks_used / max(1, s.host_blocks_total),
    ),
    ("last_step_seconds", "Duration of the last step.", lambda s: s.last_step_seconds),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens accepted.", lambda s: s.prompt_tokens),
    ("prompt_tokens_cached", "Prompt tokens whose KV was there.", lambda s: s.prefix_hit_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("forced_tokens", "Of those, that a form left no choice about.", lambda s: s.forced_tokens),
    ("num_preemptions", "Sequences preempted.", lambda s: s.num_preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix index.", lambda s: s.prefix_query_tokens),
    ("prefix_cache_hits", "Those whose KV was there.", lambda s: s.prefix_hit_tokens),
    ("kv_blocks_evicted", "KV blocks given up for others.", lambda s: s.kv_blocks_evicted),
    ("kv_tokens_copied", "Tokens whose KV was copied.", lambda s: s.kv_tokens_copied),
    ("kv_blocks_swapped_out", "KV blocks copied to the host.", lambda s: s.num_swapped_out_blocks),
    ("kv_blocks_swapped_in", "Copied back from it.", lambda s: s.num_swapped_in_blocks),
    (
        "admissions_slowed",
        "Times that preemptions were too many, and sequences were let in more slowly.",
        lambda s: s.num_admissions_slowed,
    ),
    ("iterations", "Steps run.", lambda s: s.num_steps),
    ("iterations_failed", "Steps that failed.", lambda s: s.failed_steps),
)


class EngineFigures(Collector):
    """One engine's."""

    def __init__(self, model_name: str, health: Callable[[], Health], cache: CacheConfig) -> None:
        self._names = (model_name, ENGINE)
        self._health = health
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        health = self._health()
        for name, text, value in _GAUGES:
            yield self._gauge(name, text, value(health.stats))
        for name, text, value in _COUNTERS:
            yield self._counter(name, text, value(health.stats))
        yield from self._about_health(health)
        yield self._waiting(health.stats)
        yield self._sources(health.stats)
        yield self._step_sizes(health.stats)
        yield self._cache_config()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._names, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._names, value)
        return family

    def _about_health(self, health: Health) -> Iterator[Metric]:
        yield self._counter("engine_restarts", "Engines that died and were replaced.", health.num_restarts)
        yield self._gauge("engine_heartbeat_age_seconds", "Since the engine was heard of.", health.heartbeat_age)
        yield self._gauge("engine_healthy", "1 where /health says 200, else 0.", not health.problem)
        states = GaugeMetricFamily("engine_state", "1 for the state that it is in, else 0.", labels=(*LABELS, "state"))
        for state in get_args(State):
            states.add_metric((*self._names, state), state == health.state)
        yield states

    def _waiting(self, stats: EngineStats) -> Metric:
        """One cause at a time holds for all who wait."""
        text = "Sequences that wait: for tokens, rows or memory (capacity), or for a step to end (deferred)."
        family = GaugeMetricFamily("num_requests_waiting_by_reason", text, labels=(*LABELS, "reason"))
        held = "capacity" if stats.waiting_because in _CAPACITY else "deferred"
        for reason in ("capacity", "deferred"):
            family.add_metric((*self._names, reason), stats.num_waiting if reason == held else 0)
        return family

    def _sources(self, stats: EngineStats) -> Metric:
        text = "Prompt tokens of admitted requests, by where their KV came from."
        family = CounterMetricFamily("prompt_tokens_by_source", text, labels=(*LABELS, "source"))
        computed = stats.prefix_query_tokens - stats.prefix_hit_tokens
        for source, value in (("local_compute", computed), ("local_cache_hit", stats.prefix_hit_tokens)):
            family.add_metric((*self._names, source), value)
        return family

    def _step_sizes(self, stats: EngineStats) -> Metric:
        """vLLM's name ends in _total, and it is a histogram all the same."""
        text = "Tokens computed in each step, since the engine's start."
        family = HistogramMetricFamily("iteration_tokens_total", text, labels=LABELS)
        counts = stats.step_sizes or (0,) * (len(BOUNDS) + 1)
        bounds = [*(f"{bound}.0" for bound in BOUNDS), "+Inf"]
        buckets = [(bound, float(sum(counts[: i + 1]))) for i, bound in enumerate(bounds)]
        family.add_metric(self._names, buckets=buckets, sum_value=stats.num_step_tokens)
        return family

    def _cache_config(self) -> Metric:
        cache = self._cache
        labels = {
            "model_name": self._names[0],
            "engine": ENGINE,
            "block_size": str(cache.block_size),
            "cache_dtype": ",".join(sorted({group.dtype for group in cache.groups})),
            "enable_prefix_caching": str(cache.prefix_index != "none"),
            "num_gpu_blocks": str(sum(group.num_blocks for group in cache.groups)),
            "num_cpu_blocks": str(sum(group.num_host_blocks for group in cache.groups)),
        }
        family = GaugeMetricFamily("cache_config_info", "How the KV cache was set up; always 1.", labels=tuple(labels))
        family.add_metric(tuple(labels.values()), 1)
        return family
