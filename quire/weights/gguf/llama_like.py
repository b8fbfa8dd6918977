"""Fields of a config.json for architectures with RMS norms like Llama, without experts.

Values that llama.cpp hard-codes and does not store are constants here, with their source.
"""

from quire.weights.gguf.info import (
    ConfigDict,
    GgufInfo,
    layer_types,
    refuse_axes,
    rms_fields,
    with_rope,
    with_rotary_share,
)

_DEFAULT_WINDOW_BASE = 10000.0  # rope_theta of Gemma 3's window layers
_GEMMA3_PATTERN = 6  # every sixth layer of Gemma 3 has full attention


def llama(facts: GgufInfo) -> ConfigDict:
    """Fields of Llama and, with experts, of Mixtral."""
    found = rms_fields(facts) | {
        "attention_bias": facts.has("attn_q.bias"),
        "mlp_bias": facts.has("ffn_up.bias"),
    }
    if facts.experts:
        found |= {
            "num_local_experts": facts.experts,
            "num_experts_per_tok": facts.metadata.number(".expert_used_count"),
            "sliding_window": None,
        }
    return found


def _qwen(facts: GgufInfo) -> ConfigDict:
    return rms_fields(facts) | {"use_sliding_window": False, "sliding_window": None}


def qwen2(facts: GgufInfo) -> ConfigDict:
    """Fields of Qwen 2."""
    found = _qwen(facts)
    del found["head_dim"]  # Qwen 2 has no such field: it is always hidden size / heads
    return found


def qwen3(facts: GgufInfo) -> ConfigDict:
    """Fields of Qwen 3."""
    return _qwen(facts) | {"attention_bias": False}


def _gemma(facts: GgufInfo, largest: int) -> ConfigDict:
    """Fields of Gemma 2 and 3. largest: layers of the 27B model, whose query scale is not that of head_dim."""
    found = rms_fields(facts)
    del found["hidden_act"]
    is_largest = facts.layers == largest
    hidden = facts.metadata.number(".embedding_length")
    return found | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // facts.heads if is_largest else facts.head_dim,
        "attention_bias": False,
        "sliding_window": facts.metadata.number(".attention.sliding_window", 0) or None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def gemma2(facts: GgufInfo) -> ConfigDict:
    """Fields of Gemma 2."""
    metadata = facts.metadata
    return _gemma(facts, largest=46) | {
        "layer_types": layer_types(facts, every=2),
        "attn_logit_softcapping": metadata.real(".attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.real(".final_logit_softcapping", 30.0),
    }


def gemma3(facts: GgufInfo) -> ConfigDict:
    """Fields of Gemma 3."""
    metadata = facts.metadata
    found = _gemma(facts, largest=62)
    if metadata.has(".final_logit_softcapping"):
        found["final_logit_softcapping"] = metadata.real(".final_logit_softcapping")
    windowed = {
        "rope_type": "default",
        "rope_theta": metadata.real(".rope.freq_base_swa", _DEFAULT_WINDOW_BASE),
    }
    return found | {
        "layer_types": layer_types(facts, _GEMMA3_PATTERN)
        if found["sliding_window"]
        else ["full_attention"] * facts.layers,
        "rope_parameters": {"full_attention": found["rope_parameters"], "sliding_attention": windowed},
    }


def phi3(facts: GgufInfo) -> ConfigDict:
    """Fields of Phi-3."""
    found = rms_fields(facts)
    del found["head_dim"]
    context = facts.metadata.number(".context_length")
    return found | {
        "original_max_position_embeddings": facts.metadata.number(".rope.scaling.original_context_length", context),
        "sliding_window": facts.metadata.number(".attention.sliding_window", 0) or None,
        "attention_bias": False,
    }


def olmo2(facts: GgufInfo) -> ConfigDict:
    """Fields of OLMo 2."""
    return rms_fields(facts) | {"attention_bias": False}


def granite(facts: GgufInfo) -> ConfigDict:
    """Fields of Granite."""
    metadata = facts.metadata
    if not metadata.flag(".rope.scaling.finetuned", default=True):
        raise metadata.error("a model without rotary embeddings (rope.scaling.finetuned = False) is not supported")
    return llama(facts) | {
        "embedding_multiplier": metadata.real(".embedding_scale", 1.0),
        "residual_multiplier": metadata.real(".residual_scale", 1.0),
        "attention_multiplier": metadata.real(".attention.scale", 1.0),
        "logits_scaling": metadata.real(".logit_scale", 1.0),
    }


def gemma(facts: GgufInfo) -> ConfigDict:
    """Fields of the first Gemma."""
    found = rms_fields(facts)
    del found["hidden_act"]
    return found | {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def olmo3(facts: GgufInfo) -> ConfigDict:
    """Fields of OLMo 3, whose file has the architecture of OLMo 2. Layers with a window have no rotary scaling."""
    metadata = facts.metadata
    found = olmo2(facts)
    theta = metadata.real(".rope.freq_base_swa", metadata.real(".rope.freq_base", 10000.0))
    windowed = {"rope_type": "default", "rope_theta": theta}
    return found | {
        "sliding_window": metadata.number(".attention.sliding_window", least=1),
        "layer_types": layer_types(facts, every=4),
        "rope_parameters": {"full_attention": found["rope_parameters"], "sliding_attention": windowed},
    }


def exaone4(facts: GgufInfo) -> ConfigDict:
    """Fields of EXAONE 4. Its small model has no windows."""
    window = facts.metadata.number(".attention.sliding_window", 0)
    return rms_fields(facts) | {
        "sliding_window": window or None,
        "layer_types": layer_types(facts, every=4 if window else 1),
    }


def smollm3(facts: GgufInfo) -> ConfigDict:
    """Fields of SmolLM 3. llama.cpp rotates in all layers but every fourth."""
    return llama(facts) | {
        "no_rope_layers": [int((layer + 1) % 4 > 0) for layer in range(facts.layers)],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def seed_oss(facts: GgufInfo) -> ConfigDict:
    """Fields of Seed-OSS."""
    return llama(facts) | {"attention_out_bias": facts.has("attn_output.bias")}


def ernie4_5(facts: GgufInfo) -> ConfigDict:
    """Fields of ERNIE 4.5."""
    return rms_fields(facts) | {"use_bias": facts.has("attn_q.bias")}


def glm4(facts: GgufInfo) -> ConfigDict:
    """Fields of GLM-4."""
    refuse_axes(facts)
    return with_rotary_share(facts, rms_fields(facts)) | {"attention_bias": facts.has("attn_q.bias")}


def arcee(facts: GgufInfo) -> ConfigDict:
    """Fields of Arcee's AFM."""
    return llama(facts) | {"hidden_act": "relu2"}


def apertus(facts: GgufInfo) -> ConfigDict:
    """Fields of Apertus. The parameters of its activation are numbers of the metadata."""
    return rms_fields(facts) | {"hidden_act": "xielu", "attention_bias": facts.has("attn_q.bias"), "mlp_bias": False}


def mistral(facts: GgufInfo) -> ConfigDict:
    """Fields of Mistral Small 3, whose architecture is `mistral3`."""
    return _with_mscale(facts, rms_fields(facts)) | {"sliding_window": None}


def ministral3(facts: GgufInfo) -> ConfigDict:
    """Fields of Ministral 3, which scales queries by their position beyond the original context."""
    metadata = facts.metadata
    found = _with_mscale(facts, rms_fields(facts))
    beta = metadata.real(".attention.temperature_scale")
    if metadata.text(".rope.scaling.type", "none") != "yarn":
        raise metadata.error(
            f"{metadata.architecture}.attention.temperature_scale = {beta} needs rope.scaling.type = 'yarn', whose "
            "original context it starts from"
        )
    return with_rope(found, llama_4_scaling_beta=beta) | {"sliding_window": None}


def _with_mscale(facts: GgufInfo, fields: ConfigDict) -> ConfigDict:
    """The fields with YaRN's `mscale_all_dim`. llama.cpp assumes 1 for `mscale`."""
    below = facts.metadata.real(".rope.scaling.yarn_log_multiplier", 0.0)
    return with_rope(fields, mscale=1.0, mscale_all_dim=below) if below else fields


def hunyuan(facts: GgufInfo) -> ConfigDict:
    """Fields of Hunyuan. Its scaling of theta is in the file's theta."""
    return rms_fields(facts) | {"attention_bias": facts.has("attn_q.bias")}
