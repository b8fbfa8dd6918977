"""Settings of quantized checkpoints: each field is applied, listed as without effect, or refused by its name."""

import json

import pytest
import torch
from quantized_checkpoints import KIND, LAYOUTS, compressed, gptq, pack_quantized, with_options, write

from quire.errors import ModelError
from quire.models.description import describe
from quire.models.loading import load
from quire.weights.checkpoint import FolderCheckpoint
from quire.weights.layouts import Part, layout_of
from quire.weights.quantized_checkpoint import open_layers
from quire.weights.settings import FIELDS

OVERRIDES = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}


def opened(folder):
    return open_layers(FolderCheckpoint(folder))


def assert_numbers(folder, numbers):
    for name, tensor in opened(folder).read(numbers):
        assert torch.allclose(tensor, numbers[name], rtol=2**-9, atol=2**-9), name
    assert load(describe(opened(folder)), dtype="float32")


def only(ends, pack):
    """`pack` for weights whose names have one of these parts, else GPTQ in the order of columns."""
    return lambda name, weight, seed: (pack if any(end in name for end in ends) else gptq)(name, weight, seed)


def test_g_idx_decides_the_order_of_columns_whatever_the_settings_say(saved, tmp_path):
    numbers = write(saved(KIND)[0], tmp_path / "a", "gptq-4", pack=with_options(gptq, any_order=True), desc_act=False)
    assert_numbers(tmp_path / "a", numbers)
    assert all(opened(tmp_path / "a").tensors[name].scheme is None for name in numbers)
    numbers = write(saved(KIND)[0], tmp_path / "b", "gptq-4", desc_act=True)  # in order
    assert_numbers(tmp_path / "b", numbers)
    assert all(opened(tmp_path / "b").tensors[name].scheme is not None for name in numbers)


def test_layers_with_settings_of_their_own_are_read(saved, tmp_path):
    """GPTQModel's `dynamic`: other bits, sizes and orders of groups, and layers that are not quantized."""

    def pack(name, weight, seed):
        if "o_proj" in name:
            return {"weight": weight}, weight.float()
        if "down_proj" in name:
            return gptq(name, weight, seed, any_order=True)
        return gptq(name, weight, seed, bits=8 if "gate_proj" in name else 4)

    dynamic = {
        "+:.*down_proj.*": {"desc_act": True},
        ".*gate_proj": {"bits": 8, "group_size": 32},
        "-:.*o_proj": {},
    }
    numbers = write(saved(KIND)[0], tmp_path / "model", "gptq-4", pack=pack, dynamic=dynamic)
    assert_numbers(tmp_path / "model", numbers)
    bits = {name: scheme.bits for name in numbers if (scheme := opened(tmp_path / "model").tensors[name].scheme)}
    assert {8 if "gate_proj" in name else 4 for name in bits} == set(bits.values()) == {4, 8}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"dynamic": {".*up_proj": {"bits": 3}}}, "GPTQ with 4, 3 bits is not supported"),
        ({"dynamic": [1]}, "dynamic must be an object of objects"),
        ({"dynamic": {".*": {"group_size": "many"}}}, "group_size must be"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' is not supported"),
        ({"format": "bitblas"}, "format = 'bitblas' is not supported"),
        ({"is_marlin_format": True}, "is_marlin_format = True is not supported"),
        ({"pack_dtype": "int8"}, "pack_dtype = 'int8' is not supported"),
        ({"rotation": "hadamard"}, "rotation = 'hadamard' is not supported"),
        ({"adapter": {"name": "lora"}}, "adapter = .* is not supported"),
        ({"no_such_field": 1}, "no_such_field = 1 is not known"),
        ({"bits": None}, "GPTQ with None bits is not supported"),
        ({"bits": 8}, "_proj.weight: 48 columns cannot be divided into groups of 32"),
        ({"group_size": 64}, "_proj.weight: 96 columns cannot be divided into groups of 64"),
    ],
)
def test_fields_of_gptq_that_would_be_ignored_are_named(saved, tmp_path, settings, why):
    write(saved(KIND)[0], tmp_path / "model", "gptq-4", **settings)
    with pytest.raises(ModelError, match=why):
        opened(tmp_path / "model")


def test_zeros_that_are_not_in_the_middle_are_read_where_some_layers_have_them(saved, tmp_path):
    dynamic = {".*": {"sym": False}}
    numbers = write(saved(KIND)[0], tmp_path / "a", "gptq-4", sym=True, dynamic=dynamic)
    assert_numbers(tmp_path / "a", numbers)
    write(saved(KIND)[0], tmp_path / "b", "gptq-4", sym=True)
    description = describe(opened(tmp_path / "b"))
    with pytest.raises(ModelError, match=r"_proj\.weight: qzeros must all be the code in the middle"):
        load(description, dtype="float32", schemes=description.schemes(None))


def changed(last, change):
    def apply(tensors):
        name = next(name for name in tensors if name.endswith(last))
        tensors[name] = change(tensors[name])

    return apply


def test_an_index_of_zeros_was_not_written(saved, tmp_path):
    numbers = write(saved(KIND)[0], tmp_path / "model", "gptq-4", changed("g_idx", torch.zeros_like))
    assert_numbers(tmp_path / "model", numbers)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda index: index + 1, "g_idx must have the group of each column, from 0 to 2"),
        (lambda index: index - 1, "g_idx must have the group of each column"),
        (lambda index: index[:-1].clone(), "g_idx: expected shape"),
        (lambda index: index.float(), "g_idx: expected type I32 or I64, found F32"),
    ],
)
def test_an_index_that_does_not_fit_is_named(saved, tmp_path, change, why):
    write(saved(KIND)[0], tmp_path / "model", "gptq-4", changed("g_idx", change))
    with pytest.raises(ModelError, match=rf"_proj\.weight: {why}"):
        opened(tmp_path / "model")


def test_a_missing_index_is_named_if_columns_may_be_in_any_order(saved, tmp_path):
    def without(tensors):
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    numbers = write(saved(KIND)[0], tmp_path / "a", "gptq-4", without)
    assert_numbers(tmp_path / "a", numbers)
    write(saved(KIND)[0], tmp_path / "b", "gptq-4", without, desc_act=True)
    with pytest.raises(ModelError, match=r"_proj\.weight: g_idx is missing, although desc_act is true"):
        opened(tmp_path / "b")


def with_index(index):
    def pack(name, weight, seed):
        tensors, numbers = pack_quantized(name, weight, seed)
        return tensors | {"weight_g_idx": index(weight.shape[1])}, numbers

    return pack


def in_order(columns):
    return torch.arange(columns, dtype=torch.int32) // 32


@pytest.mark.parametrize("index", [in_order, lambda columns: torch.full((columns,), -1, dtype=torch.int32)])
def test_an_index_of_compressed_tensors_in_order_is_read(saved, tmp_path, index):
    numbers = write(saved(KIND)[0], tmp_path / "model", "pack-quantized", pack=with_index(index))
    assert_numbers(tmp_path / "model", numbers)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (lambda columns: in_order(columns).flip(0), "columns in activation order .weight_g_idx. are not supported"),
        (lambda columns: in_order(columns)[1:].clone(), "weight_g_idx: expected shape"),
        (lambda columns: in_order(columns).float(), "weight_g_idx: expected type"),
    ],
)
def test_an_index_of_compressed_tensors_in_another_order_is_named(saved, tmp_path, index, why):
    write(saved(KIND)[0], tmp_path / "model", "pack-quantized", pack=with_index(index))
    with pytest.raises(ModelError, match=rf"_proj\.weight: {why}"):
        opened(tmp_path / "model")


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ({"actorder": "group"}, "weight_g_idx is missing, although actorder is 'group'"),
        ({"actorder": True}, "weight_g_idx is missing"),
        ({"actorder": "dynamic"}, "weight_g_idx is missing"),
        ({"symmetric": False}, "weight_zero_point is missing, although symmetric is false"),
        ({"group_size": 64, "strategy": "group"}, "weight_scale has a scale for 32 columns, but the settings say 64"),
        ({"strategy": "channel"}, "weight_scale has a scale for 32 columns, but the settings say all"),
        ({"strategy": "attn_head"}, "weights.strategy = 'attn_head' is not supported"),
        ({"actorder": "other"}, "weights.actorder = 'other' is not supported"),
        ({"no_such_field": 1}, r"config_groups\.weights\.no_such_field = 1 is not known"),
    ],
)
def test_weights_of_compressed_tensors_that_would_be_wrong_are_named(saved, tmp_path, weights, why):
    groups = compressed(4, "int", **weights)["config_groups"]
    write(saved(KIND)[0], tmp_path / "model", "pack-quantized", config_groups=groups)
    with pytest.raises(ModelError, match=why):
        opened(tmp_path / "model")


def test_a_layer_of_compressed_tensors_may_be_one_group():
    layout = layout_of(compressed(4, "int", group_size=32, strategy="group"))
    parts = {"weight_packed": Part((16, 4), "I32"), "weight_scale": Part((16, 1), "F16")}
    assert layout.layer(parts)[:2] == (16, 32)
    with pytest.raises(ValueError, match="a scale for 64 columns, but the settings say 32"):
        layout.layer(parts | {"weight_packed": Part((16, 8), "I32")})


@pytest.mark.parametrize("order", ["weight", "static", False, None])
def test_orders_that_keep_columns_in_place_are_read(saved, tmp_path, order):
    groups = compressed(4, "int", actorder=order)["config_groups"]
    numbers = write(saved(KIND)[0], tmp_path / "model", "pack-quantized", config_groups=groups)
    assert_numbers(tmp_path / "model", numbers)


@pytest.mark.parametrize(
    ("layout", "settings", "why"),
    [
        ("pack-quantized", {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\.format = "),
        ("pack-quantized", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config = .*activations"),
        ("pack-quantized", {"format": "marlin-24"}, "format = 'marlin-24' is not supported"),
        ("pack-quantized", {"no_such_field": True}, "no_such_field = True is not known"),
        ("awq", {"version": "gemv"}, "version = 'gemv' is not supported"),
        ("awq", {"bits": 8}, "bits = 8 is not supported"),
        ("awq", {"no_such_field": 0}, "no_such_field = 0 is not known"),
        ("modelopt-nvfp4", {"has_zero_point": True}, "has_zero_point = True is not supported"),
        ("modelopt-nvfp4", {"pre_quant_scale": True}, "pre_quant_scale = True is not supported"),
        ("modelopt-nvfp4", {"no_such_field": 0}, "no_such_field = 0 is not known"),
        ("fp8-blocks", {"fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
        ("fp8-blocks", {"no_such_field": 0}, "no_such_field = 0 is not known"),
    ],
)
def test_fields_that_would_be_ignored_are_named(saved, tmp_path, layout, settings, why):
    write(saved(KIND)[0], tmp_path / "model", layout, **settings)
    with pytest.raises(ModelError, match=f"quantization_config: {why}"):
        opened(tmp_path / "model")


# settings in the shapes of published checkpoints
PUBLISHED = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": True, "sym": True,
     "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model"},
    {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True, "desc_act": False, "batch_size": 1,
     "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01, "dataset": None,
     "exllama_config": {"version": 1}, "max_input_length": None, "model_seqlen": None, "pad_token_id": None,
     "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "tokenizer": None,
     "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True},
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True, "lm_head": False,
     "checkpoint_format": "gptq", "pack_dtype": "int32", "dynamic": {"-:.*visual.*": {}, ".*": {"bits": 8}},
     "meta": {"quantizer": ["gptqmodel:1.4.2"], "damp_percent": 0.01, "true_sequential": True, "uri": "https://..."}},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "data_type": "int", "iters": 1000, "amp": True,
     "autoround_version": "0.3", "enable_minmax_tuning": True, "enable_quanted_input": True, "lr": 0.001,
     "seqlen": 2048, "gradient_accumulate_steps": 1, "low_gpu_mem_usage": False, "minmax_lr": 0.001, "nsamples": 512,
     "scale_dtype": "torch.float16", "batch_size": 8, "damp_percent": 0.01, "desc_act": False},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True, "do_fuse": False,
     "modules_to_not_convert": ["gate"], "fuse_max_seq_len": None, "modules_to_fuse": None, "backend": "autoawq"},
    {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM", "zero_point": True},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
     "global_compression_ratio": 1.9, "ignore": ["lm_head"], "kv_cache_scheme": None, "version": "0.12.2",
     "sparsity_config": {}, "transform_config": {},
     "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "output_activations": None,
                                   "weights": {"actorder": None, "block_structure": None, "dynamic": False,
                                               "group_size": 128, "num_bits": 4, "observer": "mse", "type": "int",
                                               "observer_kwargs": {}, "strategy": "group", "symmetric": True}}}},
    {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "frozen",
     "sparsity_config": {"format": "dense", "global_sparsity": 0.1, "ignore": [], "sparsity_structure": "unstructured",
                         "registry_requires_subclass": False, "targets": []},
     "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
     "config_groups": {"group_0": {"targets": ["Linear"], "format": "float-quantized",
                                   "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
                                   "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False,
                                               "symmetric": True, "observer": "minmax", "group_size": None,
                                               "scale_dtype": None, "zp_dtype": None}}}},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "kv_cache_scheme": None,
     "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}, "targets": ["Linear"]}},
     "producer": {"name": "modelopt", "version": "0.35.0"}},
    {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
     "modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"},
    {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static"},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
]  # fmt: skip


@pytest.mark.parametrize("settings", PUBLISHED)
def test_settings_of_published_checkpoints_are_read(settings):
    assert layout_of(settings)


@pytest.mark.parametrize("method", FIELDS)
def test_null_is_no_value(method):
    settings = next(some for some in PUBLISHED if some["quant_method"] == method.removesuffix("_fp4"))
    assert layout_of(settings | {"quant_method": method, "a_field_of_the_future": None})


@pytest.mark.parametrize(
    ("layout", "file", "change"),
    [
        ("gptq-4-sym", "quantize_config.json", lambda settings: settings.pop("quant_method")),
        ("gptq-4-sym", "quantize_config.json", lambda settings: None),
        ("gptq-act-order", "quantize_config.json", lambda settings: settings.update(true_sequential=True)),
        ("awq", "quant_config.json", lambda settings: settings.pop("quant_method")),
        ("awq", "quantize_config.json", lambda settings: None),
    ],
)
def test_settings_may_be_in_a_file_of_their_own(saved, tmp_path, layout, file, change):
    numbers = write(saved(KIND)[0], tmp_path / "model", layout, file=file)
    path = tmp_path / "model" / file
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))
    assert opened(tmp_path / "model").quant_method == layout.partition("-")[0]
    assert_numbers(tmp_path / "model", numbers)
    path.write_text(json.dumps(settings | {"bits": 3}))
    with pytest.raises(ModelError, match=rf"{file}: .*3.* not supported"):
        opened(tmp_path / "model")


def test_config_json_wins_over_a_file(saved, tmp_path):
    numbers = write(saved(KIND)[0], tmp_path / "model", "gptq-4")
    (tmp_path / "model" / "quantize_config.json").write_text('{"bits": 2}')
    assert_numbers(tmp_path / "model", numbers)


def test_early_checkpoints_of_compressed_tensors_have_another_name(saved, tmp_path):
    numbers = write(saved(KIND)[0], tmp_path / "model", "pack-quantized")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["compression_config"] = config.pop("quantization_config")
    del config["compression_config"]["quant_method"]
    path.write_text(json.dumps(config))
    assert_numbers(tmp_path / "model", numbers)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("int-quantized", "modelopt-mxfp8")])
def test_quantized_tensors_without_settings_are_the_cause_that_is_named(saved, tmp_path, layout):
    write(saved(KIND)[0], tmp_path / "model", layout, file="elsewhere.json")
    with pytest.raises(ModelError, match=r"_proj\.\w+ belongs to a quantized layer, but the settings .* are missing"):
        opened(tmp_path / "model")


def test_weights_under_another_name_are_the_cause_that_is_named(saved, tmp_path):
    write(saved(KIND)[0], tmp_path / "model", "gptq-4", file="quantize_config.json")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "gptq_model-4bit-128g.safetensors")
    with pytest.raises(ModelError, match=r"but gptq_model-4bit-128g\.safetensors; rename the file to model"):
        FolderCheckpoint(tmp_path / "model")
