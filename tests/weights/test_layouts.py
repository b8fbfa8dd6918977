"""Checkpoints in published layouts of quantized layers, packed here by hand: loaded with their codes, or refused."""

import json
import shutil

import pytest
import torch
from paged_model_forward import Sequences
from quantized_checkpoints import EXACT, EXPANDED, KIND, LAYOUTS, compressed, write, write_stacks
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.errors import ModelError
from quire.hub import embedded
from quire.kernels import reference
from quire.kernels.contract import MXFP4, PackedWeight
from quire.kernels.reference.codes import dequantize, numbers_of, rows_of
from quire.models.description import describe
from quire.models.loading import load
from quire.weights.checkpoint import FolderCheckpoint
from quire.weights.layouts import Part, layout_of
from quire.weights.quantized_checkpoint import QuantizedCheckpoint, open_layers

cpu = pytest.importorskip("quire.kernels.cpu.kernels")
multiplies = pytest.importorskip("quire.kernels.cpu.products").multiplies


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_loaded_and_keep_their_codes(saved, tmp_path, layout):
    numbers = write(saved(KIND)[0], tmp_path / "model", layout)
    checkpoint = open_layers(FolderCheckpoint(tmp_path / "model"))
    assert isinstance(checkpoint, QuantizedCheckpoint)
    for name, tensor in checkpoint.read(numbers):
        assert torch.allclose(tensor, numbers[name], rtol=2**-9, atol=2**-9), name
        if layout in EXACT and layout != "nvfp4-pack-quantized":  # whose stored factor is the reciprocal
            assert torch.equal(tensor, numbers[name]), name
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
        kept = {name: scheme for name, scheme in schemes.items() if kernels is reference or multiplies(scheme)}
        some = load(description, dtype="float32", kernels=kernels, schemes=kept)
        found.append(Sequences(description, some, [30], kernels=kernels).logits([(0, 0, list(range(30)))]))
    assert (found[0] - found[1]).abs().max() < 0.02 * (found[0].max() - found[0].min())


def test_stacks_of_experts_in_mxfp4_keep_their_codes(saved, tmp_path):
    numbers = write_stacks(saved("mixtral-window")[0], tmp_path / "model")
    checkpoint = open_layers(FolderCheckpoint(tmp_path / "model"))
    found = dict(checkpoint.read(numbers))
    assert all(torch.equal(found[name], numbers[name]) for name in numbers)
    description = describe(checkpoint)
    schemes = description.schemes(None)
    assert set(schemes.values()) == {MXFP4}
    assert {path.rpartition(".")[2] for path in schemes} == {"up", "down"}
    plain, model = (load(description, dtype="float32", schemes=some) for some in ({}, schemes))
    for number, layer in enumerate(model.layers):
        for name in ("up", "down"):
            for weight, expected in zip(getattr(layer.mlp, name), getattr(plain.layers[number].mlp, name), strict=True):
                assert torch.equal(dequantize(rows_of(weight), MXFP4), expected)


@pytest.mark.parametrize(
    ("last", "change", "why"),
    [
        ("blocks", lambda blocks: blocks.flatten(2), r"blocks must be uint8 \(experts, rows, groups, 16\)"),
        ("blocks", lambda blocks: blocks.int(), "blocks must be uint8 .*, not I32"),
        ("scales", lambda scales: scales[:, :-1], "scales must be uint8"),
        ("scales", lambda scales: scales.float(), "scales must be uint8 .*, not F32"),
        ("scales", lambda scales: None, "scales is missing"),
    ],
)
def test_stacks_that_do_not_fit_are_named(saved, tmp_path, last, change, why):
    def spoil(tensors):
        name = next(name for name in tensors if name.endswith(f"_{last}"))
        tensor = change(tensors.pop(name))
        tensors |= {} if tensor is None else {name: tensor.contiguous()}

    write_stacks(saved("mixtral-window")[0], tmp_path / "model", spoil)
    with pytest.raises(ModelError, match=rf"experts\.w?\w+\.weight: {why}"):
        open_layers(FolderCheckpoint(tmp_path / "model"))


def shorter(tensors):
    name = next(name for name in tensors if name.endswith(("scales", "weight_scale", "weight_scale_inv")))
    tensors[name] = tensors[name][:-1].contiguous()


def with_fewer_zeros(tensors):
    name = next(name for name in tensors if name.endswith("weight_zero_point"))
    tensors[name] = tensors[name][:-1].contiguous()


def changed(last, change):
    """A function that changes the first tensor whose name ends in `last`; a change to None deletes it."""

    def apply(tensors):
        name = next(name for name in tensors if name.endswith(f"_proj.{last}"))
        tensor = change(tensors.pop(name))
        tensors |= {} if tensor is None else {name: tensor.contiguous()}

    return apply


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
        ("float-quantized-blocks", shorter, "weight_scale .* does not fit blocks"),
        ("nvfp4-pack-quantized", shorter, "weight_scale .* does not fit .* in groups of 16"),
        ("nvfp4-pack-quantized", changed("weight_packed", lambda w: w[:, :-4]), "weight_scale .* groups of 16"),
        ("nvfp4-pack-quantized", changed("weight_packed", lambda w: w[0]), ".*must have two dimensions"),
        ("nvfp4-pack-quantized", changed("weight_scale", lambda s: s.float()), ".*scales of F8_E4M3, not U8 and F32"),
        ("nvfp4-pack-quantized", changed("weight_global_scale", lambda f: f.expand(2)), ".*must be one float32"),
        ("nvfp4-pack-quantized", changed("weight_global_scale", lambda f: None), "MXFP4 has uint8 and scales of U8"),
        ("mxfp4-pack-quantized", shorter, "weight_scale .* does not fit .* in groups of 32"),
        ("mxfp4-pack-quantized", changed("weight_scale", lambda s: s.repeat(1, 2)), ".*in groups of 32"),
        ("mxfp8-quantized", shorter, "weight_scale: expected one scale or"),
        ("mxfp8-quantized", changed("weight_scale", lambda s: s.int()), ".*must be floating point or uint8, not I32"),
        ("modelopt-nvfp4", changed("weight_scale_2", lambda f: None), "weight_scale_2 is missing"),
        ("modelopt-nvfp4", shorter, "weight_scale .* does not fit .* in groups of 16"),
        ("modelopt-fp8", changed("weight_scale", lambda s: torch.ones(3)), "weight_scale: expected one scale or"),
    ],
)
def test_tensors_that_do_not_fit_are_named_before_weights_are_read(saved, tmp_path, layout, change, why):
    write(saved(KIND)[0], tmp_path / "model", layout, change)
    with pytest.raises(ModelError, match=rf"_proj\.weight: {why}"):
        open_layers(FolderCheckpoint(tmp_path / "model"))


@pytest.mark.parametrize(
    ("layout", "spoil"),
    [
        ("awq", lambda tensors: tensors[next(name for name in tensors if name.endswith("scales"))].fill_(torch.nan)),
        ("mxfp4-pack-quantized", changed("weight_scale", lambda scales: scales.fill_(255))),
        ("nvfp4-pack-quantized", changed("weight_global_scale", torch.zeros_like)),
        (
            "modelopt-nvfp4",
            changed("weight_scale", lambda scales: scales.view(torch.uint8).fill_(127).view(scales.dtype)),
        ),
        ("modelopt-nvfp4", changed("weight_scale_2", lambda factor: factor * torch.nan)),
    ],
)
def test_scales_that_are_not_finite_are_named(saved, tmp_path, layout, spoil):
    write(saved(KIND)[0], tmp_path / "model", layout, spoil)
    description = describe(open_layers(FolderCheckpoint(tmp_path / "model")))
    with pytest.raises(ModelError, match=r"_proj\.weight: its scales are not finite"):
        load(description, dtype="float32", schemes=description.schemes(None))


@pytest.mark.parametrize("layout", ["pack-quantized", "int-quantized", "modelopt-nvfp4", "fp8-blocks"])
def test_a_weight_that_is_not_quantized_is_plain_beside_scales(saved, tmp_path, layout):
    plain, name = load_file(saved(KIND)[0] / "model.safetensors"), "model.layers.0.self_attn.o_proj.weight"

    def unquantize(tensors):
        for part in ("weight_packed", "weight_shape"):
            tensors.pop(name.removesuffix("weight") + part, None)
        tensors[name] = plain[name]

    write(saved(KIND)[0], tmp_path / "model", layout, unquantize)
    checkpoint = open_layers(FolderCheckpoint(tmp_path / "model"))
    assert checkpoint.tensors[name].scheme is None and torch.equal(dict(checkpoint.read([name]))[name], plain[name])
    assert load(describe(checkpoint), dtype="float32")


@pytest.mark.parametrize("layout", ["pack-quantized", "modelopt-nvfp4"])
def test_the_tensors_of_an_ignored_layer_say_whether_it_is_quantized(saved, tmp_path, layout):
    numbers = write(saved(KIND)[0], tmp_path / "model", layout)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["model.layers.0.self_attn.o_proj", "re:.*gate_proj"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    checkpoint = open_layers(FolderCheckpoint(tmp_path / "model"))
    assert all(checkpoint.tensors[name].scheme is not None for name in numbers)


KV_SCALES = ("k_scale", "v_scale", "q_scale", "k_proj.output_scale", "k_proj.k_scale", "v_proj.v_scale", "kv_scale",
             "prob_scale", "k_zero_point", "v_zero_point", "v_proj.output_zero_point")  # fmt: skip


def with_kv_scales(tensors):
    for layer in range(3):
        tensors |= {f"model.layers.{layer}.self_attn.{last}": torch.ones(1) for last in KV_SCALES}


KV_FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize("layout", ["float-quantized", "pack-quantized", "modelopt-fp8", "fp8-blocks"])
def test_scales_of_kv_are_not_used(saved, tmp_path, layout):
    numbers = write(saved(KIND)[0], tmp_path / "model", layout, with_kv_scales)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    field = {"kv_cache_quant_algo": "FP8"} if layout == "modelopt-fp8" else {"kv_cache_scheme": KV_FLOAT8}
    config["quantization_config"] |= field
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    checkpoint = open_layers(FolderCheckpoint(tmp_path / "model"))
    assert not any(name.endswith(KV_SCALES) for name in checkpoint.tensors)
    assert all(checkpoint.tensors[name].scheme is not None for name in numbers)
    assert load(describe(checkpoint), dtype="float32")


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": KV_FLOAT8},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
)
def test_a_checkpoint_with_scales_of_kv_alone_is_plain(saved, tmp_path, settings):
    folder = shutil.copytree(saved(KIND)[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    with_kv_scales(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    description = describe(open_layers(FolderCheckpoint(folder)))
    assert not description.schemes(None)
    assert load(description, dtype="float32")


def test_modelopt_settings_in_a_file_of_their_own(saved, tmp_path):
    folder = tmp_path / "model"
    numbers = write(saved(KIND)[0], folder, "modelopt-nvfp4")
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}))
    checkpoint = open_layers(FolderCheckpoint(folder))
    assert checkpoint.quant_method == settings["quant_method"]
    assert all(checkpoint.tensors[name].scheme.grid == "e2m1" for name in numbers)
    file.write_text(json.dumps({"quantization": ["NVFP4"]}))
    with pytest.raises(ModelError, match=r"hf_quant_config\.json must be an object"):
        open_layers(FolderCheckpoint(folder))


@pytest.mark.parametrize("refuses", [False, True])
def test_the_start_says_which_weights_are_expanded(tmp_path, monkeypatch, refuses):
    """All projections of the first layer in NVFP4, and the others in float8."""
    folder = tmp_path / "model"
    shutil.copytree(embedded.folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    tensors = load_file(folder / "model.safetensors")
    for seed, name in enumerate([name for name in tensors if name.endswith("_proj.weight")]):
        layout = "modelopt-nvfp4" if ".layers.0." in name else "modelopt-fp8"
        parts, _ = LAYOUTS[layout][0](name, tensors.pop(name), seed)
        tensors |= {name.removesuffix("weight") + last: tensor.contiguous() for last, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    if refuses:
        monkeypatch.setattr(cpu, "multiplies", lambda scheme: scheme.grid != "e4m3" and multiplies(scheme))
    lines = []
    LLM(str(folder), quantization="modelopt_fp4", memory="256MiB", max_model_len=256, report=lines.append).close()
    (line,) = [line for line in lines if line.startswith("weights    as stored: ")]
    kept, expanded = "4 in fp4_e2m1, groups of 16", ""
    if refuses:
        reason = "cpu: it does not multiply weights in fp8_e4m3, one scale a row"
        expanded = f"; expanded from low bits to bfloat16: {reason}"
    else:
        kept += "; 16 in fp8_e4m3, one scale a row"
    assert line == f"weights    as stored: {kept}; --quantization none expands them{expanded}"


def test_every_scale_of_mxfp4_is_exact():
    layout = layout_of(compressed(4, "float"))
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    packed_codes = torch.full((255, 16), 0x21, dtype=torch.uint8)
    parts = {"weight_packed": Part((255, 16), "U8"), "weight_scale": Part((255, 1), "U8")}
    layer = layout.layer(parts)
    rows = layout.codes({"weight_packed": packed_codes, "weight_scale": scales}, layer)
    expected = torch.tensor([0.5, 1.0]) * 2.0 ** torch.arange(-127, 128, dtype=torch.float64)[:, None]
    found = numbers_of(rows.codes, layer.scheme).double() * rows.scales.double()
    assert torch.equal(found, expected.repeat(1, 16))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        *(
            ({"quant_method": method}, f"'{method}' is not supported; use a checkpoint in AWQ")
            for method in ("bitsandbytes", "torchao", "exl2", "exl3", "aqlm")
        ),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "version = 'marlin' .* supported: 'gemm'"),
        ({"quant_method": "awq", "bits": 3}, "bits = 3 is not supported"),
        ({"quant_method": "awq", "version": "gemm"}, "AWQ has 4 bits"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 12}, "group_size must be"),
        ({"quant_method": "compressed-tensors"}, "config_groups must be"),
        (compressed(3, "int"), "weights must have 4 bits or 8"),
        (compressed([4], "int"), "weights must have 4 bits or 8"),
        (compressed(6, "float"), "weights must have 4 bits or 8"),
        (compressed(8, "float", block_structure=[128]), "weight_block_size must be two sizes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ' is not supported"),
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
