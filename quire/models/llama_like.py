"""Families with RMS norms and gated MLPs like Llama: Mistral, Qwen, Gemma, Phi-3, OLMo 2, Granite, and MoE models."""

from dataclasses import replace

from quire.layers.experts import ExpertsConfig
from quire.models.config import TensorNames
from quire.models.config_fields import choice, flag, integer, integers, number
from quire.models.family import ACTIVATIONS, LLAMA, MAX_PARTS, WindowRule, like
from quire.models.rope_config import RopeRule

_WINDOW = integer("sliding_window", default=4096, null=0, least=0)

MISTRAL = like(LLAMA, rules={"windows": WindowRule("all", _WINDOW)})

QWEN2 = like(
    LLAMA,
    rules={"windows": WindowRule("upper", _WINDOW, used=flag("use_sliding_window"))},
    qkv_bias=True,
    o_bias=False,
)

QWEN3 = like(
    LLAMA,
    rules={"windows": WindowRule("upper", _WINDOW, used=flag("use_sliding_window"))},
    qk_norm="head",
    head_dim=integer("head_dim", default=128),
)

GEMMA = like(
    LLAMA,
    norm="rms_plus_one",
    head_dim=integer("head_dim", default=256),
    tied=flag("tie_word_embeddings", default=True),
    embed_scale=0.0,
    # the first checkpoints have "gelu" but need the tanh approximation
    activation=choice(
        "hidden_activation",
        "hidden_act",
        default="gelu_pytorch_tanh",
        value_map={"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"},
    ),
)

GEMMA2 = like(
    GEMMA,
    rules={
        "names": TensorNames(
            attn_out_norm="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            mlp_out_norm="post_feedforward_layernorm",
        ),
        "windows": WindowRule("pattern", _WINDOW, pattern=2),
        "scale": number("query_pre_attn_scalar", default=256.0, power=-0.5),
        "softcap": number("attn_logit_softcapping", default=50.0, null=0.0),
    },
    order="both",
    activation=choice("hidden_activation", default="gelu_pytorch_tanh", value_map=ACTIVATIONS),
    logit_softcap=number("final_logit_softcapping", default=30.0, null=0.0),
)

GEMMA3 = like(
    GEMMA2,
    rules={
        "softcap": 0.0,
        "unused": ("attn_logit_softcapping",),  # of Gemma 2
        "rope": RopeRule(
            theta=number("rope_theta", default=1e6), local_theta=number("rope_local_base_freq", default=1e4)
        ),
        "windows": WindowRule(
            "pattern", _WINDOW, pattern=integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
        ),
    },
    qk_norm="head",
    logit_softcap=number("final_logit_softcapping", default=0.0),
)

PHI3 = like(
    LLAMA,
    rules={
        "names": TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
        "rope": RopeRule(
            allows_partial=True,
            original_max_positions=integer("original_max_position_embeddings", default=4096, least=2),
        ),
        "windows": WindowRule("always"),
    },
    norm_eps=number("rms_norm_eps", default=1e-5),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
)

OLMO2 = like(
    LLAMA,
    rules={
        "names": TensorNames(attn_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm"),
    },
    order="branch",
    norm_eps=number("rms_norm_eps", default=1e-5),
    qk_norm="projection",
)

GRANITE = like(
    LLAMA,
    rules={"scale": number("attention_multiplier", default=1.0)},
    embed_scale=number("embedding_multiplier", default=1.0),
    residual_scale=number("residual_multiplier", default=1.0),
    logit_scale=number("logits_scaling", default=1.0, power=-1.0),
)

MIXTRAL = like(
    LLAMA,
    rules={
        "names": TensorNames(
            router="block_sparse_moe.gate",
            expert="block_sparse_moe.experts.{}.",
            expert_up=("w1", "w3"),
            expert_down="w2",
        ),
        "rope": RopeRule(theta=number("rope_theta", default=1e6)),
        "windows": WindowRule("always"),
    },
    norm_eps=number("rms_norm_eps", default=1e-5),
    experts=ExpertsConfig(
        num_experts=integer("num_local_experts", "num_experts", default=8, most=MAX_PARTS),
        per_token=integer("num_experts_per_tok", default=2),
        intermediate_size=integer("intermediate_size"),
        normalise=True,
    ),
)

_QWEN_EXPERTS = ExpertsConfig(
    num_experts=integer("num_experts", "num_local_experts", most=MAX_PARTS),
    per_token=integer("num_experts_per_tok"),
    intermediate_size=integer("moe_intermediate_size"),
    normalise=flag("norm_topk_prob"),
    sparse_step=integer("decoder_sparse_step", default=1),
    dense_layers=integers("mlp_only_layers"),
)

QWEN2_MOE = like(
    QWEN2,
    rules={"windows": WindowRule("listed", _WINDOW, used=flag("use_sliding_window"))},
    qkv_bias=flag("qkv_bias", default=True),
    experts=replace(_QWEN_EXPERTS, shared_size=integer("shared_expert_intermediate_size")),
)

QWEN3_MOE = like(
    QWEN3,
    rules={"windows": WindowRule("always", _WINDOW, used=flag("use_sliding_window"))},
    head_dim=integer("head_dim", default=0),
    experts=_QWEN_EXPERTS,
)
