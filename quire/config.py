"""Configuration records of cache, scheduler and engine. All are frozen."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from quire.core.kv_groups import KVGroup
from quire.core.states import StateGroup
from quire.errors import ConfigError, known_arguments_only, nearest

DType = Literal["auto", "float32", "float16", "bfloat16", "float", "half"]
StateDType = Literal["float32", "bfloat16"]
KVDType = Literal["auto", "float32", "float16", "bfloat16", "float", "half", "fp8", "fp8_e4m3", "int8", "int4"]
ModelImpl = Literal["auto", "quire", "transformers"]
# layouts of quantized checkpoints
QuantMethod = Literal["awq", "gptq", "compressed-tensors", "modelopt", "modelopt_fp4", "fp8", "gguf"]
Quantization = Literal["int8", "int4", "mxfp4", "nvfp4", "none", QuantMethod]
PrefixIndexKind = Literal["radix", "hash", "none"]
Routing = Literal["predicted", "round-robin", "least-loaded", "cache"]  # of requests to replicas
MOST_REPLICAS = 64
Policy = Literal["fcfs", "lpm", "cache-aware", "priority", "fair"]
DEFAULT_POLICY: Policy = "fcfs"
PreemptionMode = Literal["auto", "recompute", "swap"]
GrammarBackend = Literal["auto", "llguidance", "fsm"]
Eviction = Literal["lru", "lfu", "priority", "cost"]


Activation = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True, slots=True)
class Classification:
    """The classes of a model with a classification head.

    activation: what makes probabilities of its logits; "none": they are the result.
    """

    labels: tuple[str, ...]
    activation: Activation


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache: block size, KV groups, prefix index."""

    block_size: int  # tokens
    groups: tuple[KVGroup, ...]
    prefix_index: PrefixIndexKind = "none"
    public_prefixes: tuple[tuple[int, ...], ...] = ()  # tokens whose KV every tenant may read
    eviction: Eviction = "lru"
    states: StateGroup | None = None  # of a model with recurrent states; its blocks hold no tokens
    turn_ends: frozenset[int] = frozenset()  # tokens that end a turn: snapshots of states stand behind them

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1 token, not {self.block_size}")
        if not self.groups:
            raise ConfigError("a cache needs at least one KV group")
        if self.eviction not in (known := get_args(Eviction)):
            raise ConfigError(f"there is no eviction {self.eviction!r:.60}; known: {', '.join(known)}")
        if self.eviction != "lru" and self.prefix_index != "radix":
            raise ConfigError(
                f"eviction {self.eviction!r} needs the radix tree: use prefix_index 'radix', not {self.prefix_index!r}"
                ", or eviction 'lru'"
            )
        for group in self.groups:
            if group.num_blocks < 1:
                raise ConfigError("a KV group needs at least one block; give it more memory")
        if self.states is not None and self.states.num_blocks < 1:
            raise ConfigError("recurrent states need at least one block; give them more memory")

    def __str__(self) -> str:
        blocks = " and ".join(str(group.num_blocks) for group in self.groups)
        return f"{blocks} blocks of {self.block_size} tokens"

    def fits_sequence(self, length: int, step_tokens: int) -> bool:
        """Whether one sequence of `length` tokens fits into empty pools if a step computes at most `step_tokens`."""
        return all(
            group.kind.max_blocks(length, step_tokens, self.block_size) <= group.num_blocks for group in self.groups
        )

    def num_blocks(self, group: int, num_tokens: int, reserve: int = 0) -> int:
        """Blocks of a block table: see `KVKind.blocks_for`."""
        return self.groups[group].kind.blocks_for(num_tokens, self.block_size, reserve)

    def first_attended_block(self, group: int, position: int) -> int:
        """Index of the first block that a query at `position` attends to."""
        return self.groups[group].kind.first_attended(position) // self.block_size

    @property
    def pools(self) -> tuple[KVGroup | StateGroup, ...]:
        """The KV groups, and the state blocks if there are any, in the order of `Move.group`."""
        return self.groups if self.states is None else (*self.groups, self.states)

    @property
    def shares_partial_blocks(self) -> bool:
        """Whether a sequence may continue behind a part of another one's block."""
        return all(group.kind.shares_partial_blocks for group in self.groups)

    @property
    def dropping(self) -> list[int]:
        """The groups in which sequences release blocks before their end."""
        return [index for index, group in enumerate(self.groups) if group.kind.drops_blocks]


DEFAULT_WAIT_WEIGHT = 100.0
DrafterName = Literal["suffix", "answers", "prediction"]
MAX_SPECULATIVE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the queue, policy, preemption mode."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    step_seconds: float  # the most predicted time of one step
    watermark: float  # least share of blocks that admission leaves free for growth
    steps_in_flight: int
    policy: Policy = DEFAULT_POLICY
    long_prefill_token_threshold: int | None = None  # tokens of one prompt in one step; None: as many as the step has
    wait_weight: float = (
        DEFAULT_WAIT_WEIGHT  # policy "cache-aware": tokens of prefix match that equal one second of waiting
    )
    preemption: PreemptionMode = "auto"
    max_queued_requests: int | None = None  # waiting requests that have never run; None: no limit
    max_queued_tokens: int | None = None  # prompt tokens of these requests
    target_tpot_seconds: float | None = None  # of a step in which sequences decode; None: StepBudget chooses it
    speculation: tuple[DrafterName, ...] = ()  # drafters; empty: no speculative decoding
    num_speculative_tokens: int = 8  # the most drafts of a sequence in one step
    governs_speculation: bool = True  # whether only drafts are verified that are expected to save time
    max_loras: int = 0  # adapters that can be in memory at the same time; 0: no adapters
    lora_bytes: int = 0  # of all these adapters

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can have a token in each step"
            )
        self._check_threshold()
        if not 0 < self.step_seconds < inf:
            raise ConfigError(f"step_seconds must be positive and finite, not {self.step_seconds}")
        if self.target_tpot_seconds is not None and not 0 < self.target_tpot_seconds <= self.step_seconds:
            raise ConfigError(
                f"target_tpot_ms must be above 0 and at most {1000 * self.step_seconds:g} (step_seconds), not "
                f"{1000 * self.target_tpot_seconds:g}"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be at least 0 and below 1, not {self.watermark}")
        if self.steps_in_flight < 1:
            raise ConfigError(f"steps_in_flight must be at least 1, not {self.steps_in_flight}")
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens must be from 1 to {MAX_SPECULATIVE_TOKENS}, not {self.num_speculative_tokens}"
            )
        if not 0 <= self.wait_weight < inf:
            raise ConfigError(f"wait_weight must be at least 0 and finite, not {self.wait_weight}")
        self._check_limits()

    def _check_limits(self) -> None:
        for name in ("max_loras", "lora_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, not {getattr(self, name)}")
        for name in ("max_queued_requests", "max_queued_tokens"):
            bound = getattr(self, name)
            if bound is not None and bound < 1:
                raise ConfigError(f"{name} must be at least 1, not {bound}; leave it out for no limit")

    def _check_threshold(self) -> None:
        threshold = self.long_prefill_token_threshold
        if threshold is not None and not 1 <= threshold <= self.max_num_batched_tokens:
            raise ConfigError(
                f"long_prefill_token_threshold must be from 1 to max_num_batched_tokens "
                f"({self.max_num_batched_tokens}), not {threshold}; leave it out for no limit of one prompt"
            )


@dataclass(frozen=True, slots=True)
class Help:
    """Help text and stability of an option.

    envvar: an environment variable that the command line reads for it. group: heading in the help of the command line.
    rare: whether only --help-all shows it.
    """

    text: str
    stability: Literal["stable", "beta", "prototype"] = "stable"
    envvar: str | None = None
    group: str = "Options"
    rare: bool = False


MAX_LORAS = 4096  # adapters in memory at once
MODEL_HELP = (
    "a name of `quire pull`, Hugging Face id, folder of a checkpoint, or .gguf file [default: quire's own model]"
)


@known_arguments_only(ConfigError, elsewhere={"gpu_memory_utilization": "memory", "context_length": "max_model_len"})
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of an engine. None and "auto" are defaults, most of which `quire.startup.build.prepare` resolves."""

    model: Annotated[str | None, Help(MODEL_HELP, group="Model")] = None
    revision: Annotated[str | None, Help("branch, tag or commit of a model that is downloaded", group="Model")] = None
    download_dir: Annotated[
        str | None, Help("where downloads are kept [default: Hugging Face's cache]", group="Model", rare=True)
    ] = None
    offline: Annotated[bool, Help("use only what was downloaded before", group="Model")] = False
    model_impl: Annotated[
        ModelImpl,
        Help(
            "quire's own, transformers (extra hf), or auto: own if it supports the model",
            "beta",
            group="Model",
            rare=True,
        ),
    ] = "auto"
    dtype: Annotated[DType, Help("compute and weight type; auto: as the checkpoint says", group="Model")] = "auto"
    kv_cache_dtype: Annotated[
        KVDType,
        Help(
            "type of cached keys and values; auto: same as dtype; fp8 (e4m3), int8: half the memory; int4: a third",
            group="KV cache",
        ),
    ] = "auto"
    state_dtype: Annotated[
        StateDType,
        Help("type of recurrent states; bfloat16: half the memory, less exact", "beta", group="KV cache", rare=True),
    ] = "float32"
    quantization: Annotated[
        Quantization | None,
        Help(
            "int8, or fp8, int4, mxfp4 or nvfp4 with an int8 head: round weights as they are loaded; none: expand "
            "low-bit weights to dtype; others: the layout that the checkpoint has anyway "
            "[default: weights as they are stored]",
            "beta",
            group="Model",
        ),
    ] = None
    weight_cache: Annotated[
        str | None,
        Help(
            "folder for packed weights of CPU kernels, which make later starts faster; takes the weights' size on disk "
            "[default: none]",
            "beta",
            group="Model",
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        Help(
            "format of the model's tool calls, such as hermes or mistral [default: from the chat template]",
            "beta",
            group="Model",
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Help(
            "format of its reasoning, such as qwen3; none: leave it in the text [default: from the chat template]",
            "beta",
            group="Model",
        ),
    ] = None
    block_size: Annotated[
        int, Meta(ge=1, le=65536), Help("tokens in one KV block, a multiple of 16", group="KV cache", rare=True)
    ] = 16
    enable_prefix_caching: Annotated[
        bool, Help("reuse the KV of earlier requests with the same prefix", group="KV cache")
    ] = True
    prefix_index: Annotated[
        Literal["radix", "hash"],
        Help(
            "radix: exact to the token; hash: whole blocks, by their chained hashes",
            "beta",
            group="KV cache",
            rare=True,
        ),
    ] = "radix"
    public_prefixes: Annotated[
        str | None,
        Help("JSON file of prompt prefixes whose KV all tenants may share", "beta", group="KV cache", rare=True),
    ] = None
    max_model_len: Annotated[
        int | None, Help("longest prompt plus output, in tokens [default: the model's]", group="KV cache")
    ] = None
    memory: Annotated[
        str | None, Help("for weights, KV and workspace: bytes, '4GiB', or a share such as '0.5'", group="KV cache")
    ] = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=65536), Help("sequences that run at once", group="Scheduling")] = 128
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, le=2**24), Help("tokens computed in one step", group="Scheduling")
    ] = 2048
    long_prefill_token_threshold: Annotated[
        int | None,
        Help(
            "tokens of one prompt that are computed in one step; short prompts are first without it, too "
            "[default: as many as the step has]",
            group="Scheduling",
            rare=True,
        ),
    ] = None
    step_seconds: Annotated[
        float, Help("predicted time that one step may take", "beta", group="Scheduling", rare=True)
    ] = 0.5
    target_tpot_ms: Annotated[
        float | None,
        Help(
            "target in ms for the time between tokens of running streams while prompts are computed, at most "
            "step_seconds [default: 8 to 16 measured decode steps, at least 50, for a server]",
            "beta",
            group="Scheduling",
        ),
    ] = None
    watermark: Annotated[
        float, Help("share of blocks that admission leaves free", "beta", group="KV cache", rare=True)
    ] = 0.01
    policy: Annotated[
        Policy | None,
        Help(
            "order of waiting requests: by arrival, cached tokens, priority, or fairness to tenants "
            "[default: fair for a server whose API keys name several tenants, else fcfs]",
            "beta",
            group="Scheduling",
        ),
    ] = None
    max_queued_requests: Annotated[
        int | None,
        Help(
            "most waiting requests; more are rejected; shared by tenants or classes with policy fair or priority "
            "[default: 16 x max_num_seqs for a server, else no limit]",
            group="Scheduling",
        ),
    ] = None
    max_queued_tokens: Annotated[
        int | None,
        Help(
            "most prompt tokens of waiting requests [default: 4194304 for a server, else no limit]",
            group="Scheduling",
            rare=True,
        ),
    ] = None
    wait_weight: Annotated[
        float | None,
        Help(
            "policy cache-aware: cached tokens that equal one second of waiting [default: 100]",
            "beta",
            group="Scheduling",
            rare=True,
        ),
    ] = None
    preemption: Annotated[
        PreemptionMode,
        Help(
            "recompute, swap to host memory, or auto: the faster one by prediction",
            "beta",
            group="Scheduling",
            rare=True,
        ),
    ] = "auto"
    swap_space: Annotated[
        str | None,
        Help(
            "memory for swapped sequences: bytes, '4GiB', or a number of GiB [default: 4 on a GPU, else 0]",
            "beta",
            group="KV cache",
        ),
    ] = None
    eviction: Annotated[Eviction, Help("eviction order of the prefix cache", "beta", group="KV cache", rare=True)] = (
        "lru"
    )
    calibration: Annotated[
        float | None,
        Help(
            "seconds of cost measurement at start-up [default: 0.3 for a server, else 0]",
            "beta",
            group="Scheduling",
            rare=True,
        ),
    ] = None
    steps_in_flight: Annotated[
        int | None,
        Help(
            "1, or 2 to plan a step while the previous one runs [default: 2 on a GPU]",
            "prototype",
            group="Scheduling",
            rare=True,
        ),
    ] = None
    kernels: Annotated[
        str, Help("kernel module: auto, cpu, triton or reference", "beta", group="Hardware", rare=True)
    ] = "auto"
    threads: Annotated[
        int | None,
        Help("compute threads on the host [default: one per core, one for tiny models]", "beta", group="Hardware"),
    ] = None
    device: Annotated[str, Help("auto, cpu or cuda", "beta", group="Hardware")] = "auto"
    grammar_backend: Annotated[
        GrammarBackend,
        Help("backend of structured outputs: llguidance (auto) or built-in fsm", "beta", group="Decoding", rare=True),
    ] = "auto"
    fast_forward: Annotated[
        Literal["on", "off"],
        Help("append tokens that a constraint forces all at once, or one by one", "beta", group="Decoding", rare=True),
    ] = "on"
    speculation: Annotated[
        str,
        Help(
            "drafters of speculative decoding: off, auto (all), or a list of suffix (what followed the same tokens in "
            "the text), answers (earlier ones of the namespace), prediction (of the request)",
            "beta",
            group="Decoding",
        ),
    ] = "auto"
    num_speculative_tokens: Annotated[
        int,
        Meta(ge=1, le=MAX_SPECULATIVE_TOKENS),
        Help("most drafts of a sequence in one step", "beta", group="Decoding", rare=True),
    ] = 8
    speculative_config: Annotated[
        str | None,
        Help(
            "vLLM's JSON object for the methods ngram and suffix, in place of these two options",
            "beta",
            group="Decoding",
            rare=True,
        ),
    ] = None
    enable_lora: Annotated[
        bool, Help("run LoRA adapters; naming some turns it on, too", "beta", group="LoRA adapters", rare=True)
    ] = False
    max_loras: Annotated[
        int, Meta(ge=1, le=MAX_LORAS), Help("most adapters in memory at once", "beta", group="LoRA adapters", rare=True)
    ] = 256
    lora_memory: Annotated[
        str | None,
        Help(
            "memory for adapters: bytes, '512MiB', or a share of --memory [default: an eighth of it, at most 1GiB]",
            "beta",
            group="LoRA adapters",
            rare=True,
        ),
    ] = None
    seed: Annotated[int, Help("seed of requests without one", group="Scheduling")] = 0
    journal: Annotated[
        str | None, Help("file that records every input of the scheduler", "beta", group="Scheduling", rare=True)
    ] = None


_VLLM_METHODS: Mapping[str, tuple[DrafterName, ...]] = MappingProxyType(
    {"ngram": ("suffix",), "suffix": ("suffix", "answers")}
)
# fields of vLLM's object that have no effect: the governor decides from measured costs and chances instead
_VLLM_IGNORED = (
    *("prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size", "suffix_decoding_max_tree_depth"),
    *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
)


def speculation_of(options: EngineOptions) -> tuple[tuple[DrafterName, ...], int]:
    """The drafters, and the most drafts of a sequence in one step. Raises ConfigError."""
    if options.speculative_config is None:
        return drafters_of(options.speculation), options.num_speculative_tokens
    name = "speculative_config"
    try:
        given = json.loads(options.speculative_config)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f'{name} must be an object such as {{"method": "ngram", "num_speculative_tokens": 8}}')
    known = ("method", "num_speculative_tokens", *_VLLM_IGNORED)
    method, number = given.get("method"), given.get("num_speculative_tokens", options.num_speculative_tokens)
    if not isinstance(method, str) or method not in _VLLM_METHODS:
        raise ConfigError(f"{name}: method must be ngram or suffix, not {method!r:.60}; quire has no draft models yet")
    for field in given:
        if field not in known:
            raise ConfigError(f"{name} has no field {field!r:.60}{nearest(field, known)}")
    if type(number) is not int or not 1 <= number <= MAX_SPECULATIVE_TOKENS:
        raise ConfigError(
            f"{name}: num_speculative_tokens must be from 1 to {MAX_SPECULATIVE_TOKENS}, not {number!r:.60}"
        )
    return _VLLM_METHODS[method], number


def drafters_of(speculation: str) -> tuple[DrafterName, ...]:
    """The drafters of the option `speculation`. Raises ConfigError for an unknown one, with the nearest known one."""
    known = get_args(DrafterName)
    if speculation in ("auto", "off"):
        return known if speculation == "auto" else ()
    names = tuple(name.strip() for name in speculation.split(","))
    for name in names:
        if name not in known:
            raise ConfigError(
                f"speculation: there is no drafter {name!r}{nearest(name, known)}; auto uses all, off none"
            )
    return names  # type: ignore[return-value]  # checked


# Values that an option had in an earlier version, or has in another engine: what to use instead.
REMOVED_VALUES = {
    "policy": {"dfs-weight": "use lpm, whose hit rate is within 1 % of it"},
    "quantization": {"bitsandbytes": "use int8 or int4, with a checkpoint in 16 bits"},
}
_FIELD_PATH = re.compile(r" - at `\$\.([^`]*)`")  # the field, in an error of msgspec


def check_options(options: Any) -> None:  # noqa: ANN401 (a dataclass)
    """Raises ConfigError that names an option with a wrong type or a value out of bounds."""
    for name, removed in REMOVED_VALUES.items():
        if (value := getattr(options, name, None)) in removed:
            raise ConfigError(f"{name}: {value!r} is not supported; {removed[value]}")
    try:
        msgspec.convert(asdict(options), type(options))
    except msgspec.ValidationError as error:
        message = str(error)
        place = _FIELD_PATH.search(message)
        if place is None:
            raise ConfigError(message) from error
        values = _literals(get_type_hints(type(options)).get(place[1]))
        known = f"; known: {', '.join(map(str, values))}" if values else ""
        raise ConfigError(f"{place[1]}: {_FIELD_PATH.sub('', message)}{known}") from error


def _literals(kind: Any) -> tuple[object, ...]:  # noqa: ANN401 (a type)
    """The values that a Literal allows; empty for other types."""
    return get_args(kind) if get_origin(kind) is Literal else ()


_QUEUED_PER_ROW = 16
_QUEUED_TOKENS = 4 * 2**20


def with_queue_limits(options: EngineOptions) -> EngineOptions:
    """A copy with a server's queue limits in place of those that are None."""
    requests, tokens = options.max_queued_requests, options.max_queued_tokens
    return replace(
        options,
        max_queued_requests=_QUEUED_PER_ROW * options.max_num_seqs if requests is None else requests,
        max_queued_tokens=_QUEUED_TOKENS if tokens is None else tokens,
    )
