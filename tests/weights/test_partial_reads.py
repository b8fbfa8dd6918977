"""Parts of tensors, read by a range on each axis, are those of the whole tensors, in all formats of checkpoints."""

import random
from dataclasses import replace

import pytest
import quantized_checkpoints
import random_checkpoints
import torch
from gguf_writer import write_gguf
from rank_descriptions import share
from safetensors.torch import load_file, save_file

from quire.kernels import reference
from quire.kernels.contract import FP8, INT4
from quire.kernels.reference.codes import dequantize, quantize_rows
from quire.models.description import describe
from quire.models.loading import load
from quire.models.text_part import TextCheckpoint
from quire.weights.checkpoint import FolderCheckpoint, part_of
from quire.weights.gguf.checkpoint import GgufCheckpoint
from quire.weights.placement import Placement, write_weight
from quire.weights.quantized_checkpoint import open_layers
from quire.weights.schemes import has_whole_groups, part_of_rows, schemes_of_checkpoint

WIDE = {"hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
GGUF = {
    **dict.fromkeys(("F32", "Q8_0", "Q4_1", "MXFP4"), "llama-gqa-tied"),  # heads in another order
    "F16": "gpt2",  # transposed
    "Q4_0": "qwen3-moe",  # stacks of experts
}
FORMATS = ("safetensors", "text part", *GGUF, "Q4_K_M", *quantized_checkpoints.LAYOUTS, "mxfp4 stacks")


def open_format(name, saved, folder):
    """A small checkpoint of a format."""
    made = folder / "made"
    match name:
        case "safetensors":
            return FolderCheckpoint(saved("llama-gqa-tied")[0])
        case "text part":
            return text_part(saved("llama-gqa-tied")[0], made)
        case "Q4_K_M":
            random_checkpoints.save(made, "llama-gqa-tied", **WIDE)
            return GgufCheckpoint(write_gguf(made, folder / "model.gguf", kind=name))
        case "mxfp4 stacks":
            quantized_checkpoints.write_stacks(saved("mixtral")[0], made)
        case kind if kind in GGUF:
            return GgufCheckpoint(write_gguf(saved(GGUF[kind])[0], folder / "model.gguf", kind=kind))
        case layout:
            quantized_checkpoints.write(saved(quantized_checkpoints.KIND)[0], made, layout)
    return open_layers(FolderCheckpoint(made))


def text_part(source, folder):
    """The Llama in `source`, as the text model of a multimodal checkpoint."""
    folder.mkdir()
    tensors = {f"language_model.{name}": one for name, one in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"text_config": {"model_type": "mistral"}}')
    return TextCheckpoint(FolderCheckpoint(folder), "Mistral3ForConditionalGeneration")


def drawn(shape, draw):
    """A range on each axis, not empty."""
    return tuple(range(start := draw.randrange(size), draw.randint(start + 1, size)) for size in shape)


def at(ranges):
    return tuple(slice(one.start, one.stop) for one in ranges)


@pytest.mark.parametrize("format", FORMATS)
def test_a_part_of_a_tensor_is_that_of_the_whole(format, saved, tmp_path):
    checkpoint, draw = open_format(format, saved, tmp_path), random.Random(format)
    ranges = {name: drawn(stored.shape, draw) for name, stored in checkpoint.tensors.items() if draw.random() < 0.8}
    whole, parts = dict(checkpoint.read(checkpoint.tensors)), dict(checkpoint.read(checkpoint.tensors, ranges))
    assert list(whole) == list(parts)
    for name, tensor in whole.items():
        expected = tensor[at(ranges[name])] if name in ranges else tensor
        assert torch.equal(parts[name], expected), name


@pytest.mark.parametrize("format", [name for name in FORMATS if name not in ("safetensors", "text part", "F32", "F16")])
def test_codes_of_whole_groups_are_those_of_the_whole(format, saved, tmp_path):
    checkpoint, draw = open_format(format, saved, tmp_path), random.Random(format)
    schemes = {name: stored.scheme for name, stored in checkpoint.tensors.items() if stored.scheme is not None}
    ranges = {}
    for name, scheme in schemes.items():
        rows, columns = checkpoint.tensors[name].shape
        unit = 256 if scheme.has_factors else scheme.group_size or 1
        (cut,) = drawn((columns // unit,), draw)
        ranges[name] = (*drawn((rows,), draw), range(cut.start * unit, cut.stop * unit))
    whole, parts = dict(checkpoint.read_codes(schemes)), dict(checkpoint.read_codes(schemes, ranges))
    assert list(whole) == list(parts)
    for name, rows in whole.items():
        expected = dequantize(rows, schemes[name])[at(ranges[name])]
        assert torch.equal(dequantize(parts[name], schemes[name]), expected), name


def test_columns_in_part_of_a_group_are_refused():
    rows = quantize_rows(torch.randn(4, 96), INT4)
    for columns in (range(16, 64), range(32, 80)):
        assert not has_whole_groups(Placement((4, 96), "p", ranges=(range(4), columns)), INT4)
        with pytest.raises(ValueError, match=f"columns {columns.start} to {columns.stop} are no whole groups of int4"):
            part_of_rows(rows, INT4, (range(4), columns))
    short = replace(INT4, group_size=64)
    assert has_whole_groups(Placement((4, 96), "p", ranges=(range(4), range(64, 96))), short)  # its last group
    assert has_whole_groups(Placement((4, 96), "p", ranges=(range(4), range(5, 7))), FP8)  # one scale a row
    place = Placement((4, 96), "layers.0.mlp.down.weight", ranges=(range(4), range(16, 64)))
    assert schemes_of_checkpoint({"w": place}, {"w": INT4}) == {}
    assert schemes_of_checkpoint({"w": replace(place, ranges=(range(4), range(32, 64)))}, {"w": INT4})


@pytest.mark.parametrize("kind", ["llama-mqa-biases", "gpt2"])  # gpt2: transposed
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_two_ranks_load_their_shares_of_a_model(kind, quantization, saved):
    description = describe(saved(kind)[0])
    schemes = description.schemes(quantization)
    whole = load(description, dtype="float32")
    for rank in range(2):
        half = share(description, rank)
        assert half.weight_bytes("float32") < description.weight_bytes("float32")
        model = load(half, dtype="float32", schemes=schemes)
        size = half.config.intermediate_size
        own = slice(rank * size, (rank + 1) * size)
        for layer, full in zip(model.layers, whole.layers, strict=True):
            ups = full.mlp.up.weight.view(-1, 2 * size, full.mlp.up.weight.shape[1])[:, own].flatten(0, 1)
            for weight, numbers in ((layer.mlp.up.weight, ups), (layer.mlp.down.weight, full.mlp.down.weight[:, own])):
                x = torch.randn(3, numbers.shape[1])
                expected = x @ numbers.T
                close = 0.03 if quantization else 1e-5
                assert (reference.linear(x, weight) - expected).abs().max() <= close * expected.abs().max()
            assert torch.equal(layer.mlp.up.bias, full.mlp.up.bias.view(-1, 2 * size)[:, own].flatten())


def test_the_order_of_rows_is_that_of_the_part():
    rows = torch.arange(24.0).view(8, 3)
    place = Placement((8, 3), "p", start=1, row_order=(1, 3, 0, 2), ranges=(range(4, 8), range(1, 3)))
    write_weight(part_of(rows, place.ranges), filled := torch.zeros(5, 2), place)
    assert place.read_shape == (4, 2)
    assert torch.equal(filled[1:], rows[[5, 7, 4, 6], 1:])
