"""Input of the memory plan, computed from a model's shape, with the cache config made from the plan."""

from quire.config import CacheConfig, EngineOptions, KVGroup
from quire.cost.memory_plan import Demand, HostPool, KVDemand, MemoryPlan
from quire.cost.model_shape import KVLayer, ModelShape
from quire.kernels.contract import DTYPES, Kernels, Recorded
from quire.kernels.reference.quantized import kept_as, read_bytes
from quire.kernels.reference.sampling import LOGITS_AT_ONCE
from quire.kv_store.host import STAGED_BYTES
from quire.models.model import Description

_LOGIT_COPIES = 4  # of the logits of all rows: in the model's dtype, in float32, with edits, and the result
_SAMPLING_BYTES = 50  # per logit that is sampled at once: filtered, sorted, cumulative sums, random numbers


def shape_of(description: Description, dtype: str) -> ModelShape:
    """The shape of a model whose weights are loaded as `dtype`."""
    return ModelShape(
        vocab_size=description.vocab_size,
        max_positions=description.max_positions,
        num_parameters=description.num_parameters,
        weight_bytes=description.weight_bytes(dtype),
        activations_per_token=description.activations_per_token,
        layers=tuple(description.kv_layers),
    )


def demand_of(
    shape: ModelShape,
    options: EngineOptions,
    dtypes: tuple[str, str],
    kernels: Kernels,
    *,
    swaps_beside: bool = False,
) -> Demand:
    """The input of the memory plan, in bytes. dtypes: of weights and computation, and of KV.

    swaps_beside: whether blocks may be swapped to the host while the device computes, which needs staging buffers.
    """
    dtype, kv_dtype = dtypes
    groups = shape.kv_groups
    length = min(options.max_model_len or shape.max_positions, shape.max_positions)
    read = read_bytes(kv_dtype, DTYPES[dtype])
    widest = max(2 * layer.num_kv_heads * layer.head_dim * read for layer in groups)
    attention = min(max(kernels.SCRATCH_BYTES, length * widest), options.max_num_seqs * length * widest)
    sampled = min(max(LOGITS_AT_ONCE, shape.vocab_size), options.max_num_seqs * shape.vocab_size)
    token_bytes, logit_bytes = shape.activations_per_token * 4, shape.vocab_size * 4
    recorded = Recorded(0, "")
    if kernels.recorder is not None:
        recorded = kernels.recorder.takes(options.max_num_seqs, token_bytes, logit_bytes, kernels.SCRATCH_BYTES)
    return Demand(
        weight_bytes=shape.weight_bytes,
        weight_reason=f"{shape.num_parameters / 1e6:.2f} M parameters, {dtype}",
        kv=tuple(_kv_demand(layer, len(layers), kv_dtype) for layer, layers in groups.items()),
        block_size=options.block_size,
        model_max_len=shape.max_positions,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        workspace_bytes_per_token=token_bytes,
        workspace_bytes_per_seq=logit_bytes * _LOGIT_COPIES
        + (length + len(groups) * -(-length // options.block_size)) * 4,
        scratch_bytes=attention + _SAMPLING_BYTES * sampled,
        recording_bytes=recorded.bytes,
        recording_reason=recorded.reason,
        staging_bytes=len(groups) * 2 * STAGED_BYTES if swaps_beside else 0,
    )


def _kv_demand(layer: KVLayer, num_layers: int, kv_dtype: str) -> KVDemand:
    window = f", last {layer.window} tokens" if layer.window else ""
    stored, size = kept_as(kv_dtype, layer.head_dim)
    return KVDemand(
        num_layers * 2 * layer.num_kv_heads * size * stored.itemsize,
        layer.window,
        f"{num_layers} layers x 2 x {layer.num_kv_heads} heads x {size} x {stored.itemsize} B{window}",
    )


def cache_of(shape: ModelShape, dtype: str, plan: MemoryPlan, host: HostPool) -> CacheConfig:
    """The cache config with pools of the planned sizes, without a prefix index."""
    block_size = plan.demand.block_size
    return CacheConfig(
        block_size,
        tuple(
            KVGroup(
                layers=layers,
                kind="window" if layer.window else "full",
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                dtype=dtype,
                num_blocks=num_blocks,
                bytes_per_block=kv.bytes_per_token * block_size,
                window=layer.window,
                num_host_blocks=num_host_blocks,
            )
            for (layer, layers), kv, num_blocks, num_host_blocks in zip(
                shape.kv_groups.items(), plan.demand.kv, plan.num_blocks, host.num_blocks, strict=True
            )
        ),
    )
