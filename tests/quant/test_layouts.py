"""Checkpoints in published layouts of quantized layers, packed here by hand: loaded with their codes, or refused."""

import json
import shutil

import pytest
import torch
from paged_model_forward import Sequences
from safetensors.torch import load_file, save_file

from quire.errors import ModelError
from quire.kernels import reference
from quire.kernels.contract import PackedWeight
from quire.kernels.reference.codes import dequantize, rows_of
from quire.models.checkpoint import FolderCheckpoint
from quire.models.description import describe
from quire.models.loading import load
from quire.models.quantized_checkpoint import QuantizedCheckpoint, open_layers

cpu = pytest.importorskip("quire.kernels.cpu.kernels")

KIND = "llama-gqa-tied"  # hidden size 64
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble, the lowest first


def packed(codes, bits, order=None):
    """int32 with 32 / bits neighbouring columns in each number, the first in the lowest bits or in this order."""
    many = 32 // bits
    order = order or range(many)
    out = torch.zeros(codes.shape[0], codes.shape[1] // many, dtype=torch.int64)
    for place, column in enumerate(order):
        out |= codes[:, column::many].long() << (bits * place)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def drawn(weight, bits, group_size, seed):
    """Random codes, zeros and scales (out, groups) for a weight of this shape, and the numbers that they mean."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = weight.shape
    groups = columns // (group_size or columns)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=draw)
    zeros = torch.randint(1, 1 << bits, (rows, groups), generator=draw)
    scales = (0.01 + 0.02 * torch.rand(rows, groups, generator=draw)).half()
    return codes, zeros, scales


def meant(codes, zeros, scales, groups=None):
    groups = torch.arange(codes.shape[1]) * scales.shape[1] // codes.shape[1] if groups is None else groups
    return (codes - zeros[:, groups]) * scales.float()[:, groups]


def awq(name, weight, seed):
    codes, zeros, scales = drawn(weight, 4, 32, seed)
    tensors = {"qweight": packed(codes.T, 4, AWQ_ORDER), "qzeros": packed(zeros.T, 4, AWQ_ORDER), "scales": scales.T}
    return tensors, meant(codes, zeros, scales)


def gptq(name, weight, seed, *, bits=4, any_order=False, symmetric=False, lowest=1):
    codes, zeros, scales = drawn(weight, bits, 32, seed)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    groups = torch.arange(codes.shape[1]) // 32
    if any_order:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
    tensors = {
        "qweight": packed(codes, bits).T,
        "qzeros": packed((zeros - lowest).T, bits),
        "scales": scales.T,
        "g_idx": groups.int(),
    }
    return tensors, meant(codes, zeros, scales, groups)


def pack_quantized(name, weight, seed, *, bits=4, symmetric=True, group_size=32):
    codes, zeros, scales = drawn(weight, bits, group_size, seed)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    tensors = {"weight_packed": packed(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = packed(zeros.T, bits).T
    return tensors, meant(codes, zeros, scales)


def int_quantized(name, weight, seed):
    codes, _, scales = drawn(weight, 8, 0, seed)
    numbers = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales.bfloat16()}
    return numbers, (codes - 128) * scales.bfloat16().float()


def float_quantized(name, weight, seed):
    scales = drawn(weight, 8, 0, seed)[2].float()
    eight = (weight.float() / scales).to(torch.float8_e4m3fn)
    return {"weight": eight, "weight_scale": scales}, eight.float() * scales


def blocks(name, weight, seed):
    """FP8 with a scale for each block of 16 rows and 32 columns."""
    eight = weight.float().to(torch.float8_e4m3fn)
    shape = -(-weight.shape[0] // 16), -(-weight.shape[1] // 32)
    scales = 1 + torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    spread = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)[: weight.shape[0], : weight.shape[1]]
    return {"weight": eight, "weight_scale_inv": scales}, eight.float() * spread


def compressed(bits, kind):
    weights = {"num_bits": bits, "type": kind, "symmetric": True}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def with_options(pack, **options):
    return lambda name, weight, seed: pack(name, weight, seed, **options)


GPTQ = {"quant_method": "gptq", "group_size": 32, "desc_act": False}
LAYOUTS = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "gptq-4": (gptq, {**GPTQ, "bits": 4, "sym": False}),
    "gptq-4-sym": (with_options(gptq, symmetric=True), {**GPTQ, "bits": 4, "sym": True}),
    "gptq-8": (with_options(gptq, bits=8), {**GPTQ, "bits": 8}),
    "gptq-v2": (with_options(gptq, lowest=0), {**GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}),
    "gptq-act-order": (with_options(gptq, any_order=True), {**GPTQ, "bits": 4, "desc_act": True}),
    "pack-quantized": (pack_quantized, compressed(4, "int")),
    "pack-quantized-zeros": (with_options(pack_quantized, symmetric=False), compressed(4, "int")),
    "pack-quantized-channel": (with_options(pack_quantized, group_size=0), compressed(4, "int")),
    "pack-quantized-8": (with_options(pack_quantized, bits=8), compressed(8, "int")),
    "int-quantized": (int_quantized, compressed(8, "int")),
    "float-quantized": (float_quantized, compressed(8, "float")),
    "fp8-blocks": (blocks, {"quant_method": "fp8", "weight_block_size": [16, 32]}),
}
EXPANDED = ("gptq-act-order", "float-quantized", "fp8-blocks")  # no scheme holds their numbers


def write(source, folder, layout, change=lambda tensors: None):
    """The checkpoint in `source` with all projections in a layout. Returns the numbers of each of their weights."""
    shutil.copytree(source, folder)
    pack, settings = LAYOUTS[layout]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    tensors, numbers = load_file(folder / "model.safetensors"), {}
    for seed, name in enumerate([name for name in tensors if name.endswith("_proj.weight")]):
        parts, numbers[name] = pack(name, tensors.pop(name), seed)
        base = name.removesuffix("weight")
        tensors |= {base + last: tensor.contiguous() for last, tensor in parts.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return numbers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_loaded_and_keep_their_codes(saved, tmp_path, layout):
    numbers = write(saved(KIND)[0], tmp_path / "model", layout)
    checkpoint = open_layers(FolderCheckpoint(tmp_path / "model"))
    assert isinstance(checkpoint, QuantizedCheckpoint)
    for name, tensor in checkpoint.read(numbers):
        assert torch.allclose(tensor, numbers[name], rtol=2**-9, atol=2**-9), name
    description = describe(checkpoint)
    schemes = description.schemes(None)
    assert bool(schemes) == (layout not in EXPANDED)
    plain, model = (load(description, dtype="float32", schemes=some) for some in ({}, schemes))
    for path, scheme in schemes.items():
        module, _, name = path.rpartition(".")
        weight, expected = (getattr(some.get_submodule(module), name) for some in (model, plain))
        assert isinstance(weight, PackedWeight)
        assert torch.allclose(dequantize(rows_of(weight), scheme), expected, rtol=2**-9, atol=2**-8), path
    found = []
    for kernels in (reference, cpu):
        some = load(description, dtype="float32", kernels=kernels, schemes=schemes)
        found.append(Sequences(description, some, [30], kernels=kernels).logits([(0, 0, list(range(30)))]))
    assert (found[0] - found[1]).abs().max() < 0.02 * (found[0].max() - found[0].min())


def shorter(tensors):
    name = next(name for name in tensors if name.endswith(("scales", "weight_scale", "weight_scale_inv")))
    tensors[name] = tensors[name][:-1].contiguous()


def with_fewer_zeros(tensors):
    name = next(name for name in tensors if name.endswith("weight_zero_point"))
    tensors[name] = tensors[name][:-1].contiguous()


def without_zeros(tensors):
    del tensors[next(name for name in tensors if name.endswith("qzeros"))]


@pytest.mark.parametrize(
    ("layout", "change", "why"),
    [
        ("awq", shorter, "scales: expected shape"),
        ("awq", without_zeros, "qzeros is missing"),
        ("pack-quantized", shorter, "weight_scale .* does not fit"),
        ("int-quantized", shorter, "weight_scale .* does not fit"),
        ("fp8-blocks", shorter, "weight_scale_inv .* does not fit blocks"),
        ("float-quantized", shorter, "weight_scale: expected one scale or"),
        ("pack-quantized-zeros", with_fewer_zeros, "weight_zero_point: expected shape"),
    ],
)
def test_tensors_that_do_not_fit_are_named_before_weights_are_read(saved, tmp_path, layout, change, why):
    write(saved(KIND)[0], tmp_path / "model", layout, change)
    with pytest.raises(ModelError, match=rf"_proj\.weight: {why}"):
        open_layers(FolderCheckpoint(tmp_path / "model"))


def test_scales_that_are_not_finite_are_named(saved, tmp_path):
    def spoil(tensors):
        tensors[next(name for name in tensors if name.endswith("scales"))][0, 0] = torch.nan

    write(saved(KIND)[0], tmp_path / "model", "awq", spoil)
    description = describe(open_layers(FolderCheckpoint(tmp_path / "model")))
    with pytest.raises(ModelError, match=r"_proj\.weight: its scales are not finite"):
        load(description, dtype="float32", schemes=description.schemes(None))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; use a checkpoint in AWQ"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "version 'gemm'"),
        ({"quant_method": "awq", "bits": 3}, "AWQ has 4 bits"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 12}, "group_size must be"),
        ({"quant_method": "compressed-tensors"}, "config_groups must be"),
        (compressed(3, "int"), "weights must have 4 bits or 8"),
        (compressed([4], "int"), "weights must have 4 bits or 8"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two sizes"),
        ("awq", "must be an object"),
    ],
)
def test_settings_that_are_not_supported_are_named(saved, tmp_path, settings, why):
    shutil.copytree(saved(KIND)[0], tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    with pytest.raises(ModelError, match=rf"quantization_config.*{why}"):
        open_layers(FolderCheckpoint(tmp_path / "model"))
