"""The simulated engines of the rows, and the search for the rate that one sustains."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from quire.config import EngineOptions, SchedulerConfig
from quire.core.kv_groups import kv_kind
from quire.cost.devices import find_device
from quire.cost.latency_profile import LatencyProfile, roofline_profile
from quire.cost.memory_plan import HostPoolPlan, MemoryPlan
from quire.kernels.reference import REFERENCE
from quire.planner.baselines import baseline_setup
from quire.planner.kv_meter import KVMeter
from quire.planner.results import SimulationResult
from quire.planner.setup import find_model
from quire.planner.simulated_engine import EngineSetup, NewCache, paged_cache
from quire.planner.simulation import Simulation
from quire.planner.workloads import Part, Session, Turn, Workload, with_arrivals
from quire.startup.memory_demand import compute_shape_of, make_cache_config, memory_profile, shape_of

PAGED = "paged"
OPT_13B_SLOTS = 15_700  # tokens of KV beside OPT-13B on an A100-40GB: Kwon et al., 2023, table 1
LATENCY_LIMIT = 0.1  # seconds per output token, request latency over output length: about 4 times that without load
_TOLERANCE = 0.06
_MOST_OVER_START = 64.0  # of a rate


@dataclass(frozen=True, slots=True)
class Engine:
    """A model on a device, with a number of KV blocks."""

    model: str
    device: str
    num_tokens: int  # of the KV pool
    max_model_len: int = 2048
    max_num_seqs: int = 256
    block_size: int = 16
    quantization: str | None = None
    num_devices: int = 1  # as one device with all their rates: their communication takes no time

    @property
    def profile(self) -> LatencyProfile:
        """Step times by rooflines."""
        model = find_model(EngineOptions(model=self.model))
        dtype, description = model.description.dtype, model.description
        shape = compute_shape_of(description, dtype, dtype, description.schemes(self.quantization))
        one, count = find_device(self.device), self.num_devices
        flops = {name: count * rate for name, rate in one.flops.items()}
        return roofline_profile(
            self.model, replace(one, bytes_per_second=count * one.bytes_per_second, flops=flops), shape
        )

    def setup(self, *, prefix_index: bool = False, num_samples: int = 1) -> EngineSetup:
        """The engine with paged memory, without speculation and swapping."""
        description = find_model(EngineOptions(model=self.model)).description
        shape, dtype = shape_of(description, description.dtype), description.dtype
        options = EngineOptions(model=self.model, block_size=self.block_size, max_model_len=self.max_model_len)
        profile = memory_profile(shape, options, (dtype, dtype), REFERENCE)
        plan = MemoryPlan(profile, (), (self.num_tokens // self.block_size,), self.max_model_len, "")
        cache = make_cache_config(shape, dtype, plan, HostPoolPlan((0,), None))
        scheduler = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max(2048, self.max_num_seqs),
            max_model_len=self.max_model_len,
            step_seconds=1e3,
            watermark=0.01,
            steps_in_flight=1,
            preemption="recompute",
        )
        cache = replace(cache, prefix_index="radix" if prefix_index else "none")
        return EngineSetup(
            scheduler=scheduler,
            cache=cache,
            profile=self.profile,
            vocab_size=description.vocab_size,
            num_samples=num_samples,
        )


OPT_13B = Engine("opt-13b", "A100-40GB", OPT_13B_SLOTS)
OPT_175B = Engine("opt-175b", "A100-80GB", 60_100, num_devices=8)  # slots: the same table
QWEN_05B = Engine("qwen2.5-0.5b", "A100-40GB", 1 << 20)  # more memory than 256 sequences need
# Document 001: 35 GB of weights in 4 bits on 80 GB, 42 GB of KV
LLAMA_70B = Engine("llama-2-70b", "A100-80GB", 42_000_000_000 // 327_680, max_model_len=2048, quantization="int4")


def kv_bytes_per_token(model: str) -> int:
    """Bytes of KV of one token, in the model's dtype."""
    (group,) = Engine(model, "H100", 2**16).setup().cache.groups
    return group.bytes_per_block // 16


def kv_bytes_of_layers(num_layers: int, num_kv_heads: int) -> int:
    """Bytes of KV of one token by the memory plan: layers with heads of 128 numbers in fp16."""
    description = find_model(EngineOptions(model="llama-2-70b")).description
    layers = (kv_kind(num_kv_heads, 128),) * num_layers
    shape = replace(shape_of(description, "float16"), layers=layers)
    profile = memory_profile(shape, EngineOptions(), ("float16", "float16"), REFERENCE)
    return sum(kv.bytes_per_token for kv in profile.kv)


def run(
    setup: EngineSetup, memory: str, workload: Workload, *, meter: KVMeter | None = None, until: float = inf
) -> SimulationResult:
    """A workload with paged memory, or with a baseline's."""
    new_cache: NewCache = paged_cache
    if memory != PAGED:
        setup, new_cache = baseline_setup(setup, memory)
    if memory == "static":  # the whole batch is admitted at once
        scheduler = replace(setup.scheduler, max_num_batched_tokens=2**16)
        setup = replace(setup, scheduler=scheduler)
    return Simulation(setup, new_cache=new_cache, on_step=meter).run(workload, until=until)


def sustained(
    setup: EngineSetup, memory: str, workload: Workload, *, start: float, seed: int, quick: bool = False
) -> float:
    """The highest rate in requests per second with a mean normalized latency of at most LATENCY_LIMIT.

    start: where the search begins. quick: a figure without meaning. Raises AssertionError if the requests are too few
    to fill a queue, so that the rate has no limit.
    """
    if quick:
        return start * run(setup, memory, with_arrivals(workload, start, seed=seed)).normalized_latency

    def keeps(rate: float) -> bool:
        return run(setup, memory, with_arrivals(workload, rate, seed=seed)).normalized_latency <= LATENCY_LIMIT

    low, high = start, inf
    while not keeps(low):  # it ends: a request that runs alone is within the limit
        high, low = low, low / 2
    while high == inf:
        if low > start * _MOST_OVER_START:
            raise AssertionError("too few requests to fill a queue")
        if keeps(low * 2):
            low *= 2
        else:
            high = low * 2
    while high / low > 1 + _TOLERANCE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def equal_requests(count: int, num_prompt: int, num_output: int, *, shared: int = 0) -> list[Session]:
    """Requests that arrive at once, with `shared` tokens in common at their begin."""
    prefix = (Part(7, shared),) if shared else ()
    return [Session(0.0, (Turn((*prefix, Part(1000 + i, num_prompt - shared)), num_output),)) for i in range(count)]


def closed_loop(workload: Sequence[Session], clients: int) -> list[Session]:
    """The requests as turns of `clients` sessions: each client sends its next request when the one before has ended."""
    turns = [turn for session in workload for turn in session.turns]
    return [Session(0.0, tuple(turns[i::clients])) for i in range(min(clients, len(turns)))]
