"""Conversion of Hugging Face checkpoints to GGUF as llama.cpp's converter does it, with the package `gguf`.

Names come from that package's tables. The converter's changes of numbers are implemented here in numpy.
"""

import json
import math
import warnings
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file

from quire.weights.gguf.tensor_types import TENSOR_TYPES

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "GPT2LMHeadModel": gguf.MODEL_ARCH.GPT2,
    "StableLmForCausalLM": gguf.MODEL_ARCH.STABLELM,
    "FalconForCausalLM": gguf.MODEL_ARCH.FALCON,
    "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "GPTNeoXForCausalLM": gguf.MODEL_ARCH.GPTNEOX,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "GemmaForCausalLM": gguf.MODEL_ARCH.GEMMA,
    "Olmo3ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "GraniteMoeForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "CohereForCausalLM": gguf.MODEL_ARCH.COMMAND_R,
    "Cohere2ForCausalLM": gguf.MODEL_ARCH.COHERE2,
    "NemotronForCausalLM": gguf.MODEL_ARCH.NEMOTRON,
    "Ministral3ForCausalLM": gguf.MODEL_ARCH.MISTRAL3,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
    "SeedOssForCausalLM": gguf.MODEL_ARCH.SEED_OSS,
    "Ernie4_5ForCausalLM": gguf.MODEL_ARCH.ERNIE4_5,
    "Ernie4_5_MoeForCausalLM": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "Glm4ForCausalLM": gguf.MODEL_ARCH.GLM4,
    "Glm4MoeForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
    "Exaone4ForCausalLM": gguf.MODEL_ARCH.EXAONE4,
    "ArceeForCausalLM": gguf.MODEL_ARCH.ARCEE,
    "HunYuanDenseV1ForCausalLM": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "HunYuanMoEV1ForCausalLM": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "Dots1ForCausalLM": gguf.MODEL_ARCH.DOTS1,
    "MiniMaxM2ForCausalLM": gguf.MODEL_ARCH.MINIMAXM2,
    "AfmoeForCausalLM": gguf.MODEL_ARCH.AFMOE,
    "ApertusForCausalLM": gguf.MODEL_ARCH.APERTUS,
    "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2,
    "Lfm2MoeForCausalLM": gguf.MODEL_ARCH.LFM2MOE,
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


# architectures whose converter moves rows of queries and keys; those with norms whose weights lack 1
_MOVED = ("llama", "granite", "granitemoe", "mistral3", "smollm3", "arcee")
_LINEAR = ("qwen3next", "qwen35", "qwen35moe")
_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", *_LINEAR)
# whose converter writes the number of dimensions that are rotated; elsewhere it is that of a head
_ROTARY_COUNT = (
    *_MOVED,
    *_LINEAR,
    "apertus",
    "afmoe",
    "glm4",
    "glm4moe",
    "minimax-m2",
    "cohere2",
    "nemotron",
    "phi3",
    "stablelm",
    "gptneox",
)


def write_gguf(
    folder, path, *, kind="F32", pre="gpt-2", tensors_in_shard=0, pooling=None, architecture=None, keys=None
) -> Path:
    """Write the checkpoint in `folder` as GGUF to `path`, with its tokenizer.json, if any, and the pre-tokenizer `pre`.

    kind: type of the matrices whose rows it fits; all else is F32. K-quants have random numbers. "Q4_K_M" is Q4_K, with
    Q6_K for values and down projections. tensors_in_shard: 0 writes one file. With shards, `path` is NAME.gguf, and the
    first of NAME-00001-of-... is returned. pooling: the value of pooling_type, of an embedding model. architecture:
    another one than that of config.json, whose tensors have the same names. keys: further numbers, or lists of them, by
    name without the architecture.
    """
    folder, path = Path(folder), Path(path)
    config = json.loads((folder / "config.json").read_text())
    name = architecture or _architecture_name(config)
    writer = gguf.GGUFWriter(path, name, split_max_tensors=tensors_in_shard)
    add_config(writer, config)
    for key, value in (keys or {}).items():
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"{name}.{key}", value)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    if (folder / "tokenizer.json").exists():
        settings = folder / "tokenizer_config.json"
        add_byte_level(
            writer, folder / "tokenizer.json", pre, json.loads(settings.read_text()) if settings.exists() else {}
        )
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {name: tensor.float().numpy() for name, tensor in load_file(file).items()}
    _add_activations(writer, config, tensors)
    for name, tensor in convert(config, tensors).items():
        add_tensor(writer, name, tensor, kind)
    finish(writer)
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-*.gguf"))


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer, name, tensor, kind="F32"):
    if kind == "Q4_K_M":
        kind = "Q6_K" if "attn_v" in name or "ffn_down" in name else "Q4_K"
    type_ = gguf.GGMLQuantizationType[kind]
    if tensor.ndim < 2 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[type_][0]:
        type_ = gguf.GGMLQuantizationType.F32
    if type_.name.endswith("_K"):
        writer.add_tensor(name, random_k_quants(tensor.shape, type_, sum(map(ord, name))), raw_dtype=type_)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about numbers that underflow in half precision
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(tensor), type_), raw_dtype=type_)


def random_k_quants(shape, type_, seed):
    """A tensor of random bytes, but for the factors of scales, which are small."""
    layout, draw = (
        next(one.layout for one in TENSOR_TYPES.values() if one.name == type_.name),
        np.random.default_rng(seed),
    )
    number = math.prod(shape) // gguf.GGML_QUANT_SIZES[type_][0]
    blocks = draw.integers(0, 256, number * layout.itemsize, dtype=np.uint8).view(layout)
    for name in {"scale", "low"} & set(layout.names):
        blocks[name] = draw.normal(size=number) / 4096
    return blocks.view(np.uint8).reshape(*shape[:-1], -1)


def _architecture_name(config):
    return gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["architectures"][0]]]


# Metadata of the model


def add_config(writer, config):
    get = config.get
    heads = get("num_attention_heads", get("n_head"))
    hidden = get("hidden_size", get("n_embd"))
    inner = get("intermediate_size") or get("ffn_hidden_size") or get("n_inner") or 4 * hidden
    head_dim = get("head_dim") or hidden // heads
    writer.add_context_length(get("max_position_embeddings", get("n_positions")))
    writer.add_embedding_length(hidden)
    writer.add_block_count(_layers(config))
    if _architecture_name(config) != "qwen35moe":
        writer.add_feed_forward_length(_adjusted(config, inner))
    writer.add_head_count(heads)
    writer.add_head_count_kv(_key_heads(config))
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name in ("layer_norm_eps", "layer_norm_epsilon"):
        if name in config:
            writer.add_layer_norm_eps(config[name])
    if get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _add_rope(writer, config, head_dim)
    for name, add in (
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("n_routed_experts", writer.add_expert_count),
        ("moe_num_experts", writer.add_expert_count),
        ("moe_k", writer.add_expert_used_count),
        ("moe_topk", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("shared_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("num_shared_experts", writer.add_expert_shared_count),
        ("moe_num_shared_experts", writer.add_expert_shared_count),
        ("first_k_dense_replace", writer.add_leading_dense_block_count),
        ("num_dense_layers", writer.add_leading_dense_block_count),
        ("moe_layer_start_index", writer.add_leading_dense_block_count),
        ("moe_layer_interval", writer.add_interleave_moe_layer_step),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
        ("route_scale", writer.add_expert_weights_scale),
        ("logit_scale", writer.add_logit_scale),
        ("norm_eps", writer.add_layer_norm_rms_eps if "conv_L_cache" in config else writer.add_layer_norm_eps),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("use_parallel_residual", writer.add_parallel_residual),
    ):
        if get(name) is not None:
            add(config[name])
    _add_experts(writer, config, inner)
    _add_windows(writer, config)
    _add_recurrence(writer, config)


def _add_experts(writer, config, inner):
    """What is not a copy of one field. inner: the size of the MLP."""
    name = _architecture_name(config)
    if name in ("glm4moe", "dots1", "afmoe"):
        writer.add_expert_weights_norm(value=config.get("norm_topk_prob", True))
    if name in ("glm4moe", "dots1", "minimax-m2", "afmoe", "lfm2moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if name in ("minimax-m2", "hunyuan-moe"):
        writer.add_expert_feed_forward_length(inner)
    if name == "hunyuan-moe":
        writer.add_expert_shared_count(config.get("num_shared_expert", 1))
        writer.add_expert_shared_feed_forward_length(inner)
    if name == "ernie4_5-moe":
        writer.add_expert_shared_feed_forward_length(inner // _key_heads(config))
    if name == "glm4moe":
        writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])


def _adjusted(config, inner):
    """The size of an MLP of LFM2, where it is not that of the config."""
    if not config.get("block_auto_adjust_ff_dim"):
        return inner
    inner, multiple = int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3)), config["block_multiple_of"]
    return multiple * ((inner + multiple - 1) // multiple)


def _add_recurrence(writer, config):
    if "conv_L_cache" in config:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        writer.add_vocab_size(config["vocab_size"])
    if "linear_num_value_heads" in config:
        values = config["linear_num_value_heads"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(values)
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * values)
        writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    if "mrope_section" in config.get("rope_parameters", {}) or _architecture_name(config).startswith("qwen35"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_windows(writer, config):
    name, window = _architecture_name(config), config.get("sliding_window") or 0
    if name in ("gemma2", "gemma3", "phi3", "cohere2", "afmoe"):
        writer.add_sliding_window(window)
    if name in ("olmo2", "exaone4") and window:
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _add_activations(writer, config, tensors):
    """Move the parameters of Apertus's activation from the tensors to lists with a number for each layer."""
    for part in ("alpha_p", "alpha_n", "beta", "eps") if _architecture_name(config) == "apertus" else ():
        names = [f"model.layers.{layer}.mlp.act_fn.{part}" for layer in range(_layers(config))]
        writer.add_array(f"xielu.{part}", [float(tensors.pop(name).item()) for name in names])


def _layers(config):
    """Number of layers, with those for drafts."""
    return config.get("num_hidden_layers", config.get("n_layer")) + config.get("num_nextn_predict_layers", 0)


def _key_heads(config):
    heads = config.get("num_attention_heads", config.get("n_head"))
    if config.get("multi_query") and not config["new_decoder_architecture"]:
        return 1
    if "conv_L_cache" in config:
        return [config["num_key_value_heads"] * (kind != "conv") for kind in config["layer_types"]]
    return config.get("num_key_value_heads") or config.get("num_kv_heads") or heads


def _add_rope(writer, config, head_dim):
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta")}
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    rope = rope.get("full_attention", rope)
    if rope["rope_theta"] is None or _architecture_name(config) == "gemma":  # whose converter writes no key of RoPE
        return
    writer.add_rope_freq_base(rope["rope_theta"])
    if _architecture_name(config) in _ROTARY_COUNT:
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn" and "attention_factor" in rope:
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if _architecture_name(config) in ("cohere2", "command-r", "nemotron"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if "original_max_position_embeddings" in rope and rope["rope_type"] != "llama3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def rope_tensors(config):
    """The divisors of RoPE frequencies, which the converter stores as tensors."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32) for name in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = (turns - low) / (high - low)
        blended = 1 / ((1 - smooth) / rope["factor"] + smooth) if low <= turns <= high else None
        divisors.append(1 if turns > high else rope["factor"] if turns < low else blended)
    return {"rope_freqs.weight": np.array(divisors, np.float32)}


# Tensors


def convert(config, tensors):
    """GGUF name -> array."""
    architecture = ARCHITECTURES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(architecture, _layers(config))
    found = rope_tensors(config)
    for name, tensor in _split(_stacked(tensors)).items():
        if name.startswith("lm_head") and config.get("tie_word_embeddings"):
            continue
        # biases of routers become names with a suffix
        named = name.replace("e_score_correction_bias", "e_score_correction.bias")
        named = f"{named}.bias" if named.endswith(".expert_bias") else named
        named = named.replace(".dt_bias", ".dt_proj.bias")
        target = names.get_name(named, try_suffixes=(".weight", ".bias"))
        assert target, f"the gguf package has no name for {name}"
        if gguf.MODEL_ARCH_NAMES[architecture] in _LINEAR and "linear_attn." in name:
            found |= _recurrent(architecture, config, target, tensor)
            continue
        tensor = tensor.squeeze(1) if name.endswith(".conv.conv.weight") else tensor
        found[target] = _changed(architecture, config, target, name, tensor)
    return found


def _stacked(tensors):
    """Experts and per-head norms, each stacked into one tensor."""
    found, groups = {}, {}
    for name, tensor in tensors.items():
        before, dot, after = name.partition(".experts." if ".experts." in name else ".norms.")
        if not dot:
            found[name] = tensor
            continue
        if after == "gate_up_proj":
            gate, up = np.split(tensor, 2, axis=1)
            found |= {f"{before}.experts.gate_proj.weight": gate, f"{before}.experts.up_proj.weight": up}
            continue
        if after == "down_proj":
            found[f"{before}.experts.down_proj.weight"] = tensor
            continue
        number, _, rest = after.partition(".")
        merged = f"{before}.experts.{rest}" if dot == ".experts." else f"{before}.weight"
        groups.setdefault(merged.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
                          if "block_sparse_moe" in merged or "feed_forward" in merged else merged,
                          {})[int(number)] = tensor  # fmt: skip
    return found | {name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in groups.items()}


def _split(tensors):
    """The gates and the other halves of Granite's experts, which a checkpoint has in one tensor."""
    found = {}
    for name, tensor in tensors.items():
        before, dot, after = name.rpartition("input_linear.")
        if not dot:
            found[name.replace("shared_mlp.output_linear", "mlp.shared_experts.down_proj")] = tensor
            continue
        before = before.replace("block_sparse_moe.", "mlp.experts.").replace("shared_mlp.", "mlp.shared_experts.")
        gate, up = np.split(tensor, 2, axis=-2)
        found |= {f"{before}gate_proj.{after}": gate, f"{before}up_proj.{after}": up}
    return found


def _changed(architecture, config, target, name, tensor):
    heads = config.get("num_attention_heads", config.get("n_head"))
    groups = _key_heads(config)
    if gguf.MODEL_ARCH_NAMES[architecture] in _MOVED:
        if "attn_q." in target:
            return _neighbours(tensor, heads)
        if "attn_k." in target:
            return _neighbours(tensor, groups)
    if gguf.MODEL_ARCH_NAMES[architecture] in _PLUS_ONE and name.endswith("norm.weight"):
        return tensor + np.float32(1)
    if architecture is gguf.MODEL_ARCH.GPT2 and name.endswith(("attn.weight", "proj.weight", "fc.weight")):
        return tensor.T
    if "query_key_value" in name:
        return _queries_keys_values(tensor, heads, groups)
    return tensor


def _recurrent(architecture, config, target, tensor):
    """The tensors of the file for one of a gated delta rule."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    part = target.split(".")[2]
    if part == "ssm_a":
        tensor = -np.exp(tensor)
    if part == "ssm_conv1d":
        tensor = tensor.squeeze(1)
    if part == "ssm_in":
        shared = values // keys * value_dim
        groups = tensor.reshape(keys, -1, tensor.shape[1])
        q, k, v, z = (
            some.reshape(-1, tensor.shape[1])
            for some in np.split(groups, (key_dim, 2 * key_dim, 2 * key_dim + shared), 1)
        )
        return {target.replace(part, "attn_qkv"): np.concatenate([q, k, v]), target.replace(part, "attn_gate"): z}
    if architecture is gguf.MODEL_ARCH.QWEN3NEXT or part == "ssm_norm":
        return {target: tensor}
    first = 2 * keys * key_dim if part in ("attn_qkv", "ssm_conv1d") else 0
    if part == "ssm_out":
        return {target: _tiled(tensor.T, 0, keys, values).T}
    return {target: _tiled(tensor, first, keys, values)}


def _tiled(tensor, first, keys, values):
    """Rows from `first` on: the first value heads of all key heads, then the second ones."""
    heads = np.split(tensor[first:], values)
    return np.concatenate([tensor[:first], *(heads[i] for tile in range(values // keys)
                                             for i in range(tile, values, values // keys))])  # fmt: skip


def _neighbours(tensor, heads):
    """Row i of a head's first half next to row i of its second."""
    rows = []
    for head in np.split(tensor, heads):
        first, second = np.split(head, 2)
        rows += [row for pair in zip(first, second, strict=True) for row in pair]
    return np.stack(rows)


def _queries_keys_values(tensor, heads, groups):
    """From groups of queries, a key and a value to all queries, all keys, all values."""
    each = np.split(tensor, heads + 2 * groups)
    width = heads // groups + 2
    queries = [part for i, part in enumerate(each) if i % width < width - 2]
    return np.concatenate([*queries, *each[width - 2 :: width], *each[width - 1 :: width]])


# Tokenizer


def add_byte_level(writer, tokenizer_json, pre, settings):
    """Add a byte-level tokenizer.json. settings: its tokenizer_config.json."""
    source = json.loads(Path(tokenizer_json).read_text())
    added = {entry["id"]: entry for entry in source["added_tokens"]}
    ids = {token: text for text, token in source["model"]["vocab"].items()} | {
        i: e["content"] for i, e in added.items()
    }
    size = max(ids) + 3  # the converter pads the vocabulary to the size of the embedding
    kinds = [UNUSED if i not in ids else NORMAL if i not in added else CONTROL if added[i]["special"] else USER_DEFINED
             for i in range(size)]  # fmt: skip
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([ids.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in source["model"]["merges"]])
    by_text = {text: token for token, text in ids.items()}
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        text = settings.get(name)
        text = text.get("content") if isinstance(text, dict) else text
        if text in by_text:
            add(by_text[text])
    if template := settings.get("chat_template"):
        writer.add_chat_template(template)


def add_sentencepiece(writer, processor):
    """Add a trained sentencepiece.SentencePieceProcessor."""
    size = processor.vocab_size()
    kinds = [
        UNKNOWN if processor.is_unknown(i)
        else CONTROL if processor.is_control(i)
        else BYTE if processor.is_byte(i)
        else UNUSED if processor.is_unused(i)
        else NORMAL
        for i in range(size)
    ]  # fmt: skip
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([processor.id_to_piece(i) for i in range(size)])
    writer.add_token_scores([processor.get_score(i) for i in range(size)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    writer.add_unk_token_id(processor.unk_id())
