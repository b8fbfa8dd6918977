"""Small schedulers and caches for tests and benchmarks, and the simulator over them with steps of a simple length."""

from itertools import accumulate
from zlib import crc32

import numpy as np
from kv_groups import kv_group

from quire.config import CacheConfig, SchedulerConfig
from quire.core.request import Namespace, Request
from quire.core.scheduling_params import SchedulingParams
from quire.core.step import ChunkOutput, Step, StepResult
from quire.cost.latency_profile import AttentionTime, LatencyProfile
from quire.params import SamplingParams
from quire.planner.simulated_engine import EngineSetup
from quire.planner.simulation import Simulation

VOCAB = 32000


def request(
    request_id: str,
    prompt: list[int],
    num_output_tokens: int,
    *,
    tenant: str = "",
    scheduling_params: SchedulingParams | None = None,
) -> Request:
    """A greedy request with a fixed output length. The simulator's tokens depend on its seed, which is its own."""
    seed = crc32(request_id.encode())
    params = SamplingParams(max_tokens=num_output_tokens, seed=seed, ignore_eos=True, temperature=0.0)
    return Request(
        id=request_id,
        prompt=prompt,
        params=params,
        namespace=Namespace(tenant),
        scheduling_params=scheduling_params or SchedulingParams(),
    )


def memory(num_blocks: int, block_size: int = 16, prefix_index: str = "radix") -> CacheConfig:
    """One KV group. Its sizes in bytes have no effect."""
    group = kv_group((0,), 1, 64, "bfloat16", num_blocks, 2 * 64 * 2 * block_size)
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
    """For a scheduler that runs alone: one token per sampling chunk, a function of its sequence and position."""
    counts = (step.chunks.outputs == int(ChunkOutput.SAMPLE)).astype(np.int32)
    samples = counts.astype(bool)
    tokens = (step.chunks.seq_ids[samples] * 7919 + step.chunks.stops[samples] * 31) % VOCAB
    return StepResult(step.id, seconds, counts, tokens.astype(np.int32))


def simulated(scheduler: SchedulerConfig, cache: CacheConfig, fixed: float, per_token: float = 0.0) -> Simulation:
    """The simulator with steps of `fixed` seconds and `per_token` seconds for each of their tokens."""
    profile = LatencyProfile(
        model="none",
        device="none",
        source="a formula",
        fixed=fixed,
        per_chunk=0.0,
        linear=((1.0, per_token),),
        attention=(AttentionTime(0, 0.0, 0.0),) * len(cache.groups),
        seconds_per_byte=0.0,
    )
    return Simulation(EngineSetup(scheduler=scheduler, cache=cache, profile=profile, vocab_size=VOCAB))


def poisson(rng: np.random.Generator, rate: float, seconds: float) -> list[float]:
    """Random arrival times, `rate` per second on average."""
    gaps = rng.exponential(1 / rate, size=int(rate * seconds * 1.5) + 20)
    return [at for at in accumulate(gaps.tolist()) if at < seconds]
