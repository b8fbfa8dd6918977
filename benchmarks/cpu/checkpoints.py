"""Checkpoints with random weights in Hugging Face layout. Speed depends on their shapes only."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
)

from quire.hub import embedded

VOCAB_SIZE = 32000  # of the shapes for CPUs; below the vocabulary sizes of all other shapes
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _qwen2_half() -> PretrainedConfig:
    """The shape of Qwen2.5-0.5B, except for the vocabulary."""
    return Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **_COMMON,
    )


def _llama_1b() -> PretrainedConfig:
    """The shape of Llama-3.2-1B, except for the vocabulary."""
    return LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        **_COMMON,
    )


def _qwen3_06b() -> PretrainedConfig:
    """The shape of Qwen3-0.6B."""
    return Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **{**_COMMON, "vocab_size": 151936, "max_position_embeddings": 40960},
    )


def _llama_8b() -> PretrainedConfig:
    """The shape of Llama-3.1-8B, except for RoPE scaling."""
    return LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        **{**_COMMON, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False},
    )


def _mixtral_small() -> PretrainedConfig:
    """Mixtral with eight layers of eight experts, of which a token uses two; 0.5 billion parameters."""
    return MixtralConfig(
        hidden_size=1024,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2048,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **{**_COMMON, "tie_word_embeddings": False},
    )


def _smollm3_half() -> PretrainedConfig:
    """SmolLM3 in the shape "0.5b"; every fourth layer has no RoPE."""
    return SmolLM3Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        **_COMMON,
    )


def _glm4_moe_small() -> PretrainedConfig:
    """GLM-4.5 with eight layers of eight experts, of which a token uses two, and a shared one; 0.3 billion weights."""
    return Glm4MoeConfig(
        hidden_size=1024,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=4096,
        moe_intermediate_size=1024,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        **{**_COMMON, "tie_word_embeddings": False},
    )


def _gemma4_small() -> PretrainedConfig:
    """Gemma 4 without inputs of each layer; every sixth layer has no window and wider heads; 0.3 billion weights."""
    return Gemma4TextConfig(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        global_head_dim=256,
        sliding_window=512,
        hidden_size_per_layer_input=0,
        intermediate_size=3584,
        **_COMMON,
    )


def _hybrid(hidden: int, num_layers: int, num_heads: int, head_dim: int) -> PretrainedConfig:
    """Qwen 3.5 with attention in every fourth layer, and `num_heads` recurrent states of each other layer."""
    return Qwen3_5TextConfig(
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads // 2,
        num_key_value_heads=2,
        head_dim=2 * head_dim,
        intermediate_size=3 * hidden,
        linear_num_key_heads=num_heads,
        linear_num_value_heads=num_heads,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        **_COMMON,
    )


def _attention_of_hybrid(hidden: int, num_layers: int, num_heads: int, head_dim: int) -> PretrainedConfig:
    """Attention in all layers, and MLPs of such a size that it has as many weights as `_hybrid`."""
    return Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        head_dim=head_dim,
        intermediate_size=4 * hidden + hidden // 2,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **_COMMON,
    )


def _tiny() -> PretrainedConfig:
    """A shape for trying every part. Its figures have no meaning."""
    return LlamaConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        **_COMMON,
    )


SHAPES = {
    "0.5b": _qwen2_half,
    "1b": _llama_1b,
    "qwen3-0.6b": _qwen3_06b,
    "llama-8b": _llama_8b,
    "mixtral-small": _mixtral_small,
    "smollm3-0.5b": _smollm3_half,
    "glm4-moe-small": _glm4_moe_small,
    "gemma4-small": _gemma4_small,
    "hybrid-0.5b": partial(_hybrid, 1024, 24, 16, 128),  # 18 layers with 16 states of 128 x 128 each
    "attention-of-hybrid-0.5b": partial(_attention_of_hybrid, 1024, 24, 16, 128),
    "tiny": _tiny,
    "hybrid-tiny": partial(_hybrid, 64, 4, 4, 16),
    "attention-of-hybrid-tiny": partial(_attention_of_hybrid, 64, 4, 4, 16),
}


def checkpoint(shape: str, models: Path, device: str = "cpu") -> Path:
    """The folder of this shape's checkpoint below `models`. Creates it, in bfloat16, unless it exists.

    "embedded" is quire's own model with its own shape and weights; it is too small for conclusions about speed. device:
    the device that draws the random numbers. Another device draws other numbers.
    """
    if shape == "embedded":
        return embedded.folder()
    folder = models / f"random-{shape}"
    if folder.exists():
        return folder
    unfinished = folder.with_name(f"{folder.name}.part")
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=torch.float32).to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=2, pad_token_id=0, do_sample=False)
    model.save_pretrained(unfinished, max_shard_size="20GB")
    config = json.loads((unfinished / "config.json").read_text())
    _write_tokenizer(unfinished, config["vocab_size"], config["max_position_embeddings"])
    config["torch_dtype"] = "bfloat16"  # older names
    if "rope_theta" in config["rope_parameters"]:  # not where kinds of layers have one each
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (unfinished / "config.json").write_text(json.dumps(config, indent=1))
    return unfinished.rename(folder)


def weight_bytes(folder: Path) -> int:
    """Bytes of the checkpoint's weight files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _write_tokenizer(folder: Path, vocab_size: int, longest: int) -> None:
    """Write the embedded model's tokenizer with a word for every missing id, because engines detokenize outputs."""
    tokenizer = json.loads((embedded.folder() / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    taken = set(vocabulary.values()) | {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary |= {f"<{index}>": index for index in range(vocab_size) if index not in taken}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((embedded.folder() / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": longest}))
