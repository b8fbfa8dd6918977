"""Fields of published checkpoints, among them those that quire does not read: they are described as before."""

from pathlib import Path

import numpy as np
import pytest

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
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_fields_of_published_checkpoints_are_accepted(name):
    architecture, fields = CONFIGS[name]
    config = {**COMMON, "model_type": MODEL_TYPES[architecture][0], "architectures": [architecture], **fields}
    assert config["model_type"] in MODEL_TYPES[architecture]
    assert decoder_config(FAMILIES[architecture], Fields(config, PATH), None).num_layers in (12, 24)


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
