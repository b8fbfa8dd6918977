"""What a workload needs of a device by means alone: the rate to begin a search at, and the sizes of separate pools.

All requests count as the mean request, and steps follow each other without a gap. So queues, bursts and long requests
are left out; a simulation has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

from quire.cost.latency_profile import LatencyProfile
from quire.cost.step_work import StepWork
from quire.planner.simulated_engine import EngineSetup
from quire.planner.workloads import Session, context_lengths

_LEAST_RATE, _MOST_RATE = 1e-4, 1e5  # requests per second
_PROMPT_CHUNK = 2048  # tokens of a step of a device that computes prompts only
_ITERATIONS = 60


@dataclass(frozen=True, slots=True)
class Demand:
    """The mean request of a workload."""

    prompt: float  # tokens that the prefix cache does not have
    output: float  # tokens of all its sequences
    context: float  # positions that a decoded token attends to
    longest: tuple[int, int]  # (prompt, output) of the request with most output, and then with most prompt

    def longest_seconds(self, profile: LatencyProfile, token_seconds: float) -> float:
        """Seconds of the longest request if no step waits, at `token_seconds` per output token."""
        prompt, output = self.longest
        return profile.prefill_seconds(prompt) + output * token_seconds


def demand_of(sessions: Sequence[Session], setup: EngineSetup, cached_share: float) -> Demand:
    """The mean request. cached_share: share of prompt tokens that the prefix cache has."""
    prompts = outputs = reads = requests = 0
    longest = (0, 0)
    for session in sessions:
        for turn, (prompt, output) in zip(session.turns, context_lengths(session), strict=True):
            total = output * setup.num_sequences(turn)
            requests += 1
            prompts += prompt
            outputs += total
            reads += total * (2 * prompt + output)  # twice the sum of the contexts
            longest = max(longest, (output, prompt))
    requests, decoded = max(1, requests), max(1, outputs)
    return Demand((1 - cached_share) * prompts / requests, outputs / requests, reads / 2 / decoded, longest[::-1])


def step_seconds(setup: EngineSetup, demand: Demand, rate: float) -> float:
    """Mean seconds of a step at a rate; infinite if the device, its rows, its KV blocks or the token budget are short.

    Little's law: rate x output tokens x step seconds sequences decode. The step time is the least fixed point.
    """
    limits, profile = setup.scheduler, setup.profile
    rows = min(limits.max_num_seqs, kv_rows(setup, demand.context))
    seconds = profile.decode_seconds(1)
    for _ in range(_ITERATIONS):
        decoding, prompts = rate * demand.output * seconds, rate * demand.prompt * seconds
        if decoding > rows or decoding + prompts > limits.max_num_batched_tokens:
            return inf
        num_chunks = max(1, round(decoding))
        kv = [round(decoding * min(demand.context, window or inf)) for window in profile.windows]
        pairs = [prompts * min(demand.prompt, window or inf) / 2 for window in profile.windows]
        work = StepWork(num_chunks + round(prompts), num_chunks, tuple(pairs), tuple(kv))
        before, seconds = seconds, profile.seconds(work) + profile.per_sequence * rate * seconds
        if abs(seconds - before) < 1e-3 * before:
            break
    return seconds


def kv_rows(setup: EngineSetup, context: float) -> int:
    """How many sequences of `context` tokens the KV blocks hold, at least 1."""
    cache = setup.cache
    sizes = (group.kind.attended(context) for group in cache.groups)
    held = (
        group.num_blocks * cache.block_size / max(1.0, size) for group, size in zip(cache.groups, sizes, strict=True)
    )
    return max(1, int(min(held)))


def rate_bound(setup: EngineSetup, demand: Demand, most_step_seconds: float = inf) -> float:
    """The highest rate in requests per second whose steps take at most `most_step_seconds`. About 1e-4 if none does."""
    low, high = _LEAST_RATE, _MOST_RATE
    while high / low > 1.01:
        middle = sqrt(low * high)
        seconds = step_seconds(setup, demand, middle)
        if seconds <= most_step_seconds and seconds < inf:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Pools:
    """Seconds of a device per request, if some devices compute prompts and others decode."""

    prefill: float
    decode: float
    rows: int  # sequences that decode at once

    @property
    def ratio(self) -> float:
        """Decode devices per prefill device."""
        return self.decode / self.prefill if self.prefill else inf


def pools_of(setup: EngineSetup, demand: Demand, most_step_seconds: float = inf) -> Pools:
    """The device time of prompts and of decoding, with as many rows as fit and keep `most_step_seconds`."""
    profile, context = setup.profile, round(demand.context)
    low, high = 1, min(setup.scheduler.max_num_seqs, kv_rows(setup, demand.context)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if profile.decode_seconds(middle, context) <= most_step_seconds:
            low = middle
        else:
            high = middle
    decode = demand.output * profile.decode_seconds(low, context) / low
    chunk = StepWork(
        _PROMPT_CHUNK, 1, tuple(_PROMPT_CHUNK * demand.prompt / 2 for _ in profile.windows), (0,) * len(profile.windows)
    )
    return Pools(demand.prompt * profile.seconds(chunk) / _PROMPT_CHUNK, decode, low)
