"""Families in which some layers have a recurrence in place of attention: Qwen3-Next, Qwen 3.5, LFM2, Granite 4,
Nemotron-H, Kimi Linear."""

from dataclasses import replace

from quire.kernels.contract import Routing
from quire.layers.experts import ExpertsConfig
from quire.models.config import TensorNames
from quire.models.config_fields import choice, flag, integer, integers, mapping, number, strings
from quire.models.family import ACTIVATIONS, LLAMA, MAX_PARTS, InnerSizeRule, SparseRule, like
from quire.models.llama_like import GRANITE
from quire.models.recurrence_config import RecurrenceRule
from quire.models.rope_config import RopeRule
from quire.weights.latent import Latent

_MOST_HEAD_DIM = 1024
_MOST_CONV_WIDTH = 64
# also the activation behind the convolution
_SILU = choice("hidden_act", default="silu", value_map={"silu": "silu", "swish": "silu"})

# fields of Nemotron-H of training, and of kernels
_NEMOTRON_UNUSED = (
    *("moe_shared_expert_overlap", "time_step_max", "time_step_floor", "time_step_limit", "chunk_size", "expand"),
    *("use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep", "rescale_prenorm_residual"),
    *("residual_in_fp32", "num_nextn_predict_layers", "mtp_layers_block_type", "mamba_proj_bias", "attention_bias"),
)

_DELTA = RecurrenceRule(
    rule="delta",
    conv_width=integer("linear_conv_kernel_dim", default=4, least=2, most=_MOST_CONV_WIDTH),
    num_value_heads=integer("linear_num_value_heads", default=32, most=MAX_PARTS),
    value_dim=integer("linear_value_head_dim", default=128, most=_MOST_HEAD_DIM),
    num_key_heads=integer("linear_num_key_heads", default=16, most=MAX_PARTS),
    key_dim=integer("linear_key_head_dim", default=128, most=_MOST_HEAD_DIM),
    interval=integer("full_attention_interval", default=4, least=2),
)

QWEN3_5 = like(
    LLAMA,
    rules={
        "names": TensorNames(ignored_prefixes=("mtp.",)),  # layers for drafts
        "rope": RopeRule(rotary_fraction=number("partial_rotary_factor", default=0.25), allows_partial=True),
        "recurrence": _DELTA,
    },
    norm="rms_plus_one",
    head_dim=integer("head_dim", default=256),
    qk_norm="head",
    attention_gate=flag("attn_output_gate", default=True, value_map={True: "sigmoid"}),
    gate_in_queries=True,
    activation=_SILU,
    mlp_bias=False,
)

QWEN3_5_MOE = like(
    QWEN3_5,
    intermediate_size=integer("moe_intermediate_size", default=512),
    experts=ExpertsConfig(
        num_experts=integer("num_experts", default=256, most=MAX_PARTS),
        per_token=integer("num_experts_per_tok", default=8),
        intermediate_size=integer("moe_intermediate_size", default=512),
        routing=Routing(normalise=True),
        shared_size=integer("shared_expert_intermediate_size", default=512),
    ),
)

QWEN3_NEXT = like(
    QWEN3_5,
    rules={
        "names": replace(
            QWEN3_5.names,
            recurrence_inputs=("in_proj_qkvz",),
            recurrence_gates=("in_proj_ba",),
        ),
        "sparse": SparseRule(step=integer("decoder_sparse_step", default=1), dense=integers("mlp_only_layers")),
    },
    experts=ExpertsConfig(
        num_experts=integer("num_experts", default=512, most=MAX_PARTS),
        per_token=integer("num_experts_per_tok", default=10),
        intermediate_size=integer("moe_intermediate_size", default=512),
        routing=Routing(normalise=flag("norm_topk_prob", default=True)),
        shared_size=integer("shared_expert_intermediate_size", default=512),
    ),
)

LFM2 = like(
    LLAMA,
    rules={
        "names": TensorNames(
            norm="embedding_norm",
            attn_norm="operator_norm",
            mlp_norm="ffn_norm",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
            o="self_attn.out_proj",
            up=("feed_forward.w1", "feed_forward.w3"),
            down="feed_forward.w2",
            recurrence="conv.",
            recurrence_inputs=("in_proj",),
            convs=("conv",),
        ),
        "rope": RopeRule(theta=number("rope_theta", "theta", default=1e6)),
        "inner_size": InnerSizeRule(
            used=flag("block_auto_adjust_ff_dim", default=True),
            multiplier=number("block_ffn_dim_multiplier", default=1.0, null=0.0),
            multiple_of=integer("block_multiple_of", default=256),
        ),
        "recurrence": RecurrenceRule(
            rule="convolution",
            conv_width=integer("conv_L_cache", default=3, least=2, most=_MOST_CONV_WIDTH),
            bias=flag("conv_bias"),
            conv_bias=flag("conv_bias"),
            kinds=("conv",),
            listed=integers("full_attn_idxs"),
        ),
    },
    intermediate_size=integer("block_ff_dim", "intermediate_size", default=12288, is_first=True),
    norm_eps=number("norm_eps", default=1e-5),
    tied=flag("tie_embedding", "tie_word_embeddings", default=True),
    qk_norm="head",
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    activation="silu",
)

LFM2_MOE = like(
    LFM2,
    rules={
        "names": replace(
            LFM2.names,
            router="feed_forward.gate",
            router_bias="feed_forward.expert_bias",
            expert="feed_forward.experts.{}.",
            expert_up=("w1", "w3"),
            expert_down="w2",
            stacked_up="feed_forward.experts.gate_up_proj",
            stacked_down="feed_forward.experts.down_proj",
        ),
        "inner_size": InnerSizeRule(),
        "sparse": SparseRule(first=integer("num_dense_layers", default=2, least=0)),
    },
    intermediate_size=integer("intermediate_size", default=7168),
    experts=ExpertsConfig(
        num_experts=integer("num_experts", default=32, most=MAX_PARTS),
        per_token=integer("num_experts_per_tok", default=4),
        intermediate_size=integer("moe_intermediate_size", default=1792),
        routing=Routing(
            normalise=flag("norm_topk_prob", default=True),
            score="sigmoid",
            scale=number("routed_scaling_factor", default=1.0),
        ),
        has_router_bias=flag("use_expert_bias", default=True),
    ),
)

GRANITE_HYBRID = like(
    GRANITE,
    rules={
        "names": TensorNames(
            up=("shared_mlp.input_linear",),
            down="shared_mlp.output_linear",
            router="block_sparse_moe.router.layer",
            stacked_up="block_sparse_moe.input_linear.weight",
            stacked_down="block_sparse_moe.output_linear.weight",
            shared="shared_mlp.",
            shared_up=("input_linear",),
            shared_down="output_linear",
            recurrence="mamba.",
            recurrence_inputs=("in_proj",),
        ),
        "rope": RopeRule(
            layers=choice("position_embedding_type", default="nope", value_map={"rope": "all", "nope": "none"})
        ),
        "sparse": SparseRule(used=integer("num_local_experts", default=8, least=0)),
        "unused": ("mamba_chunk_size",),  # tokens that a kernel takes at once
        "recurrence": RecurrenceRule(
            rule="mamba2",
            conv_width=integer("mamba_d_conv", default=4, least=2, most=_MOST_CONV_WIDTH),
            num_value_heads=integer("mamba_n_heads", default=128, most=MAX_PARTS),
            value_dim=integer("mamba_d_head", default=0, most=_MOST_HEAD_DIM, allows_auto=True),
            num_key_heads=integer("mamba_n_groups", default=1, most=MAX_PARTS),
            key_dim=integer("mamba_d_state", default=256, most=_MOST_HEAD_DIM),
            expand=integer("mamba_expand", default=2),
            bias=flag("mamba_proj_bias"),
            conv_bias=flag("mamba_conv_bias", default=True),
            time_limits="time_step_limit",
            kinds=("mamba", "linear_attention"),
            attending=("attention", "full_attention"),
        ),
    },
    intermediate_size=integer("shared_intermediate_size", default=1024),
    activation=_SILU,
    mlp_bias=False,
    experts=ExpertsConfig(
        num_experts=integer("num_local_experts", default=8, least=0, most=MAX_PARTS),
        per_token=integer("num_experts_per_tok", default=2, least=0),
        intermediate_size=integer("intermediate_size"),
        routing=Routing(normalise=True),
        shared_size=integer("shared_intermediate_size", default=1024),
        has_shared_gate=False,
    ),
)

NEMOTRON_H = like(
    LLAMA,
    rules={
        "names": TensorNames(
            prefix="backbone.",
            embed="embeddings",
            norm="norm_f",
            attn_norm="norm",
            qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
            o="mixer.o_proj",
            up=("mixer.up_proj",),
            down="mixer.down_proj",
            recurrence="mixer.",
            recurrence_inputs=("in_proj",),
            router="mixer.gate",
            router_bias="mixer.gate.e_score_correction_bias",
            expert="mixer.experts.{}.",
            expert_up=("up_proj",),
            stacked_up="mixer.experts.up_proj",
            stacked_down="mixer.experts.down_proj",
            shared="mixer.shared_experts.",
            shared_up=("up_proj",),
            latent_in="mixer.fc1_latent_proj",
            latent_out="mixer.fc2_latent_proj",
            ignored_prefixes=("mtp.",),
        ),
        "rope": None,
        "recurrence": RecurrenceRule(
            rule="mamba2",
            conv_width=integer("conv_kernel", "mamba_d_conv", default=4, least=2, most=_MOST_CONV_WIDTH),
            num_value_heads=integer("mamba_num_heads", default=128, most=MAX_PARTS),
            value_dim=integer("mamba_head_dim", default=64, most=_MOST_HEAD_DIM),
            num_key_heads=integer("n_groups", "mamba_n_groups", default=8, most=MAX_PARTS),
            key_dim=integer("ssm_state_size", default=128, most=_MOST_HEAD_DIM),
            bias=flag("use_bias"),
            conv_bias=flag("use_conv_bias", "mamba_conv_bias", default=True),
            least_time=number("time_step_min", "mamba_dt_min", default=0.001),
            kinds=("mamba", "linear_attention"),
            attending=("attention", "full_attention"),
            without=("mlp",),
            sparse=("moe",),
        ),
        "unused": _NEMOTRON_UNUSED,
    },
    num_layers=integer("num_hidden_layers", default=0, least=0, most=MAX_PARTS),
    order="single",
    norm_eps=number("layer_norm_epsilon", "norm_eps", default=1e-5),
    head_dim=integer("head_dim", "attention_head_dim", default=128),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=flag("mlp_bias"),
    activation=choice("mlp_hidden_act", default="relu2", value_map=ACTIVATIONS),
    gated=False,
    experts=ExpertsConfig(
        num_experts=integer("n_routed_experts", "num_local_experts", default=8, most=MAX_PARTS),
        per_token=integer("num_experts_per_tok", default=2),
        intermediate_size=integer("moe_intermediate_size", default=7688),
        routing=Routing(
            normalise=flag("norm_topk_prob", default=True),
            score="sigmoid",
            scale=number("routed_scaling_factor", default=1.0),
            num_groups=integer("n_group", default=1),
            top_groups=integer("topk_group", default=1),
        ),
        is_router_float32=True,
        has_router_bias=True,
        shared_size=integer("moe_shared_expert_intermediate_size", default=7688),
        num_shared=choice("n_shared_experts", default=1, value_map={1: 1}),
        has_shared_gate=False,
        gated=False,
        latent_size=integer("moe_latent_size", default=0),
        bias=flag("mlp_bias"),
    ),
)

KIMI_LINEAR = like(
    LLAMA,
    rules={
        "names": TensorNames(
            router="block_sparse_moe.gate",
            router_bias="block_sparse_moe.gate.e_score_correction_bias",
            expert="block_sparse_moe.experts.{}.",
            expert_up=("w1", "w3"),
            expert_down="w2",
            shared="block_sparse_moe.shared_experts.",
            recurrence="self_attn.",
            recurrence_inputs=("q_proj", "k_proj", "v_proj"),
            recurrence_gates=("b_proj", "f_a_proj", "g_a_proj"),
            convs=("q_conv1d", "k_conv1d", "v_conv1d"),
            recurrence_norm="o_norm",
            recurrence_out="o_proj",
        ),
        "rope": None,
        "sparse": SparseRule(
            step=choice("moe_layer_freq", default=1, value_map={1: 1}),
            first=integer("first_k_dense_replace", default=1, least=0),
            kinds=strings("mlp_layer_types"),
        ),
        "recurrence": RecurrenceRule(
            rule="kda",
            conv_width=integer("linear_conv_kernel_dim", default=4, least=2, most=_MOST_CONV_WIDTH),
            num_value_heads=integer("linear_num_heads", default=32, most=MAX_PARTS),
            value_dim=integer("linear_head_dim", default=128, most=_MOST_HEAD_DIM),
            num_key_heads=integer("linear_num_heads", default=32, most=MAX_PARTS),
            key_dim=integer("linear_head_dim", default=128, most=_MOST_HEAD_DIM),
            nested=mapping("linear_attn_config"),
        ),
    },
    max_positions=integer("model_max_length", "max_position_embeddings", default=1048576),
    norm_eps=number("rms_norm_eps", default=1e-5),
    latent=Latent(
        rank=integer("kv_lora_rank", default=512),
        key_dim=integer("qk_nope_head_dim", default=128, most=_MOST_HEAD_DIM),
        shared_dim=integer("qk_rope_head_dim", default=64, most=_MOST_HEAD_DIM),
        value_dim=integer("v_head_dim", default=128, most=_MOST_HEAD_DIM),
    ),
    activation=_SILU,
    qkv_bias=choice("attention_bias", default=False, value_map={False: False}),
    o_bias=False,
    mlp_bias=False,
    experts=ExpertsConfig(
        num_experts=integer("num_experts", "num_local_experts", default=256, most=MAX_PARTS),
        per_token=integer("num_experts_per_token", "num_experts_per_tok", default=8),
        intermediate_size=integer("moe_intermediate_size", default=1024),
        routing=Routing(
            normalise=flag("moe_renormalize", "norm_topk_prob", default=True),
            score=choice("moe_router_activation_func", default="sigmoid", value_map={"sigmoid": "sigmoid"}),
            scale=number("routed_scaling_factor", default=2.446),
            num_groups=integer("num_expert_group", "n_group", default=1),
            top_groups=integer("topk_group", default=1),
        ),
        is_router_float32=True,
        has_router_bias=True,
        shared_size=integer("moe_intermediate_size", default=1024),
        num_shared=integer("num_shared_experts", "n_shared_experts", default=1, least=0),
        has_shared_gate=False,
    ),
)
