"""Construction of an engine from its options.

The memory plan is computed and reported before the weights are loaded.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast

import msgspec
import torch

from quire.cache.kv_cache import KVCache
from quire.chat.detect import chat_format
from quire.config import (
    DEFAULT_POLICY,
    DEFAULT_WAIT_WEIGHT,
    CacheConfig,
    DType,
    EngineOptions,
    KVDType,
    SchedulerConfig,
    check_options,
    speculation_of,
)
from quire.core.capabilities import Capabilities
from quire.core.journal_file import open_journal, open_restart_journal
from quire.cost.memory_plan import (
    DEFAULT_SWAP_SPACE,
    HostPoolPlan,
    MemoryPlan,
    format_bytes,
    parse_swap_space,
    plan_host_pool,
    plan_memory,
)
from quire.cost.model_shape import ModelShape
from quire.cost.step_time import Calibration
from quire.engine.engine import Engine
from quire.engine.shared_prefixes import PrefixLimits, num_public_blocks, read_public_prefixes
from quire.errors import ConfigError
from quire.hub import embedded, packaged
from quire.hub.locate import locate
from quire.kernels.choose import Chosen, choose, unsupported_reason, usable_device
from quire.kernels.contract import Requirements
from quire.kernels.reference.quantized import QUANTIZED
from quire.lora.loader import AdapterLoader
from quire.lora.tables import AdapterTables
from quire.models.decoder import Decoder
from quire.models.description import ModelDescription
from quire.models.model import Model, Progress
from quire.models.sentence_transformers import EmbeddingConfig
from quire.runner.model_runner import TorchRunner
from quire.scheduler.journal import JournalledScheduler
from quire.scheduler.scheduler import Scheduler
from quire.startup.calibration import decode_ratio, measure
from quire.startup.calibration_cache import calibration_file, read_calibration, write_calibration
from quire.startup.freed_memory import return_freed_memory
from quire.startup.hardware import available_memory, num_cores, pick_device
from quire.startup.low_bits import choose_schemes
from quire.startup.memory_demand import make_cache_config, memory_profile, shape_of
from quire.startup.model_info import ModelInfo
from quire.startup.model_loading import ModelFiles, open_model
from quire.startup.replica_share import WHOLE, ReplicaShare
from quire.structured_outputs.grammar_compilation import GrammarCompiler, vocabulary_of
from quire.tokenizer.tokenizer import Tokenizer
from quire.weights.schemes import Schemes
from quire.weights.weight_cache import WeightCache

_NO_ADAPTERS = "enable_lora needs a model of quire's own decoder, and transformers runs this one; leave it out"
_PREFIX_AWARE_POLICIES = ("lpm", "cache-aware")
_LONGEST_CALIBRATION = 600.0  # seconds
_SAME_SPEED = 1.25  # ratio of decode steps up to which the costs of an earlier start are used


def check_policies(options: EngineOptions) -> None:
    """Raises ConfigError for options that contradict each other or have no effect, and says what to change."""
    if options.policy in _PREFIX_AWARE_POLICIES and not options.enable_prefix_caching:
        raise ConfigError(
            f"policy {options.policy!r} orders requests by their prefix match; do not turn off "
            "enable_prefix_caching, or choose another policy"
        )
    if options.wait_weight is not None:
        if options.policy != "cache-aware":
            policy = options.policy or DEFAULT_POLICY
            raise ConfigError(f"wait_weight applies to policy 'cache-aware'; policy {policy!r} does not use it")
        if not 0 <= options.wait_weight < inf:
            raise ConfigError(f"wait_weight must be at least 0 and finite, not {options.wait_weight}")
    if options.eviction != "lru" and (not options.enable_prefix_caching or options.prefix_index != "radix"):
        instead = "do not turn off enable_prefix_caching" if not options.enable_prefix_caching else "use the radix one"
        raise ConfigError(f"eviction {options.eviction!r} needs the radix prefix index; {instead}, or leave it at lru")
    _check_preemption(options)
    if options.calibration is not None and not 0 <= options.calibration <= _LONGEST_CALIBRATION:
        raise ConfigError(f"calibration must be 0 to {_LONGEST_CALIBRATION:.0f} seconds, not {options.calibration}")


def _check_preemption(options: EngineOptions) -> None:
    has_swap_space = options.swap_space is not None and parse_swap_space(options.swap_space) > 0
    if options.preemption == "recompute" and has_swap_space:
        raise ConfigError(
            f"swap_space={options.swap_space} has no effect with preemption 'recompute'; leave out one of them"
        )


_DEFAULT_MEMORY_SHARES = {
    "cpu": 0.5,
    "cuda": 0.9,
}  # default share of available memory; a host has other users, a GPU has not
_THREADS_PER_CORE = 4  # of `threads` at most: more would only take turns
_TINY_WEIGHT_BYTES = 32 * 2**20  # bytes of weights that fit into the caches of one or two cores
_DTYPE_ALIASES: Mapping[str, str] = MappingProxyType({"float": "float32", "half": "float16", "fp8": "fp8_e4m3"})

Report = Callable[[str], None]  # receives a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Built(ModelInfo):
    """An engine with its tokenizer and model information."""

    engine: Engine
    tokenizer: Tokenizer
    share: ReplicaShare  # with the available memory and the costs that were found


class OpenFiles(NamedTuple):
    """A model's name, the path of its files, and what was read from them."""

    name: str
    path: Path
    files: ModelFiles


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """All decisions that are made before the weights are loaded."""

    name: str
    path: Path
    files: ModelFiles
    kernels: Chosen
    device: str
    dtype: str
    schemes: Schemes  # of low-bit weights
    plan: MemoryPlan
    cache: CacheConfig
    scheduler_config: SchedulerConfig
    options: EngineOptions  # resolved; `memory` is the default share if none was given
    share: ReplicaShare  # with the available memory


def build(
    options: EngineOptions,
    *,
    report: Report,
    progress: Progress,
    is_restart: bool = False,
    share: ReplicaShare = WHOLE,
) -> Built:
    """Resolve `options`, report the memory plan, load the weights, and assemble the engine.

    report: receives lines. progress(done, total): receives bytes, first of downloaded files, then of loaded weights.
    is_restart: whether the engine replaces one that ended, so that it needs a journal file of its own.
    share: the part of the machine that the engine may use. Bytes and threads that options name are for each replica.
    Raises ConfigError, ModelError.
    """
    prepared = prepare(options, report=report, progress=progress, share=share)
    limits, cache, description = prepared.scheduler_config, prepared.cache, prepared.files.description
    grammars = _grammar_compiler(prepared)
    with ExitStack() as on_error:
        # of the first engine before the weights, so that a bad path fails early; of a restart after them, so that
        # failed restarts leave no files
        scheduler = None if is_restart else _scheduler(prepared, grammars, is_restart=False)
        if scheduler is not None:
            on_error.callback(scheduler.close)
        kernels = prepared.kernels.kernels
        weights = None if options.weight_cache is None else WeightCache(Path(options.weight_cache), report)
        model = prepared.files.load(prepared.dtype, prepared.device, kernels, prepared.schemes, progress, weights)
        return_freed_memory()  # loading makes temporary copies
        scheduler = scheduler or _scheduler(prepared, grammars, is_restart=True)
        adapters = _adapters(prepared, model) if options.enable_lora else None
        runner = TorchRunner(
            model,
            prepared.kernels.kernels,
            cache=cache,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            deterministic_kernels=prepared.kernels.deterministic,
            generates=description.generates,
            adapters=None if adapters is None else adapters.loaded,
        )
        costs = _calibrate(scheduler, runner, prepared, report)
        if costs is not None or prepared.options.target_tpot_ms is not None:
            report(f"tpot       {_tpot_line(scheduler, prepared.options)}")
        on_error.pop_all()
    engine = Engine(
        scheduler,
        runner,
        vocab_size=description.vocab_size,
        eos_token_ids=description.eos_token_ids,
        seed=options.seed,
        prerequisites=(grammars,),
        adapter_loader=adapters,
    )
    return Built(
        engine=engine,
        tokenizer=prepared.files.tokenizer,
        share=msgspec.structs.replace(prepared.share, costs=costs),
        model_name=prepared.name,
        architecture=description.architecture,
        num_parameters=description.num_parameters,
        weight_bytes=description.weight_bytes(prepared.dtype, prepared.schemes),
        classification=description.classification,
        generates=description.generates,
        embedding=prepared.files.embedding,
        path=str(prepared.path),
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        num_end_tokens=engine.num_end_tokens,
        hidden_size=description.hidden_size,
        sampling_defaults=description.sampling_defaults,
        options=prepared.options,
        cache=cache,
    )


def prepare(options: EngineOptions, *, report: Report, progress: Progress, share: ReplicaShare = WHOLE) -> Prepared:
    """Find or download the model's files, choose kernels and dtypes, and plan the memory. Loads no weights.

    report, progress, share: as in `build`. Raises ConfigError, ModelError.
    """
    _check_replicas(options, share.count)
    return prepare_files(options, open_files(options, report=report, progress=progress), report=report, share=share)


def _check_replicas(options: EngineOptions, count: int) -> None:
    if count == 1:
        return
    if (device := pick_device(options.device)).startswith("cuda"):
        raise ConfigError(
            f"data_parallel_size needs CPU engines, and the device is {device!r}: use --device cpu, or leave "
            "data_parallel_size out"
        )
    if count > num_cores():
        raise ConfigError(
            f"data_parallel_size: {count} replicas need a core each, and this process may use {num_cores()}; lower "
            "data_parallel_size"
        )


def open_files(options: EngineOptions, *, report: Report, progress: Progress) -> OpenFiles:
    """Find or download the model's files, and read its description and tokenizer. Raises ConfigError, ModelError."""
    check_options(options)
    check_policies(options)
    speculation_of(options)
    name, path = _locate_model(options, report, progress)
    return OpenFiles(name, path, open_model(path, options.model_impl, max_model_len=options.max_model_len))


def prepare_files(
    options: EngineOptions, opened: OpenFiles, *, report: Report, share: ReplicaShare = WHOLE
) -> Prepared:
    """Choose kernels and dtypes for a model, and plan the memory. Raises ConfigError, ModelError."""
    name, path, files = opened
    description = files.description
    device = pick_device(options.device)
    kinds = tuple(dict.fromkeys(description.kv_layers))
    head_dims = tuple({kind.head_dim for kind in kinds})
    dtype, kv_dtype = resolve_dtypes(options, description.dtype)
    state = next(iter(description.state_layers), None)
    requirements = Requirements(
        usable_device(device), dtype, kv_dtype, options.block_size, head_dims, kv_kinds=kinds, state_kind=state
    )
    requirements, dtype_line = _substitute_float16(options, requirements)
    dtype, kv_dtype = requirements.dtype, requirements.kv_dtype
    _check_block_size(options, requirements)
    if options.enable_lora and not isinstance(description, ModelDescription):
        raise ConfigError(_NO_ADAPTERS)
    schemes, chosen, schemes_line = choose_schemes(options, description, requirements)
    shape = _limited(shape_of(description, dtype, schemes), options, files.embedding)
    threads = _threads(options.threads, shape.weight_bytes, share.count)
    chosen.kernels.use_threads(threads)
    kept = "" if kv_dtype == dtype else f", keys and values in {kv_dtype}"
    report(f"{description.architecture} from {path}, {dtype} on {device}{kept}")
    report(f"model      {files.implementation}")
    if files.tokenizer.has_chat_template:
        format = chat_format(files.tokenizer.tool_template, options.tool_call_parser, options.reasoning_parser)
        report(f"chat       {format.reason}")
        for name, problem in files.tokenizer.template_errors.items():
            report(f"chat       conversations with the template {name!r:.80} are refused: {problem}")
    report(f"kernels    {chosen.reason}; {threads} threads")
    if files.embedding.source:
        report(f"embeddings {files.embedding}")
    if schemes_line:
        report(f"weights    {schemes_line}")
    if dtype_line:
        report(f"dtype      {dtype_line}")
    kind = torch.device(device).type
    swaps_beside = kind != "cpu" and options.preemption != "recompute"
    demand = memory_profile(shape, options, (dtype, kv_dtype), chosen.kernels, overlaps_swaps=swaps_beside)
    default_memory = _DEFAULT_MEMORY_SHARES[kind]
    of_all = available_memory(device) if share.available is None else share.available
    available = of_all // share.count
    if share.count > 1:
        parts = f"{threads} threads and {format_bytes(available)} of the {format_bytes(of_all)} available"
        report(f"replicas   {share.count}, each with {parts}")
    plan = plan_memory(
        demand,
        available=available,
        default_share=default_memory,
        limit=options.memory,
        # by default an engine on a host leaves memory that it does not need to other programs
        fill_budget=options.enable_prefix_caching and (options.memory is not None or kind == "cuda"),
        num_replicas=share.count,
    )
    for line in str(plan).splitlines():
        report(line)
    host_memory = available - sum(line.bytes for line in plan.lines) if kind == "cpu" else available_memory("cpu")
    host = _host_pool(options, plan, kind, host_memory, share.count)
    if host.line is not None:
        report(str(host.line))
    # a second step in flight overlaps planning with a device; without one it gains no time and may be discarded
    steps_in_flight = (2 if kind == "cuda" else 1) if options.steps_in_flight is None else options.steps_in_flight
    Capabilities().check_steps_in_flight(steps_in_flight)  # those of the runner, before the weights are loaded
    limits = scheduler_config_of(options, plan.max_model_len, steps_in_flight, lora_bytes=plan.lora_bytes)
    cache = _with_prefix_cache(make_cache_config(shape, kv_dtype, plan, host), options, files, limits)
    report(_prefix_cache_line(cache))
    resolved = replace(
        options,
        dtype=cast(DType, dtype),
        kv_cache_dtype=cast(KVDType, kv_dtype),
        max_model_len=limits.max_model_len,
        memory=options.memory or str(default_memory),
        kernels=chosen.kernels.NAME,
        steps_in_flight=steps_in_flight,
        policy=limits.policy,
        wait_weight=limits.wait_weight if options.policy == "cache-aware" else None,
        swap_space="0" if host.line is None else f"{host.line.bytes}B",
        calibration=options.calibration or 0.0,
        threads=threads,
        device=device,
    )
    found = msgspec.structs.replace(share, available=of_all)
    return Prepared(name, path, files, chosen, device, dtype, schemes, plan, cache, limits, resolved, found)


def _limited(shape: ModelShape, options: EngineOptions, embedding: EmbeddingConfig) -> ModelShape:
    """The shape with the longest sequence of an embedding model. Raises ConfigError for a longer max_model_len."""
    longest = min(shape.max_positions, embedding.max_length or shape.max_positions)
    if options.max_model_len is not None and longest < options.max_model_len <= shape.max_positions:
        raise ConfigError(
            f"max_model_len must be at most {longest}, not {options.max_model_len}: the model makes no vectors of "
            "longer texts (max_seq_length of sentence_bert_config.json, or model_max_length of tokenizer_config.json)"
        )
    return replace(shape, max_positions=longest)


def resolve_dtypes(options: EngineOptions, model_dtype: str) -> tuple[str, str]:
    """Dtypes of weights and computation, and of KV. model_dtype: the checkpoint's dtype. Raises ConfigError."""
    dtype = model_dtype if options.dtype == "auto" else _DTYPE_ALIASES.get(options.dtype, options.dtype)
    kv_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    kv_dtype = _DTYPE_ALIASES.get(kv_dtype, kv_dtype)
    if kv_dtype != dtype and kv_dtype not in QUANTIZED:
        raise ConfigError(
            f"kv_cache_dtype {kv_dtype!r} is not dtype {dtype!r}; "
            f"keys and values are stored in dtype, or in {', '.join(QUANTIZED)}"
        )
    return dtype, kv_dtype


def _substitute_float16(options: EngineOptions, requirements: Requirements) -> tuple[Requirements, str]:
    """The requirements of a float16 model in bfloat16, in which the C++ kernels compute it, and a line that says so.

    They stay as they are, with an empty line, for other models and where the C++ kernels would not run anyway. With
    options.dtype "float16" they stay, too, and the line says what that costs.
    """
    kv_dtype = "bfloat16" if options.kv_cache_dtype == "auto" else requirements.kv_dtype
    substitute = replace(requirements, dtype="bfloat16", kv_dtype=kv_dtype)
    if requirements.dtype != "float16" or options.kernels not in ("auto", "cpu"):
        return requirements, ""
    if unsupported_reason("cpu", requirements) is None or unsupported_reason("cpu", substitute) is not None:
        return requirements, ""
    if options.dtype != "auto":
        return requirements, "float16 runs in plain torch, which is slow; --dtype bfloat16 and float32 run in C++"
    why = "because the C++ kernels have no float16"
    how = "--dtype float32 keeps all bits of the weights, in twice the memory"
    return substitute, f"bfloat16 in place of the checkpoint's float16, {why}; {how}"


def _check_block_size(options: EngineOptions, requirements: Requirements) -> None:
    """Raise ConfigError if the block size alone makes plain torch compute, and the kernels were not named."""
    usual = replace(requirements, block_size=EngineOptions().block_size)
    if options.kernels != "auto" or choose("auto", requirements).kernels.NAME != "reference":
        return
    fast = choose("auto", usual).kernels.NAME
    if fast != "reference":
        raise ConfigError(
            f"{fast}: {unsupported_reason(fast, requirements)}. Use such a block_size; --kernels reference computes "
            "with any, in plain torch, which is slow"
        )


def scheduler_config_of(
    options: EngineOptions, max_model_len: int, steps_in_flight: int, *, lora_bytes: int = 0
) -> SchedulerConfig:
    """The scheduler's part of the options, with what the memory plan and the device have decided."""
    drafters, num_drafts = speculation_of(options)
    return SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max_model_len,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        step_seconds=options.step_seconds,
        target_tpot_seconds=None if options.target_tpot_ms is None else options.target_tpot_ms / 1000,
        watermark=options.watermark,
        steps_in_flight=steps_in_flight,
        policy=options.policy or DEFAULT_POLICY,
        preemption=options.preemption,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        speculation=drafters,
        num_speculative_tokens=num_drafts,
        wait_weight=DEFAULT_WAIT_WEIGHT if options.wait_weight is None else options.wait_weight,
        max_loras=options.max_loras if options.enable_lora else 0,
        lora_bytes=lora_bytes,
    )


def _threads(requested: int | None, weight_bytes: int, num_replicas: int) -> int:
    """Number of compute threads on the host of each replica. Raises ConfigError.

    The default for a tiny model is 1: it gains little from a second thread, and other programs slow down both. For
    other models replicas divide the cores.
    """
    threads = requested
    if threads is None:
        cores = min(torch.get_num_threads(), num_cores())
        threads = 1 if weight_bytes < _TINY_WEIGHT_BYTES else max(1, cores // num_replicas)
    if threads < 1:
        raise ConfigError(f"threads: must be at least 1, not {threads}")
    most = _THREADS_PER_CORE * (os.cpu_count() or 1)
    if threads > most:
        raise ConfigError(
            f"threads: must be at most {most} on this machine ({_THREADS_PER_CORE} for each core), not {threads}"
        )
    return threads


def _locate_model(options: EngineOptions, report: Report, progress: Progress) -> tuple[str, Path]:
    """The model name that requests use, and the path of its files."""
    if options.model is None:
        if options.revision is not None:
            raise ConfigError("revision applies to a model that is downloaded; name one, or leave it out")
        return embedded.NAME, embedded.folder()
    path = locate(
        options.model,
        revision=options.revision,
        offline=options.offline,
        cache_dir=options.download_dir,
        report=report,
        progress=progress,
    )
    if options.model in packaged.PACKAGED and path == packaged.PACKAGED[options.model].path(options.download_dir):
        return options.model, path
    if path.is_file():
        return path.stem, path
    if Path(options.model).expanduser().exists():
        return path.resolve().name, path
    return options.model, path


def _host_pool(options: EngineOptions, plan: MemoryPlan, kind: str, available: int, num_replicas: int) -> HostPoolPlan:
    """The host pool. A device that uses host memory has none by default, because swapping gains nothing there.

    available: bytes of host memory that the plan does not use. Raises ConfigError for preemption "swap" without a host
    pool.
    """
    if options.preemption == "recompute":
        return plan_host_pool(plan, asked="0", default=0, available=0)
    default = DEFAULT_SWAP_SPACE if kind == "cuda" else 0
    host = plan_host_pool(
        plan, asked=options.swap_space, default=default, available=available, num_replicas=num_replicas
    )
    if options.preemption == "swap" and host.line is None:
        raise ConfigError("preemption 'swap' needs a host pool; give swap_space, such as 4GiB")
    return host


def _calibrate(scheduler: Scheduler, runner: TorchRunner, prepared: Prepared, report: Report) -> Calibration | None:
    """Give the scheduler costs before the first request, and return them; None without the option `calibration`.

    They are those of the share. Without any they are those of an earlier start if a decode step is as fast as then, or
    are measured. Errors are reported only, as the cost model also learns from steps.
    """
    if (given := prepared.share.costs) is not None:
        scheduler.calibrate(given)
        report(f"costs      {scheduler.costs}; as the first replica measured them")
        return given
    if not prepared.options.calibration:
        return None
    options, limits, vocab_size = prepared.options, prepared.scheduler_config, prepared.files.description.vocab_size
    checkpoint = prepared.files.description.checkpoint
    file = None if options.weight_cache is None else calibration_file(options.weight_cache, checkpoint, options)
    known = None if file is None else read_calibration(file)
    if known is not None:
        ratio = decode_ratio(runner, prepared.cache, limits, known, vocab_size=vocab_size)
        if 1 / _SAME_SPEED <= ratio <= _SAME_SPEED:
            scheduler.calibrate(known)
            report(
                f"costs      {scheduler.costs}; of an earlier start, whose decode steps took {1 / ratio:.2f} of today's"
            )
            return known
    seconds = options.calibration or 0.0
    measured = measure(runner, prepared.cache, limits, vocab_size=vocab_size, seconds=seconds)
    scheduler.calibrate(measured.calibration)
    report(f"costs      {scheduler.costs}; {measured.quality}")
    if file is not None and measured.is_reliable:
        write_calibration(file, measured.calibration)
    return measured.calibration


def _tpot_line(scheduler: Scheduler, options: EngineOptions) -> str:
    budget, decode = scheduler.step_budget, scheduler.costs.decode_step_seconds
    target, longest = budget.target_seconds(1), budget.target_seconds(options.max_num_seqs)
    if target is None or longest is None:
        return "no target, because decode steps could not be measured; --target-tpot-ms sets one"
    line = f"target {1000 * target:.3g} ms between tokens while prompts are computed"
    if options.target_tpot_ms is None:
        more = f", up to {1000 * longest:.3g} ms while many sequences run" if longest > target else ""
        return f"{line}{more}; --target-tpot-ms sets another one"
    if target < 2 * decode:
        return f"{line}; steps can take longer, because a decode step alone takes {1000 * decode:.3g} ms"
    return line


def _with_prefix_cache(
    cache: CacheConfig, options: EngineOptions, files: ModelFiles, limits: SchedulerConfig
) -> CacheConfig:
    """The config with prefix index, public prefixes and eviction policy. Raises ConfigError."""
    if not options.enable_prefix_caching:
        if options.public_prefixes is not None:
            raise ConfigError("public_prefixes are stored in the prefix cache; do not turn off enable_prefix_caching")
        return cache
    public: tuple[tuple[int, ...], ...] = ()
    if options.public_prefixes is not None:
        vocab_size = files.description.vocab_size
        bounds = PrefixLimits(vocab_size, limits.max_model_len, cache.block_size)
        public = read_public_prefixes(options.public_prefixes, files.tokenizer, bounds)
    ends = {*files.description.eos_token_ids, files.tokenizer.eos_token_id} if cache.states is not None else ()
    turn_ends = frozenset(token for token in ends if token is not None)
    cache = replace(cache, prefix_index=options.prefix_index, eviction=options.eviction)
    return replace(cache, public_prefixes=public, turn_ends=turn_ends)


def _prefix_cache_line(cache: CacheConfig) -> str:
    kinds = {
        "radix": "radix index, exact to the token",
        "hash": f"hash index, whole blocks of {cache.block_size} tokens",
        "none": "no prefix cache: enable_prefix_caching is off",
    }
    num_blocks = num_public_blocks(cache.public_prefixes, cache.block_size)
    public = f"; {len(cache.public_prefixes)} public ones, {num_blocks} whole blocks of {cache.block_size} tokens"
    return f"prefixes   {kinds[cache.prefix_index]}{public if cache.public_prefixes else ''}"


def _grammar_compiler(prepared: Prepared) -> GrammarCompiler:
    tokenizer, description = prepared.files.tokenizer, prepared.files.description
    # not the description in the function: its checkpoint, with all texts of a GGUF header, would stay in memory
    vocab_size, eos_token_ids = description.vocab_size, description.eos_token_ids
    return GrammarCompiler(
        lambda: vocabulary_of(tokenizer, vocab_size, eos_token_ids),
        vocab_size,
        backend=prepared.options.grammar_backend,
        fast_forward=prepared.options.fast_forward == "on",
    )


def _adapters(prepared: Prepared, model: Model) -> AdapterLoader:
    """The loader of adapters for a model of quire's decoder, whose products get tables for them."""
    description = prepared.files.description
    if not isinstance(description, ModelDescription) or not isinstance(model, Decoder):
        raise ConfigError(_NO_ADAPTERS)
    tables = AdapterTables(model, prepared.kernels.kernels, prepared.options.max_loras)
    return AdapterLoader(description, prepared.dtype, tables, memory=prepared.plan.lora_bytes)


def _scheduler(prepared: Prepared, grammars: GrammarCompiler, *, is_restart: bool) -> Scheduler:
    limits, cache, journal = prepared.scheduler_config, prepared.cache, prepared.options.journal
    if journal is None:
        return Scheduler(limits, KVCache(cache), grammars.constraints)
    path = prepared.share.journal(journal)
    file = open_restart_journal(path) if is_restart else open_journal(path)
    if file is None:
        return Scheduler(limits, KVCache(cache), grammars.constraints)
    return JournalledScheduler(limits, KVCache(cache), file, grammars.constraints)
