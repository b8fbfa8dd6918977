"""Families with layer norms, most of them with biases and without gated MLPs: GPT-2 and similar models."""

from dataclasses import replace
from typing import Any

from quire.models.config import TensorNames
from quire.models.config_fields import choice, flag, integer, number
from quire.models.family import ACTIVATIONS, LLAMA, MAX_PARTS, WINDOW, WindowRule, like
from quire.models.rope_config import RopeRule

_GPT = like(
    LLAMA,
    norm="layer",
    norm_eps=number("layer_norm_eps", default=1e-5),
    norm_bias=True,
    gated=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)

GPT2 = like(
    _GPT,
    rules={
        "rope": None,
        "names": TensorNames(
            prefix="transformer.",
            embed="wte",
            positions="wpe",
            norm="ln_f",
            layer="h.{}.",
            attn_norm="ln_1",
            mlp_norm="ln_2",
            qkv=("attn.c_attn",),
            o="attn.c_proj",
            up=("mlp.c_fc",),
            down="mlp.c_proj",
            transposed=True,
            ignored_suffixes=("attn.bias", "attn.masked_bias"),
        ),
        "scale": flag("scale_attn_weights", default=True, value_map={True: 0.0, False: 1.0}),
        "scale_by_layer": flag("scale_attn_by_inverse_layer_idx"),
    },
    # if a config.json has both names, transformers uses the first
    hidden_size=integer("hidden_size", "n_embd", is_first=True),
    num_layers=integer("num_hidden_layers", "n_layer", most=MAX_PARTS, is_first=True),
    num_heads=integer("num_attention_heads", "n_head", most=MAX_PARTS, is_first=True),
    num_kv_heads=0,
    max_positions=integer("max_position_embeddings", "n_positions", is_first=True),
    norm_eps=number("layer_norm_epsilon", default=1e-5),
    intermediate_size=integer("n_inner", default=0),
    position_offset=0,
    tied=flag("tie_word_embeddings", default=True),
    activation=choice("activation_function", default="gelu_new", value_map=ACTIVATIONS),
)

_OPT_NAMES = TensorNames(
    prefix="model.decoder.",
    positions="embed_positions",
    norm="final_layer_norm",
    attn_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    o="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
)

OPT = like(
    _GPT,
    rules={
        "rope": None,
        "names": flag(
            "do_layer_norm_before",
            default=True,
            value_map={
                True: _OPT_NAMES,
                False: replace(_OPT_NAMES, attn_out_norm="self_attn_layer_norm", mlp_out_norm="final_layer_norm"),
            },
        ),
    },
    order=flag("do_layer_norm_before", default=True, value_map={True: "pre", False: "post"}),
    final_norm=flag(
        "do_layer_norm_before",
        default=True,
        value_map={True: flag("_remove_final_layer_norm", value_map={True: False, False: True}), False: False},
    ),
    position_offset=2,
    embed_size=integer("word_embed_proj_dim", default=0),
    intermediate_size=integer("ffn_dim"),
    tied=flag("tie_word_embeddings", default=True),
    norm_eps=1e-5,
    activation=choice("activation_function", default="relu", value_map=ACTIVATIONS),
    qkv_bias=flag("enable_bias", default=True),
    o_bias=flag("enable_bias", default=True),
    mlp_bias=flag("enable_bias", default=True),
)

NEOX = like(
    _GPT,
    rules={
        "names": TensorNames(
            prefix="gpt_neox.",
            embed="embed_in",
            norm="final_layer_norm",
            head="embed_out",
            qkv=("attention.query_key_value",),
            qkv_rows="grouped",
            o="attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
            ignored_suffixes=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
        ),
        "rope": RopeRule(
            theta=number("rotary_emb_base", default=10000.0),
            rotary_fraction=number("rotary_pct", default=0.25),
            allows_partial=True,
        ),
    },
    order=flag("use_parallel_residual", default=True, value_map={True: "parallel_two", False: "pre"}),
    num_kv_heads=0,
    activation=choice("hidden_act", default="gelu", value_map=ACTIVATIONS),
    qkv_bias=flag("attention_bias", default=True),
    o_bias=flag("attention_bias", default=True),
)

_FALCON_NAMES = TensorNames(
    prefix="transformer.",
    embed="word_embeddings",
    norm="ln_f",
    layer="h.{}.",
    qkv=("self_attention.query_key_value",),
    qkv_rows="grouped",
    o="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


def _falcon(*, two_norms: object, one_norm: object, old: object) -> Any:  # noqa: ANN401
    """A value of the 40B architecture with two norms or one norm, and of the older 7B architecture."""
    new = choice("num_ln_in_parallel_attn", default=2, value_map={2: two_norms, 1: one_norm})
    return flag("new_decoder_architecture", value_map={True: new, False: old})


FALCON = like(
    _GPT,
    rules={
        "names": _falcon(
            two_norms=replace(_FALCON_NAMES, attn_norm="ln_attn", mlp_norm="ln_mlp"),
            one_norm=_FALCON_NAMES,
            old=_FALCON_NAMES,
        )
    },
    order=_falcon(
        two_norms="parallel_two",
        one_norm="parallel",
        old=flag("parallel_attn", default=True, value_map={True: "parallel", False: "pre"}),
    ),
    num_layers=integer("num_hidden_layers", "n_layer", most=MAX_PARTS),
    num_heads=integer("num_attention_heads", "n_head", most=MAX_PARTS),
    norm_eps=number("layer_norm_epsilon", default=1e-5),
    num_kv_heads=flag(
        "new_decoder_architecture",
        value_map={
            True: integer("num_kv_heads", "n_head_kv", default=0),
            False: flag("multi_query", default=True, value_map={True: 1, False: 0}),
        },
    ),
    intermediate_size=integer("ffn_hidden_size", default=0),
    max_positions=integer("max_position_embeddings", default=2048),
    tied=flag("tie_word_embeddings", default=True),
    activation=choice("activation", default="gelu", value_map=ACTIVATIONS),
    qkv_bias=flag("bias"),
    o_bias=flag("bias"),
    mlp_bias=flag("bias"),
)

PHI = like(
    _GPT,
    rules={
        "names": TensorNames(
            norm="final_layernorm",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
            o="self_attn.dense",
            up=("mlp.fc1",),
            down="mlp.fc2",
        ),
        "rope": RopeRule(rotary_fraction=number("partial_rotary_factor", default=0.5), allows_partial=True),
    },
    order="parallel",
    qk_norm=flag("qk_layernorm", value_map={True: "head", False: "none"}),
    qk_norm_bias=True,
    head_bias=True,
    activation=choice("hidden_act", default="gelu_new", value_map=ACTIVATIONS),
)

STARCODER2 = like(
    _GPT,
    rules={
        "names": TensorNames(up=("mlp.c_fc",), down="mlp.c_proj"),
        "windows": WindowRule("always"),
    },
    norm_eps=number("norm_epsilon", default=1e-5),
    tied=flag("tie_word_embeddings", default=True),
    activation=choice("hidden_act", default="gelu_pytorch_tanh", value_map=ACTIVATIONS),
    qkv_bias=flag("use_bias", default=True),
    o_bias=flag("use_bias", default=True),
    mlp_bias=flag("use_bias", default=True),
)

STABLELM = like(
    LLAMA,
    rules={
        "names": TensorNames(q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}"),
        "rope": RopeRule(
            rotary_fraction=number("partial_rotary_factor", "rope_pct", default=0.25), allows_partial=True
        ),
    },
    order=flag("use_parallel_residual", value_map={True: "parallel", False: "pre"}),
    norm="layer",
    norm_eps=number("layer_norm_eps", default=1e-5),
    norm_bias=True,
    qk_norm=flag("qk_layernorm", value_map={True: "each", False: "none"}),
    qkv_bias=flag("use_qkv_bias"),
    o_bias=False,
)

COHERE = like(
    LLAMA,
    rules={
        "names": TensorNames(
            interleaved=choice("position_embedding_type", default="rope_gptj", value_map={"rope_gptj": True})
        ),
        "rope": RopeRule(theta=number("rope_theta", default=5e5)),
    },
    order="parallel",
    norm="layer",
    norm_eps=number("layer_norm_eps", default=1e-5),
    qk_norm=flag("use_qk_norm", value_map={True: "each", False: "none"}),
    tied=flag("tie_word_embeddings", default=True),
    logit_scale=number("logit_scale", default=0.0625),
)

COHERE2 = like(
    COHERE,
    rules={
        "rope": RopeRule(theta=number("rope_theta", default=1e4), layers="window"),
        "windows": WindowRule("pattern", WINDOW, pattern=integer("sliding_window_pattern", default=4)),
    },
    qk_norm="none",
)

NEMOTRON = like(
    _GPT,
    rules={
        "names": TensorNames(up=("mlp.up_proj",)),
        "rope": RopeRule(rotary_fraction=number("partial_rotary_factor", default=0.5), allows_partial=True),
    },
    norm="layer_plus_one",
    norm_eps=number("norm_eps", default=1e-5),
    activation=choice("hidden_act", default="relu2", value_map=ACTIVATIONS),
    qkv_bias=flag("attention_bias"),
    o_bias=flag("attention_bias"),
    mlp_bias=flag("mlp_bias"),
)
