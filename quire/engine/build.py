"""From options to a running engine: resolve, plan the memory, say so, and only then load."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, EngineOptions, KVGroup, SchedulerConfig
from quire.core.runner import Runner
from quire.cost.memory import Demand, MemoryPlan, plan_memory
from quire.engine import embedded
from quire.engine.engine import Engine
from quire.engine.machine import available_memory, pick_device
from quire.engine.tokenizer import Tokenizer
from quire.errors import ConfigError
from quire.kernels.choose import choose
from quire.kernels.contract import DTYPES
from quire.models.description import ModelDescription, describe
from quire.models.loading import load
from quire.runner.torch_runner import TorchRunner
from quire.sched.journal import JournalledScheduler
from quire.sched.scheduler import Scheduler

_SHARES = {"cpu": 0.5, "cuda": 0.9}  # of the memory available: a host is shared with others, a GPU is not
_LOGIT_COPIES = 4  # logits, their filtered and sorted forms, and random numbers, in float32
_PLACE = re.compile(r" - at `\$\.(\w+)`$")


@dataclass(frozen=True, slots=True)
class Built:
    """An engine and what its front end needs to know."""

    engine: Engine
    tokenizer: Tokenizer
    model_name: str


def build(options: EngineOptions, *, report: Callable[[str], None], progress: Callable[[int, int], None]) -> Built:
    """Resolve `options`, report the plan line by line, load the weights, and put the floors together.

    progress(done, total) is called in bytes while weights stream in. Raises ConfigError, ModelError.
    """
    _check(options)
    folder = embedded.folder() if options.model is None else Path(options.model)
    description = describe(folder)
    tokenizer = Tokenizer.from_folder(folder)
    device = pick_device(options.device)
    kernels, kernel_reason = choose(options.kernels, device)
    dtype = description.dtype if options.dtype == "auto" else options.dtype
    kv_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    if kv_dtype != dtype:
        raise ConfigError(
            f"kv_cache_dtype {kv_dtype!r} differs from dtype {dtype!r}; only equal types are supported yet"
        )
    report(f"{description.architecture} from {folder}, {dtype} on {device}")
    report(f"kernels    {kernel_reason}")
    demand = _demand(description, options, dtype, kernels.SCRATCH_BYTES)
    share = _SHARES[torch.device(device).type]
    plan = plan_memory(demand, available=available_memory(device), default_share=share, limit=options.memory)
    for line in str(plan).splitlines():
        report(line)
    cache = CacheConfig(options.block_size, (_kv_group(description, kv_dtype, plan, demand.kv_bytes_per_token),))
    limits = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        step_seconds=options.step_seconds,
        watermark=options.watermark,
        steps_in_flight=options.steps_in_flight,
    )
    scheduler = _scheduler(limits, cache, options.journal)  # before the weights: a bad path should not cost them
    model = load(description, kernels, dtype=dtype, device=device, progress=progress)
    runner: Runner = TorchRunner(
        model, kernels, cache=cache, max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len
    )
    engine = Engine(
        scheduler,
        runner,
        vocab_size=description.config.vocab_size,
        eos_token_ids=description.eos_token_ids,
        seed=options.seed,
    )
    name = embedded.NAME if options.model is None else folder.resolve().name
    return Built(engine, tokenizer, name)


def _check(options: EngineOptions) -> None:
    """Options may come from anywhere; a wrong type or a value out of bounds is a ConfigError that names the option."""
    try:
        msgspec.convert(asdict(options), EngineOptions)
    except msgspec.ValidationError as error:
        message = str(error)
        place = _PLACE.search(message)
        option = f"{place[1]}: " if place else ""
        raise ConfigError(option + _PLACE.sub("", message)) from error


def _demand(description: ModelDescription, options: EngineOptions, dtype: str, scratch_bytes: int) -> Demand:
    config = description.config
    width = DTYPES[dtype].itemsize
    kv_per_layer = 2 * config.num_kv_heads * config.head_dim * width
    length = options.max_model_len or config.max_positions
    activations = 4 * config.hidden_size + 3 * config.intermediate_size + 3 * config.num_heads * config.head_dim
    return Demand(
        weight_bytes=description.num_parameters * width,
        weight_reason=f"{description.num_parameters / 1e6:.2f} M parameters x {width} B ({dtype})",
        kv_bytes_per_token=config.num_layers * kv_per_layer,
        kv_reason=f"{config.num_layers} layers x 2 x {config.num_kv_heads} heads x {config.head_dim} x {width} B",
        block_size=options.block_size,
        model_max_len=config.max_positions,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        workspace_bytes_per_token=activations * 4,
        workspace_bytes_per_seq=config.vocab_size * 4 * _LOGIT_COPIES + (length + -(-length // options.block_size)) * 4,
        scratch_bytes=min(max(scratch_bytes, length * kv_per_layer), options.max_num_seqs * length * kv_per_layer),
    )


def _kv_group(description: ModelDescription, dtype: str, plan: MemoryPlan, bytes_per_token: int) -> KVGroup:
    config = description.config
    return KVGroup(
        layers=tuple(range(config.num_layers)),
        kind="full",
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        num_blocks=plan.num_blocks,
        bytes_per_block=bytes_per_token * plan.block_size,
    )


def _scheduler(limits: SchedulerConfig, cache: CacheConfig, journal: str | None) -> Scheduler:
    if journal is None:
        return Scheduler(limits, KVCache(cache))
    try:
        file = open(journal, "xb")  # noqa: SIM115  (open as long as the scheduler lives)
    except FileExistsError as error:
        raise ConfigError(f"the journal {journal!r} exists; name another file, or move it away") from error
    except OSError as error:
        raise ConfigError(f"the journal {journal!r} cannot be written: {error.strerror}") from error
    return JournalledScheduler(limits, KVCache(cache), file)
