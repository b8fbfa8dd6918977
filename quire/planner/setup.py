"""The engine that options make on a device: memory plan, scheduler, cache and latency profile, without weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from quire.config import EngineOptions, check_options, with_queue_limits
from quire.cost.devices import Device, find_device
from quire.cost.latency_profile import LatencyProfile, read_profile, roofline_profile
from quire.cost.memory_plan import DEFAULT_SWAP_SPACE, HostPoolPlan, MemoryPlan, plan_host_pool, plan_memory
from quire.errors import ConfigError, ModelError, nearest
from quire.hub import embedded
from quire.hub.locate import locate_config
from quire.kernels.choose import MODULES
from quire.kernels.contract import Kernels
from quire.models.description import ModelDescription, describe
from quire.planner.simulated_engine import EngineSetup
from quire.planner.traces import approximate_tokens
from quire.startup.build import check_policies, resolve_dtypes, scheduler_config_of
from quire.startup.hardware import available_memory
from quire.startup.memory_demand import compute_shape_of, make_cache_config, memory_profile, shape_of
from quire.tokenizer.gguf import read_gguf_tokenizer
from quire.tokenizer.tokenizer import Tokenizer
from quire.weights.checkpoint import ConfigCheckpoint
from quire.weights.gguf.checkpoint import GgufCheckpoint

GPU_MEMORY_SHARE = 0.9  # as in `quire serve`
CPU_MEMORY_SHARE = 0.5
_HOST_MEMORY = 2**40  # bytes of the host of a named device: no limit of swap space
_CONFIGS = Path(str(files("quire"))) / "assets" / "model_configs"
_BITS_AT_LOAD: Mapping[int, str] = {4: "int4", 8: "int8"}


@dataclass(frozen=True, slots=True, eq=False)
class PlannedModel:
    """A model that is described by its config.json, or by the header of its .gguf file."""

    name: str
    path: Path  # of a folder, a config.json or a .gguf file
    description: ModelDescription
    quantization: str | None  # of its checkpoint's weights, as the scheme that comes nearest; None: in its dtype

    def tokenize(self) -> Callable[[str], list[int]]:
        """The function that makes tokens of texts: of the model's tokenizer if it is there, else an approximation."""
        folder = self.path if self.path.is_dir() else self.path.parent
        if self.path.suffix == ".gguf":
            tokenizer = read_gguf_tokenizer(self.path)
        elif (folder / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_folder(folder)
        else:
            vocab_size = self.description.vocab_size
            return lambda text: approximate_tokens(text, vocab_size)
        return lambda text: tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedEngine:
    """An engine on a device, as `quire serve` would make it, without its weights."""

    model: PlannedModel
    device: str
    options: EngineOptions
    memory: MemoryPlan
    host: HostPoolPlan
    setup: EngineSetup
    notes: tuple[str, ...]  # what the plan does not know
    is_estimated: bool = False  # whether no step of quire has been measured on the device


def known_configs() -> list[str]:
    """Names of models whose config.json is part of quire."""
    return sorted(path.stem for path in _CONFIGS.glob("*.json"))


def find_model(options: EngineOptions) -> PlannedModel:
    """The model of the options, described by its config or .gguf header alone.

    It is a folder, a .gguf file, one of `known_configs`, a packaged model that is downloaded, or an id on the Hub.
    Raises ModelError.
    """
    name = options.model
    if name is None:
        return _described(embedded.NAME, embedded.folder(), options)
    named = _CONFIGS / f"{name.lower()}.json"
    if name.lower() in known_configs():
        return _described(name.lower(), named, options)
    try:
        place = locate_config(name, revision=options.revision, offline=options.offline, cache_dir=options.download_dir)
    except ModelError as error:
        hint = nearest(name.lower(), known_configs())
        raise ModelError(f"{error}; configs that are part of quire: {', '.join(known_configs())}{hint}") from error
    return _described(name if not Path(name).exists() else place.resolve().name, place, options)


def _described(name: str, place: Path, options: EngineOptions) -> PlannedModel:
    if place.suffix == ".gguf" and place.is_file():
        description = describe(GgufCheckpoint(place), max_model_len=options.max_model_len)
        return PlannedModel(name, place, description, None)  # the description has the types of the weights
    checkpoint = ConfigCheckpoint(place)
    description = describe(checkpoint, max_model_len=options.max_model_len)
    return PlannedModel(name, place, description, _quantization_of(checkpoint.quantization_config))


def _quantization_of(settings: object) -> str | None:
    """The scheme at load that is nearest to the weights of a quantized checkpoint."""
    if not isinstance(settings, dict):
        return None
    if settings.get("quant_method") in ("fp8", "modelopt"):
        return "fp8"
    groups = settings.get("config_groups")
    if isinstance(groups, dict):  # compressed-tensors
        group = next(iter(groups.values()), None)
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise ModelError("quantization_config: config_groups names no weights, so that their size is not known")
        bits = weights.get("num_bits")
        return "fp8" if weights.get("type") == "float" and bits == 8 else _bits(bits)
    return _bits(settings.get("bits", settings.get("w_bit", 4)))


def _bits(bits: object) -> str:
    return _BITS_AT_LOAD.get(bits if isinstance(bits, int) else 4, "int4")


def plan_engine(options: EngineOptions, device: str, model: PlannedModel | None = None) -> PlannedEngine:
    """The engine of these options on a device: a name of DEVICES, or a file of `quire calibrate` for this machine.

    Raises ConfigError, ModelError: also if the model does not fit.
    """
    check_options(options)
    check_policies(options)
    model = model or find_model(options)
    description = model.description
    found = named_device(device)
    dtype, kv_dtype = resolve_dtypes(options, description.dtype)
    schemes = description.schemes(options.quantization or model.quantization)
    shape = shape_of(description, dtype, schemes)
    notes: list[str] = []
    if found is None:
        profile = read_profile(Path(device))
        kernels, memory, share = _kernels("cpu", notes), available_memory("cpu"), CPU_MEMORY_SHARE
        if profile.model != model.name:
            notes.append(f"the profile is that of {profile.model}, not of {model.name}")
    else:
        _check_kv_type(found, kv_dtype)
        work = compute_shape_of(description, dtype, kv_dtype, schemes, options.state_dtype)
        profile = roofline_profile(model.name, found, work)
        kernels, memory, share = _kernels("triton", notes), found.memory_bytes, GPU_MEMORY_SHARE
        notes.append(f"step times are {profile.source}; {_origin(found)}")
    if options.quantization is None and model.quantization is not None:
        notes.append(f"low-bit weights of the checkpoint count as those of --quantization {model.quantization}")
    is_gpu = found is not None
    demand = memory_profile(
        shape, options, (dtype, kv_dtype), kernels, overlaps_swaps=is_gpu and options.preemption != "recompute"
    )
    plan = plan_memory(
        demand,
        available=memory,
        default_share=share,
        limit=options.memory,
        fill_budget=options.enable_prefix_caching and (options.memory is not None or is_gpu),
    )
    host = plan_host_pool(
        plan,
        asked="0" if options.preemption == "recompute" else options.swap_space,
        default=DEFAULT_SWAP_SPACE if is_gpu else 0,
        available=_HOST_MEMORY if is_gpu else available_memory("cpu"),
    )
    served = with_queue_limits(options)
    steps_in_flight = options.steps_in_flight or (2 if is_gpu else 1)
    limits = scheduler_config_of(served, plan.max_model_len, steps_in_flight, lora_bytes=plan.lora_bytes)
    cache = make_cache_config(shape, kv_dtype, plan, host)
    if options.enable_prefix_caching:
        cache = replace(cache, prefix_index=options.prefix_index, eviction=options.eviction)
    setup = EngineSetup(scheduler=limits, cache=cache, profile=profile, vocab_size=description.vocab_size)
    is_estimated = found is not None and not found.record
    return PlannedEngine(model, _device_name(found, profile), options, plan, host, setup, tuple(notes), is_estimated)


def named_device(device: str) -> Device | None:
    """The device of that name; None for a file of `quire calibrate`. Raises ConfigError for an unknown name."""
    file = Path(device)
    return None if file.suffix == ".json" or file.is_file() else find_device(device)


def _check_kv_type(device: Device, kv_dtype: str) -> None:
    """Raises ConfigError for keys and values in a type that quire's kernels for GPUs do not have on the device."""
    if kv_dtype == "int4":
        raise ConfigError("kv_cache_dtype: on a GPU, quire does not keep keys and values in int4; use int8")
    if kv_dtype == "fp8_e4m3" and kv_dtype not in device.flops:
        raise ConfigError(f"kv_cache_dtype: {device.name} has no fp8; use int8")


def _origin(device: Device) -> str:
    """Where the shares of the peak rates come from, and how to have measured times instead."""
    if device.record:
        return f"the shares are those of quire in {device.record}; `quire calibrate` measures other machines"
    return (
        f"estimated: no step of quire has been measured on {device.name}, which is assumed to reach the shares of an "
        "H100. Run `quire calibrate` on the device, and give its file as --device"
    )


def _device_name(device: Device | None, profile: LatencyProfile) -> str:
    return profile.device if device is None else device.name


def _kernels(name: str, notes: list[str]) -> Kernels:
    """The kernels whose memory counts. Those in plain torch stand in for kernels that are not installed."""
    found = MODULES[name]().kernels
    if found is None:
        notes.append(f"the {name} kernels are not installed here, so the memory of captured steps is not counted")
        found = MODULES["reference"]().kernels
    assert found is not None, "plain torch is always there"
    return found
