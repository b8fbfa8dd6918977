"""Families with RMS norms like Llama, without experts: Mistral, Qwen, Gemma, Phi-3, OLMo, Granite, GLM-4 and others."""

from types import MappingProxyType

from quire.models.config import TensorNames
from quire.models.config_fields import choice, flag, integer, integers, number
from quire.models.family import ACTIVATIONS, LLAMA, WINDOW, WindowRule, like
from quire.models.rope_config import RopeRule

MISTRAL = like(LLAMA, rules={"windows": WindowRule("all", WINDOW)})

_UPPER = WindowRule(
    "upper", WINDOW, used=flag("use_sliding_window"), first=integer("max_window_layers", default=28, least=0)
)

QWEN2 = like(
    LLAMA,
    rules={"windows": _UPPER},
    qkv_bias=True,
    o_bias=False,
)

QWEN3 = like(
    LLAMA,
    rules={"windows": _UPPER},
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
        "windows": WindowRule("pattern", WINDOW, pattern=2),
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
            "pattern", WINDOW, pattern=integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
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

OLMO3 = like(
    OLMO2,
    rules={
        "rope": RopeRule(
            theta=number("rope_theta", default=5e5),
            local_theta=number("rope_theta", default=5e5),  # layers with a window have no scaling
        ),
        "windows": WindowRule("pattern", WINDOW, pattern=4),
    },
)

EXAONE4 = like(
    OLMO2,
    rules={
        "rope": RopeRule(layers="window_if_any"),
        "windows": WindowRule(
            "pattern", WINDOW, pattern=integer("sliding_window_pattern", default=4, null=0, least=0, letters="LG")
        ),
    },
    qk_norm="head",
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
)

SMOLLM3 = like(
    LLAMA,
    rules={
        "rope": RopeRule(
            theta=number("rope_theta", default=2e6),
            layers="listed",
            listed=integers("no_rope_layers"),
            interval=integer("no_rope_layer_interval", default=4),
        ),
        "windows": WindowRule("listed", integer("sliding_window", default=0, least=0), used=flag("use_sliding_window")),
    },
    tied=flag("tie_word_embeddings", default=True),
)

SEED_OSS = like(
    LLAMA,
    head_dim=integer("head_dim", default=128),
    qkv_bias=flag("attention_bias", default=True),
    o_bias=flag("attention_out_bias"),
)

ERNIE4_5 = like(
    LLAMA,
    rules={
        "names": TensorNames(interleaved=True),
        "rope": RopeRule(theta=number("rope_theta", default=5e5)),
    },
    norm_eps=number("rms_norm_eps", default=1e-5),
    head_dim=integer("head_dim", default=128),
    tied=flag("tie_word_embeddings", default=True),
    qkv_bias=flag("use_bias"),
    o_bias=flag("use_bias"),
    mlp_bias=flag("use_bias"),
)

GLM4 = like(
    LLAMA,
    rules={
        "names": TensorNames(
            attn_out_norm="post_self_attn_layernorm",
            mlp_out_norm="post_mlp_layernorm",
            up=("mlp.gate_up_proj",),
            interleaved=True,
        ),
        "rope": RopeRule(rotary_fraction=number("partial_rotary_factor", default=0.5), allows_partial=True),
    },
    order="both",
    norm_eps=number("rms_norm_eps", default=1.5625e-7),
    head_dim=integer("head_dim", default=128),
    qkv_bias=flag("attention_bias", default=True),
    o_bias=False,
    mlp_bias=False,
)

ARCEE = like(
    LLAMA,
    rules={"names": TensorNames(up=("mlp.up_proj",))},
    norm_eps=number("rms_norm_eps", default=1e-5),
    activation=choice("hidden_act", default="relu2", value_map=ACTIVATIONS),
    gated=False,
)

MINISTRAL3 = like(
    LLAMA,
    rules={
        "rope": RopeRule(
            theta=number("rope_theta", default=1e6),
            keys=("llama_4_scaling_beta",),
            missing=MappingProxyType(
                {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 16.0,
                    "original_max_position_embeddings": 16384,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                }
            ),
        ),
        "windows": WindowRule("all"),
    },
    norm_eps=number("rms_norm_eps", default=1e-5),
    head_dim=integer("head_dim", default=128, null=0),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
)

APERTUS = like(
    LLAMA,
    rules={
        "names": TensorNames(attn_norm="attention_layernorm", mlp_norm="feedforward_layernorm", up=("mlp.up_proj",)),
        "rope": RopeRule(
            theta=number("rope_theta", default=12e6),
            missing=MappingProxyType(
                {
                    "rope_type": "llama3",
                    "rope_theta": 12e6,
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            ),
        ),
    },
    norm_eps=number("rms_norm_eps", default=1e-5),
    qk_norm="head",
    activation=choice("hidden_act", default="xielu", value_map={**ACTIVATIONS, "xielu": "xielu"}),
    gated=False,
    mlp_bias=False,
)

# beta_fast to mscale_all_dim are in its files, beside an `alpha` that needs none of them
_HUNYUAN_ROPE = RopeRule(keys=("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"))
HUNYUAN = like(
    LLAMA,
    rules={
        "names": TensorNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
        "rope": _HUNYUAN_ROPE,
    },
    norm_eps=number("rms_norm_eps", default=1e-5),
    qk_norm="head",
    qk_norm_first=False,
    mlp_bias=False,
)
