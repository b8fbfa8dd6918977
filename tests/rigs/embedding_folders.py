"""Folders of random embedding models, as sentence-transformers writes them, and their vectors by torch."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import random_checkpoints as checkpoints
import small_tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import processors

FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": torch.nn.functional.gelu,
    "torch.nn.modules.activation.SiLU": torch.nn.functional.silu,
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
}
HIDDEN = checkpoints.SHAPE["hidden_size"]


def verbose(mode: str, size: int = HIDDEN, **more) -> dict:
    """The older spelling of a pooling: one flag for each mode."""
    return {"word_embedding_dimension": size, **{f"pooling_mode_{name}": name == mode for name in FLAGS}, **more}


def compact(mode: str, size: int = HIDDEN, **more) -> dict:
    """The newer spelling."""
    return {"embedding_dimension": size, "pooling_mode": mode, "include_prompt": True, **more}


def tokenizer():
    """Byte-level BPE that puts a token behind every text, as embedding models that pool the last state do."""
    core = small_tokenizers.qwen()
    core.post_processor = processors.TemplateProcessing(
        single=["$A", "<|endoftext|>"], special_tokens=[("<|endoftext|>", core.token_to_id("<|endoftext|>"))]
    )
    return core


def pool(states: torch.Tensor, mode: str) -> torch.Tensor:
    """The pooled state of (positions, hidden), by the name in the compact spelling."""
    weights = torch.arange(1, len(states) + 1)[:, None]
    return {
        "cls": states[0],
        "max": states.max(0).values,
        "mean": states.mean(0),
        "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
        "weightedmean": (states * weights).sum(0) / weights.sum(),
        "lasttoken": states[-1],
    }[mode]


@dataclass
class Folder:
    """A folder, and what its modules do."""

    path: Path
    model: torch.nn.Module
    core: object
    modules: list = field(default_factory=list)  # functions of one vector

    def states(self, ids) -> torch.Tensor:
        """The last hidden states of token ids, after the final norm."""
        with torch.no_grad():
            return self.model.model(torch.tensor([ids])).last_hidden_state[0].float()

    def vector(self, text: str, mode: str) -> torch.Tensor:
        """What sentence-transformers computes for a text."""
        found = pool(self.states(self.core.encode(text).ids), mode)
        for module in self.modules:
            found = module(found)
        return found


def write(
    folder: Path,
    pooling: dict | None = None,
    modules=(),
    *,
    prefix="sentence_transformers.models",
    kind="qwen3-gqa",
    **files,
):
    """Write a random model with a pooling and `modules` behind it, each a type or (type, config, tensors).

    files: the content of other JSON files, by name. Returns a Folder; functions of its modules are appended by callers.
    """
    core = tokenizer()
    model = checkpoints.save(folder, kind, vocab_size=core.get_vocab_size())
    small_tokenizers.write_folder(folder, core, **{"tokenizer_config": {"eos_token": "<|endoftext|>"}, **files})
    listed = [("Transformer", None, {}), ("Pooling", compact("mean") if pooling is None else pooling, {})]
    listed += [one if isinstance(one, tuple) else (one, None, {}) for one in modules]
    entries = []
    for index, (kind, config, tensors) in enumerate(listed):
        path = f"{index}_{kind}" if index else ""
        entries.append({"idx": index, "name": str(index), "path": path, "type": f"{prefix}.{kind}"})
        if config is not None:
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(config))
        if tensors:
            save_file(tensors, folder / path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(entries))
    return Folder(folder, model, core)


def dense(rows: int, columns: int = HIDDEN, activation="torch.nn.modules.linear.Identity", *, bias=True, **more):
    """A random Dense module, and its function. more: further fields of its config."""
    generator = torch.Generator().manual_seed(rows * columns)
    tensors = {"linear.weight": torch.randn(rows, columns, generator=generator) * 0.2}
    if bias:
        tensors["linear.bias"] = torch.randn(rows, generator=generator)
    if more.get("use_residual") and rows != columns:
        tensors["residual.weight"] = torch.randn(rows, columns, generator=generator)

    def compute(vector: torch.Tensor) -> torch.Tensor:
        found = ACTIVATIONS[activation](
            torch.nn.functional.linear(vector, tensors["linear.weight"], tensors.get("linear.bias"))
        )
        if more.get("use_residual"):
            found = found + (vector if rows == columns else tensors["residual.weight"] @ vector)
        return found

    config = {"in_features": columns, "out_features": rows, "bias": bias, "activation_function": activation, **more}
    return ("Dense", config, tensors), compute


def normalize(vector: torch.Tensor) -> torch.Tensor:
    """The function of the module Normalize."""
    return torch.nn.functional.normalize(vector, dim=0)
