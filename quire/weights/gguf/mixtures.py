"""Fields of a config.json for architectures with experts in place of MLPs."""

from quire.weights.gguf.info import ConfigDict, GgufInfo, layer_types, refuse_axes, rms_fields, with_rotary_share
from quire.weights.gguf.llama_like import ernie4_5, granite, hunyuan, qwen2, qwen3

_SIGMOID = 2  # value of expert_gating_func


def qwen3moe(facts: GgufInfo) -> ConfigDict:
    """Fields of Qwen 3 MoE."""
    metadata = facts.metadata
    return qwen3(facts) | {
        **_experts(facts),
        "moe_intermediate_size": metadata.number(".expert_feed_forward_length"),
        "norm_topk_prob": True,  # in llama.cpp's graph of this architecture
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def qwen2moe(facts: GgufInfo) -> ConfigDict:
    """Fields of Qwen 1.5 MoE and Qwen 2 MoE."""
    metadata = facts.metadata
    return qwen2(facts) | {
        **_experts(facts),
        "moe_intermediate_size": metadata.number(".expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.number(".expert_shared_feed_forward_length"),
        "qkv_bias": facts.has("attn_q.bias"),
        "norm_topk_prob": False,  # in llama.cpp's graph of this architecture
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def olmoe(facts: GgufInfo) -> ConfigDict:
    """Fields of OLMoE. norm_topk_prob is that of llama.cpp's graph."""
    return rms_fields(facts) | {**_experts(facts), "attention_bias": False, "norm_topk_prob": False}


def granitemoe_shared(facts: GgufInfo) -> ConfigDict:
    """Fields of Granite MoE with a shared expert."""
    return granite(facts) | {"shared_intermediate_size": facts.metadata.number(".expert_shared_feed_forward_length")}


def hunyuan_moe(facts: GgufInfo) -> ConfigDict:
    """Fields of Hunyuan A13B. llama.cpp gives all experts the size of the shared one."""
    metadata, size = facts.metadata, facts.metadata.number(".feed_forward_length")
    for key in (".expert_feed_forward_length", ".expert_shared_feed_forward_length"):
        _check_size(facts, key, size)
    return hunyuan(facts) | {
        "num_experts": _number(facts),
        "moe_topk": metadata.number(".expert_used_count"),
        "moe_intermediate_size": size,
        "num_shared_expert": metadata.number(".expert_shared_count", 1),
    }


def ernie4_5_moe(facts: GgufInfo) -> ConfigDict:
    """Fields of ERNIE 4.5 with experts."""
    metadata = facts.metadata
    return ernie4_5(facts) | {
        "moe_num_experts": _number(facts),
        "moe_k": metadata.number(".expert_used_count"),
        "moe_num_shared_experts": _shared_experts(facts),
        "moe_intermediate_size": metadata.number(".expert_feed_forward_length"),
        "moe_layer_interval": metadata.number(".interleave_moe_layer_step", least=1),
        "moe_layer_start_index": metadata.number(".leading_dense_block_count", 0),
        "moe_layer_end_index": -1,  # the last of all: the converter stores no other
    }


def glm4moe(facts: GgufInfo) -> ConfigDict:
    """Fields of GLM-4.5."""
    refuse_axes(facts)
    return with_rotary_share(facts, rms_fields(facts)) | {
        **_sigmoid_experts(facts, default=_SIGMOID),
        "attention_bias": facts.has("attn_q.bias"),
        "use_qk_norm": facts.has("attn_q_norm.weight"),
    }


def dots1(facts: GgufInfo) -> ConfigDict:
    """Fields of dots.llm1."""
    return rms_fields(facts) | {
        **_sigmoid_experts(facts),
        "attention_bias": facts.has("attn_q.bias"),
        "sliding_window": None,
    }


def minimax_m2(facts: GgufInfo) -> ConfigDict:
    """Fields of MiniMax M2."""
    require_sigmoid(facts)
    _check_size(facts, ".expert_feed_forward_length", facts.metadata.number(".feed_forward_length"))
    return rms_fields(facts) | {**_experts(facts), "use_qk_norm": True}


def afmoe(facts: GgufInfo) -> ConfigDict:
    """Fields of Trinity. Embeddings are scaled as in llama.cpp's graph, and only layers with a window rotate."""
    metadata = facts.metadata
    require_sigmoid(facts, default=_SIGMOID)
    if not metadata.flag(".expert_weights_norm", default=False):
        raise metadata.error(f"{metadata.architecture}.expert_weights_norm must be True")
    return rms_fields(facts) | {
        **_experts(facts),
        "moe_intermediate_size": metadata.number(".expert_feed_forward_length"),
        "num_shared_experts": _shared_experts(facts),
        "num_dense_layers": metadata.number(".leading_dense_block_count", 0),
        "route_scale": metadata.real(".expert_weights_scale", 1.0) or 1.0,
        "sliding_window": metadata.number(".attention.sliding_window", least=1),
        "layer_types": layer_types(facts, every=4),
        "mup_enabled": True,
    }


def _number(facts: GgufInfo) -> int:
    """Number of experts of a layer."""
    return facts.metadata.number(".expert_count", least=1)


def _experts(facts: GgufInfo) -> ConfigDict:
    """Number of experts, by both names that transformers has for it, and of those for a token."""
    return {
        "num_experts": _number(facts),
        "num_local_experts": _number(facts),
        "num_experts_per_tok": facts.metadata.number(".expert_used_count"),
    }


def _sigmoid_experts(facts: GgufInfo, default: int | None = None) -> ConfigDict:
    """Fields of experts that are chosen by sigmoids with a bias, beside shared ones. 0 is llama.cpp's "not set".

    default: the function of the router where the file says none; None: it must.
    """
    metadata = facts.metadata
    require_sigmoid(facts, default)
    return {
        "n_routed_experts": _number(facts),
        "num_experts_per_tok": metadata.number(".expert_used_count"),
        "moe_intermediate_size": metadata.number(".expert_feed_forward_length"),
        "n_shared_experts": _shared_experts(facts),
        "first_k_dense_replace": metadata.number(".leading_dense_block_count", 0),
        "norm_topk_prob": metadata.flag(".expert_weights_norm", default=False),
        "routed_scaling_factor": metadata.real(".expert_weights_scale", 1.0) or 1.0,
        "n_group": metadata.number(".expert_group_count", 1) or 1,
        "topk_group": metadata.number(".expert_group_used_count", 1) or 1,
    }


def require_sigmoid(facts: GgufInfo, default: int | None = None) -> None:
    """Raise ModelError unless the router's function is a sigmoid."""
    found = facts.metadata.number(".expert_gating_func", default)
    if found != _SIGMOID:
        raise facts.metadata.error(
            f"{facts.metadata.architecture}.expert_gating_func must be {_SIGMOID} (sigmoid), not {found}"
        )


def _shared_experts(facts: GgufInfo) -> int:
    """Number of shared experts. Raises ModelError if their size is not that of as many experts."""
    metadata = facts.metadata
    count = metadata.number(".expert_shared_count")
    if count:
        size = count * metadata.number(".expert_feed_forward_length")
        _check_size(facts, ".expert_shared_feed_forward_length", size)
    return count


def _check_size(facts: GgufInfo, key: str, size: int) -> None:
    """Raise ModelError if the file has this key with another value."""
    if (found := facts.metadata.number(key, size)) != size:
        raise facts.metadata.error(
            f"{facts.metadata.architecture}{key} = {found} does not fit the other sizes, which make it {size}"
        )
