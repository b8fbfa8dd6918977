"""Fields of a config.json for architectures with layer norms."""

from quire.weights.gguf.info import ConfigDict, GgufInfo, common_fields, layer_types, with_rotary_share


def gpt2(facts: GgufInfo) -> ConfigDict:
    """Fields of GPT-2."""
    metadata = facts.metadata
    if facts.kv_heads != facts.heads:
        raise metadata.error(
            f"{facts.kv_heads} KV heads for {facts.heads} heads are not supported in this architecture"
        )
    return {
        "vocab_size": facts.vocab_size,
        "n_positions": metadata.number(".context_length"),
        "n_embd": metadata.number(".embedding_length"),
        "n_layer": facts.layers,
        "n_head": facts.heads,
        "n_inner": metadata.number(".feed_forward_length"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": metadata.real(".attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in facts.names,
    }


def stablelm(facts: GgufInfo) -> ConfigDict:
    """Fields of StableLM."""
    return with_rotary_share(facts, common_fields(facts)) | {
        "hidden_act": "silu",
        "layer_norm_eps": facts.metadata.real(".attention.layer_norm_epsilon"),
        "use_qkv_bias": facts.has("attn_q.bias"),
        "qk_layernorm": facts.has("attn_q_norm.weight"),
        "use_parallel_residual": not facts.has("ffn_norm.weight"),
    }


def falcon(facts: GgufInfo) -> ConfigDict:
    """Falcon 7B has one KV head. Newer models have several and, except for the 11B model, two norms per layer."""
    found = common_fields(facts)
    del found["num_key_value_heads"], found["intermediate_size"]
    is_new = facts.kv_heads > 1
    return found | {
        "num_kv_heads": facts.kv_heads,
        "ffn_hidden_size": facts.metadata.number(".feed_forward_length"),
        "layer_norm_epsilon": facts.metadata.real(".attention.layer_norm_epsilon"),
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": (2 if facts.has("attn_norm_2.weight") else 1) if is_new else None,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "activation": "gelu",
    }


def gptneox(facts: GgufInfo) -> ConfigDict:
    """Fields of GPT-NeoX."""
    found = with_rotary_share(facts, common_fields(facts))
    del found["num_key_value_heads"]
    return found | {
        "hidden_act": "gelu",
        "layer_norm_eps": facts.metadata.real(".attention.layer_norm_epsilon"),
        "use_parallel_residual": facts.metadata.flag(".use_parallel_residual", default=True),
        "attention_bias": facts.has("attn_qkv.bias"),
    }


def command_r(facts: GgufInfo) -> ConfigDict:
    """Fields of Command R."""
    return common_fields(facts) | {
        "hidden_act": "silu",
        "layer_norm_eps": facts.metadata.real(".attention.layer_norm_epsilon"),
        "logit_scale": facts.metadata.real(".logit_scale"),
        "use_qk_norm": facts.has("attn_q_norm.weight"),
        "attention_bias": False,
    }


def cohere2(facts: GgufInfo) -> ConfigDict:
    """Fields of Command R7B and Command A. Only layers with a window rotate."""
    return common_fields(facts) | {
        "head_dim": facts.head_dim,
        "hidden_act": "silu",
        "layer_norm_eps": facts.metadata.real(".attention.layer_norm_epsilon"),
        "logit_scale": facts.metadata.real(".logit_scale"),
        "sliding_window": facts.metadata.number(".attention.sliding_window", least=1),
        "layer_types": layer_types(facts, every=4),
        "attention_bias": False,
    }


def nemotron(facts: GgufInfo) -> ConfigDict:
    """Fields of Nemotron and Minitron."""
    return with_rotary_share(facts, common_fields(facts)) | {
        "head_dim": facts.head_dim,
        "hidden_act": "relu2",
        "norm_eps": facts.metadata.real(".attention.layer_norm_epsilon"),
        "attention_bias": facts.has("attn_q.bias"),
        "mlp_bias": facts.has("ffn_up.bias"),
    }
