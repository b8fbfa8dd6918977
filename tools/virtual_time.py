"""The real scheduler and KV cache in virtual time: a formula gives the duration of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, KVGroup, SchedulerConfig
from quire.core.request import Namespace, Request
from quire.core.scheduling_params import SchedulingParams
from quire.core.step import ChunkOutput, Step, StepResult
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.scheduler.scheduler import Scheduler

VOCAB = 32000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request with its arrival in seconds."""

    at: float
    request: Request


@dataclass(slots=True)
class Outcome:
    """Outcome of a request. Times are seconds of the virtual clock, None if the event did not happen."""

    tenant: str
    arrived: float
    first_token: float | None = None
    ended: float | None = None
    reason: str | None = None
    num_tokens: int = 0

    @property
    def wait(self) -> float:
        """Seconds to the first token; infinite without one."""
        return float("inf") if self.first_token is None else self.first_token - self.arrived


def request(
    request_id: str,
    prompt: list[int],
    num_output_tokens: int,
    *,
    tenant: str = "",
    scheduling_params: SchedulingParams | None = None,
) -> Request:
    """A greedy request with a fixed output length."""
    params = SamplingParams(max_tokens=num_output_tokens, seed=0, ignore_eos=True, temperature=0.0)
    return Request(
        id=request_id,
        prompt=prompt,
        params=params,
        namespace=Namespace(tenant),
        scheduling_params=scheduling_params or SchedulingParams(),
    )


def memory(num_blocks: int, block_size: int = 16, prefix_index: str = "radix") -> CacheConfig:
    """One KV group. Its sizes in bytes have no effect."""
    group = KVGroup((0,), "full", 1, 64, "bfloat16", num_blocks, 2 * 64 * 2 * block_size)
    return CacheConfig(block_size, (group,), prefix_index)


def limits(policy: str = "fcfs", **changed: object) -> SchedulerConfig:
    """A scheduler configuration."""
    options: dict[str, object] = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_model_len": 2048,
        "step_seconds": 1e9,
        "watermark": 0.01,
        "steps_in_flight": 1,
    }
    return SchedulerConfig(**(options | changed), policy=policy)  # type: ignore[arg-type]


def result_of(step: Step, seconds: float) -> StepResult:
    """One token per sampling chunk, which is a function of its sequence and position."""
    counts = (step.chunks.outputs == int(ChunkOutput.SAMPLE)).astype(np.int32)
    samples = counts.astype(bool)
    tokens = (step.chunks.seq_ids[samples] * 7919 + step.chunks.stops[samples] * 31) % VOCAB
    return StepResult(step.id, seconds, counts, tokens.astype(np.int32))


class Server:
    """Runs requests as they arrive."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, seconds_of: Callable[[int], float]) -> None:
        """seconds_of: duration of a step, from its number of tokens."""
        self.scheduler = Scheduler(config, KVCache(cache))
        self.now = 0.0
        self.outcomes: dict[str, Outcome] = {}
        self.refused: list[str] = []
        self.num_steps = 0
        self._seconds_of = seconds_of

    def run(self, arrivals: Sequence[Arrival], until: float = float("inf")) -> dict[str, Outcome]:
        """Run all requests, or until `until`."""
        at = 0
        while self.now < until:
            while at < len(arrivals) and arrivals[at].at <= self.now:
                self.add(arrivals[at])
                at += 1
            if not self.scheduler.has_work:
                if at == len(arrivals):
                    break
                self.now = arrivals[at].at
                continue
            self.step()
        return self.outcomes

    def add(self, one: Arrival) -> None:
        """Add a request, which may be rejected."""
        try:
            self.scheduler.add(one.request, one.at)
        except RequestError:
            self.refused.append(one.request.id)
            return
        self.outcomes[one.request.id] = Outcome(one.request.namespace.tenant, one.at)

    def step(self) -> None:
        """Plan a step, advance the clock by its duration, commit it."""
        step = self.scheduler.plan(self.now)
        outputs = self.scheduler.take_ended()
        if step is not None:
            seconds = self._seconds_of(step.num_tokens)
            self.now += seconds
            self.num_steps += 1
            outputs += self.scheduler.commit(result_of(step, seconds), self.now)
        elif not outputs:
            raise AssertionError("nothing can run, and somebody waits")
        for output in outputs:
            outcome = self.outcomes[output.request_id]
            outcome.num_tokens += len(output.token_ids)
            if output.token_ids and outcome.first_token is None:
                outcome.first_token = self.now
            if output.finish_reason is not None:
                outcome.ended, outcome.reason = self.now, output.finish_reason


def poisson(rng: np.random.Generator, rate: float, seconds: float) -> list[float]:
    """Random arrival times, `rate` per second on average."""
    gaps = rng.exponential(1 / rate, size=int(rate * seconds * 1.5) + 20)
    return [at for at in accumulate(gaps.tolist()) if at < seconds]
