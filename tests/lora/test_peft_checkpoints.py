"""Adapters on text parts of multimodal models, GGUF files, low-bit checkpoints and the shipped model."""

from pathlib import Path

import gguf_writer
import multimodal_checkpoints as multimodal
import pytest
import quantized_checkpoints
import torch
from model_equality import assert_alike, prompt_of, theirs_of
from peft_adapters import (
    adapted_logits,
    assert_adapted_alike,
    change_config,
    change_tensors,
    merge,
    products,
    save_adapter,
    save_matrices,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from quire.cli import app
from quire.errors import AdapterError
from quire.hub import embedded
from quire.lora.peft import read_adapter
from quire.models.description import describe
from quire.weights.checkpoint import FolderCheckpoint
from quire.weights.gguf.checkpoint import GgufCheckpoint
from quire.weights.quantized_checkpoint import open_layers

ASSETS = Path(__file__).parents[1] / "assets"
OLDER = {  # first part of names in transformers 5 -> in adapters of older ones
    "gemma3": ("model.language_model.", "language_model.model."),
    "qwen2-vl": ("model.language_model.", "model."),
    "smolvlm": ("model.text_model.", "model.text_model."),
    "llava-mistral": ("model.language_model.", "language_model.model."),
    "glm4v": ("model.language_model.", "model."),
    "glm4v-moe": ("model.language_model.", "model.language_model."),
}


@pytest.mark.parametrize("kind", OLDER)
def test_text_parts_equal_peft_under_older_names_too(kind, tmp_path):
    whole = multimodal.make(kind)
    multimodal.publish(whole, tmp_path / "model")
    new, old = OLDER[kind]
    targets = [name for name in products(whole) if name.startswith(new)]
    adapted = save_adapter(tmp_path / "adapter", whole, target_modules=targets)
    assert_adapted_alike(tmp_path / "model", adapted, tmp_path / "adapter")
    change_tensors(tmp_path / "adapter", lambda found: {name.replace(new, old): found[name] for name in found})
    change_config(tmp_path / "adapter", target_modules="all-linear")
    assert_adapted_alike(tmp_path / "model", adapted, tmp_path / "adapter")


def test_adapters_of_a_vision_tower_are_refused(tmp_path):
    whole = multimodal.make("gemma3")
    multimodal.publish(whole, tmp_path / "model")
    save_adapter(tmp_path / "adapter", whole, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match=r"vision.* cannot have an adapter: .* has no such product"):
        read_adapter(tmp_path / "adapter", "a", describe(tmp_path / "model"), "float32")


@pytest.mark.parametrize("kind", ["llama-3", "mistral", "cohere", "glm4", "phi3", "gpt2", "olmo2", "ernie4-5"])
def test_gguf_files_equal_peft(saved, tmp_path, kind):
    """The rows of some of their weights have another order in the file."""
    folder, theirs = saved(kind)
    checkpoint = GgufCheckpoint(gguf_writer.write_gguf(folder, tmp_path / "model.gguf"))
    adapted = save_adapter(tmp_path / "adapter", theirs)
    assert_adapted_alike(checkpoint, adapted, tmp_path / "adapter")


@pytest.mark.parametrize("layout", ["awq", "gptq-4", "pack-quantized-8"])
def test_low_bit_checkpoints_have_the_adapters_of_their_model(saved, tmp_path, layout):
    folder, theirs = saved("llama-3")
    numbers = quantized_checkpoints.write(folder, tmp_path / "model", layout)
    shapes = {name.removesuffix(".weight"): tuple(some.shape) for name, some in list(numbers.items())[::3]}
    matrices = save_matrices(tmp_path / "adapter", shapes)
    rounded = merge(theirs, {})
    with torch.no_grad():
        for name, some in numbers.items():
            rounded.get_parameter(name).copy_(some)
    checkpoint = open_layers(FolderCheckpoint(tmp_path / "model"))
    assert_adapted_alike(checkpoint, merge(rounded, matrices), tmp_path / "adapter")


@pytest.mark.parametrize("name", ["demo_json", "demo_pirate"])
def test_the_shipped_adapters_change_the_shipped_model_as_merged_weights_do(name):
    theirs = AutoModelForCausalLM.from_pretrained(embedded.folder(), dtype=torch.float32).eval()
    merged = merge(theirs, {})
    found = load_file(ASSETS / name / "adapter_model.safetensors")
    with torch.no_grad():
        for key in (key for key in found if "lora_A" in key):
            b = found[key.replace("lora_A", "lora_B")].float()
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            merged.get_submodule(module).weight += 2 * b @ found[key].float()
    prompt = prompt_of(60, 2048)
    expected = theirs_of(merged, prompt)
    assert_alike(adapted_logits(embedded.folder(), ASSETS / name, prompt), expected, 3e-5)
    assert (theirs_of(theirs, prompt) - expected).abs().max() > 0.1 * (expected.max() - expected.min())


# In the doctor's report


def doctor(folder):
    shown = CliRunner().invoke(app, ["doctor", "--memory", "300MiB", "--adapter", str(folder)], catch_exceptions=False)
    return shown.exit_code, shown.stdout.partition("adapter\n")[2].splitlines()


def test_the_doctor_describes_an_adapter_of_the_model(tmp_path):
    code, lines = doctor(ASSETS / "demo_pirate")
    description = describe(embedded.folder())
    adapter = read_adapter(ASSETS / "demo_pirate", "a", description, "bfloat16")
    assert code == 0
    assert lines[0] == f"  {ASSETS / 'demo_pirate'} has the digest {adapter.digest}"
    assert lines[1:] == ["  rank 8, 35 adapted weights, 345.00 KiB in bfloat16", "  it applies to all tokens"]


def test_the_doctor_says_from_where_on_an_adapter_applies(tmp_path):
    shapes = {"model.layers.0.self_attn.o_proj": (256, 256)}
    save_matrices(tmp_path / "adapter", shapes, alora_invocation_tokens=[3, 17])
    assert doctor(tmp_path / "adapter")[1][2] == "  invocation tokens 3, 17: it applies from there on"


def test_the_doctor_says_why_the_model_cannot_have_an_adapter(tmp_path):
    save_matrices(tmp_path / "adapter", {"model.layers.0.self_attn.o_proj": (256, 64)})
    code, lines = doctor(tmp_path / "adapter")
    assert code == 1
    assert "expected shape (4, 256) for the rank 4" in lines[0]
