"""Fields of the settings of quantized weights (`quantization_config`), by layout, and what quire does with each.

`check_settings` refuses a field that is not listed. docs/models.md has these tables.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Use(NamedTuple):
    """What quire does with a field. values: the supported ones of a field that has other values; (): all."""

    how: str  # it is applied, or why it changes nothing
    is_applied: bool = False
    values: tuple[object, ...] = ()


def _applied(how: str, *values: object) -> Use:
    return Use(how, True, values)  # noqa: FBT003


_TENSORS = "the tensors of a layer say it"
_METHOD = _applied("the layout")
_BY_TENSORS = Use(_TENSORS)
_RECORD = Use("it says how the weights were rounded")
_RUNTIME = Use("it chooses kernels or memory of another program")
_ACTIVATIONS = Use("quire rounds activations by its own rule, for each token")
_KV = Use("quire computes its own scales of keys and values")
_MODULES = Use(f"{_TENSORS}: a layer without codes is not quantized")
_OFF = (False,)
_NONE: tuple[object, ...] = (False, "", [], {})  # values of a field that is not used
_FORMATS = (
    *("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)

# of AutoGPTQ, GPTQModel, AutoAWQ, AutoRound, Optimum and transformers
_RECORDS = dict.fromkeys(
    (
        *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path", "meta"),
        *("model_file_base_name", "batch_size", "cache_block_outputs", "dataset", "tokenizer", "max_input_length"),
        *("model_seqlen", "module_name_preceding_first_block", "pad_token_id", "mse", "v2", "v2_alpha", "gptaq"),
        *("gptaq_alpha", "act_group_aware", "hessian", "foem", "process", "fail_safe", "failsafe", "fallback"),
        *("autoround_version", "iters", "lr", "minmax_lr", "nsamples", "seqlen", "enable_quanted_input", "quantizer"),
        *("enable_minmax_tuning", "gradient_accumulate_steps", "amp", "scale_dtype", "train_bs", "not_use_best_mse"),
        *("lr_scheduler", "nblocks", "dynamic_max_gap", "enable_norm_bias_tuning", "enable_adam", "version_date"),
        *("calib_data", "duo_scaling", "apply_clip", "export_compatible", "n_parallel_calib_samples"),
        *("max_calib_samples", "max_calib_seq_len", "uri", "wbits"),
    ),
    _RECORD,
) | dict.fromkeys(
    (
        *("exllama_config", "use_exllama", "disable_exllama", "use_cuda_fp16", "backend", "parallel_packing"),
        *("pack_impl", "low_gpu_mem_usage", "low_cpu_mem_usage", "offload_to_disk", "offload_to_disk_path"),
        *("compute_device_filter", "vram_strategy", "gc_mode", "auto_forward_data_parallel", "kernel", "do_fuse"),
        *("wait_for_submodule_finalizers", "fuse_max_seq_len", "modules_to_fuse", "max_memory", "device"),
    ),
    _RUNTIME,
)
_SHARED = {
    **_RECORDS,
    "quant_method": _METHOD,
    "lm_head": _BY_TENSORS,
    **dict.fromkeys(
        (
            *("modules_in_block_to_quantize", "modules_to_not_convert", "block_name_to_quantize"),
            *("to_quant_block_names", "inside_layer_modules", "outside_layer_modules", "quant_nontext_module"),
        ),
        _MODULES,
    ),
    **dict.fromkeys(("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym"), _ACTIVATIONS),
    **dict.fromkeys(
        ("super_bits", "super_group_size"), Use("scales that have scales are not read", values=(0, *_NONE))
    ),
    "data_type": _applied("the type of codes", "int"),
    "pack_dtype": _applied("the type of packed codes", "int32"),
    "rotation": Use("rotated weights need rotated activations", values=_NONE),
    "adapter": Use("an adapter changes the weights; load it by its own name", values=_NONE),
}
_GPTQ: Mapping[str, Use] = MappingProxyType(
    _SHARED
    | {
        "bits": _applied("bits of codes; the shapes of a layer must agree"),
        "group_size": _applied("columns of a group; the shapes of a layer must agree"),
        "sym": _applied("whether all zeros are the code in the middle; others are refused"),
        "desc_act": _applied("true needs `g_idx`, which decides the groups of columns in any case"),
        "dynamic": _applied(f"{_TENSORS}: bits, size and order of groups; `sym` false for some is so for all"),
        "extra_config": _applied("as `dynamic`"),
        "checkpoint_format": _applied("whether stored zeros are lower by 1", "gptq", "gptq_v2"),
        "format": _applied("as `checkpoint_format`", "gptq", "gptq_v2"),
        "packing_format": _applied(
            "as `checkpoint_format`", "gptq", "auto_round:gptq", "auto_round:auto_gptq", "auto_gptq"
        ),
        "is_marlin_format": _applied("another order of codes", *_OFF),
        "method": _applied("as `quant_method`", "gptq"),
    }
)
_AWQ: Mapping[str, Use] = MappingProxyType(
    _SHARED
    | {
        "bits": _applied("bits of codes", 4),
        "w_bit": _applied("as `bits`", 4),
        "group_size": _applied("columns of a group; the shapes of a layer must agree"),
        "q_group_size": _applied("as `group_size`"),
        "version": _applied("order of codes", "gemm", "GEMM"),
        "format": _applied("as `version`", "gemm", "GEMM"),
        "checkpoint_format": _applied("as `version`", "gemm", "GEMM"),
        "packing_format": _applied("as `version`", "awq", "auto_round:awq", "auto_round:auto_awq"),
        "method": _applied("as `quant_method`", "awq"),
        **dict.fromkeys(("zero_point", "sym"), Use("`qzeros` has the zeros in any case")),
        "desc_act": _applied("the layout has columns in order", *_OFF),
        **dict.fromkeys(("dynamic", "extra_config"), _BY_TENSORS),
    }
)
_COMPRESSED_TENSORS: Mapping[str, Use] = MappingProxyType(
    {
        "quant_method": _METHOD,
        "config_groups": _applied("`weights` of each group of layers, below"),
        "config_groups.targets": _MODULES,
        "config_groups.format": _applied("as `format`", *_FORMATS),
        "config_groups.weights": _applied("below"),
        "config_groups.input_activations": _ACTIVATIONS,
        "config_groups.output_activations": _ACTIVATIONS,
        "config_groups.weights.num_bits": _applied("bits of codes"),
        "config_groups.weights.type": _applied("integers or floats", "int", "float"),
        "config_groups.weights.symmetric": _applied("false needs `weight_zero_point`"),
        "config_groups.weights.group_size": _applied("columns of a group; the shapes of a layer must agree"),
        "config_groups.weights.strategy": _applied(
            "which numbers share a scale; the shapes of a layer must agree",
            *("tensor", "channel", "group", "block", "tensor_group"),
        ),
        "config_groups.weights.block_structure": _applied("rows and columns of a block"),
        "config_groups.weights.actorder": _applied(
            "columns in activation order (`group`, `dynamic`) are refused, unless `weight_g_idx` has them in order",
            *("group", "weight", "static", "dynamic", False, True),
        ),
        "config_groups.weights.dynamic": _BY_TENSORS,
        **{
            f"config_groups.weights.{name}": _RECORD
            for name in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "is_mx")
        },
        "format": _applied("the layout of a layer, which its tensors say, too", *_FORMATS),
        "ignore": _MODULES,
        "kv_cache_scheme": _KV,
        "sparsity_config": _applied("only of weights that are stored in full"),
        "sparsity_config.format": _applied("of weights that are stored in full", "dense"),
        **{
            f"sparsity_config.{name}": _RECORD
            for name in ("global_sparsity", "sparsity_structure", "targets", "ignore", "registry_requires_subclass")
        },
        "transform_config": Use("transformed weights need transformed activations", values=({}, {"config_groups": {}})),
        **dict.fromkeys(("quantization_status", "global_compression_ratio", "version", "run_compressed"), _RECORD),
    }
)
_MODELOPT: Mapping[str, Use] = MappingProxyType(
    {
        "quant_method": _METHOD,
        "quant_algo": _applied("the kind of weights, which the tensors of a layer say, too"),
        **dict.fromkeys(("ignore", "exclude_modules", "quantized_layers", "config_groups"), _MODULES),
        **dict.fromkeys(("kv_cache_quant_algo", "kv_cache_scheme"), _KV),
        **dict.fromkeys(("group_size", "awq_block_size"), _BY_TENSORS),
        **dict.fromkeys(("producer", "smoothquant_val", "version"), _RECORD),
        "has_zero_point": _applied("zeros are refused", *_OFF),
        "pre_quant_scale": _applied("scales of the columns of x are refused", *_OFF),
    }
)
_FP8: Mapping[str, Use] = MappingProxyType(
    {
        "quant_method": _METHOD,
        "weight_block_size": _applied("rows and columns of a block; without it, one scale or one for each row"),
        "fmt": _applied("the type of weights", "e4m3", "float8_e4m3fn"),
        **dict.fromkeys(("ignored_layers", "modules_to_not_convert"), _MODULES),
        **dict.fromkeys(("activation_scheme", "scale_fmt"), _ACTIVATIONS),
        "kv_cache_scheme": _KV,
        "dequantize": _RUNTIME,
    }
)
_MXFP4: Mapping[str, Use] = MappingProxyType(
    {"quant_method": _METHOD, "modules_to_not_convert": _MODULES, **dict.fromkeys(("dequantize", "swizzle"), _RUNTIME)}
)

# by the name in `quant_method`. A name with dots is that of a field in an object; `config_groups` has one more level
FIELDS: Mapping[str, Mapping[str, Use]] = MappingProxyType(
    {
        "gptq": _GPTQ,
        "awq": _AWQ,
        "compressed-tensors": _COMPRESSED_TENSORS,
        "modelopt": _MODELOPT,
        "modelopt_fp4": _MODELOPT,
        "fp8": _FP8,
        "mxfp4": _MXFP4,
    }
)


def check_settings(settings: Mapping[str, object], known: Mapping[str, Use], prefix: str = "") -> None:
    """Raise ValueError for a field that is not in `known`, or has a value that is not supported. null is no value."""
    for name, value in settings.items():
        if value is None:
            continue
        full = f"{prefix}{name}"
        use = known.get(full)
        if use is None:
            raise ValueError(
                f"{full} = {value!r:.80} is not known, so it may change the weights; remove it if it does not"
            )
        if use.values and value not in use.values:
            raise ValueError(f"{full} = {value!r:.80} is not supported: {use.how}{_supported(use)}")
        inner = [value] if isinstance(value, Mapping) else []
        if full == "config_groups" and isinstance(value, Mapping):
            inner = [group for group in value.values() if isinstance(group, Mapping)]
        if any(other.startswith(f"{full}.") for other in known):
            for one in inner:
                check_settings(one, known, f"{full}.")


def _supported(use: Use) -> str:
    shown = [repr(value) for value in use.values if value not in _NONE or not isinstance(value, str | list | dict)]
    return f"; supported: {', '.join(shown)}" if use.is_applied else ""
