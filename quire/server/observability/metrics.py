"""Prometheus metrics of the engine, of requests and of HTTP, with vLLM's names.

Each app has its own registries. The prefix of names is added on export.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.config import CacheConfig, DrafterName
from quire.core.explanation import DraftCounts
from quire.engine.engine import STEP_SIZE_BUCKETS, EngineStats
from quire.engine.outputs import RequestMetrics
from quire.fleet.fleet import ReplicaStatus
from quire.fleet.routing import ERROR_BUCKETS, RoutingStats
from quire.params import SamplingParams
from quire.server.observability.request_record import RequestRecord
from quire.supervisor.health import Health, State

LABELS = ("model_name", "engine")
_BY_DRAFTER = (*LABELS, "drafter")
ENGINE = "0"  # of what the front end measures for all replicas
_CAPACITY = frozenset({"tokens", "rows", "memory"})  # wait causes that more capacity would end

# name, help, value
_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Running sequences.", lambda s: s.num_running),
    ("num_requests_waiting", "Waiting sequences.", lambda s: s.num_waiting),
    (
        "kv_cache_usage_perc",
        "Share of KV blocks in use; 1 is all.",
        lambda s: s.kv_blocks_used / max(1, s.kv_blocks_total),
    ),
    ("kv_blocks_cached", "Idle KV blocks kept by the prefix cache.", lambda s: s.kv_blocks_cached),
    (
        "cpu_cache_usage_perc",
        "Share of the host pool's blocks in use; 1 is all.",
        lambda s: s.host_blocks_used / max(1, s.host_blocks_total),
    ),
    ("last_step_seconds", "Duration of the last step.", lambda s: s.last_step_seconds),
    ("prompts_running", "Running prompts that take more than one step.", lambda s: s.prompts.num_prompts),
    ("prompts_running_tokens", "Tokens of these prompts.", lambda s: s.prompts.num_tokens),
    ("prompts_running_tokens_done", "Those of them that have KV.", lambda s: s.prompts.num_done),
    ("adapters_resident", "LoRA adapters in memory.", lambda s: s.num_adapters),
    ("adapter_memory_bytes", "Bytes of LoRA adapters in memory or being loaded.", lambda s: s.adapter_bytes),
    (
        "num_requests_waiting_for_adapters",
        "Requests whose adapter is not in memory yet.",
        lambda s: s.num_waiting_for_adapters,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens computed or found in the prefix cache.", lambda s: s.prompt_tokens),
    ("prompt_tokens_cached", "Prompt tokens whose KV was in the prefix cache.", lambda s: s.prefix_hit_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("forced_tokens", "Generated tokens that a constraint forced.", lambda s: s.forced_tokens),
    ("num_preemptions", "Sequences preempted.", lambda s: s.num_preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix index.", lambda s: s.prefix_query_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix index.", lambda s: s.prefix_hit_tokens),
    ("kv_blocks_evicted", "KV blocks evicted from the prefix cache.", lambda s: s.kv_blocks_evicted),
    ("kv_tokens_copied", "Tokens whose KV was copied.", lambda s: s.kv_tokens_copied),
    ("kv_blocks_swapped_out", "KV blocks copied to the host pool.", lambda s: s.num_swapped_out_blocks),
    ("kv_blocks_swapped_in", "KV blocks copied back from the host pool.", lambda s: s.num_swapped_in_blocks),
    (
        "admissions_slowed",
        "Times that preemptions raised the admission watermark.",
        lambda s: s.num_admissions_slowed,
    ),
    ("spec_decode_num_drafts", "Verified chains of drafts.", lambda s: s.num_draft_chains),
    ("spec_decode_num_draft_tokens", "Verified drafts.", lambda s: s.num_draft_tokens),
    ("spec_decode_num_accepted_tokens", "Accepted drafts.", lambda s: s.num_accepted_drafts),
    ("adapter_loads", "LoRA adapters loaded into memory.", lambda s: s.num_adapter_loads),
    ("adapter_load_seconds", "Seconds of these loads.", lambda s: s.adapter_load_seconds),
    ("adapters_evicted", "LoRA adapters that left memory for others.", lambda s: s.num_evicted_adapters),
    ("iterations", "Steps run.", lambda s: s.num_steps),
    ("iterations_failed", "Steps that failed.", lambda s: s.failed_steps),
)
# of models with recurrent states
_STATE_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("state_blocks", "Blocks of recurrent states.", lambda s: s.state_blocks_total),
    ("state_blocks_used", "Those of them that running sequences use.", lambda s: s.state_blocks_used),
    ("state_snapshots", "Snapshots of recurrent states behind cached prefixes.", lambda s: s.num_snapshots),
)
_STATE_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("state_snapshots_evicted", "Snapshots that left for other states.", lambda s: s.num_evicted_snapshots),
    ("state_snapshot_hits", "Requests that started from a snapshot.", lambda s: s.num_snapshot_hits),
    (
        "prompt_tokens_without_state",
        "Prompt tokens computed although their KV was in the prefix cache, because no snapshot was behind them.",
        lambda s: s.num_stateless_tokens,
    ),
)


class _Sampled(NamedTuple):
    """What a collector reads of one replica. labels: the values of LABELS."""

    labels: tuple[str, str]
    cache: CacheConfig
    status: ReplicaStatus

    @property
    def health(self) -> Health:
        return self.status.health

    @property
    def stats(self) -> EngineStats:
        return self.status.health.stats


class EngineCollector(Collector):
    """Collector of the metrics of engines, read from the statuses of the replicas. The label `engine` is the replica.

    caches: by replica. max_loras: 0 without adapters.
    """

    def __init__(
        self,
        model_name: str,
        statuses: Callable[[], Sequence[ReplicaStatus]],
        caches: Sequence[CacheConfig],
        max_model_len: int,
        max_loras: int,
    ) -> None:
        self._model_name = model_name
        self._statuses = statuses
        self._caches = caches
        self._max_model_len = max_model_len
        self._max_loras = max_loras

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        replicas = [
            _Sampled((self._model_name, str(number)), cache, status)
            for number, (cache, status) in enumerate(zip(self._caches, self._statuses(), strict=True))
        ]
        has_states = any(one.cache.states is not None for one in replicas)
        for name, text, value in (*_GAUGES, *(_STATE_GAUGES if has_states else ())):
            yield _family(GaugeMetricFamily, name, text, [(one.labels, value(one.stats)) for one in replicas])
        for name, text, value in (*_COUNTERS, *(_STATE_COUNTERS if has_states else ())):
            yield _family(CounterMetricFamily, name, text, [(one.labels, value(one.stats)) for one in replicas])
        yield from self._health_metrics(replicas)
        yield self._waiting_by_reason(replicas)
        yield self._prompt_tokens_by_source(replicas)
        yield self._step_sizes(replicas)
        yield from self._drafts(replicas)
        yield self._cache_config(replicas)
        if self._max_loras:
            yield self._adapters_of_requests(replicas)
        routed = [(one.labels, one.status.routed) for one in replicas if one.status.routed is not None]
        if routed:
            yield from _routing_metrics(routed)

    def _health_metrics(self, replicas: Sequence[_Sampled]) -> Iterator[Metric]:
        restarts = [(one.labels, one.health.num_restarts) for one in replicas]
        yield _family(CounterMetricFamily, "engine_restarts", "Restarts of the engine.", restarts)
        ages = [(one.labels, one.health.heartbeat_age) for one in replicas if one.health.heartbeat_age is not None]
        if ages:
            yield _family(GaugeMetricFamily, "engine_heartbeat_age_seconds", "Age of the last heartbeat.", ages)
        healthy = [(one.labels, not one.health.problem) for one in replicas]
        yield _family(GaugeMetricFamily, "engine_healthy", "1 while the engine has no problem, else 0.", healthy)
        states = GaugeMetricFamily("engine_state", "1 for the present state, else 0.", labels=(*LABELS, "state"))
        for one in replicas:
            for state in State:
                states.add_metric((*one.labels, state), state == one.health.state)
        yield states
        placed = [(one.labels, one.status.num_requests) for one in replicas]
        yield _family(GaugeMetricFamily, "engine_requests", "Open requests that are placed on the engine.", placed)
        drained = [(one.labels, one.status.is_drained) for one in replicas]
        yield _family(
            GaugeMetricFamily, "engine_drained", "1 while no request is placed on the engine, else 0.", drained
        )

    def _waiting_by_reason(self, replicas: Sequence[_Sampled]) -> Metric:
        """Waiting sequences by reason. At any time all of an engine have the same one."""
        text = "Waiting sequences: for tokens, rows or memory (capacity), or for a step to end (deferred)."
        family = GaugeMetricFamily("num_requests_waiting_by_reason", text, labels=(*LABELS, "reason"))
        for one in replicas:
            held = "capacity" if one.stats.waiting_because in _CAPACITY else "deferred"
            for reason in ("capacity", "deferred"):
                family.add_metric((*one.labels, reason), one.stats.num_waiting if reason == held else 0)
        return family

    def _prompt_tokens_by_source(self, replicas: Sequence[_Sampled]) -> Metric:
        text = "Prompt tokens by where their KV came from."
        family = CounterMetricFamily("prompt_tokens_by_source", text, labels=(*LABELS, "source"))
        for one in replicas:
            hits = one.stats.prefix_hit_tokens
            family.add_metric((*one.labels, "local_compute"), one.stats.prompt_tokens - hits)
            family.add_metric((*one.labels, "local_cache_hit"), hits)
        return family

    def _drafts(self, replicas: Sequence[_Sampled]) -> Iterator[Metric]:
        """Drafts by drafter, and accepted ones by their place in the chain, since the engine's start."""
        verified = CounterMetricFamily("spec_decode_draft_tokens_by_drafter", "Verified drafts.", labels=_BY_DRAFTER)
        accepted = CounterMetricFamily("spec_decode_accepted_tokens_by_drafter", "Accepted drafts.", labels=_BY_DRAFTER)
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by place in their chain."
        by_place = CounterMetricFamily(name, text, labels=(*LABELS, "position"))
        for one in replicas:
            for drafter in dict.fromkeys((*get_args(DrafterName), *one.stats.drafts)):
                counts = one.stats.drafts.get(drafter, DraftCounts())
                verified.add_metric((*one.labels, drafter), counts.num_drafts)
                accepted.add_metric((*one.labels, drafter), counts.num_accepted)
            for place, number in enumerate(one.stats.accepted_by_place):
                by_place.add_metric((*one.labels, str(place)), number)
        yield verified
        yield accepted
        yield by_place

    def _step_sizes(self, replicas: Sequence[_Sampled]) -> Metric:
        """Tokens per step: a histogram, although its name, which is vLLM's, ends in _total."""
        text = "Tokens computed in each step, since the engine's start."
        family = HistogramMetricFamily("iteration_tokens_total", text, labels=LABELS)
        bounds = [*(f"{bound}.0" for bound in STEP_SIZE_BUCKETS), "+Inf"]
        for one in replicas:
            counts = one.stats.step_sizes or (0,) * len(bounds)
            buckets = [(bound, float(sum(counts[: i + 1]))) for i, bound in enumerate(bounds)]
            family.add_metric(one.labels, buckets=buckets, sum_value=one.stats.num_step_tokens)
        return family

    def _cache_config(self, replicas: Sequence[_Sampled]) -> Metric:
        text = "Configuration of the cache; always 1."
        return _info("cache_config_info", text, [self._cache_labels(one) for one in replicas], 1)

    def _cache_labels(self, replica: _Sampled) -> dict[str, str]:
        cache, most = replica.cache, self._most_longest_sequences(replica.cache)
        return {
            **dict(zip(LABELS, replica.labels, strict=True)),
            "block_size": str(cache.block_size),
            "cache_dtype": ",".join(sorted({group.dtype for group in cache.groups})),
            "enable_prefix_caching": str(cache.prefix_index != "none"),
            "num_gpu_blocks": str(sum(group.num_blocks for group in cache.groups)),
            "num_cpu_blocks": str(sum(group.num_host_blocks for group in cache.groups)),
            "kv_cache_size_tokens": str(round(most * self._max_model_len)),
            "kv_cache_max_concurrency": f"{most:.2f}",
        }

    def _adapters_of_requests(self, replicas: Sequence[_Sampled]) -> Metric:
        """vLLM's gauge, whose value is the time."""
        text = "Names of the LoRA adapters of running and waiting requests; the value is the time."
        return _info("lora_requests_info", text, [self._adapter_labels(one) for one in replicas], time.time())

    def _adapter_labels(self, replica: _Sampled) -> dict[str, str]:
        counts = sorted(replica.stats.adapter_requests.items())
        return {
            **dict(zip(LABELS, replica.labels, strict=True)),
            "max_lora": str(self._max_loras),
            "waiting_lora_adapters": ",".join(name for name, (_, waiting) in counts if waiting),
            "running_lora_adapters": ",".join(name for name, (running, _) in counts if running),
        }

    def _most_longest_sequences(self, cache: CacheConfig) -> float:
        """Sequences of max_model_len tokens whose KV fits. A window needs a block more than its own length at most."""
        size, longest = cache.block_size, self._max_model_len
        lengths = [
            min(longest, group.kind.span + size) if group.kind.drops_blocks else longest for group in cache.groups
        ]
        return min(group.num_blocks * size / length for group, length in zip(cache.groups, lengths, strict=True))


def _routing_metrics(routed: Sequence[tuple[tuple[str, str], RoutingStats]]) -> Iterator[Metric]:
    for name, text, value in _ROUTING_COUNTERS:
        yield _family(CounterMetricFamily, name, text, [(labels, value(stats)) for labels, stats in routed])
    text = "Difference between the predicted and the actual time from the placing of a request to its first token."
    family = HistogramMetricFamily("routing_error_seconds", text, labels=LABELS)
    bounds = [*map(str, ERROR_BUCKETS), "+Inf"]
    for labels, stats in routed:
        buckets = list(zip(bounds, map(float, accumulate(stats.errors)), strict=True))
        family.add_metric(labels, buckets=buckets, sum_value=stats.error_seconds)
    yield family


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    samples: Iterable[tuple[tuple[str, str], float]],
) -> Metric:
    """A family with a sample of each replica: the values of LABELS, and the value."""
    family = kind(name, text, labels=LABELS)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _info(name: str, text: str, samples: Sequence[Mapping[str, str]], value: float) -> Metric:
    """A gauge whose labels say more than its value. samples: labels of each replica, at least one."""
    family = GaugeMetricFamily(name, text, labels=tuple(samples[0]))
    for labels in samples:
        family.add_metric(tuple(labels.values()), value)
    return family


_ROUTING_COUNTERS: tuple[tuple[str, str, Callable[[RoutingStats], float]], ...] = (
    (
        "routing_requests",
        "Requests placed on the engine, with those that moved there and those that it refused.",
        lambda s: s.num_placed,
    ),
    ("routing_prompt_tokens", "Tokens of these requests.", lambda s: s.num_tokens),
    ("routing_matched_tokens", "Those that its prefix cache had as far as was known.", lambda s: s.num_cached_tokens),
)

# Upper bounds of buckets, seconds: vLLM's, and some smaller ones for small models.
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

_FINISH_REASONS = ("stop", "length", "repetition", "abort", "error")
_REJECTIONS = ("queue_full", "deadline_unreachable", "rate_limit_exceeded")
_CHECKS = ("ok", "bad", "slow")
_PLACES = ("body", "messages")
_CODE = re.compile(r"[a-z_]{1,64}\Z")


class FinishedRequestStats(NamedTuple):
    """Figures of a finished or aborted prompt."""

    metrics: RequestMetrics
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: Sequence[int] = ()  # per sequence
    params: SamplingParams | None = None  # None for an embedding


class Metrics:
    """All metrics of one app. Routes update those of requests; those of the engines are read on export.

    statuses: the replicas, by number. caches: theirs. max_loras: 0 without adapters.
    """

    def __init__(
        self,
        model_name: str,
        statuses: Callable[[], Sequence[ReplicaStatus]],
        *,
        caches: Sequence[CacheConfig],
        max_model_len: int,
        max_loras: int = 0,
    ) -> None:
        self._registry = CollectorRegistry()
        self._http_registry = CollectorRegistry()  # metrics of HTTP, whose names get no prefix
        self._label_values = (model_name, ENGINE)
        tokens = build_1_2_5_buckets(max_model_len)
        self._success = self._counter("request_success", "Finished sequences.", "finished_reason", _FINISH_REASONS)
        self._refused = self._counter("requests_refused", "Requests answered with an error.", "reason")
        self._rejected = self._counter(
            "admission_rejections", "Requests rejected because of load or rate limits.", "reason", _REJECTIONS
        )
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency_seconds", "Time between two tokens.", _BETWEEN_TOKENS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean of one prompt, after the first token.", _BETWEEN_TOKENS
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _WHOLE_REQUEST)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to admission.", _WHOLE_REQUEST)
        self._prefill = self._histogram("request_prefill_time_seconds", "Admission to first token.", _WHOLE_REQUEST)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.", _WHOLE_REQUEST)
        self._inference = self._histogram("request_inference_time_seconds", "Admission to last token.", _WHOLE_REQUEST)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of one prompt.", tokens)
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not in the prefix cache.", tokens
        )
        self._generated = self._histogram("request_generation_tokens", "Tokens of one sequence.", tokens)
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest sequence of a prompt.", tokens
        )
        self._preemptions = self._histogram("request_num_preemptions", "Preemptions of one prompt.", _COUNT)
        self._n = self._histogram("request_params_n", "The parameter n.", _COUNT)
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "The parameter max_tokens, if it was set.", tokens
        )
        self._checks = self._counter("grammar_checks", "Constraints that were checked.", "result", _CHECKS)
        self._check_seconds = self._histogram("grammar_check_seconds", "Duration of the check of a constraint.", _CHECK)
        self._unknown_fields = self._counter(
            "unknown_fields", "Unknown fields that were accepted: of bodies, and of messages.", "place", _PLACES
        )
        self._ignored = Counter(
            "ignored_fields",
            "Fields of other servers, and tools that a server would have to run, that were accepted without effect.",
            (*LABELS, "field"),
            registry=self._registry,
        )
        self._ignored.labels(*self._label_values, "tools")  # so that it is there from the start
        self._lost_log_lines = Counter(
            "access_log_lines_lost", "Lines of the access log that were not written.", LABELS, registry=self._registry
        ).labels(*self._label_values)
        self._requests = Counter(
            "http_requests", "HTTP requests.", ("method", "status", "handler"), registry=self._http_registry
        )
        self._durations = Histogram(
            "http_request_duration_seconds",
            "From the request's headers to the end of its response.",
            ("method", "handler"),
            buckets=_WHOLE_REQUEST,
            registry=self._http_registry,
        )
        self._registry.register(EngineCollector(model_name, statuses, caches, max_model_len, max_loras))

    def observe_tokens(self, metrics: RequestMetrics, before: float | None, now: float, num_tokens: int) -> None:
        """Observe new tokens of a sequence. before: time of its previous tokens; None for its first ones."""
        if before is None:
            self._first_token.observe(now - metrics.arrival_time)
            return
        for _ in range(num_tokens):
            self._between.observe((now - before) / num_tokens)

    def observe_finished_sequence(self, reason: str) -> None:
        """Count a sequence by its finish reason."""
        self._success.labels(*self._label_values, reason).inc()

    def observe_finished_request(self, stats: FinishedRequestStats, now: float) -> None:
        """Observe a finished or aborted prompt. now: its end if it has no finished_time."""
        self._whole.observe((stats.metrics.finished_time or now) - stats.metrics.arrival_time)
        self._prompt.observe(stats.num_prompt_tokens)
        self._computed.observe(stats.num_prompt_tokens - stats.num_cached_tokens)
        if stats.params is None:
            return
        explanation = stats.metrics.explanation
        self._preemptions.observe(0 if explanation is None else len(explanation.preemptions))
        self._n.observe(stats.params.n)
        if stats.params.max_tokens is not None:
            self._max_tokens.observe(stats.params.max_tokens)
        for num_tokens in stats.num_output_tokens:
            self._generated.observe(num_tokens)
        longest = max(stats.num_output_tokens, default=0)
        self._longest.observe(longest)
        self._observe_phases(stats.metrics, longest)

    def observe_http_request(self, record: RequestRecord) -> None:
        """Count an HTTP request: a sink of request records."""
        handler = record.route or "none"
        self._requests.labels(record.method, f"{record.status // 100}xx" if record.status else "none", handler).inc()
        self._durations.labels(record.method, handler).observe(record.seconds)
        reason = _reason(record)
        if reason is not None:
            self._refused.labels(*self._label_values, reason).inc()
        if reason in _REJECTIONS:
            self._rejected.labels(*self._label_values, reason).inc()

    def observe_grammar_check(self, result: str, seconds: float) -> None:
        """Observe the check of a constraint. result: one of _CHECKS."""
        self._checks.labels(*self._label_values, result).inc()
        self._check_seconds.observe(seconds)

    def count_unknown_fields(self, place: str, num_fields: int) -> None:
        """Count unknown fields that were accepted. place: one of _PLACES."""
        self._unknown_fields.labels(*self._label_values, place).inc(num_fields)

    def count_ignored(self, field: str) -> None:
        """Count a field that was accepted without effect: one of the table of known fields, or "tools"."""
        self._ignored.labels(*self._label_values, field).inc()

    def count_lost_log_lines(self, num_lines: int) -> None:
        """Count lines that the access log could not write."""
        self._lost_log_lines.inc(num_lines)

    def export(self, prefix: str) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(_Prefixed(self._registry, prefix)) + generate_latest(self._http_registry)

    def _observe_phases(self, metrics: RequestMetrics, longest: int) -> None:
        first, last, queued = metrics.first_token_time, metrics.last_token_time, metrics.queue_seconds
        if first is None or last is None:
            return
        if longest > 1:
            self._per_token.observe((last - first) / (longest - 1))
        if queued is None:  # beam search does not report its admission
            return
        admitted = metrics.arrival_time + queued
        self._queue.observe(queued)
        self._prefill.observe(max(0.0, first - admitted))
        self._decode.observe(last - first)
        self._inference.observe(max(0.0, last - admitted))

    def _counter(self, name: str, text: str, label: str, values: Sequence[str] = ()) -> Counter:
        """values: label values that exist from the start, because rate() misses the first increment of a new series."""
        counter = Counter(name, text, (*LABELS, label), registry=self._registry)
        for value in values:
            counter.labels(*self._label_values, value)
        return counter

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self._registry).labels(*self._label_values)


class _Prefixed(Collector):
    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self._registry = registry
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            named = Metric(self._prefix + family.name, family.documentation, family.type)
            named.samples = [sample._replace(name=self._prefix + sample.name) for sample in family.samples]
            yield named


def _reason(record: RequestRecord) -> str | None:
    """The reason label of a rejected request, with few values. None for success and for a disconnected client."""
    if record.status < 400 or record.status == 499:
        return None
    if record.status == 500:  # its code is a random id
        return "internal_error"
    return record.error if record.error and _CODE.match(record.error) else f"http_{record.status}"


def build_1_2_5_buckets(most: int) -> list[float]:
    """1, 2, 5, 10, ... up to `most`."""
    bounds = [float(digit * 10**power) for power in range(len(str(most))) for digit in (1, 2, 5)]
    return [bound for bound in bounds if bound <= most]
