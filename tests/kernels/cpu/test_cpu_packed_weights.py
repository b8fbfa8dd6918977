"""Weights loaded into the layout of the CPU kernels equal the plain model's weights after packing, bit for bit."""

import shutil
from itertools import pairwise
from pathlib import Path

import gguf_writer as gguf_files
import pytest
import random_checkpoints as checkpoints
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quire.kernels.contract import PackedWeight
from quire.models.description import describe
from quire.models.loading import load
from quire.weights.checkpoint import FolderCheckpoint
from quire.weights.gguf.checkpoint import GgufCheckpoint

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
kernels = pytest.importorskip("quire.kernels.cpu.kernels")
products = pytest.importorskip("quire.kernels.cpu.products")

PIECES = st.lists(st.integers(1, 40), min_size=1, max_size=5)  # rows of each piece


@pytest.fixture(autouse=True)
def two_threads():
    """Number of kernel threads."""
    _C.set_threads(2)
    yield
    _C.set_threads(1)


def assert_packed_alike(checkpoint, dtype):
    """Compare a model loaded for the kernels with one loaded without. Returns the names of packed weights."""
    plain = load(describe(checkpoint), dtype=dtype)
    model = load(describe(checkpoint), dtype=dtype, kernels=kernels)
    kept, packed = dict(model.named_parameters()), []
    for name, parameter in plain.named_parameters():
        if name in kept:
            assert torch.equal(kept[name], parameter), name
            continue
        module, _, attribute = name.rpartition(".")
        weight = getattr(model.get_submodule(module), attribute)
        expected = products.pack_weight(parameter, weight.parts)
        assert isinstance(weight, PackedWeight)
        assert (weight.rows, weight.columns) == (expected.rows, expected.columns)
        assert weight.data.dtype == parameter.dtype
        assert torch.equal(weight.data, expected.data), name
        packed.append(name)
    assert kept.keys() <= dict(plain.named_parameters()).keys()
    return packed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_weights_of_every_family_are_those_of_the_plain_model(saved, kind, dtype):
    packed = assert_packed_alike(FolderCheckpoint(saved(kind)[0]), dtype)
    layers = [name for name in packed if ".0.attention" in name]
    gate = ["gate"] if describe(saved(kind)[0]).config.attention_gate else []
    assert sorted(layers) == [f"layers.0.attention.{name}.weight" for name in [*gate, "o", "qkv"]]
    assert ("head.weight" in packed) != ("embed.weight" in packed)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_weights_of_gguf_files_are_those_of_the_plain_model(saved, tmp_path, kind):
    path = gguf_files.write_gguf(saved("llama-mha")[0], tmp_path / "model.gguf", kind=kind)
    for dtype in ("float32", "bfloat16"):
        assert len(assert_packed_alike(GgufCheckpoint(path), dtype)) == 4 * 3 + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_every_type_are_those_of_the_plain_model(saved, tmp_path, stored, dtype):
    folder = Path(shutil.copytree(saved("qwen3-tied")[0], tmp_path / "model"))
    tensors = {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    assert "embed.weight" in assert_packed_alike(FolderCheckpoint(folder), dtype)


@settings(max_examples=30)
@given(PIECES, st.integers(1, 70), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 3), st.data())
def test_rows_may_come_in_any_pieces_types_and_order(pieces, columns, dtype, parts, data):
    number, rows = data.draw(st.integers(0, 2)), parts * sum(pieces)
    shape = (number, rows, columns) if number else (rows, columns)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(rows)).to(dtype)
    expected = products.pack_weight(whole, parts)
    weight = products.allocate_weight(shape, dtype, parts)
    cuts = sorted({0, rows, *(data.draw(st.integers(0, rows)) for _ in pieces)})
    spans = [(index, *span) for index in range(number or 1) for span in pairwise(cuts)]
    for index, start, stop in data.draw(st.permutations(spans)):
        piece = (whole[index] if number else whole)[start:stop]
        kind = data.draw(st.sampled_from([dtype, torch.float32, torch.float64]))  # each represents its values
        piece = piece.to(kind) if data.draw(st.booleans()) else piece.to(kind).T.contiguous().T
        products.write_rows(weight, piece, start, index)
    assert torch.equal(weight.data, expected.data)
    assert (weight.rows, weight.columns, weight.parts) == (expected.rows, expected.columns, expected.parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_converted_in_several_goes_are_all_there(dtype):
    whole = torch.randn(2500, 6, generator=torch.Generator().manual_seed(0)).double()
    weight = products.allocate_weight(whole.shape, dtype)
    products.write_rows(weight, whole, 0)
    assert torch.equal(weight.data, products.pack_weight(whole.to(dtype)).data)


def test_a_tile_holds_its_rows_term_by_term():
    """float32: [term][row]; bf16: [pair of terms][row][term], padded with zeros to 32 terms."""
    whole = torch.arange(20.0 * 3).view(20, 3)
    tiles = products.pack_weight(whole).data
    padded = torch.cat([whole, torch.zeros(12, 3)])
    assert torch.equal(tiles.view(2, 3, 16), padded.view(2, 16, 3).transpose(1, 2))
    pairs = torch.cat([padded, torch.zeros(32, 29)], 1).view(2, 16, 16, 2).transpose(1, 2).bfloat16()
    assert torch.equal(products.pack_weight(whole.bfloat16()).data.view(2, 16, 16, 2), pairs)


@pytest.mark.parametrize(("shape", "start"), [((4, 7), 0), ((4, 8), 3), ((7, 8), 0), ((4, 8), -1), ((8,), 0)])
def test_rows_that_have_no_place_are_refused(shape, start):
    weight = products.allocate_weight((6, 8), torch.float32)
    with pytest.raises(ValueError, match="do not fit a weight"):
        products.write_rows(weight, torch.ones(shape), start)
    assert not weight.data.any()
