"""A random checkpoint of an architecture that only transformers knows."""

import numpy as np
import random_checkpoints as checkpoints
import torch
import transformers

from quire.models.transformers import describe_transformers, load_transformers
from quire.weights.checkpoint import FolderCheckpoint

SHAPE = {**checkpoints.SHAPE, "num_key_value_heads": 2, "max_position_embeddings": 256}

WINDOW = {"sliding_window": 9, "num_hidden_layers": 4}

ALTERNATING = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}

UNKNOWN = {
    "glm": ("Glm", {"head_dim": 32}),
    "olmo": ("Olmo", {"clip_qkv": 0.9}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "exaone4": ("Exaone4", WINDOW),
    "cohere2": ("Cohere2", ALTERNATING),
    "olmo3": ("Olmo3", {**ALTERNATING, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "vaultgemma": ("VaultGemma", {**ALTERNATING, "head_dim": 24, "query_pre_attn_scalar": 50}),
    "nemotron": ("Nemotron", {}),
    "helium": ("Helium", {"head_dim": 16}),
    "seed-oss": ("SeedOss", {"head_dim": 24}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16}),
    "diffllama": ("DiffLlama", {}),  # two attentions per layer
    "olmoe": ("Olmoe", checkpoints.EXPERTS),  # one tensor per expert in the file, fused in the model
    "olmoe-odd": ("Olmoe", {**checkpoints.EXPERTS, "intermediate_size": 37}),  # torch's grouped products refuse it
    "granite-moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0}),
}


def save(folder, family, dtype=torch.float32, **values):
    """Write a random transformers model to a folder. Every parameter affects the result."""
    torch.manual_seed(sum(map(ord, family)))
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **values})
    config._experts_implementation = "eager"  # takes experts of any size
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and "Gemma" not in family
            parameter.normal_(std=0.3 if parameter.dim() == 1 else 0.12).add_(float(is_norm))
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


def loaded(folder, dtype="float32", **options):
    description = describe_transformers(FolderCheckpoint(folder))
    return description, load_transformers(description, dtype=dtype, **options)


def prompt_of(length):
    return np.random.default_rng(length).integers(3, checkpoints.VOCAB, length).tolist()
