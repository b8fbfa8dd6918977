"""Adapters with random matrices that PEFT has saved, and quire's decoder with them."""

import copy
import json
import warnings
from pathlib import Path
from unittest.mock import patch

import torch
from model_equality import assert_alike, prompt_of, theirs_of
from paged_model_forward import Sequences, logits_of
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from quire.kernels import reference
from quire.lora.peft import CONFIG_FILE, TENSORS_FILE, load_adapter, read_adapter
from quire.lora.tables import AdapterTables
from quire.models.description import describe
from quire.models.loading import load

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

RANK = 4
ALPHA = 16
SLOT, NUM_SLOTS = 2, 3

# PEFT takes names like gate_proj of mixtures as those of experts, which transformers 5 stacks. Here they are those of
# shared experts and of layers without experts.
_CONVERSION = "peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"


def products(model) -> list[str]:
    """The names of the linear modules of a transformers model, without its head and routers that select experts.

    PEFT refuses out_proj of Nemotron-H, whose kernels in transformers may compute it with the state.
    """
    head, is_nemotron = model.get_output_embeddings(), model.config.model_type == "nemotron_h"
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and "Router" not in type(module).__name__
        and not (is_nemotron and name.endswith("out_proj"))
    ]


def adapt(theirs, *, strength=0.05, **config):
    """A copy of a transformers model with a random adapter. config: fields of LoraConfig in place of defaults."""
    values = {"r": RANK, "lora_alpha": ALPHA, "target_modules": products(theirs), "task_type": "CAUSAL_LM"} | config
    with warnings.catch_warnings(), patch(_CONVERSION):
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(copy.deepcopy(theirs), peft.LoraConfig(**values)).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_A" in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif "lora_B" in name:
                parameter.normal_(std=strength)
    return adapted


def save_adapter(folder: Path, theirs, **config):
    """Save the adapter of `adapt`, and return the adapted model."""
    adapted = adapt(theirs, **config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(folder)
    return adapted


def save_matrices(folder: Path, shapes, *, prefix="base_model.model.", seed=3, **config):
    """Save random matrices, and return (a, b) by module. shapes: (rows, columns) of the weight of each module."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        module: (
            torch.randn(RANK, columns, generator=generator) / columns**0.5,
            torch.randn(rows, RANK, generator=generator) / 2,
        )
        for module, (rows, columns) in shapes.items()
    }
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets} | config
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(fields))
    parts = {f"{prefix}{module}.lora_{'AB'[i]}.weight": some[i] for module, some in made.items() for i in (0, 1)}
    save_file(parts, folder / TENSORS_FILE)
    return made


@torch.no_grad()
def merge(theirs, matrices):
    """A copy of a transformers model, to whose weights the matrices of `save_matrices` are added, by its modules."""
    merged = copy.deepcopy(theirs)
    for module, (a, b) in matrices.items():
        merged.get_submodule(module).weight += b @ a * (ALPHA / RANK)
    return merged


def change_config(folder: Path, **fields):
    """Change fields of a saved config; `...` removes one."""
    path = folder / CONFIG_FILE
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


def change_tensors(folder: Path, change):
    """Replace saved tensors by `change` of their dict."""
    path = folder / TENSORS_FILE
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in change(load_file(path)).items()},
        path,
    )


def adapted_logits(folder: Path, adapter_folder: Path, prompt, *, kernels=reference, dtype="float32", **options):
    """Logits of quire's decoder with an adapter in one of several slots, in chunks of 13 tokens."""
    description = describe(folder, **options)
    model = load(description, dtype=dtype)
    tables = AdapterTables(model, kernels, NUM_SLOTS)
    adapter = read_adapter(adapter_folder, "random", description, dtype)
    packed = tables.pack(load_adapter(adapter, description, dtype))
    tables.put(SLOT, packed)
    sequences = Sequences(description, model, [len(prompt)], block_size=8, kernels=kernels)
    sequences.slots, sequences.width = [SLOT], tables.width(packed)
    parts = [(start, prompt[start : start + 13]) for start in range(0, len(prompt), 13)]
    return torch.cat([sequences.logits([(0, start, tokens)]) for start, tokens in parts])


def assert_adapted_alike(folder: Path, theirs, adapter_folder: Path, **options):
    """Compare the logits of quire's decoder with a saved adapter to those of an adapted model of transformers.

    They differ by at least 10% of their range from the logits without the adapter.
    """
    prompt = prompt_of(40)
    expected = theirs_of(theirs, prompt)
    assert_alike(adapted_logits(folder, adapter_folder, prompt, **options), expected, 3e-5)
    plain = logits_of(folder, prompt, **options)
    assert (plain - expected).abs().max() > 0.1 * (expected.max() - expected.min())
