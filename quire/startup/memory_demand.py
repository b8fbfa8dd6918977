"""Input of the memory plan and of the cost model, computed from a model, with the cache config made from the plan."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from quire.config import CacheConfig, EngineOptions, speculation_of
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.states import StateGroup, StateKind
from quire.cost.memory_plan import DEFAULT_LORA_MEMORY, HostPoolPlan, KVProfile, MemoryPlan, MemoryProfile
from quire.cost.model_shape import ModelShape
from quire.cost.step_work import AttentionWork, ComputeShape, StateWork
from quire.errors import ConfigError
from quire.kernels.contract import DTYPES, CaptureMemory, Kernels
from quire.kernels.reference.quantized import read_bytes, stored_dtype_and_size
from quire.kernels.reference.sampling import LOGITS_AT_ONCE
from quire.kernels.state_contract import STATE_DTYPES
from quire.kv_store.host import STAGING_BYTES
from quire.models.description import ModelDescription
from quire.models.model import Description
from quire.weights.schemes import NO_SCHEMES, Schemes

_LOGIT_COPIES = 4  # of the logits of all rows: in the model's dtype, in float32, with edits, and the result
_SAMPLING_BYTES = 50  # per logit that is sampled at once: filtered, sorted, cumulative sums, random numbers


def shape_of(description: Description, dtype: str, schemes: Schemes = NO_SCHEMES) -> ModelShape:
    """The shape of a model whose weights are loaded in their schemes, and others as `dtype`."""
    return ModelShape(
        vocab_size=description.vocab_size,
        max_positions=description.max_positions,
        num_parameters=description.num_parameters,
        weight_bytes=description.weight_bytes(dtype, schemes),
        weight_types=" and ".join([*dict.fromkeys(scheme.type_name for scheme in schemes.values()), dtype]),
        activations_per_token=description.activations_per_token,
        layers=tuple(description.kv_layers),
        state_layers=tuple(description.state_layers),
    )


_EXPERTS = (".mlp.up", ".mlp.down", ".experts.up", ".experts.down")  # stacks of the weights of all experts
_HEAD, _EMBED = "head.weight", "embed.weight"
_LAYER_INPUTS = "layer_inputs.weight"  # a table, of which a token reads one row


def compute_shape_of(
    description: ModelDescription,
    dtype: str,
    kv_dtype: str,
    schemes: Schemes = NO_SCHEMES,
    state_dtype: str = "float32",
) -> ComputeShape:
    """The sizes that the work of a step depends on, with weights as in `shape_of`, KV and states in their dtypes."""
    parameters, num_bytes = Counter[str](), Counter[str]()
    experts = description.config.experts
    for place in description.weight_map.values():
        kind = "expert" if f".{place.parameter}".endswith(_EXPERTS) else place.parameter
        kind = kind if kind in ("expert", _HEAD, _EMBED, _LAYER_INPUTS) else "projection"
        parameters[kind] += prod(place.shape)
        num_bytes[kind] += description.tensor_bytes(place, dtype, schemes.get(place.parameter))
    head = _EMBED if description.config.tied else _HEAD
    num_sparse = sum(layer.has_experts for layer in description.config.layers)
    num_experts = experts.num_experts if experts is not None and num_sparse else 0
    grids = Counter(scheme.grid for parameter, scheme in schemes.items() if parameter not in (_HEAD, _EMBED))
    rounds_inputs = bool(grids) and grids.most_common(1)[0][0] != "e4m3"  # float8 weights are multiplied in `dtype`
    shape = shape_of(description, dtype, schemes)
    mixers = description.config.attentions
    return ComputeShape(
        num_layers=description.config.num_layers,
        compute_dtype="int8" if rounds_inputs else dtype,
        projection_parameters=parameters["projection"],
        projection_bytes=num_bytes["projection"],
        expert_parameters=parameters["expert"] // max(1, num_experts * num_sparse),
        expert_bytes=num_bytes["expert"] // max(1, num_experts * num_sparse),
        num_experts=num_experts,
        experts_per_token=experts.per_token if experts is not None and num_sparse else 0,
        num_sparse_layers=num_sparse,
        head_parameters=parameters[head],
        head_bytes=num_bytes[head],
        activation_bytes_per_token=description.activations_per_token * DTYPES[dtype].itemsize,
        attention=tuple(
            AttentionWork(
                kind.span,
                # a score and a weighted value in each head
                sum(2.0 * mixer.num_heads * (kind.head_dim + kind.value_dim) for mixer in mixers if mixer.kv == kind),
                _kv_profile(kind, sum(mixer.kv == kind for mixer in mixers), kv_dtype).bytes_per_token,
            )
            for kind in shape.kv_groups
        ),
        states=_state_work(shape.state_layers, state_dtype),
    )


_FLOPS_PER_STATE_NUMBER = 7  # decay, prediction, update and output of the delta rule, of each number and token


def _state_work(layers: Sequence[StateKind], dtype: str) -> StateWork:
    """The work of the recurrence of all layers."""
    return StateWork(
        sum(kind.numbers(0) for kind in layers) * STATE_DTYPES[dtype].itemsize,
        sum(
            float(_FLOPS_PER_STATE_NUMBER * kind.num_recurrent + 2 * kind.conv_width * kind.num_channels)
            for kind in layers
        ),
    )


def memory_profile(
    shape: ModelShape,
    options: EngineOptions,
    dtypes: tuple[str, str],
    kernels: Kernels,
    *,
    overlaps_swaps: bool = False,
) -> MemoryProfile:
    """The input of the memory plan, in bytes. dtypes: of weights and computation, and of KV.

    overlaps_swaps: whether blocks may be swapped to the host while the device computes, which needs staging buffers.
    """
    dtype, kv_dtype = dtypes
    groups = shape.kv_groups
    length = min(options.max_model_len or shape.max_positions, shape.max_positions)
    read = read_bytes(kv_dtype, DTYPES[dtype])
    widest = max(kind.numbers_per_token * read for kind in groups)
    attention = min(max(kernels.SCRATCH_BYTES, length * widest), options.max_num_seqs * length * widest)
    sampled = min(max(LOGITS_AT_ONCE, shape.vocab_size), options.max_num_seqs * shape.vocab_size)
    token_bytes, logit_bytes = shape.activations_per_token * 4, shape.vocab_size * 4
    recorded = CaptureMemory(0, "")
    capture = kernels.new_step_capture()
    if capture is not None:
        variants = 2 if options.enable_lora else 1  # with adapters and without
        recorded = capture.capture_memory(
            options.max_num_seqs, token_bytes, logit_bytes, kernels.SCRATCH_BYTES, variants
        )
    states = _state_group(shape.state_layers, options)
    return MemoryProfile(
        weight_bytes=shape.weight_bytes,
        weight_reason=f"{shape.num_parameters / 1e6:.2f} M parameters, {shape.weight_types}",
        kv=tuple(_kv_profile(kind, len(layers), kv_dtype) for kind, layers in groups.items()),
        block_size=options.block_size,
        model_max_len=shape.max_positions,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        workspace_bytes_per_token=token_bytes,
        workspace_bytes_per_seq=logit_bytes * _LOGIT_COPIES
        + (length + len(groups) * -(-length // options.block_size)) * 4,
        scratch_bytes=attention + _SAMPLING_BYTES * sampled,
        captured_steps_bytes=recorded.bytes,
        captured_steps_reason=recorded.reason,
        staging_bytes=_staging_bytes(len(groups), states) if overlaps_swaps else 0,
        lora_memory=(options.lora_memory or DEFAULT_LORA_MEMORY) if options.enable_lora else None,
        states=states,
        has_snapshots=options.enable_prefix_caching,
    )


def _staging_bytes(num_groups: int, states: StateGroup | None) -> int:
    """Buffers of swaps in both directions, for each pool. They hold one block at least."""
    of_states = 0 if states is None else max(STAGING_BYTES, states.bytes_per_block)
    return 2 * (num_groups * STAGING_BYTES + of_states)


def _state_group(layers: Sequence[StateKind], options: EngineOptions) -> StateGroup | None:
    """The state blocks of a model, of which there are none yet; None for a model without recurrent states."""
    if not layers:
        if options.state_dtype != EngineOptions().state_dtype:
            raise ConfigError(f"state_dtype {options.state_dtype!r}: the model has no recurrent states; leave it out")
        return None
    drafters, num_drafts = speculation_of(options)
    max_pending = 1 + (num_drafts if drafters else 0)
    numbers = len(layers) * layers[0].numbers(max_pending)
    return StateGroup(
        num_layers=len(layers),
        kind=layers[0],
        dtype=options.state_dtype,
        num_blocks=0,
        max_pending=max_pending,
        bytes_per_block=numbers * STATE_DTYPES[options.state_dtype].itemsize,
    )


def _kv_profile(kind: KVKind, num_layers: int, kv_dtype: str) -> KVProfile:
    def bytes_of(numbers: int) -> int:
        stored, size = stored_dtype_and_size(kv_dtype, numbers)
        return size * stored.itemsize

    stored, size = stored_dtype_and_size(kv_dtype, kind.head_dim)
    window = f", last {kind.span} tokens" if kind.drops_blocks else ""
    return KVProfile(
        num_layers * kind.bytes_per_token(bytes_of),
        kind,
        f"{num_layers} layers x {len(kind.planes)} x {kind.num_kv_heads} heads x {size} x {stored.itemsize} B{window}",
    )


def make_cache_config(shape: ModelShape, dtype: str, plan: MemoryPlan, host: HostPoolPlan) -> CacheConfig:
    """The cache config with pools of the planned sizes, without a prefix index."""
    block_size = plan.profile.block_size
    return CacheConfig(
        block_size,
        tuple(
            KVGroup(
                layers=layers,
                kind=kind,
                dtype=dtype,
                num_blocks=num_blocks,
                bytes_per_block=kv.bytes_per_token * block_size,
                num_host_blocks=num_host_blocks,
            )
            for (kind, layers), kv, num_blocks, num_host_blocks in zip(
                shape.kv_groups.items(), plan.profile.kv, plan.num_blocks, host.num_blocks, strict=True
            )
        ),
        states=None if plan.states is None else replace(plan.states, num_host_blocks=host.num_state_blocks),
    )
