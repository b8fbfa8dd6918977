"""Random checkpoints, small enough to make in a test, saved by transformers itself."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

VOCAB = 301  # no multiple of 4 or 32, so that the ends of random words and masks are seen

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

# name -> (config class, model class, what differs from SHAPE)
KINDS = {
    "llama-mha": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama-gqa-tied": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-mqa-biases": (
        LlamaConfig,
        LlamaForCausalLM,
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen3-gqa": (Qwen3Config, Qwen3ForCausalLM, {"num_key_value_heads": 2, "head_dim": 32}),
    "qwen3-tied": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": True, "rope_theta": 1e6},
    ),
}


def save(folder: Path, kind: str = "qwen3-gqa", *, shard: str | None = None, dtype=torch.float32) -> PreTrainedModel:
    """Make a model, write it to `folder`, and return it. Every parameter is random, norms and biases too."""
    config_class, model_class, differences = KINDS[kind]
    torch.manual_seed(sum(map(ord, kind)))
    values = {**SHAPE, **differences}
    theta = values.pop("rope_theta", 10000.0)
    config = config_class(**values, rope_parameters={"rope_type": "default", "rope_theta": theta})
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
            else:
                parameter.mul_(4)  # attention that is sharp enough to be wrong
    model = model.to(dtype)
    model.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
    return model
