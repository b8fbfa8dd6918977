"""Weights arrive where they belong, and every mistake in a checkpoint is named."""

import shutil
from pathlib import Path

import checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelError
from quire.kernels import reference
from quire.models.description import describe
from quire.models.loading import load
from quire.models.names import placements
from quire.models.weights import header


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved("qwen3-gqa")[0], tmp_path / "model"))


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def loaded(folder, dtype="float32", **options):
    return load(describe(folder), reference, dtype=dtype, **options)


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_every_number_of_every_parameter_comes_from_the_checkpoint(saved, kind):
    folder, theirs = saved(kind)
    model = loaded(folder)
    stored = dict(theirs.named_parameters())
    parameters = dict(model.named_parameters())
    covered = {name: torch.zeros(parameter.shape[0], dtype=torch.int) for name, parameter in parameters.items()}
    for name, place in placements(describe(folder).config).items():
        rows = slice(place.start, place.start + place.shape[0])
        assert torch.equal(parameters[place.parameter][rows], stored[name])
        covered[place.parameter][rows] += 1
    assert all((count == 1).all() for count in covered.values())
    assert not any(parameter.requires_grad for parameter in parameters.values())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_are_cast(folder, stored, dtype):
    edit(folder, lambda tensors: tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()}))
    model = loaded(folder, dtype)
    assert {str(parameter.dtype) for parameter in model.parameters()} == {f"torch.{dtype}"}
    expected = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(model.layers[1].gate_up.weight[96:], expected.to(getattr(torch, dtype)))


def test_shards_give_the_same_model(saved, tmp_path):
    model = checkpoints.save(tmp_path, "qwen3-gqa", shard="100KB")
    assert len(describe(tmp_path).weight_files) > 3
    one, many = loaded(saved("qwen3-gqa")[0]), loaded(tmp_path)
    for (name, a), (_, b) in zip(one.named_parameters(), many.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(many.norm, model.model.norm.weight)


def test_progress_counts_every_byte_once(folder):
    seen = []
    loaded(folder, progress=lambda done, total: seen.append((done, total)))
    tensors = header(folder / "model.safetensors").values()
    assert seen[0] == (0, sum(tensor.num_bytes for tensor in tensors))
    assert seen[-1][0] == seen[-1][1]
    assert sorted(seen) == seen
    assert len(seen) == 1 + len(tensors)


def test_harmless_extras_are_ignored(saved, tmp_path):
    folder = Path(shutil.copytree(saved("qwen3-tied")[0], tmp_path / "model"))
    extras = {"lm_head.weight": torch.ones(301, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    edit(folder, lambda tensors: tensors.update(extras))
    assert loaded(folder).head is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.2.mlp.up_proj.weight"),
            r"lacks 1 of the 36 tensors .*expected model\.layers\.2\.mlp\.up_proj\.weight with shape \(96, 64\)",
        ),
        (lambda t: t.pop("lm_head.weight"), r"expected lm_head\.weight with shape \(301, 64\), found nothing"),
        (
            lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(96, 64)}),
            r"no place for: found model\.layers\.3\.mlp\.up_proj\.weight with shape \(96, 64\)",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(128)}),
            r"no place for: found model\.layers\.0\.self_attn\.q_proj\.bias",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(65)}),
            r"model\.norm\.weight: expected shape \(64,\), found \(65,\)",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(128, 64)}),
            r"k_proj\.weight: expected shape \(64, 64\), found \(128, 64\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            r"model\.norm\.weight: expected a floating point type, found I8",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
            r"model\.norm\.weight: expected a floating point type, found F8_E4M3",
        ),
    ],
)
def test_mistakes_are_named_before_anything_is_read(folder, change, message):
    edit(folder, change)
    seen = []
    with pytest.raises(ModelError, match=message):
        loaded(folder, progress=lambda done, total: seen.append(done))
    assert not seen
