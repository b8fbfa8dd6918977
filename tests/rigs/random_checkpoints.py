"""Random checkpoints, small enough to create in a test, saved by transformers."""

import re
from math import prod
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

VOCAB = 301  # no multiple of 4 or 32, to test the last words of random numbers and masks

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
ROPES_BY_KIND = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.6,
    "logits_scaling": 8.0,
}
HALF_SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 13}
NO_WINDOW = {"layer_types": ["full_attention"] * 3, "sliding_window": None}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 13,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
NEMOTRON_H = {"mamba_num_heads": 4, "mamba_head_dim": 10, "n_groups": 2, "ssm_state_size": 12, "conv_kernel": 3}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 12, "mamba_d_head": 16}
KIMI = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
SIGMOID_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}
QUERY_SCALING = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def scaled(**rope):
    """RoPE parameters that scale 128 positions to four times as many."""
    return {"rope_parameters": {"factor": 4.0, **rope}, "max_position_embeddings": 128}


# name -> (family's name in transformers, differences from SHAPE). Further variants of a family follow its first.
KINDS = {
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-gqa-tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-mqa-biases": ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"num_key_value_heads": 2, **scaled(rope_type="linear")}),
    "llama-3": (
        "Llama",
        {"num_key_value_heads": 2, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}},
    ),
    "llama-yarn": (
        "Llama",
        {"head_dim": 32, **scaled(rope_type="yarn", original_max_position_embeddings=128)},
    ),
    "llama-yarn-mscale": (
        "Llama",
        scaled(rope_type="yarn", mscale=1.0, mscale_all_dim=0.5, beta_fast=8.0, truncate=False),
    ),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None, "head_dim": 80}),
    "mistral-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 19}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-upper-window": (
        "Qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3-gqa": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
    "qwen3-tied": (
        "Qwen3",
        {"num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": True, "rope_theta": 1e6},
    ),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 256}),
    "gemma2": (
        "Gemma2",
        {"num_key_value_heads": 2, "head_dim": 96, "sliding_window": 11, "query_pre_attn_scalar": 24},
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 17,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 32,
        },
    ),
    "phi3": ("Phi3", {"num_key_value_heads": 2}),
    "phi3-window": ("Phi3", {"sliding_window": 23}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "granite": ("Granite", {"num_key_value_heads": 2, "tie_word_embeddings": True, **GRANITE}),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": (
        "Mixtral",
        {"num_key_value_heads": 4, "num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 15},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {"num_key_value_heads": 2, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0], **EXPERTS},
    ),
    "qwen3-moe": ("Qwen3Moe", {"num_key_value_heads": 2, "head_dim": 128, "norm_topk_prob": True, **EXPERTS}),
    "qwen3-moe-sparse-step": (
        "Qwen3Moe",
        {"num_key_value_heads": 1, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3], **EXPERTS},
    ),
    "gpt2": ("GPT2", {}),
    "gpt2-scaled-by-layer": ("GPT2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 80}),
    "opt": ("OPT", {"ffn_dim": 96}),
    "opt-post-norm": ("OPT", {"ffn_dim": 96, "do_layer_norm_before": False, "word_embed_proj_dim": 40}),
    "opt-no-bias": ("OPT", {"ffn_dim": 96, "enable_bias": False, "tie_word_embeddings": False}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt-neox-sequential": (
        "GPTNeoX",
        {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0, "num_attention_heads": 2},
    ),
    "falcon-mqa": ("Falcon", {}),
    "falcon-40b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 96},
    ),
    "falcon-sequential": ("Falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "phi": ("Phi", {}),
    "phi-qk-norm": ("Phi", {"num_key_value_heads": 2, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2, "sliding_window": 21}),
    "stablelm": ("StableLm", {"num_key_value_heads": 4, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel-qk-norm": (
        "StableLm",
        {"num_key_value_heads": 2, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "olmo3": ("Olmo3", {"num_key_value_heads": 2, "rope_parameters": ROPES_BY_KIND, **HALF_SLIDING}),
    "olmo3-every-fourth": ("Olmo3", {"num_key_value_heads": 4, "num_hidden_layers": 4, "sliding_window": 21}),
    "exaone4": ("Exaone4", {"num_key_value_heads": 2, "head_dim": 32, **HALF_SLIDING}),
    "exaone4-no-window": ("Exaone4", {"num_key_value_heads": 2, "tie_word_embeddings": True, **NO_WINDOW}),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2, "num_hidden_layers": 4}),
    "smollm3-listed": (
        "SmolLM3",
        {
            "num_key_value_heads": 1,
            "no_rope_layers": [1, 0, 1],
            "tie_word_embeddings": False,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 17,
        },
    ),
    "seed-oss": ("SeedOss", {"num_key_value_heads": 2, "head_dim": 24}),
    "seed-oss-biases": (
        "SeedOss",
        {"num_key_value_heads": 4, "head_dim": 16, "attention_out_bias": True, "mlp_bias": True},
    ),
    "ernie4-5": ("Ernie4_5", {"num_key_value_heads": 2, "head_dim": 32}),
    "ernie4-5-biases": ("Ernie4_5", {"num_key_value_heads": 1, "use_bias": True, "tie_word_embeddings": False}),
    "glm4": ("Glm4", {"num_key_value_heads": 2, "head_dim": 32}),
    "glm4-all-rotated": (
        "Glm4",
        {"num_key_value_heads": 4, "head_dim": 16, "attention_bias": False, "partial_rotary_factor": 1.0},
    ),
    "arcee": ("Arcee", {"num_key_value_heads": 2}),
    "arcee-biases": ("Arcee", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "nemotron": ("Nemotron", {"num_key_value_heads": 2}),
    "nemotron-biases": (
        "Nemotron",
        {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "attention_bias": True,
            "mlp_bias": True,
            "partial_rotary_factor": 1.0,
        },
    ),
    "olmoe": ("Olmoe", {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32}),
    "olmoe-normalised": (
        "Olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "norm_topk_prob": True},
    ),
    "phi-moe": (
        "Phimoe",
        {
            "num_key_value_heads": 2,
            "num_local_experts": 6,
            "intermediate_size": 32,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "phi-moe-window": (
        "Phimoe",
        {"num_key_value_heads": 4, "num_local_experts": 4, "intermediate_size": 48, "sliding_window": 19},
    ),
    "granite-moe": (
        "GraniteMoe",
        {"num_key_value_heads": 2, "num_local_experts": 6, "intermediate_size": 32, **GRANITE},
    ),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40, **GRANITE},
    ),
    "granite-moe-not-shared": ("GraniteMoeShared", {"num_key_value_heads": 1, "num_local_experts": 5}),
    "mellum": (
        "Mellum",
        {"num_key_value_heads": 2, "head_dim": 32, "rope_parameters": ROPES_BY_KIND, **EXPERTS, **HALF_SLIDING},
    ),
    "mellum-dense-layers": (
        "Mellum",
        {"num_key_value_heads": 4, "head_dim": 16, "mlp_layer_types": ["dense", "sparse", "dense"], **EXPERTS},
    ),
    "cohere2": ("Cohere2", {"num_key_value_heads": 2, **HALF_SLIDING}),
    "cohere2-every-fourth": ("Cohere2", {"num_key_value_heads": 4, "num_hidden_layers": 4, "sliding_window": 9}),
    "ministral3": ("Ministral3", {"num_key_value_heads": 2, "head_dim": 32, "rope_parameters": QUERY_SCALING}),
    "ministral3-window": (
        "Ministral3",
        {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "sliding_window": 19,
            "tie_word_embeddings": True,
            "rope_parameters": {**QUERY_SCALING, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 32},
        },
    ),
    "apertus": ("Apertus", {"num_key_value_heads": 2}),
    "apertus-biases": ("Apertus", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
    "hunyuan": ("HunYuanDenseV1", {"num_key_value_heads": 2, "head_dim": 32}),
    "hunyuan-alpha": (
        "HunYuanDenseV1",
        {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 6, "moe_topk": 2},
    ),
    "hunyuan-moe-listed": (
        "HunYuanMoEV1",
        {"num_key_value_heads": 4, "head_dim": 16, "num_experts": 4, "moe_topk": [2, 2, 2]},
    ),
    "ernie4-5-moe": (
        "Ernie4_5_Moe",
        {
            "num_key_value_heads": 2,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_end_index": 2,
        },
    ),
    "ernie4-5-moe-interval": (
        "Ernie4_5_Moe",
        {
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "moe_num_experts": 4,
            "moe_k": 3,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "glm4-moe": ("Glm4Moe", {"num_key_value_heads": 2, "head_dim": 32, **SIGMOID_EXPERTS}),
    "glm4-moe-groups": (
        "Glm4Moe",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            **SIGMOID_EXPERTS,
        },
    ),
    "dots1": ("Dots1", {"num_key_value_heads": 2, "head_dim": 16, "n_shared_experts": 2, **SIGMOID_EXPERTS}),
    "dots1-window": (
        "Dots1",
        {
            "num_key_value_heads": 4,
            "n_group": 2,
            "sliding_window": 13,
            "max_window_layers": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "attention_bias": True,
            **SIGMOID_EXPERTS,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
    ),
    "minimax-m2-all-rotated": (
        "MiniMaxM2",
        {
            "num_key_value_heads": 4,
            "head_dim": 24,
            "intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
    ),
    "hy3": ("HYV3", {"num_key_value_heads": 2, "head_dim": 32, **EXPERTS}),
    "hy3-listed": (
        "HYV3",
        {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.5,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            **EXPERTS,
        },
    ),
    "trinity": (
        "Afmoe",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": 17,
            "mup_enabled": True,
            "route_scale": 2.5,
            **EXPERTS,
        },
    ),
    "trinity-every-third": (
        "Afmoe",
        {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "global_attn_every_n_layers": 3,
            "num_dense_layers": 2,
            "num_shared_experts": 1,
            **EXPERTS,
        },
    ),
    "laguna": (
        "Laguna",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_attention_heads_per_layer": [4, 6, 4],
            "shared_expert_intermediate_size": 48,
            "moe_routed_scaling_factor": 2.5,
            **HALF_SLIDING,
            **EXPERTS,
        },
    ),
    "laguna-per-element": (
        "Laguna",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "gating": "per-element",
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "shared_expert_intermediate_size": 32,
            **EXPERTS,
        },
    ),
    "gemma4": (
        "Gemma4",
        {**GEMMA4, "num_key_value_heads": 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4-moe": (
        "Gemma4",
        {
            **GEMMA4,
            "num_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma4-shared-kv": (
        "Gemma4",
        {
            **GEMMA4,
            "num_key_value_heads": 1,
            "num_hidden_layers": 6,
            "layer_types": 2 * HALF_SLIDING["layer_types"][:2] + ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "use_double_wide_mlp": True,
        },
    ),
    "cohere": ("Cohere", {"num_key_value_heads": 2}),
    "cohere-qk-norm": ("Cohere", {"num_key_value_heads": 2, "use_qk_norm": True, "logit_scale": 0.5}),
}

# with layers that have a recurrence in place of attention
HYBRIDS = {
    "qwen3-next": (
        "Qwen3Next",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": True,
            **DELTA,
            **EXPERTS,
        },
    ),
    "qwen3-next-listed": (
        "Qwen3Next",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_only_layers": [1],
            "attention_bias": True,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": False,
            **DELTA,
            **EXPERTS,
            "linear_num_value_heads": 2,
        },
    ),
    "qwen3-5": ("Qwen3_5", {"num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4, **DELTA}),
    "qwen3-5-tied": (
        "Qwen3_5",
        {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            **DELTA,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "qwen3-5-moe": (
        "Qwen3_5Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 48,
            **DELTA,
            **EXPERTS,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_key_value_heads": 2,
            "intermediate_size": 144,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.1,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
        },
    ),
    "lfm2-indices": (
        "Lfm2",
        {
            "num_key_value_heads": 4,
            "full_attn_idxs": [1, 3],
            "num_hidden_layers": 5,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            "num_key_value_heads": 2,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_hidden_layers": 4,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
            **EXPERTS,
        },
    ),
    "lfm2-moe-no-bias": (
        "Lfm2Moe",
        {
            "num_key_value_heads": 4,
            "layer_types": ["full_attention", "conv", "conv"],
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "conv_bias": True,
            "tie_word_embeddings": False,
            **EXPERTS,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            "num_key_value_heads": 2,
            "num_local_experts": 6,
            "intermediate_size": 32,
            "shared_intermediate_size": 40,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            **MAMBA,
            **GRANITE,
        },
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "tie_word_embeddings": True,
            **MAMBA,
            **GRANITE,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "time_step_limit": [0.2, 1.0],
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
            **NEMOTRON_H,
        },
    ),
    "nemotron-h-biases": (
        "NemotronH",
        {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "layers_block_type": ["mlp", "full_attention", "linear_attention", "linear_attention"],
            **NEMOTRON_H,
            "n_groups": 1,
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "time_step_min": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-3": (
        "NemotronH",
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
            **NEMOTRON_H,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron-3-latent": (
        "NemotronH",
        {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "layers_block_type": ["mlp", "moe", "full_attention", "linear_attention", "moe"],
            **NEMOTRON_H,
            "mlp_bias": True,
            "n_routed_experts": 12,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "granite-hybrid-no-states": (
        "GraniteMoeHybrid",
        {"num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": ["full_attention"] * 3, **MAMBA},
    ),
    "kimi-linear": (
        "KimiLinear",
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 4,
            "linear_num_heads": 3,
            "linear_head_dim": 20,
            **KIMI,
        },
    ),
    "kimi-linear-groups": (
        "KimiLinear",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "linear_num_heads": 2,
            "linear_head_dim": 12,
            "linear_conv_kernel_dim": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            **KIMI,
            "v_head_dim": 24,
        },
    ),
}

# RoPE depends on the longest sequence, in transformers on the longest one so far. Beyond the training context its
# generated tokens are no oracle; its logits of a whole sequence are.
LENGTH_DEPENDENT = {
    "llama-dynamic": (
        "Llama",
        {"num_key_value_heads": 2, "max_position_embeddings": 96, "rope_parameters": DYNAMIC},
    ),
    "phi3-longrope": (
        "Phi3",
        {
            "num_key_value_heads": 2,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 2.0, 4.0, 6.0, 9.0, 12.0],
            },
        },
    ),
}

EVERY = KINDS | HYBRIDS | LENGTH_DEPENDENT

_CONFIGS = {name: f"{name}TextConfig" for name in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")}
_MODELS = {"GPT2": "GPT2LMHeadModel"}
_WITHOUT = {"OPT": ("intermediate_size",), "GPT2": ("intermediate_size",), "Falcon": ("intermediate_size",)}
_ROUTER_BIASES = ("correction_bias", "expert_bias")  # they select other experts for some tokens
_ROUTERS = (".gate.weight", ".mlp.router.weight", ".router.proj.weight", ".gate.wg.weight", ".router.layer.weight")
_PLUS_ONE = ("Gemma", "Qwen3Next", "Qwen3_5")  # families with norms whose weights are stored minus 1
_CONVOLUTIONS = (".conv1d.weight", ".conv.conv.weight")
_STEEP = {"OPT": ("q_proj.weight", "k_proj.weight")}  # whose norms come after attention
_RENAMED = {
    "GPT2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
}


def architecture(kind: str) -> str:
    """The architecture of a kind in config.json."""
    family, _ = EVERY[kind]
    return _MODELS.get(family, f"{family}ForCausalLM")


def config_of(kind: str):
    """The transformers config of a kind."""
    family, differences = EVERY[kind]
    values = {key: value for key, value in {**SHAPE, **differences}.items() if key not in _WITHOUT.get(family, ())}
    values = {_RENAMED.get(family, {}).get(key, key): value for key, value in values.items()}
    return getattr(transformers, _CONFIGS.get(family, f"{family}Config"))(**values)


def classifier(kind: str) -> str:
    """The architecture of a kind with a classification head."""
    family, _ = EVERY[kind]
    return f"{family}TextForSequenceClassification" if family == "Gemma3" else f"{family}ForSequenceClassification"


def num_stored(model: PreTrainedModel) -> int:
    """Numbers of the parameters and buffers that a checkpoint has: biases of routers and xIELU's are buffers."""
    buffers = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    return sum(tensor.numel() for tensor in [*model.parameters(), *map(model.get_buffer, buffers)])


def num_expanded(description) -> int:
    """Numbers that the weights of a description's decoder have beside its parameters: zeros and ones of latent keys."""
    places = [place for place in description.weight_map.values() if place.latent is not None]
    return sum(prod(place.latent.expanded_shape(place.shape[0])) - prod(place.shape) for place in places)


def save(
    folder: Path, kind: str = "qwen3-gqa", *, shard: str | None = None, dtype=torch.float32, head=architecture, **config
) -> PreTrainedModel:
    """Create a model, write it to `folder`, and return it. Every parameter is random, also norms and biases.

    head: `architecture` or `classifier`. config: further fields of its config.
    """
    family, _ = EVERY[kind]
    torch.manual_seed(sum(map(ord, kind)))
    made = config_of(kind)
    made.update(config)
    model = getattr(transformers, head(kind))(made).eval()
    randomize(model, family)
    model = model.to(dtype)
    model.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
    if family == "KimiLinear":
        rename_dense_layers(folder)
    return model


def rename_dense_layers(folder: Path) -> None:
    """Give MLPs of Kimi Linear their published names: transformers 5.23 saves them with those of mixtures."""
    names = re.compile(r"block_sparse_moe\.((gate|up|down)_proj\.weight)$")
    for file in folder.glob("*.safetensors"):
        save_file({names.sub(r"mlp.\1", name): some for name, some in load_file(file).items()}, file, {"format": "pt"})


@torch.no_grad()
def randomize(model: PreTrainedModel, family: str) -> None:
    """Make every parameter random, also norms, biases and the biases of routers.

    family: its name in transformers, which decides around what norms are distributed.
    """
    for name, bias in model.named_buffers():
        if name.endswith(_ROUTER_BIASES):
            # transformers adds 1e-6 to the sum of a token's weights in LFM2, which counts if they are all small
            bias.normal_(std=0.1 if family == "Lfm2Moe" else 1.0)
        elif name.endswith("layer_scalar"):
            bias.uniform_(0.5, 1.5)
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name or "ln_" in name
        if name.endswith(_ROUTER_BIASES):
            parameter.normal_()
        elif name.endswith(".router.scale"):
            parameter.uniform_(4, 8)
        elif name.endswith("A_log"):
            parameter.uniform_(-5, 0)  # states that last
        elif is_norm or parameter.dim() == 1:
            is_plus_one = family.startswith(_PLUS_ONE) and "linear_attn." not in name
            offset = is_norm and not name.endswith("bias") and not is_plus_one
            parameter.copy_(torch.randn_like(parameter) * 0.3 + offset)
        else:  # attention with large enough scores to find errors, routers with clear decisions
            is_steep = name.endswith((*_ROUTERS, *_CONVOLUTIONS, *_STEEP.get(family, ())))
            parameter.normal_(std=0.5 if is_steep else 0.08)
