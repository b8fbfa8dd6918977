"""Families with experts in place of MLPs: Mixtral, Qwen MoE, Granite MoE, OLMoE, GLM-4.5 and others."""

from dataclasses import replace
from types import MappingProxyType

from quire.kernels.contract import Routing
from quire.layers.experts import ExpertsConfig
from quire.models.config import TensorNames
from quire.models.config_fields import choice, flag, integer, integers, mapping, number, strings
from quire.models.family import LLAMA, MAX_PARTS, WINDOW, FullRule, SharingRule, SparseRule, WindowRule, like
from quire.models.llama_like import ERNIE4_5, GEMMA3, GRANITE, HUNYUAN, QWEN2, QWEN3
from quire.models.rope_config import RopeRule

_NO_LAYER = MAX_PARTS  # no layer has a window but those of `layer_types`

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
        "unused": ("router_jitter_noise",),  # of training
    },
    norm_eps=number("rms_norm_eps", default=1e-5),
    experts=ExpertsConfig(
        num_experts=integer("num_local_experts", "num_experts", default=8, most=MAX_PARTS),
        per_token=integer("num_experts_per_tok", default=2),
        intermediate_size=integer("intermediate_size"),
        routing=Routing(normalise=True),
    ),
)

PHIMOE = like(
    MIXTRAL,
    rules={
        "rope": RopeRule(theta=number("rope_theta", default=1e6), keys=("short_mscale", "long_mscale")),
        "unused": (),
    },
    norm="layer",
    norm_bias=True,
    head_bias=flag("lm_head_bias"),
    experts=ExpertsConfig(
        num_experts=integer("num_local_experts", default=16, most=MAX_PARTS),
        per_token=integer("num_experts_per_tok", default=2, least=2, most=2),
        intermediate_size=integer("intermediate_size"),
        routing=Routing(normalise=False, score="sparsemixer", jitter=number("router_jitter_noise", default=0.01)),
    ),
)

_QWEN_EXPERTS = ExpertsConfig(
    num_experts=integer("num_experts", "num_local_experts", most=MAX_PARTS),
    per_token=integer("num_experts_per_tok"),
    intermediate_size=integer("moe_intermediate_size"),
    routing=Routing(normalise=flag("norm_topk_prob")),
)
_QWEN_SPARSE = SparseRule(step=integer("decoder_sparse_step", default=1), dense=integers("mlp_only_layers"))

QWEN2_MOE = like(
    QWEN2,
    rules={
        "windows": WindowRule("listed", WINDOW, used=flag("use_sliding_window")),
        "unused": ("max_window_layers",),  # windows need `layer_types`
        "sparse": _QWEN_SPARSE,
    },
    qkv_bias=flag("qkv_bias", default=True),
    experts=replace(_QWEN_EXPERTS, shared_size=integer("shared_expert_intermediate_size")),
)

QWEN3_MOE = like(
    QWEN3,
    rules={
        "windows": WindowRule("always", WINDOW, used=flag("use_sliding_window")),
        "sparse": _QWEN_SPARSE,
    },
    head_dim=integer("head_dim", default=0),
    experts=_QWEN_EXPERTS,
)

MELLUM = like(
    QWEN3,
    rules={
        "names": TensorNames(ignored_prefixes=("mtp.",)),  # layers for drafts
        "rope": RopeRule(theta=number("rope_theta", default=5e5), local_theta=1e4),
        "windows": WindowRule("upper", integer("sliding_window", default=1024, null=0, least=0), first=_NO_LAYER),
        "sparse": SparseRule(kinds=strings("mlp_layer_types")),
        "unused": ("num_mtp_layers",),
    },
    experts=replace(_QWEN_EXPERTS, routing=Routing(normalise=flag("norm_topk_prob", default=True))),
)

OLMOE = like(
    LLAMA,
    norm_eps=number("rms_norm_eps", default=1e-5),
    qk_norm="projection",
    experts=ExpertsConfig(
        num_experts=integer("num_experts", "num_local_experts", default=64, most=MAX_PARTS),
        per_token=integer("num_experts_per_tok", default=8),
        intermediate_size=integer("intermediate_size"),
        routing=Routing(normalise=flag("norm_topk_prob")),
    ),
)

_GRANITE_EXPERTS = ExpertsConfig(
    num_experts=integer("num_local_experts", default=8, most=MAX_PARTS),
    per_token=integer("num_experts_per_tok", default=2),
    intermediate_size=integer("intermediate_size"),
    routing=Routing(normalise=True),
)
GRANITE_MOE = like(
    GRANITE,
    rules={
        "names": TensorNames(
            router="block_sparse_moe.router.layer",
            stacked_up="block_sparse_moe.input_linear.weight",
            stacked_down="block_sparse_moe.output_linear.weight",
            shared="shared_mlp.",
            shared_up=("input_linear",),
            shared_down="output_linear",
        ),
    },
    mlp_bias=False,
    experts=_GRANITE_EXPERTS,
)

GRANITE_MOE_SHARED = like(
    GRANITE_MOE,
    experts=replace(
        _GRANITE_EXPERTS,
        shared_size=integer("shared_intermediate_size", default=0, least=0),
        has_shared_gate=False,
    ),
)

HUNYUAN_MOE = like(
    HUNYUAN,
    rules={
        "names": replace(HUNYUAN.names, router="mlp.gate.wg", shared="mlp.shared_mlp."),
    },
    experts=ExpertsConfig(
        num_experts=integer("num_experts", "num_local_experts", most=MAX_PARTS, is_each=True),
        per_token=integer("moe_topk", "num_experts_per_tok", is_each=True),
        intermediate_size=integer("moe_intermediate_size", "intermediate_size", is_each=True, is_first=True),
        routing=Routing(normalise=True),
        is_router_float32=True,
        shared_size=integer("intermediate_size"),
        num_shared=integer("num_shared_expert", default=1, is_each=True),
        has_shared_gate=False,
    ),
)

ERNIE4_5_MOE = like(
    ERNIE4_5,
    rules={
        "names": replace(
            ERNIE4_5.names,
            router_bias="mlp.moe_statics.e_score_correction_bias",
            router_bias_axes=2,
            shared="mlp.shared_experts.",
            ignored_prefixes=("model.mtp_",),
        ),
        "sparse": SparseRule(
            step=integer("moe_layer_interval", default=1),
            first=integer("moe_layer_start_index", default=1, least=0),
            last=integer("moe_layer_end_index", default=-1, least=-1),
        ),
    },
    head_dim=integer("head_dim", default=0),
    qkv_bias=flag("use_bias", value_map={False: False}),
    o_bias=False,
    mlp_bias=False,
    experts=ExpertsConfig(
        num_experts=integer("moe_num_experts", "num_experts", default=64, most=MAX_PARTS),
        per_token=integer("moe_k", "num_experts_per_tok", default=6),
        intermediate_size=integer("moe_intermediate_size", default=1536),
        routing=Routing(normalise=True),
        is_router_float32=True,
        has_router_bias=True,
        shared_size=integer("moe_intermediate_size", default=1536),
        num_shared=integer("moe_num_shared_experts", default=2, least=0),
        has_shared_gate=False,
    ),
)

_SIGMOIDS = Routing(
    normalise=flag("norm_topk_prob", default=True),
    score=choice("scoring_func", default="sigmoid", value_map={"sigmoid": "sigmoid"}),
    scale=number("routed_scaling_factor", default=1.0),
    num_groups=integer("n_group", default=1),
    top_groups=integer("topk_group", default=1),
)
_SIGMOID_EXPERTS = ExpertsConfig(
    num_experts=integer("n_routed_experts", "num_local_experts", default=128, most=MAX_PARTS),
    per_token=integer("num_experts_per_tok", default=8),
    intermediate_size=integer("moe_intermediate_size", default=1408),
    routing=_SIGMOIDS,
    is_router_float32=True,
    has_router_bias=True,
    shared_size=integer("moe_intermediate_size", default=1408),
    num_shared=integer("n_shared_experts", default=1, least=0),
    has_shared_gate=False,
)
_SHARED_EXPERTS = TensorNames(
    shared="mlp.shared_experts.", extra_layers=integer("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0)
)

GLM4_MOE = like(
    LLAMA,
    rules={
        "names": _SHARED_EXPERTS,
        "rope": RopeRule(rotary_fraction=number("partial_rotary_factor", default=0.5), allows_partial=True),
        "sparse": SparseRule(first=integer("first_k_dense_replace", default=1, least=0)),
    },
    norm_eps=number("rms_norm_eps", default=1e-5),
    qk_norm=flag("use_qk_norm", value_map={True: "head", False: "none"}),
    o_bias=False,
    mlp_bias=False,
    experts=_SIGMOID_EXPERTS,
)

DOTS1 = like(
    LLAMA,
    rules={
        "names": _SHARED_EXPERTS,
        "windows": WindowRule("upper", WINDOW, first=integer("max_window_layers", default=62, least=0)),
        "sparse": SparseRule(first=integer("first_k_dense_replace", default=0, least=0)),
    },
    qk_norm="head",
    mlp_bias=False,
    experts=replace(
        _SIGMOID_EXPERTS,
        num_experts=integer("n_routed_experts", "num_local_experts", most=MAX_PARTS),
        per_token=integer("num_experts_per_tok"),
        routing=replace(_SIGMOIDS, normalise=flag("norm_topk_prob")),
        num_shared=integer("n_shared_experts", default=0, least=0),
    ),
)

MINIMAX_M2 = like(
    LLAMA,
    rules={
        "names": replace(MIXTRAL.names, router_bias="block_sparse_moe.e_score_correction_bias"),
        "rope": RopeRule(
            theta=number("rope_theta", default=5e6),
            allows_partial=True,
            rotary_dim=integer("rotary_dim", default=0, least=0),
        ),
        "unused": ("router_jitter_noise",),  # of training
    },
    head_dim=integer("head_dim", default=128),
    qk_norm=flag("use_qk_norm", default=True, value_map={True: "projection"}),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    experts=ExpertsConfig(
        num_experts=integer("num_local_experts", "num_experts", default=256, most=MAX_PARTS),
        per_token=integer("num_experts_per_tok", default=8),
        intermediate_size=integer("intermediate_size"),
        routing=replace(_SIGMOIDS, normalise=True, scale=1.0, num_groups=1, top_groups=1),
        is_router_float32=True,
        has_router_bias=True,
    ),
)

HY3 = like(
    LLAMA,
    rules={
        "names": replace(
            _SHARED_EXPERTS, router="mlp.router.gate", router_bias="mlp.expert_bias", shared="mlp.shared_mlp."
        ),
        "rope": RopeRule(theta=number("rope_theta", default=11158840.0)),
        "sparse": SparseRule(
            first=integer("first_k_dense_replace", default=1, least=0), kinds=strings("mlp_layer_types")
        ),
    },
    norm_eps=number("rms_norm_eps", default=1e-5),
    head_dim=integer("head_dim", default=128),
    qk_norm="head",
    mlp_bias=flag("mlp_bias", value_map={False: False}),
    experts=replace(
        _SIGMOID_EXPERTS,
        num_experts=integer("num_experts", "num_local_experts", default=192, most=MAX_PARTS),
        intermediate_size=integer("moe_intermediate_size", default=1536),
        routing=Routing(normalise=True, score="sigmoid", scale=number("router_scaling_factor", default=2.826)),
        shared_size=integer("moe_intermediate_size", default=1536),
        num_shared=integer("num_shared_experts", default=1, least=0),
    ),
)

TRINITY = like(
    LLAMA,
    rules={
        "names": TensorNames(
            attn_out_norm="post_attention_layernorm",
            mlp_norm="pre_mlp_layernorm",
            mlp_out_norm="post_mlp_layernorm",
            router="mlp.router.gate",
            router_bias="mlp.expert_bias",
            shared="mlp.shared_experts.",
        ),
        "rope": RopeRule(layers="window"),
        "windows": WindowRule(
            "pattern",
            integer("sliding_window", default=1024, null=0, least=0),
            pattern=integer("global_attn_every_n_layers", default=4),
        ),
        "sparse": SparseRule(first=integer("num_dense_layers", default=1, least=0)),
    },
    order="both",
    norm_eps=number("rms_norm_eps", default=1e-5),
    head_dim=integer("head_dim", default=128),
    qk_norm="head",
    attention_gate="sigmoid",
    mlp_bias=False,
    embed_scale=flag("mup_enabled", value_map={True: 0.0, False: 1.0}),
    experts=replace(
        _SIGMOID_EXPERTS,
        num_experts=integer("num_experts", default=64, most=MAX_PARTS),
        per_token=integer("num_experts_per_tok", default=6),
        routing=Routing(normalise=True, score="sigmoid", scale=number("route_scale", default=1.0)),
        num_shared=integer("num_shared_experts", default=2, least=0),
    ),
)

_LAGUNA_ROPES = MappingProxyType(
    {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }
)
LAGUNA = like(
    LLAMA,
    rules={
        "names": TensorNames(
            attention_gate="self_attn.g_proj",
            router_bias="mlp.experts.e_score_correction_bias",
            shared="mlp.shared_expert.",
        ),
        "rope": RopeRule(theta=5e5, local_theta=1e4, allows_partial=True, missing=_LAGUNA_ROPES),
        "windows": WindowRule("upper", integer("sliding_window", default=512, least=0), first=_NO_LAYER),
        "sparse": SparseRule(first=1, kinds=strings("mlp_layer_types")),
        "heads_of_layers": integers("num_attention_heads_per_layer"),
    },
    head_dim=integer("head_dim", default=128),
    qk_norm="head",
    attention_gate=choice(
        "gating",
        default=True,
        value_map={True: "softplus:head", "per-head": "softplus:head", "per-element": "softplus"},
    ),
    mlp_bias=False,
    experts=replace(
        _SIGMOID_EXPERTS,
        num_experts=integer("num_experts", default=256, most=MAX_PARTS),
        intermediate_size=integer("moe_intermediate_size", default=512),
        routing=Routing(normalise=True, score="sigmoid", scale=number("moe_routed_scaling_factor", default=1.0)),
        shared_size=integer("shared_expert_intermediate_size", default=512, least=0),
        num_shared=1,
    ),
)

_GEMMA4_ROPES = MappingProxyType(
    {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
)
GEMMA4 = like(
    GEMMA3,
    rules={
        "names": replace(
            GEMMA3.names,
            router="router.proj",
            stacked_up="experts.gate_up_proj",
            stacked_down="experts.down_proj",
            is_stacked=True,
        ),
        "scale": 1.0,
        "rope": RopeRule(theta=1e6, local_theta=1e4, allows_partial=True, missing=_GEMMA4_ROPES),
        "windows": WindowRule("pattern", integer("sliding_window", default=512, least=0), pattern=6),
        "full": FullRule(
            head_dim=integer("global_head_dim", default=512),
            num_kv_heads=integer("num_global_key_value_heads", default=0),
            values_are_keys=flag("attention_k_eq_v"),
            layers=mapping("per_layer_config"),
        ),
        "sharing": SharingRule(
            num_layers=integer("num_kv_shared_layers", default=0, least=0),
            mlp_factor=flag("use_double_wide_mlp", value_map={True: 2, False: 1}),
        ),
        "sparse": SparseRule(used=flag("enable_moe_block")),
    },
    norm="rms",
    v_norm=True,
    layer_input_size=integer("hidden_size_per_layer_input", default=256, null=0, least=0),
    layer_input_rows=integer("vocab_size_per_layer_input", default=262144),
    has_layer_scale=True,
    experts=ExpertsConfig(
        num_experts=integer("num_experts", default=1, most=MAX_PARTS),
        per_token=integer("top_k_experts", default=1),
        intermediate_size=integer("moe_intermediate_size", default=1),
        routing=Routing(normalise=True),
        is_beside_mlp=True,
    ),
)
