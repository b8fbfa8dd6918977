"""What became of the requests of a simulation, or of a run of a benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Literal, get_args

import numpy as np

Metric = Literal["ttft", "tpot", "latency"]


@dataclass(slots=True)
class RequestResult:
    """What became of a request. Times are seconds of the virtual clock; infinite if the event did not happen."""

    tenant: str
    arrived: float
    num_prompt: int
    first_token: float = inf
    ended: float = inf
    reason: str = ""  # finish reason; "rejected" for a request that was not accepted
    num_output: int = 0  # tokens of all sequences
    num_cached: int = 0  # prompt tokens of the prefix match
    num_sequences: int = 1
    session: int = 0  # place of its session in the workload
    turn: int = 0  # place in the session
    replica: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token - self.arrived

    @property
    def latency(self) -> float:
        """Seconds from arrival to the end."""
        return self.ended - self.arrived

    @property
    def output_length(self) -> float:
        """Output tokens of a sequence: the mean, if there are several."""
        return self.num_output / self.num_sequences

    @property
    def tpot(self) -> float:
        """Mean seconds between tokens of a sequence; 0 for a single token."""
        return (self.ended - self.first_token) / (self.output_length - 1) if self.output_length > 1 else 0.0

    @property
    def is_complete(self) -> bool:
        """Whether it has all its output."""
        return self.reason in ("length", "stop")


@dataclass(slots=True, kw_only=True)
class SimulationResult:
    """The requests of a simulation, and means over its time: those of its window, if it has one."""

    requests: list[RequestResult] = field(default_factory=list)
    seconds: float = 0.0  # virtual, until the last request ended, or of the window
    busy_seconds: float = 0.0  # in which a step ran
    num_steps: int = 0
    num_step_tokens: int = 0
    num_preemptions: int = 0
    num_evicted_blocks: int = 0
    row_seconds: float = 0.0  # running sequences, integrated over time
    block_seconds: float = 0.0  # share of KV blocks held by running sequences, integrated over time
    most_running: int = 0  # sequences in one step of one engine
    most_kv_use: float = 0.0  # share of an engine's KV blocks held by running sequences, at most
    open_requests: tuple[float, ...] = ()  # mean number in each of NUM_BATCHES equal parts of the window
    stopped_early: bool = False  # whether the simulation was stopped before its end
    num_replicas: int = 1  # over which counts and times are sums, and `mean_kv_use` is the mean

    def add(self, other: "SimulationResult") -> None:
        """Add the steps of another engine, which ran at the same time."""
        self.busy_seconds += other.busy_seconds
        self.num_steps += other.num_steps
        self.num_step_tokens += other.num_step_tokens
        self.num_preemptions += other.num_preemptions
        self.num_evicted_blocks += other.num_evicted_blocks
        self.row_seconds += other.row_seconds
        self.block_seconds += other.block_seconds
        self.most_running = max(self.most_running, other.most_running)
        self.most_kv_use = max(self.most_kv_use, other.most_kv_use)

    @property
    def complete(self) -> list[RequestResult]:
        """Requests that have all their output."""
        return [one for one in self.requests if one.is_complete]

    @property
    def mean_running(self) -> float:
        """Mean number of running sequences."""
        return self.row_seconds / self.seconds if self.seconds else 0.0

    @property
    def mean_kv_use(self) -> float:
        """Mean share of KV blocks that running sequences hold."""
        return self.block_seconds / self.seconds / self.num_replicas if self.seconds else 0.0

    @property
    def request_rate(self) -> float:
        """Completed requests per second."""
        return len(self.complete) / self.seconds if self.seconds else 0.0

    @property
    def token_rate(self) -> float:
        """Output tokens of completed requests per second."""
        return sum(one.num_output for one in self.complete) / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the prefix cache had."""
        prompts = sum(one.num_prompt for one in self.requests)
        return sum(one.num_cached for one in self.requests) / prompts if prompts else 0.0

    @property
    def steady_rate(self) -> float:
        """Completed requests per second between the first and the last quarter of them."""
        ends = sorted(one.ended for one in self.complete)
        first, last = len(ends) // 4, len(ends) * 3 // 4
        seconds = ends[last] - ends[first] if ends else 0.0
        return (last - first) / seconds if seconds else self.request_rate

    @property
    def normalized_latency(self) -> float:
        """Mean of latency divided by output length, in seconds: the metric of Orca and of PagedAttention."""
        complete = [one for one in self.complete if one.num_output]
        return sum(one.latency / one.output_length for one in complete) / len(complete) if complete else inf

    def percentile(self, metric: Metric, share: float) -> float:
        """The value that `share` of all requests do not exceed. Requests that did not complete count as infinite."""
        values = sorted(
            getattr(one, metric) if one.is_complete else inf for one in self.requests if one.reason != "abort"
        )
        return values[min(len(values) - 1, int(share * len(values)))] if values else inf

    def figures(self) -> dict[str, float]:
        """The figures as plain numbers, for JSON."""
        found: dict[str, float] = {
            "requests": len(self.requests),
            "complete": len(self.complete),
            "seconds": self.seconds,
            "requests_per_second": self.request_rate,
            "output_tokens_per_second": self.token_rate,
            "mean_running": self.mean_running,
            "mean_kv_use": self.mean_kv_use,
            "hit_rate": self.hit_rate,
            "preemptions": self.num_preemptions,
            "steps": self.num_steps,
            "normalized_latency": self.normalized_latency,
        }
        for metric in get_args(Metric):
            for share in (0.5, 0.9, 0.99):
                found[f"{metric}_p{round(100 * share)}"] = self.percentile(metric, share)
        return found


NUM_BATCHES = 8  # equal parts of a window, whose means are compared


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a simulation that counts: requests that arrive in it, and its time."""

    start: float = 0.0  # seconds
    stop: float = inf

    def overlap(self, begin: float, end: float) -> float:
        """Seconds of [begin, end] in the window."""
        return max(0.0, min(end, self.stop) - max(begin, self.start))

    def mean_open(self, requests: Sequence[RequestResult]) -> tuple[float, ...]:
        """Mean number of requests that have arrived and not ended, in each of NUM_BATCHES equal parts."""
        edges = np.linspace(self.start, self.stop, NUM_BATCHES + 1)
        arrived, ended = (np.array([getattr(one, name) for one in requests]) for name in ("arrived", "ended"))
        overlaps = (
            np.clip(np.minimum(ended, stop) - np.maximum(arrived, start), 0, None) for start, stop in pairwise(edges)
        )
        return tuple((NUM_BATCHES * overlap.sum() / (self.stop - self.start)).item() for overlap in overlaps)
