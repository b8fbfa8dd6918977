"""Edited config.json files mean the same as in transformers: unknown, missing and duplicate fields."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from model_equality import assert_alike, prompt_of, theirs_of
from paged_model_forward import logits_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.models.description import describe

LINEAR = {"rope_type": "linear", "factor": 2.0}
UPPER = ["full_attention", "sliding_attention", "sliding_attention"]


def changed(source, folder, **values):
    """A copy of a checkpoint with changed values in config.json; None is null."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return Path(folder)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama-mha", {"tie_word_embeddings": True}),  # the file has an output head
        ("gpt-neox", {"tie_word_embeddings": True}),
        ("mistral-window", {"sliding_window": None}),
        ("mistral", {"sliding_window": 7, "layer_types": UPPER}),
        ("qwen2", {"max_window_layers": 0}),
        ("qwen2-upper-window", {"max_window_layers": 0, "layer_types": None}),
        ("phi3-window", {"layer_types": ["sliding_attention"] * 3}),
        ("gpt2", {"layer_norm_eps": 0.1}),
        ("gpt2", {"num_hidden_layers": 2}),
        ("falcon-mqa", {"layer_norm_eps": 0.1}),
        ("gemma3", {"attn_logit_softcapping": 3.0}),
        ("gemma3", {"rope_scaling": LINEAR}),
        ("qwen3-tied", {"rope_scaling": LINEAR}),
        ("stablelm", {"rope_scaling": LINEAR}),
        ("gpt-neox", {"rope_parameters": None, "rope_theta": 777.0}),
    ],
)
def test_logits_equal_transformers(saved, tmp_path, kind, values):
    folder = changed(saved(kind)[0], tmp_path / "model", **values)
    if values.get("num_hidden_layers") == 2:
        tensors = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if "h.2." not in name}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = prompt_of(75)
    assert_alike(logits_of(folder, prompt, cut=13), theirs_of(theirs, prompt), 1e-5)


def test_qwen2_moe_may_have_no_biases(saved, tmp_path):
    assert describe(saved("qwen2-moe")[0]).config.qkv_bias
    assert not describe(changed(saved("qwen2-moe")[0], tmp_path / "model", qkv_bias=False)).config.qkv_bias


@pytest.mark.parametrize("kind", ["mistral-window", "gemma2", "gemma3", "qwen2-upper-window"])
def test_no_window_at_all_is_null_not_missing(saved, tmp_path, kind):
    folder = changed(saved(kind)[0], tmp_path / "model", sliding_window=None, layer_types=None)
    assert {layer.span for layer in describe(folder).kv_layers} == {0}
    config = json.loads((folder / "config.json").read_text())
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))
    assert max(layer.span for layer in describe(folder).kv_layers) == 4096
