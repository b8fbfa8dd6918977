"""Weight loading: every tensor is in its place, and every error in a checkpoint is named."""

import shutil
from pathlib import Path

import pytest
import random_checkpoints as checkpoints
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelError
from quire.kernels.contract import PackedWeight
from quire.models.description import describe
from quire.models.loading import load
from quire.weights.placement import Placement, write_weight


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved("qwen3-gqa")[0], tmp_path / "model"))


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def loaded(folder, dtype="float32", **options):
    return load(describe(folder), dtype=dtype, **options)


@pytest.mark.parametrize("kind", checkpoints.EVERY)
def test_every_number_of_every_parameter_is_filled_once(saved, kind):
    folder, theirs = saved(kind)
    model, description = loaded(folder), describe(folder)
    stored = description.num_parameters + checkpoints.num_expanded(description)
    assert sum(parameter.numel() for parameter in model.parameters()) == stored
    counts = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    for place in description.weight_map.values():
        ones = torch.ones(place.shape) - place.offset - float(place.is_log)  # the exponential of 0 is 1
        write_weight(ones, filled := torch.zeros_like(counts[place.parameter]), place)
        counts[place.parameter] += filled.abs() if place.latent is None else 1
    assert all((count == 1).all() for count in counts.values())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert checkpoints.num_stored(theirs) == description.num_parameters


def test_tensors_are_written_where_their_placement_says():
    rows = torch.arange(12.0).view(4, 3)
    parameter = torch.zeros(2, 6, 3)
    write_weight(rows, parameter, Placement((4, 3), "p", start=2, part=1, row_order=(3, 1, 0, 2)))
    assert torch.equal(parameter[1, 2:], rows[[3, 1, 0, 2]])
    assert not parameter[0].any()
    assert not parameter[1, :2].any()
    write_weight(rows, short := torch.zeros(3, 4), Placement((4, 3), "p", transposed=True))
    assert torch.equal(short, rows.T)
    write_weight(
        torch.full((3,), 2.0**-9, dtype=torch.bfloat16), one := torch.zeros(3), Placement((3,), "p", offset=1.0)
    )
    assert one.tolist() == [1 + 2.0**-9] * 3  # a bfloat16 would lose it
    with pytest.raises(TypeError, match="packed by another kernel module"):
        write_weight(rows, PackedWeight(torch.zeros(4, 3), 4, 3, torch.float32), Placement((4, 3), "p"))


def test_rows_of_a_grouped_projection_are_queries_then_keys_then_values(saved):
    folder, theirs = saved("falcon-40b")
    stored = dict(theirs.named_parameters())["transformer.h.1.self_attention.query_key_value.weight"]
    groups = stored.view(2, 4, 16, 64)  # KV heads: two queries, a key, a value
    expected = torch.cat([groups[:, :2].reshape(64, 64), groups[:, 2].reshape(32, 64), groups[:, 3].reshape(32, 64)])
    assert torch.equal(loaded(folder).layers[1].attention.qkv.weight, expected)


def test_names_without_the_first_part_of_the_prefix_are_found(saved, tmp_path):
    """As in GPT-2's own checkpoint, with its stored masks."""
    folder = Path(shutil.copytree(saved("gpt2")[0], tmp_path / "model"))
    whole = loaded(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 512, 512)}, folder / "model.safetensors")
    for (name, a), (_, b) in zip(whole.named_parameters(), loaded(folder).named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_are_cast(folder, stored, dtype):
    edit(folder, lambda tensors: tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()}))
    model = loaded(folder, dtype)
    assert {str(parameter.dtype) for parameter in model.parameters()} == {f"torch.{dtype}"}
    expected = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(model.layers[1].mlp.up.weight[96:], expected.to(getattr(torch, dtype)))


def test_shards_give_the_same_model(saved, tmp_path):
    model = checkpoints.save(tmp_path, "qwen3-gqa", shard="100KB")
    assert len({stored.file for stored in describe(tmp_path).checkpoint.tensors.values()}) > 3
    one, many = loaded(saved("qwen3-gqa")[0]), loaded(tmp_path)
    for (name, a), (_, b) in zip(one.named_parameters(), many.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(many.norm.weight, model.model.norm.weight)


def test_progress_counts_every_byte_once(folder):
    seen = []
    loaded(folder, progress=lambda done, total: seen.append((done, total)))
    tensors = describe(folder).checkpoint.tensors.values()
    assert seen[0] == (0, sum(tensor.num_bytes for tensor in tensors))
    assert seen[-1][0] == seen[-1][1]
    assert sorted(seen) == seen
    assert len(seen) == 1 + len(tensors)


def test_harmless_extras_are_ignored(saved, tmp_path):
    folder = Path(shutil.copytree(saved("qwen3-tied")[0], tmp_path / "model"))
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert loaded(folder).head is None
    assert describe(folder).num_parameters == describe(saved("qwen3-tied")[0]).num_parameters


def test_a_head_in_the_file_that_is_not_the_embedding_counts_whatever_the_config_says(saved, tmp_path):
    folder = Path(shutil.copytree(saved("qwen3-tied")[0], tmp_path / "model"))
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    assert torch.equal(loaded(folder).head.weight, head)
    assert describe(folder).num_parameters == describe(saved("qwen3-tied")[0]).num_parameters + head.numel()
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": head.bfloat16()}))
    assert torch.equal(loaded(folder).head.weight, head.bfloat16().float())
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(7, 64)}))
    with pytest.raises(ModelError, match=r"lm_head.weight: expected shape \(301, 64\), found \(7, 64\)"):
        loaded(folder)


def test_norms_of_weights_minus_one_stay_in_float32(saved):
    model = loaded(saved("gemma2")[0], "bfloat16")
    norms = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert norms == {name for name, _ in model.named_parameters() if "norm" in name}


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
            r"does not have: found model\.layers\.3\.mlp\.up_proj\.weight with shape \(96, 64\)",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(128)}),
            r"does not have: found model\.layers\.0\.self_attn\.q_proj\.bias",
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
