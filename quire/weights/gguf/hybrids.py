"""Architectures whose layers have attention or a recurrence: fields of a config.json, and the order of value heads."""

import torch
from torch import Tensor

from quire.weights.gguf.info import ConfigDict, GgufInfo, common_fields, rms_fields, with_rotary_share
from quire.weights.gguf.mixtures import require_sigmoid


def qwen35(facts: GgufInfo) -> ConfigDict:
    """Fields of Qwen 3.5."""
    metadata = facts.metadata
    heads = metadata.number(".ssm.time_step_rank", least=1)
    return with_rotary_share(facts, rms_fields(facts)) | {
        "layer_types": _layer_types(facts, "linear_attention"),
        "attention_bias": False,
        "linear_conv_kernel_dim": metadata.number(".ssm.conv_kernel"),
        "linear_num_key_heads": metadata.number(".ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.number(".ssm.state_size"),
        "linear_value_head_dim": metadata.number(".ssm.inner_size") // heads,
    }


def qwen35moe(facts: GgufInfo) -> ConfigDict:
    """Fields of Qwen 3.5 with experts."""
    metadata = facts.metadata
    return qwen35(facts) | {
        "num_experts": metadata.number(".expert_count", least=1),
        "num_experts_per_tok": metadata.number(".expert_used_count"),
        "moe_intermediate_size": metadata.number(".expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.number(".expert_shared_feed_forward_length"),
    }


def qwen3next(facts: GgufInfo) -> ConfigDict:
    """Fields of Qwen3-Next."""
    # norm_topk_prob is that of llama.cpp's graph
    return qwen35moe(facts) | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def lfm2(facts: GgufInfo) -> ConfigDict:
    """Fields of LFM2. The size of its MLP is that which transformers derives."""
    metadata = facts.metadata
    return common_fields(facts) | {
        "norm_eps": metadata.real(".attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": _layer_types(facts, "conv"),
        "conv_L_cache": metadata.number(".shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in facts.names),
    }


def lfm2moe(facts: GgufInfo) -> ConfigDict:
    """Fields of LFM2 with experts. Weights of experts are those of llama.cpp's graph."""
    metadata = facts.metadata
    require_sigmoid(facts)
    found = lfm2(facts)
    del found["block_auto_adjust_ff_dim"]
    return found | {
        "num_experts": metadata.number(".expert_count", least=1),
        "num_experts_per_tok": metadata.number(".expert_used_count"),
        "moe_intermediate_size": metadata.number(".expert_feed_forward_length"),
        "num_dense_layers": metadata.number(".leading_dense_block_count"),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in facts.names),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _layer_types(facts: GgufInfo, otherwise: str) -> list[str]:
    """The field `layer_types`: layers that have queries attend."""
    attends = [f"blk.{layer}.attn_q.weight" in facts.names for layer in range(facts.layers)]
    return ["full_attention" if does else otherwise for does in attends]


def log_of_decay(tensor: Tensor) -> Tensor:
    """A_log from the file's -exp(A_log)."""
    return (-tensor.float()).log()


def with_channel_axis(tensor: Tensor) -> Tensor:
    """The weight (channels, width) of a convolution as Hugging Face stores it, (channels, 1, width)."""
    return tensor.unsqueeze(1)


def group_values(tensor: Tensor, first: int, heads: int, key_heads: int) -> Tensor:
    """The rows from `first` on, of value heads, in another order: those of each key head together.

    In the file the first value heads of all key heads come first, then the second ones, and so on.
    """
    rest = tensor.shape[1:]
    before, values = tensor[:first], tensor[first:]
    grouped = values.reshape(heads // key_heads, key_heads, -1, *rest).transpose(0, 1).reshape(values.shape)
    return torch.cat((before, grouped))


def group_value_columns(tensor: Tensor, heads: int, key_heads: int) -> Tensor:
    """The columns in the order of `group_values`."""
    return group_values(tensor.t(), 0, heads, key_heads).t().contiguous()
