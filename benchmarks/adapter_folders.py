"""Adapters with random weights in PEFT's layout, for a checkpoint of `benchmarks.cpu.checkpoints`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FEW = ("q_proj", "v_proj")
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


def write_adapter(
    folder: Path, model: Path, *, rank: int, targets: Sequence[str] = ALL, seed: int = 0, invocation: Sequence[int] = ()
) -> Path:
    """Write an adapter of bfloat16 for the checkpoint in `model`, and return its folder.

    invocation: tokens of an activated one.
    """
    shape = json.loads((model / "config.json").read_text())
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head_dim = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    heads, kv = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    sizes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (columns, rows) in sizes.items():
            if name.partition(".")[2] not in targets:
                continue
            place = f"base_model.model.model.layers.{layer}.{name}"
            for matrix, size in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                values = 0.02 * torch.randn(size, generator=generator)
                tensors[f"{place}.{matrix}.weight"] = values.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / _WEIGHTS)
    _write_config(folder, rank, targets, rank, invocation)
    return folder


def write_variants(folder: Path, adapter: Path, number: int) -> list[Path]:
    """Write adapters that share the tensors of another one on disk, and have other scales, so that they differ."""
    config = json.loads((adapter / _CONFIG).read_text())
    folders = []
    for i in range(number):
        one = folder / f"variant-{i}"
        one.mkdir(parents=True)
        os.link(adapter / _WEIGHTS, one / _WEIGHTS)
        _write_config(one, config["r"], config["target_modules"], config["r"] * (1 + i / 4096), ())
        folders.append(one)
    return folders


def _write_config(folder: Path, rank: int, targets: Sequence[str], alpha: float, invocation: Sequence[int]) -> None:
    config: dict[str, object] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha}
    config |= {"target_modules": list(targets), "bias": "none"}
    if invocation:
        config["alora_invocation_tokens"] = list(invocation)
    (folder / _CONFIG).write_text(json.dumps(config))
