"""Fields of published checkpoints, among them those that quire does not read: they are described as before."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers

from quire.models.config_fields import Fields
from quire.models.config_reader import decoder_config
from quire.models.description import FAMILIES, MODEL_TYPES
from quire.models.sentence_transformers import read_gguf
from quire.weights.gguf.config import check_unread, hf_config
from quire.weights.gguf.info import GgufInfo
from quire.weights.gguf.reader import Metadata

PATH = Path("config.json")
COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "use_cache": True,
    "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 16,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "pretraining_tp": 1, "rope_scaling": None, "vocab_size": 32000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.46.0", "hidden_act": "silu",
}  # fmt: skip
RMS = {"rms_norm_eps": 1e-5, "attention_bias": False}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
QWEN = {"max_window_layers": 21, "sliding_window": 131072, "use_sliding_window": False, "rms_norm_eps": 1e-6}
EXPERTS = {"output_router_logits": False, "router_aux_loss_coef": 0.001, "num_experts_per_tok": 4}
GEMMA = {
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 512,
    "cache_implementation": "hybrid",
}  # fmt: skip
GEMMA4 = {
    "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144, "use_bidirectional_attention": None,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}  # fmt: skip
PHI3 = {
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096, "sliding_window": 262144,
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
}  # fmt: skip
LONGROPE = {"long_factor": [1.5] * 64, "short_factor": [1.0] * 64}
GPT2 = {
    "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "activation_function": "gelu_new", "n_ctx": 1024,
    "layer_norm_epsilon": 1e-5, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
    "summary_type": "cls_index", "task_specific_params": {"text-generation": {"do_sample": True}}, "_num_labels": 1,
}  # fmt: skip
FALCON = {
    "apply_residual_connection_post_layernorm": False, "alibi": False, "bias": False, "hidden_dropout": 0.0,
    "layer_norm_epsilon": 1e-5, "parallel_attn": True, "hidden_size": 4544, "vocab_size": 65024,
}  # fmt: skip
EXAONE = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "rope_scaling": {**LLAMA3, "factor": 16.0, "rope_type": "llama3"},
}
SLIDING = ["sliding_attention"] * 3 + ["full_attention"]
GLM_MOE = {
    "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
    "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False, "max_position_embeddings": 131072,
}  # fmt: skip
MINISTRAL = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "type": "yarn",
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_type": "yarn",
}  # fmt: skip
HUNYUAN = {
    **RMS, "add_classification_head": False, "attention_head_dim": 128, "head_dim": 128, "cla_share_factor": 2,
    "class_num": 0, "dense_list": [4096, 0], "mlp_bias": False, "norm_type": "rms", "use_cla": False,
    "use_qk_norm": True, "use_rotary_pos_emb": True, "position_embedding_xdrope": False, "rope_theta": 10000.0,
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "type": "dynamic"},
}  # fmt: skip
GRANITE_MOE = {
    **RMS, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 6.0,
    "residual_multiplier": 0.22, "num_local_experts": 32, "num_experts_per_tok": 8, "output_router_logits": False,
    "router_aux_loss_coef": 0.0, "rope_theta": 1500000.0, "tie_word_embeddings": True,
}  # fmt: skip


def sizes(hidden, intermediate, layers, heads, kv_heads):
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    }  # fmt: skip


DELTA = {
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128,
}  # fmt: skip
QWEN35 = {
    "attention_bias": False, "attn_output_gate": True, "head_dim": 256, "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144, "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "rms_norm_eps": 1e-6,
    "mtp_use_dedicated_embeddings": False, "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
LINEAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
GRANITE4 = {
    "attention_bias": False, "embedding_multiplier": 12, "init_method": "mup", "mamba_chunk_size": 256,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "mamba_d_head": "auto", "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_proj_bias": False,
    "max_position_embeddings": 131072, "normalization_function": "rmsnorm", "output_router_logits": False,
    "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_theta": 10000,
    "router_aux_loss_coef": 0.0, "tie_word_embeddings": True, "vocab_size": 100352,
}  # fmt: skip
# architecture, fields besides those of COMMON
CONFIGS = {
    "Llama 2": ("LlamaForCausalLM", RMS),
    "Llama 3.1": ("LlamaForCausalLM", {**RMS, "mlp_bias": False, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}}),
    "Llama 3.2": ("LlamaForCausalLM", {**RMS, "head_dim": 64, "tie_word_embeddings": True}),
    "Llama with YaRN": ("LlamaForCausalLM", {**RMS, "rope_scaling": {**YARN, "finetuned": True}}),
    "DeepSeek Coder": ("LlamaForCausalLM", {**RMS, "rope_scaling": {"factor": 4.0, "type": "linear"}}),
    "SmolLM2": ("LlamaForCausalLM", {**RMS, "is_llama_config": True, "rope_interleaved": False}),
    "Mistral 0.1": ("MistralForCausalLM", {**RMS, "sliding_window": 4096}),
    "Mistral Nemo": ("MistralForCausalLM", {**RMS, "sliding_window": None, "head_dim": 128}),
    "Mixtral": ("MixtralForCausalLM", {**RMS, **EXPERTS, "num_local_experts": 8, "router_jitter_noise": 0.0,
                                       "sliding_window": None}),
    "Qwen 1.5": ("Qwen2ForCausalLM", {**QWEN, "seq_length": 32768}),
    "Qwen 2.5": ("Qwen2ForCausalLM", {**QWEN, "use_mrope": False, "rope_scaling": YARN}),
    "Qwen 1.5 MoE": ("Qwen2MoeForCausalLM", {**QWEN, **EXPERTS, "decoder_sparse_step": 1, "norm_topk_prob": False,
                                             "moe_intermediate_size": 1408, "num_experts": 60,
                                             "shared_expert_intermediate_size": 5632}),
    "Qwen 3": ("Qwen3ForCausalLM", {**QWEN, "attention_bias": False, "head_dim": 128, "sliding_window": None}),
    "Qwen 3 of transformers 5": ("Qwen3ForCausalLM", {**QWEN, "head_dim": 128, "layer_types": ["full_attention"] * 24,
                                                      "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    "Qwen 3 MoE": ("Qwen3MoeForCausalLM", {**QWEN, **EXPERTS, "decoder_sparse_step": 1, "norm_topk_prob": True,
                                           "moe_intermediate_size": 768, "num_experts": 128, "mlp_only_layers": [],
                                           "head_dim": 128, "sliding_window": None}),
    "Gemma": ("GemmaForCausalLM", {**RMS, "hidden_act": "gelu", "hidden_activation": None, "head_dim": 256}),
    "Gemma 2": ("Gemma2ForCausalLM", {**RMS, **GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
                                      "sliding_window_size": 4096}),
    "Gemma 3": ("Gemma3ForCausalLM", {**RMS, **GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                                      "rope_local_base_freq": 10000, "sliding_window_pattern": 6}),
    "Gemma 3, text of the 4B": ("Gemma3ForCausalLM", {**RMS, **GEMMA, "attn_logit_softcapping": 50.0,
                                                      "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                                                      "use_bidirectional_attention": False}),
    "Phi-3 4k": ("Phi3ForCausalLM", {**RMS, **PHI3, "sliding_window": 2047}),
    "Phi-3 128k": ("Phi3ForCausalLM", {**RMS, **PHI3, "rope_scaling": {**LONGROPE, "type": "su"}}),
    "Phi-3.5": ("Phi3ForCausalLM", {**RMS, **PHI3, "rope_scaling": {**LONGROPE, "type": "longrope"}}),
    "Phi-4": ("Phi3ForCausalLM", {**RMS, **PHI3, "sliding_window": None, "original_max_position_embeddings": 16384}),
    "Phi-4 mini": ("Phi3ForCausalLM", {**RMS, **PHI3, "full_attn_mod": 1, "interpolate_factor": 1, "mlp_bias": False,
                                       "lm_head_bias": False, "partial_rotary_factor": 0.75}),
    "OLMo 2": ("Olmo2ForCausalLM", RMS),
    "Granite 3": ("GraniteForCausalLM", {**RMS, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
                                         "logits_scaling": 8.0, "residual_multiplier": 0.22, "mlp_bias": False}),
    "GPT-2": ("GPT2LMHeadModel", GPT2),
    "OPT": ("OPTForCausalLM", {"_remove_final_layer_norm": False, "activation_function": "relu", "ffn_dim": 8192,
                               "do_layer_norm_before": True, "init_std": 0.02, "layerdrop": 0.0, "prefix": "</s>",
                               "word_embed_proj_dim": 2048}),
    "Pythia": ("GPTNeoXForCausalLM", {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_emb_base": 10000,
                                      "rotary_pct": 0.25, "use_parallel_residual": True}),
    "Falcon 7B": ("FalconForCausalLM", {**FALCON, "multi_query": True, "new_decoder_architecture": False,
                                        "num_attention_heads": 71}),
    "Falcon 40B": ("FalconForCausalLM", {**FALCON, "model_type": "RefinedWeb", "new_decoder_architecture": True,
                                         "num_attention_heads": 128, "n_head_kv": 8, "hidden_size": 8192}),
    "Phi-2": ("PhiForCausalLM", {"embd_pdrop": 0.0, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5,
                                 "partial_rotary_factor": 0.5, "qk_layernorm": False, "resid_pdrop": 0.1}),
    "StarCoder2": ("Starcoder2ForCausalLM", {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True,
                                             "mlp_type": "default", "norm_type": "layer_norm", "sliding_window": 4096,
                                             "attention_softmax_in_fp32": True, "scale_attn_weights": True}),
    "StableLM 2": ("StableLmForCausalLM", {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_qkv_bias": True,
                                           "qk_layernorm": False, "use_parallel_residual": False}),
    "Command R": ("CohereForCausalLM", {"attention_bias": False, "layer_norm_eps": 1e-5, "logit_scale": 0.0625,
                                        "model_max_length": 131072, "use_qk_norm": False}),
    "Command R7B": ("Cohere2ForCausalLM", {
        **sizes(4096, 14336, 32, 32, 8), "head_dim": 128, "layer_norm_eps": 1e-5, "logit_scale": 0.25,
        "rope_theta": 50000, "sliding_window": 4096, "sliding_window_pattern": 4, "cache_implementation": "hybrid",
        "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
        "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
        "use_parallel_embedding": True, "use_qk_norm": False, "attention_bias": False, "vocab_size": 256000}),
    "OLMo 3 7B": ("Olmo3ForCausalLM", {
        **sizes(4096, 11008, 32, 32, 32), **RMS, "rms_norm_eps": 1e-6, "rope_theta": 500000, "sliding_window": 4096,
        "layer_types": SLIDING * 8, "max_position_embeddings": 65536, "use_cache": False,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                         "original_max_position_embeddings": 8192, "rope_type": "yarn"}}),
    "EXAONE 4.0 32B": ("Exaone4ForCausalLM", {
        **sizes(5120, 27392, 64, 40, 8), **EXAONE, "head_dim": 128, "sliding_window": 4096,
        "sliding_window_pattern": "LLLG", "layer_types": SLIDING * 16, "max_position_embeddings": 131072}),
    "EXAONE 4.0 1.2B": ("Exaone4ForCausalLM", {
        **sizes(2048, 4096, 30, 32, 8), **EXAONE, "head_dim": 64, "sliding_window": None,
        "sliding_window_pattern": "LLLG", "layer_types": ["full_attention"] * 30, "tie_word_embeddings": True}),
    "SmolLM3 3B": ("SmolLM3ForCausalLM", {
        **sizes(2048, 11008, 36, 16, 4), **RMS, "max_window_layers": 28, "mlp_bias": False, "pretraining_tp": 2,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36,
        "rope_theta": 5e6, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True}),
    "Seed-OSS 36B": ("SeedOssForCausalLM", {
        **sizes(5120, 27648, 64, 80, 8), "rms_norm_eps": 1e-6, "head_dim": 128, "rope_theta": 1e7, "mlp_bias": False,
        "rope_scaling": {"rope_type": "default"}, "attention_bias": True, "attention_out_bias": False,
        "attention_dropout": 0.1, "residual_dropout": 0.1, "max_position_embeddings": 524288}),
    "ERNIE 4.5 0.3B": ("Ernie4_5ForCausalLM", {
        **sizes(1024, 3072, 18, 16, 2), "rms_norm_eps": 1e-5, "head_dim": 128, "rope_theta": 500000, "use_bias": False,
        "compression_ratio": 1.0, "tie_word_embeddings": True}),
    "ERNIE 4.5 21B-A3B": ("Ernie4_5_MoeForCausalLM", {
        **sizes(2560, 12288, 28, 20, 4), "rms_norm_eps": 1e-5, "rope_theta": 500000, "use_bias": False,
        "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_k": 6, "moe_intermediate_size": 1536,
        "moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_capacity": [64, 64, 64],
        "moe_gate": "topk", "moe_use_aux_free": True, "num_nextn_predict_layers": 1, "tie_word_embeddings": True}),
    "GLM-4 9B 0414": ("Glm4ForCausalLM", {
        **sizes(4096, 13696, 40, 32, 2), **RMS, "head_dim": 128, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
        "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329}),
    "GLM-4.5 Air": ("Glm4MoeForCausalLM", {**sizes(4096, 10944, 46, 96, 8), **GLM_MOE}),
    "GLM-4.6": ("Glm4MoeForCausalLM", {
        **sizes(5120, 12288, 92, 96, 8), **GLM_MOE, "first_k_dense_replace": 3, "moe_intermediate_size": 1536,
        "n_routed_experts": 160, "routed_scaling_factor": 2.5, "use_qk_norm": True}),
    "AFM 4.5B": ("ArceeForCausalLM", {
        **sizes(2560, 18432, 36, 20, 4), **RMS, "head_dim": 128, "hidden_act": "relu2", "mlp_bias": False,
        "rope_theta": 10000.0, "max_position_embeddings": 65536,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "rope_type": "yarn",
                         "original_max_position_embeddings": 4096, "type": "yarn"}}),
    "Phi-3.5 MoE": ("PhimoeForCausalLM", {
        **sizes(4096, 6400, 32, 32, 8), "attention_bias": True, "hidden_dropout": 0.0, "input_jitter_noise": 0.01,
        "lm_head_bias": True, "max_position_embeddings": 131072, "num_local_experts": 16, "num_experts_per_tok": 2,
        "original_max_position_embeddings": 4096, "output_router_logits": False, "rms_norm_eps": 1e-5,
        "rope_scaling": {**LONGROPE, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
                         "short_mscale": 1.243163121016122, "type": "longrope"},
        "rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01, "sliding_window": 131072}),
    "Gemma 4 E2B, text": ("Gemma4ForCausalLM", {
        **sizes(1536, 6144, 35, 8, 1), **GEMMA4, "hidden_size_per_layer_input": 256, "num_global_key_value_heads": None,
        "num_kv_shared_layers": 20, "sliding_window": 512, "use_double_wide_mlp": True,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7}),
    "Gemma 4 26B-A4B, text": ("Gemma4ForCausalLM", {
        **sizes(2816, 2112, 30, 16, 8), **GEMMA4, "attention_k_eq_v": True, "enable_moe_block": True,
        "hidden_size_per_layer_input": 0, "moe_intermediate_size": 704, "num_experts": 128,
        "num_global_key_value_heads": 2, "top_k_experts": 8, "sliding_window": 1024, "use_double_wide_mlp": False,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5}),
    "Ministral 3 8B, text": ("Ministral3ForCausalLM", {
        **sizes(4096, 14336, 34, 32, 8), "rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": None,
        "max_position_embeddings": 262144, "rope_parameters": {**MINISTRAL, "rope_theta": 1e6}}),
    "Devstral 2 123B": ("Ministral3ForCausalLM", {
        **sizes(12288, 28672, 88, 96, 8), "rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": None,
        "max_position_embeddings": 262144, "rope_parameters": {
            **MINISTRAL, "beta_fast": 4.0, "factor": 64.0, "llama_4_scaling_beta": 0.0, "mscale_all_dim": 0.0,
            "original_max_position_embeddings": 4096, "rope_theta": 1e6}}),
    "Apertus 8B": ("ApertusForCausalLM", {
        **sizes(4096, 21504, 32, 32, 8), **RMS, "hidden_act": "xielu", "mlp_bias": False, "post_norm": False,
        "qk_norm": True, "rope_theta": 12000000, "max_position_embeddings": 65536,
        "rope_scaling": {**LLAMA3, "rope_type": "llama3", "type": "llama3"}}),
    "Hunyuan 0.5B Instruct": ("HunYuanDenseV1ForCausalLM", {
        **sizes(1024, 3584, 24, 16, 8), **HUNYUAN, "tie_word_embeddings": True}),
    "Hunyuan 7B Instruct": ("HunYuanDenseV1ForCausalLM", {
        **sizes(4096, 14336, 32, 32, 8), **HUNYUAN, "num_experts": 1, "moe_topk": [1] * 32,
        "num_shared_expert": [1] * 32, "use_mixed_mlp_moe": False}),
    "Hunyuan MT 7B": ("HunYuanDenseV1ForCausalLM", {
        **sizes(4096, 14336, 32, 32, 8), **HUNYUAN, "rope_scaling": {**HUNYUAN["rope_scaling"], "alpha": 100000.0}}),
    "Hunyuan A13B": ("HunYuanMoEV1ForCausalLM", {
        **sizes(4096, 3072, 32, 32, 8), **HUNYUAN, "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32,
        "num_experts": 64, "num_shared_expert": [1] * 32, "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0,
        "norm_topk_prob": True, "routed_scaling_factor": False, "group_limited_greedy": False, "n_group": False,
        "topk_group": False, "moe_drop_tokens": False, "tie_word_embeddings": True}),
    "OLMoE 1B-7B": ("OlmoeForCausalLM", {
        **sizes(2048, 1024, 16, 16, 16), **RMS, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "clip_qkv": None, "output_router_logits": False, "router_aux_loss_coef": 0.01, "rope_theta": 10000.0}),
    "Granite 3.1 1B-A400M": ("GraniteMoeForCausalLM", {**sizes(1024, 512, 24, 16, 8), **GRANITE_MOE}),
    "Granite MoE with shared experts": ("GraniteMoeSharedForCausalLM", {
        **sizes(1024, 512, 24, 16, 8), **GRANITE_MOE, "shared_intermediate_size": 1024}),
    "Mellum 2": ("MellumForCausalLM", {
        **sizes(2304, 7168, 28, 32, 4), **RMS, "head_dim": 128, "moe_intermediate_size": 896, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "layer_types": SLIDING * 7, "sliding_window": 1024,
        "mlp_layer_types": ["sparse"] * 28, "max_position_embeddings": 131072, "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 16.0, "beta_fast": 32,
                               "original_max_position_embeddings": 8192, "attention_factor": 1.2773247398245525,
                               "beta_slow": 1},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}}),
    "dots.llm1": ("Dots1ForCausalLM", {
        **sizes(4096, 10944, 62, 32, 32), **RMS, "first_k_dense_replace": 1, "moe_intermediate_size": 1408,
        "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": None,
        "topk_group": None, "moe_layer_freq": 1, "max_window_layers": 62, "sliding_window": None,
        "use_sliding_window": False, "rope_theta": 10000000, "max_position_embeddings": 32768}),
    "MiniMax M2": ("MiniMaxM2ForCausalLM", {
        **sizes(3072, 1536, 62, 48, 8), "rms_norm_eps": 1e-6, "head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000,
        "attn_type_list": [1] * 62, "num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
        "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0,
        "mlp_intermediate_size": 8192, "num_mtp_modules": 3, "mtp_transformer_layers": 1, "use_mtp": True,
        "sliding_window": None, "max_position_embeddings": 196608}),
    "Hy3": ("HYV3ForCausalLM", {
        **sizes(4096, 13312, 80, 64, 8), "rms_norm_eps": 1e-5, "head_dim": 128, "expert_hidden_dim": 1536,
        "moe_intermediate_size": 1536, "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1,
        "first_k_dense_replace": 1, "qk_norm": True, "route_norm": True, "router_scaling_factor": 2.826,
        "moe_router_enable_expert_bias": True, "moe_router_use_sigmoid": True, "enable_moe_fp32_combine": False,
        "enable_attention_fp32_softmax": False, "enable_lm_head_fp32": True, "output_router_logits": True,
        "num_nextn_predict_layers": 1, "use_grouped_mm": False, "eod_token_id": 120026, "sep_token_id": 120007,
        "max_position_embeddings": 262144, "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"}}),
    "Trinity Nano": ("AfmoeForCausalLM", {
        **sizes(1024, 3072, 56, 8, 2), "rms_norm_eps": 1e-5, "head_dim": 128, "global_attn_every_n_layers": 4,
        "layer_types": SLIDING * 14, "sliding_window": 2048, "mup_enabled": True, "num_dense_layers": 2,
        "moe_intermediate_size": 256, "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1, "load_balance_coeff": 0.001,
        "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid", "rope_theta": 10000, "use_grouped_mm": True,
        "max_position_embeddings": 131072}),
    "Laguna XS 2.1": ("LagunaForCausalLM", {
        **sizes(2048, 8192, 40, 48, 8), "rms_norm_eps": 1e-6, "head_dim": 128, "gating": "per-head",
        "num_attention_heads_per_layer": [48, 64, 64, 64] * 10, "layer_types": SLIDING[3:] + (SLIDING * 10)[:39],
        "sliding_window": 512, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [0], "mlp_layer_types": ["dense"] + ["sparse"] * 39, "moe_routed_scaling_factor": 2.5,
        "moe_router_logit_softcapping": 0.0, "max_position_embeddings": 262144, "eos_token_id": [2, 24],
        "rope_parameters": {
            "full_attention": {"rope_theta": 500000.0, "rope_type": "yarn", "factor": 32.0, "beta_slow": 1.0,
                               "original_max_position_embeddings": 8192, "beta_fast": 64.0,
                               "attention_factor": 1.3465735902799727, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}}),
    "Minitron 4B": ("NemotronForCausalLM", {
        **sizes(3072, 9216, 32, 24, 8), "norm_eps": 1e-5, "head_dim": 128, "hidden_act": "relu2", "rope_theta": 10000,
        "partial_rotary_factor": 0.5, "attention_bias": False, "mlp_bias": False}),
    "Qwen3-Next 80B-A3B": ("Qwen3NextForCausalLM", {
        **sizes(2048, 5120, 48, 16, 2), **DELTA, "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 256,
        "rms_norm_eps": 1e-6, "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True,
        "num_experts": 512, "num_experts_per_tok": 10, "output_router_logits": False, "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "use_sliding_window": False, "max_position_embeddings": 262144}),
    "Qwen 3.5 9B": ("Qwen3_5ForCausalLM", {
        **sizes(4096, 12288, 32, 16, 4), **DELTA, **QWEN35, "layer_types": LINEAR * 8}),
    "Qwen 3.5 35B-A3B": ("Qwen3_5MoeForCausalLM", {
        **sizes(2048, 512, 40, 16, 2), **DELTA, **QWEN35, "layer_types": LINEAR * 10, "moe_intermediate_size": 512,
        "num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512,
        "output_router_logits": False, "router_aux_loss_coef": 0.001}),
    "LFM2 1.2B": ("Lfm2ForCausalLM", {
        **sizes(2048, 12288, 16, 32, 8), "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3,
        "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True, "norm_eps": 1e-5,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_heads": 32, "rope_theta": 1000000.0, "use_pos_enc": True,
        "max_position_embeddings": 128000, "tie_word_embeddings": True, "vocab_size": 65536}),
    "LFM2 8B-A1B": ("Lfm2MoeForCausalLM", {
        **sizes(2048, 7168, 24, 32, 8), "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5, "num_experts": 32,
        "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        "moe_intermediate_size": 1792, "norm_topk_prob": True, "num_dense_layers": 2, "num_experts_per_tok": 4,
        "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "use_expert_bias": True, "tie_word_embeddings": True,
        "max_position_embeddings": 128000, "vocab_size": 65536}),
    "Nemotron Nano 2 9B": ("NemotronHForCausalLM", {
        **sizes(4480, 15680, 56, 40, 8), "attention_bias": False, "attention_head_dim": 128, "chunk_size": 128,
        "conv_kernel": 4, "expand": 2, "head_dim": 128, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 80,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "mamba_num_heads": 128,
        "mamba_hidden_act": "silu", "mamba_proj_bias": False, "mlp_bias": False, "mlp_hidden_act": "relu2",
        "n_groups": 8, "rescale_prenorm_residual": True, "residual_in_fp32": False, "rms_norm_eps": 1e-5,
        "sliding_window": None, "ssm_state_size": 128, "time_step_floor": 0.0001, "time_step_max": 0.1,
        "time_step_min": 0.001, "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True,
        "num_logits_to_keep": 1, "max_position_embeddings": 131072, "vocab_size": 131072}),
    "Nemotron 3 Nano 30B-A3B": ("NemotronHForCausalLM", {
        **sizes(2688, 1856, 52, 32, 2), "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
        "head_dim": 128, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64,
        "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "mlp_bias": False, "mlp_hidden_act": "relu2",
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-5, "norm_topk_prob": True,
        "num_experts_per_tok": 6, "num_logits_to_keep": 1, "partial_rotary_factor": 1.0, "rope_theta": 10000,
        "rescale_prenorm_residual": True, "residual_in_fp32": False, "routed_scaling_factor": 2.5,
        "sliding_window": None, "ssm_state_size": 128, "time_step_floor": 0.0001, "time_step_max": 0.1,
        "time_step_min": 0.001, "topk_group": 1, "use_bias": False,
        "use_conv_bias": True, "use_mamba_kernels": True, "max_position_embeddings": 262144, "vocab_size": 131072}),
    "Granite 4.0 H Tiny": ("GraniteMoeHybridForCausalLM", {
        **sizes(1536, 512, 40, 12, 4), **GRANITE4, "attention_multiplier": 0.0078125, "logits_scaling": 6.0,
        "num_local_experts": 64, "num_experts_per_tok": 6, "shared_intermediate_size": 1024, "mamba_n_heads": 48}),
    "Granite 4.0 H Micro": ("GraniteMoeHybridForCausalLM", {
        **sizes(2048, 8192, 40, 32, 8), **GRANITE4, "attention_multiplier": 0.015625, "logits_scaling": 8.0,
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 8192, "mamba_n_heads": 64}),
    "Granite 4.0 Micro": ("GraniteMoeHybridForCausalLM", {
        **sizes(2560, 8192, 40, 40, 8), **GRANITE4, "attention_multiplier": 0.015625, "logits_scaling": 10.0,
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 8192, "mamba_n_heads": 128,
        "layer_types": ["attention"] * 40, "position_embedding_type": "rope", "rope_theta": 10000000}),
    "Kimi Linear 48B-A3B": ("KimiLinearForCausalLM", {
        **sizes(2304, 9216, 27, 32, 32), "first_k_dense_replace": 1, "head_dim": 72, "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "kda_layers": [i for i in range(1, 27) if i % 4], "short_conv_kernel_size": 4},
        "max_position_embeddings": 1048576, "mla_use_nope": True, "model_max_length": 1048576,
        "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "num_experts": 256,
        "num_experts_per_token": 8, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446, "topk_group": 1, "use_grouped_topk": True, "v_head_dim": 128,
        "vocab_size": 163840}),
}  # fmt: skip

OLDER = {"Falcon 40B", "Phi-3 128k"}  # spellings that transformers 5 does not read


def published(name):
    """The architecture and the config.json of a published checkpoint."""
    architecture, fields = CONFIGS[name]
    return architecture, {
        **COMMON,
        "model_type": MODEL_TYPES[architecture][0],
        "architectures": [architecture],
        **fields,
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_fields_of_published_checkpoints_are_accepted(name):
    architecture, config = published(name)
    assert config["model_type"] in MODEL_TYPES[architecture]
    found = decoder_config(FAMILIES[architecture], Fields(config, PATH), None)
    assert len(found.layers) == config["num_hidden_layers"]


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in OLDER])
def test_published_configs_mean_what_transformers_reads_in_them(name):
    architecture, config = published(name)
    given = {field: value for field, value in config.items() if field != "rope_scaling" or value is not None}
    theirs = getattr(transformers, architecture).config_class(**given)
    theirs = json.loads(theirs.to_json_string(use_diff=False))
    family = FAMILIES[architecture]
    assert decoder_config(family, Fields(config, PATH), None) == decoder_config(family, Fields(theirs, PATH), None)


def test_every_architecture_has_a_published_config():
    assert {architecture for architecture, _ in CONFIGS.values()} == FAMILIES.keys()


SIZES = {
    "block_count": 2, "context_length": 4096, "embedding_length": 256, "feed_forward_length": 512,
    "attention.head_count": 4,
}  # fmt: skip
RMS_KEYS = {**SIZES, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4}
LAYER_KEYS = {**SIZES, "attention.layer_norm_epsilon": 1e-5}
YARN_KEYS = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 2048,
    "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.yarn_ext_factor": 1.0,
}  # fmt: skip
LINEAR_KEYS = {
    "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32,
    "ssm.inner_size": 4096, "rope.dimension_count": 64,
}  # fmt: skip
CONVOLUTION = {"shortconv.l_cache": 3, "attention.head_count_kv": np.array([0, 2]), "vocab_size": 32000}
HEADS = {"attention.key_length": 64, "attention.value_length": 64}
ROTARY = {"rope.dimension_count": 64, "vocab_size": 32000}
MIXED = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64, "expert_shared_count": 1}
SIGMOIDS = {
    "expert_gating_func": 2, "expert_weights_scale": 1.0, "expert_weights_norm": True, "expert_group_count": 1,
    "expert_group_used_count": 1,
}  # fmt: skip
SCALED = {"rope_factors_long.weight": np.full(32, 2, np.float32), "rope_factors_short.weight": np.ones(32, np.float32)}

# architecture, keys behind its name, tensors of rotary factors
KEYS = {
    "Llama 2": ("llama", {**RMS_KEYS, **ROTARY, "tensor_data_layout": "Meta AI original pth"}, {}),
    "Llama 3.1": ("llama", {**RMS_KEYS, **ROTARY, **HEADS}, {"rope_freqs.weight": np.ones(32, np.float32)}),
    "DeepSeek Coder": ("llama", {**RMS_KEYS, **ROTARY, "rope.scale_linear": 4.0}, {}),
    "linear": ("llama", {**RMS_KEYS, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0,
                         "rope.scaling.finetuned": True, "rope.scaling.original_context_length": 2048}, {}),
    "Mixtral": ("llama", {**RMS_KEYS, **ROTARY, "expert_count": 8, "expert_used_count": 2}, {}),
    "Qwen 2.5": ("qwen2", {**RMS_KEYS, **YARN_KEYS}, {}),
    "Qwen 3 Embedding": ("qwen3", {**RMS_KEYS, **HEADS, "pooling_type": 3}, {}),
    "Qwen 3 MoE": ("qwen3moe", {**RMS_KEYS, **HEADS, "expert_count": 8, "expert_used_count": 2,
                                "expert_feed_forward_length": 64}, {}),
    "Gemma 2": ("gemma2", {**RMS_KEYS, **HEADS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
                           "attention.sliding_window": 4096}, {}),
    "Gemma 3": ("gemma3", {**RMS_KEYS, **HEADS, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
                           "attention.sliding_window": 1024, "rope.freq_base_swa": 10000.0}, {}),
    "Phi-3": ("phi3", {**RMS_KEYS, **ROTARY, "rope.scaling.original_context_length": 4096,
                       "attention.sliding_window": 2047}, {}),
    "Phi-3.5": ("phi3", {**RMS_KEYS, **ROTARY, "context_length": 131072, "rope.scaling.attn_factor": 1.19,
                         "rope.scaling.original_context_length": 4096}, SCALED),
    "GPT-2": ("gpt2", LAYER_KEYS, {}),
    "StableLM 2": ("stablelm", {**LAYER_KEYS, "rope.dimension_count": 16, "use_parallel_residual": False}, {}),
    "Falcon": ("falcon", {**LAYER_KEYS, "attention.head_count_kv": 1, "tensor_data_layout": "jploski"}, {}),
    "OLMo 2": ("olmo2", RMS_KEYS, {}),
    "Granite 3": ("granite", {**RMS_KEYS, **ROTARY, "attention.scale": 0.0078125, "embedding_scale": 12.0,
                              "residual_scale": 0.22, "logit_scale": 8.0}, {}),
    "Gemma": ("gemma", {**SIZES, **HEADS, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-6}, {}),
    "GLM-4": ("glm4", {**RMS_KEYS, **HEADS, "rope.dimension_count": 32}, {}),
    "GLM-4.5": ("glm4moe", {**RMS_KEYS, **HEADS, **MIXED, **SIGMOIDS, "rope.dimension_count": 32, "block_count": 3,
                            "leading_dense_block_count": 1, "nextn_predict_layers": 1}, {}),
    "SmolLM 3": ("smollm3", {**RMS_KEYS, **ROTARY}, {}),
    "OLMo 3": ("olmo2", {**RMS_KEYS, **YARN_KEYS, "rope.scaling.yarn_attn_factor": 1.2079442,
                         "attention.sliding_window": 4096, "attention.sliding_window_pattern": np.array([1, 0])}, {}),
    "OLMoE": ("olmoe", {**RMS_KEYS, "expert_count": 8, "expert_used_count": 2}, {}),
    "ERNIE 4.5": ("ernie4_5-moe", {**RMS_KEYS, **HEADS, **MIXED, "interleave_moe_layer_step": 1,
                                   "leading_dense_block_count": 1, "expert_shared_feed_forward_length": 64}, {}),
    "MiniMax M2": ("minimax-m2", {**RMS_KEYS, **HEADS, **MIXED, "expert_shared_count": 0, "expert_gating_func": 2,
                                  "expert_feed_forward_length": 512, "rope.dimension_count": 32}, {}),
    "Ministral 3": ("mistral3", {**RMS_KEYS, **HEADS, **ROTARY, **YARN_KEYS, "attention.temperature_scale": 0.1,
                                 "rope.scaling.yarn_log_multiplier": 1.0}, {}),
    "Command R7B": ("cohere2", {**LAYER_KEYS, **HEADS, **ROTARY, "attention.head_count_kv": 2, "logit_scale": 0.25,
                                "attention.sliding_window": 4096, "rope.scaling.type": "none"}, {}),
    "Qwen 1.5 MoE": ("qwen2moe", {**RMS_KEYS, **MIXED, "expert_shared_count": 0,
                                  "expert_shared_feed_forward_length": 256}, {}),
    "Qwen 3 VL": ("qwen3vl", {**RMS_KEYS, **HEADS, "rope.dimension_sections": np.array([24, 20, 20, 0]),
                              "n_deepstack_layers": 3}, {}),
    "Granite 3 MoE": ("granitemoe", {**RMS_KEYS, **ROTARY, "expert_count": 8, "expert_used_count": 2,
                                     "attention.scale": 0.0078125, "embedding_scale": 12.0, "logit_scale": 6.0}, {}),
    "Nemotron": ("nemotron", {**LAYER_KEYS, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 32,
                              "rope.scaling.type": "none"}, {}),
    "Qwen3-Next": ("qwen3next", {**RMS_KEYS, **HEADS, **MIXED, **LINEAR_KEYS, "full_attention_interval": 4,
                                 "expert_shared_count": 0, "expert_shared_feed_forward_length": 256},
                   {"blk.1.attn_q.weight": None}),
    "Qwen 3.5": ("qwen35", {**RMS_KEYS, **HEADS, **LINEAR_KEYS, "rope.dimension_sections": np.array([11, 11, 10, 0]),
                            "block_count": 3, "nextn_predict_layers": 1}, {"blk.1.attn_q.weight": None}),
    "Qwen 3.5 MoE": ("qwen35moe", {
        **{name: value for name, value in RMS_KEYS.items() if name != "feed_forward_length"}, **HEADS, **MIXED,
        **LINEAR_KEYS, "rope.dimension_sections": np.array([11, 11, 10, 0]), "expert_shared_count": 0,
        "expert_shared_feed_forward_length": 256,
    }, {"blk.1.attn_q.weight": None}),
    "LFM2": ("lfm2", {**RMS_KEYS, **CONVOLUTION}, {"blk.1.attn_q.weight": None}),
    "LFM2 MoE": ("lfm2moe", {**RMS_KEYS, **MIXED, **CONVOLUTION, "expert_gating_func": 2, "expert_shared_count": 0,
                             "leading_dense_block_count": 1}, {"blk.1.attn_q.weight": None}),
    "Pythia": ("gptneox", {**LAYER_KEYS, "rope.dimension_count": 16, "use_parallel_residual": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_published_gguf_files_are_accepted(name):
    architecture, keys, tensors = KEYS[name]
    general = {
        "general.architecture": architecture, "general.file_type": 15, "general.quantization_version": 2,
        "general.size_label": "7B", "quantize.imatrix.file": "a.dat", "quantize.imatrix.chunks_count": 125,
    }  # fmt: skip
    metadata = Metadata(general | {f"{architecture}.{key}": value for key, value in keys.items()}, Path("a.gguf"))
    names = frozenset({"blk.0", "blk.1", "blk.2", *tensors})
    config = hf_config(GgufInfo(metadata, names, 32000, tensors.get))
    check_unread(metadata)
    assert read_gguf(metadata, 256).size == 256
    family = FAMILIES[config["architectures"][0]]
    assert decoder_config(family, Fields(config, PATH), None).num_layers == 2
