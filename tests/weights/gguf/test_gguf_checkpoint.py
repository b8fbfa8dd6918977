"""Converted GGUF checkpoints equal their source: every tensor bit for bit, and every relevant field of the config."""

import json
import os
import shutil
from pathlib import Path

import gguf
import gguf_writer as gguf_files
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from quire.errors import ModelError
from quire.hub import embedded
from quire.weights.gguf.checkpoint import GgufCheckpoint
from quire.weights.gguf.reader import read_header

COMMON = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.5 + i / 8 for i in range(8)],
    "short_factor": [1.1 + i / 16 for i in range(8)],
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61, "eos_token_id": None,
          "bos_token_id": None}  # fmt: skip

# name -> (class in transformers, arguments of its config)
KINDS = {
    "llama": ("Llama", COMMON),
    "llama-tied-biased": ("Llama", COMMON | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-own-head-dim": ("Llama", COMMON | {"head_dim": 24}),
    "llama3": ("Llama", COMMON | {"head_dim": 64, "rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", COMMON | {"rope_parameters": LINEAR}),
    "mixtral": ("Mixtral", COMMON | EXPERTS),
    "mixtral-one-expert": ("Mixtral", COMMON | {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "qwen2": ("Qwen2", COMMON),
    "qwen2-yarn": ("Qwen2", COMMON | {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", COMMON | {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3moe": ("Qwen3Moe", COMMON | EXPERTS | {"head_dim": 32, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "gemma2": ("Gemma2", COMMON | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 128}),
    "gemma3": ("Gemma3", COMMON | {"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 7,
                                   "sliding_window": 128}),
    "phi3": ("Phi3", COMMON | {"sliding_window": 256, "original_max_position_embeddings": 512}),
    "phi3-long": ("Phi3", COMMON | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
    "gpt2": ("GPT2", {"vocab_size": 61, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 200,
                      "bos_token_id": None, "eos_token_id": None}),
    "stablelm": ("StableLm", COMMON | {"rope_parameters": PARTIAL}),
    "stablelm-12b": ("StableLm", COMMON | {"qk_layernorm": True, "use_parallel_residual": True}),
    "stablelm-biased": ("StableLm", COMMON | {"use_qkv_bias": True}),
    "falcon-7b": ("Falcon", FALCON | {"multi_query": True}),
    "falcon-40b": ("Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "Falcon",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "olmo2": ("Olmo2", COMMON),
    "granite": ("Granite", COMMON | {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
                                     "residual_multiplier": 0.22, "logits_scaling": 8.0}),
    "gptneox": ("GPTNeoX", {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}
                | {"rope_parameters": PARTIAL, "tie_word_embeddings": False}),
}  # fmt: skip

# fields of a saved config that do not affect what the model computes
ASIDE = {
    *("transformers_version", "dtype", "use_cache", "initializer_range", "pretraining_tp", "max_window_layers"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "is_decoder"),
    *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"),
    *("use_bidirectional_attention", "_sliding_window_pattern", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "classifier_dropout"),
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A function from a kind to its folder. Every number is random."""
    made = {}

    def get(kind):
        if kind not in made:
            name, fields = KINDS[kind]
            config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
            model_name = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
            torch.manual_seed(1)
            model = getattr(transformers, model_name)(getattr(transformers, config_name)(**fields))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn_like(parameter))
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return get


def stored(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_comes_back_as_it_was(source, tmp_path, kind):
    checkpoint = GgufCheckpoint(gguf_files.write_gguf(source(kind), tmp_path / "model.gguf"))
    expected = stored(source(kind))
    found = dict(checkpoint.read(checkpoint.tensors))
    assert found.keys() == expected.keys() == checkpoint.tensors.keys()
    for name, tensor in expected.items():
        assert checkpoint.tensors[name].shape == found[name].shape == tensor.shape
        if "gemma" in kind and "norm" in name:  # one was added and subtracted again
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=3e-7)
        else:
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_says_what_the_source_says(source, tmp_path, kind):
    checkpoint = GgufCheckpoint(gguf_files.write_gguf(source(kind), tmp_path / "model.gguf"))
    expected = json.loads((source(kind) / "config.json").read_text())
    # fields that only some classes have, or that repeat others, may be missing
    implied = {
        "head_dim",
        "layer_types",
        "attention_bias",
        "sliding_window",
        "num_kv_heads",
        "hidden_act",
        "rope_theta",
    }
    if expected.get("head_dim", 1) is None:
        expected["head_dim"] = COMMON["hidden_size"] // COMMON["num_attention_heads"]
    if kind == "falcon-7b":
        expected["num_kv_heads"] = 1  # the source has 4 and a field that overrides it
    if (rope := expected.get("rope_parameters", {})).get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    for name, value in expected.items():
        if name not in ASIDE and (name in checkpoint.config or name not in implied):
            assert checkpoint.config.get(name, "absent") == value, name
    assert checkpoint.config["dtype"] == "float32"


@pytest.mark.parametrize("kind", KINDS)
def test_config_and_tensors_together_are_a_model_that_computes_the_same(source, tmp_path, kind):
    checkpoint = GgufCheckpoint(gguf_files.write_gguf(source(kind), tmp_path / "model.gguf"))
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": None, **checkpoint.config}))
    save_file({name: tensor.contiguous() for name, tensor in checkpoint.read(checkpoint.tensors)},
              tmp_path / "model.safetensors")  # fmt: skip
    ids = torch.arange(60)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source(kind))(ids).logits
        found = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "gpt2", "stablelm", "phi3"])
def test_transformers_reads_the_same_from_the_file(source, tmp_path, kind):
    path = gguf_files.write_gguf(source(kind), tmp_path / "model.gguf")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source(kind)))
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    checkpoint = GgufCheckpoint(path)
    for name, tensor in checkpoint.read(checkpoint.tensors):
        assert torch.equal(theirs[name], tensor), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "F16", "BF16"])
def test_quantized_tensors_are_what_the_gguf_package_makes_of_them(source, tmp_path, kind):
    path = gguf_files.write_gguf(source("qwen3"), tmp_path / "model.gguf", kind=kind)
    checkpoint = GgufCheckpoint(path)
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert checkpoint.tensors["model.layers.1.mlp.up_proj.weight"].dtype == kind
    for name, original in (
        ("blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"),
        ("blk.2.attn_k.weight", "model.layers.2.self_attn.k_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
    ):
        ((_, found),) = checkpoint.read([original])
        assert np.array_equal(found.float().numpy(), gguf.quants.dequantize(raw[name].data, raw[name].tensor_type))
    assert checkpoint.config["dtype"] == {"F16": "float16"}.get(kind, "bfloat16")


def test_shards_are_one_model_whichever_is_named(source, tmp_path):
    first = gguf_files.write_gguf(source("qwen2"), tmp_path / "model.gguf", tensors_in_shard=9)
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) > 2
    expected = stored(source("qwen2"))
    for path in (first, shards[-1]):
        checkpoint = GgufCheckpoint(path)
        assert checkpoint.path == first
        found = dict(checkpoint.read(checkpoint.tensors))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_shards_that_are_missing_renamed_or_mixed_up(source, tmp_path):
    first = gguf_files.write_gguf(source("qwen2"), tmp_path / "model.gguf", tensors_in_shard=9)
    _, second, *_, last = sorted(tmp_path.glob("*.gguf"))
    moved = last.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=rf"lacks 1 of the model's \d files, the first is {last.name}"):
        GgufCheckpoint(first)
    moved.rename(last)
    with pytest.raises(ModelError, match="does not end in -00001-of"):
        GgufCheckpoint(first.rename(tmp_path / "model.gguf"))
    (tmp_path / "model.gguf").rename(first)
    shutil.copy(last, second)
    with pytest.raises(ModelError, match=r"is part 2 of .* by its name, but not by its metadata"):
        GgufCheckpoint(first)


def test_read_goes_through_the_file_from_front_to_back(source, tmp_path):
    checkpoint = GgufCheckpoint(gguf_files.write_gguf(source("mixtral"), tmp_path / "model.gguf"))
    names = [name for name, _ in checkpoint.read(checkpoint.tensors)]
    assert [name for name, _ in checkpoint.read(reversed(names))] == names
    with pytest.raises(ModelError, match="no tensor x"):
        list(checkpoint.read(["x"]))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists the mappings of a process")
def test_the_file_is_mapped_only_while_a_tensor_is_read(source, tmp_path):
    path = gguf_files.write_gguf(source("llama3"), tmp_path / "model.gguf", kind="Q8_0")
    checkpoint = GgufCheckpoint(path)

    def is_mapped():
        return str(path) in Path("/proc/self/maps").read_text()

    assert not is_mapped()
    schemes = {name: stored.scheme for name, stored in checkpoint.tensors.items() if stored.scheme}
    kept = []
    for read in (checkpoint.read(checkpoint.tensors), checkpoint.read_codes(schemes)):
        for one in read:
            kept.append(one)
            assert not is_mapped()
    assert len(kept) == len(checkpoint.tensors) + len(schemes) > 30
    view = read_header(path).tensors["token_embd.weight"].part_data(None)
    assert is_mapped()
    del view
    assert not is_mapped()


def test_a_file_that_changed_since_its_header_was_read_is_refused(source, tmp_path):
    path = gguf_files.write_gguf(source("qwen2"), tmp_path / "model.gguf")
    checkpoint, time = GgufCheckpoint(path), path.stat().st_mtime_ns
    for change in (
        lambda: os.utime(path, ns=(time, time + 1)),
        lambda: (path.write_bytes(path.read_bytes() + b"x"), os.utime(path, ns=(time, time))),
    ):
        change()
        with pytest.raises(ModelError, match=r"model.gguf has changed while the model was loaded; start again"):
            next(checkpoint.read(["model.norm.weight"]))
    path.unlink()
    with pytest.raises(ModelError, match=r"model.gguf cannot be read .*No such file"):
        next(checkpoint.read(["model.norm.weight"]))


def test_bytes_in_the_file_add_up(source, tmp_path):
    path = gguf_files.write_gguf(source("mixtral"), tmp_path / "model.gguf", kind="Q8_0")
    checkpoint = GgufCheckpoint(path)
    total = sum(tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)
    assert sum(tensor.num_bytes for tensor in checkpoint.tensors.values()) == total


@pytest.mark.parametrize(
    ("low", "high", "original", "factor"), [(1.0, 4.0, 8192, 32.0), (1.0, 4.0, 4096, 8.0), (1.0, 8.0, 5000, 16.0)]
)
def test_llama_3_scaling_is_found_in_its_divisors(source, tmp_path, low, high, original, factor):
    folder = shutil.copytree(source("llama3"), tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"low_freq_factor": low, "high_freq_factor": high, "factor": factor}
    config["rope_parameters"]["original_max_position_embeddings"] = original
    (folder / "config.json").write_text(json.dumps(config))
    rope = GgufCheckpoint(gguf_files.write_gguf(folder, tmp_path / "model.gguf")).config["rope_parameters"]
    assert rope == config["rope_parameters"]


def write_small(path, *, tensors=(), **keys):
    """Write a small Llama by hand. Some keys are replaced, or left out for None."""
    writer = gguf.GGUFWriter(path, "llama")
    base = {"context_length": 32, "embedding_length": 8, "block_count": 1, "feed_forward_length": 8,
            "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    for key, value in (base | keys).items():
        add = {int: writer.add_uint64, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        if value is not None:
            add[type(value)](f"llama.{key}", value)
    for name, shape in {"token_embd.weight": (5, 8), "output_norm.weight": (8,), **dict(tensors)}.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    gguf_files.finish(writer)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_count": None}, "llama.block_count is missing"),
        ({"block_count": 2**31}, "block_count must be a whole number from 1 to 2147483647"),
        ({"block_count": 2**31 - 1}, "a model of 2147483647 layers has more than 2 tensors"),
        ({"embedding_length": "many"}, "llama.embedding_length must be a whole number from 0 to 2.*, not 'many'"),
        ({"attention.head_count": 0}, "attention.head_count must be a whole number from 1 to"),
        ({"attention.head_count": 2**63}, "attention.head_count must be a whole number from 1 to"),
        ({"attention.head_count_kv": 2**63}, "attention.head_count_kv must be a whole number from 1 to"),
        ({"attention.head_count": 9}, "attention.key_length must be a whole number from 1 to .*, not 0"),
        ({"attention.key_length": 0}, "attention.key_length must be a whole number from 1 to .*, not 0"),
        ({"attention.head_count": [2, 4]}, "attention.head_count differs between layers"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "epsilon must be a number"),
        ({"rope.freq_base": -1.0}, "base of rotary embeddings must be positive"),
        ({"rope.scaling.type": "spiral", "rope.scaling.factor": 2.0}, "rotary scaling of type 'spiral'"),
        ({"tensors": {"blk.0.attn_q.weight": (6, 8)}}, r"blk.0.attn_q.weight of shape \(6, 8\) does not fit"),
        ({"tensors": {"blk.0.strange.weight": (8,)}}, "blk.0.strange.weight does not belong"),
        ({"tensors": {"blk.1.attn_norm.weight": (8,)}}, "is outside of the model"),
        ({"tensors": {"blk.0.ffn_up_exps.weight": (5000, 2, 2)}}, "is outside of the model"),
        ({"tensors": {"rope_freqs.weight": (3,)}}, "must scale all 2 rotary frequencies"),
        ({"tensors": {"token_embd.weight": ()}}, "token_embd.weight has 0 dimensions"),
    ],
)
def test_an_unsupported_gguf_file_is_an_error_that_names_the_field(tmp_path, change, message):
    with pytest.raises(ModelError, match=message):
        GgufCheckpoint(write_small(tmp_path / "model.gguf", **change))


def test_values_given_for_each_layer_may_be_equal(tmp_path):
    checkpoint = GgufCheckpoint(write_small(tmp_path / "model.gguf", **{"attention.head_count": [2, 2]}))
    assert checkpoint.config["num_attention_heads"] == 2


@pytest.mark.parametrize("name", ["mamba", "gemma3n", "gemma4", "bailingmoe"])
def test_an_unknown_architecture_is_named(tmp_path, name):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", name)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    gguf_files.finish(writer)
    with pytest.raises(ModelError, match=f"architecture '{name}' is not supported in a GGUF file; supported: llama"):
        GgufCheckpoint(tmp_path / "model.gguf")


def test_sampling_defaults_and_end_tokens(tmp_path):
    path = gguf_files.write_gguf(embedded.folder(), tmp_path / "model.gguf", pre="smollm")
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.generation_config == {"eos_token_id": [0, 2]}
    assert checkpoint.config["eos_token_id"] == 2
    writer = gguf.GGUFWriter(tmp_path / "sampling.gguf", "gpt2")
    gguf_files.add_config(writer, KINDS["gpt2"][1] | {"layer_norm_epsilon": 1e-5, "architectures": ["GPT2LMHeadModel"]})
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_tensor("token_embd.weight", np.ones((4, 64), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    gguf_files.finish(writer)
    assert GgufCheckpoint(tmp_path / "sampling.gguf").generation_config == {
        "eos_token_id": [],
        "temperature": 0.6,
        "top_k": 20,
    }
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "top_p": 0.9, "eos_token_id": 7}')
    assert GgufCheckpoint(tmp_path / "sampling.gguf").generation_config == {
        "eos_token_id": [],
        "temperature": 0.2,
        "top_k": 20,
        "top_p": 0.9,
    }


def with_keys(path, **keys):
    """A GPT-2 file with more keys."""
    writer = gguf.GGUFWriter(path, "gpt2")
    gguf_files.add_config(writer, KINDS["gpt2"][1] | {"layer_norm_epsilon": 1e-5, "architectures": ["GPT2LMHeadModel"]})
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    writer.add_tensor("token_embd.weight", np.ones((4, 64), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    gguf_files.finish(writer)
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.scale", 0.5),
        ("attention.clamp_kqv", 8.0),
        ("attention.causal", False),
        ("attention.sliding_window", 16),
        ("attn_logit_softcapping", 50.0),
        ("embedding_scale", 12.0),
        ("logit_scale", 0.25),
        ("expert_gating_func", 2),
        ("rope.scaling.type", "yarn"),
        ("no_such_key", [1, 2, 3]),
    ],
)
def test_keys_of_the_architecture_that_would_be_ignored_are_named(tmp_path, key, value):
    path = with_keys(tmp_path / "model.gguf", **{f"gpt2.{key}": value})
    with pytest.raises(ModelError, match=rf"gpt2\.{key} = .* is not supported in this architecture"):
        GgufCheckpoint(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("gpt2.vocab_size", 4), ("gpt2.attention.causal", True), ("gpt2.tensor_data_layout", "Meta AI original pth"),
     ("gpt2.pooling_type", 1), ("general.finetune", "x"), ("quantize.imatrix.chunks_count", 125), ("other.scale", 2.0)],
)  # fmt: skip
def test_keys_without_effect_are_read(tmp_path, key, value):
    assert GgufCheckpoint(with_keys(tmp_path / "model.gguf", **{key: value})).config["n_layer"] == 2


def test_values_and_keys_of_different_sizes_are_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    gguf_files.add_config(writer, LlamaConfig(**COMMON).to_dict() | {"architectures": ["LlamaForCausalLM"]})
    writer.add_key_length(16)
    writer.add_value_length(32)
    writer.add_tensor("token_embd.weight", np.ones((4, 64), np.float32))
    for layer in range(3):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(64, np.float32))
    gguf_files.finish(writer)
    with pytest.raises(ModelError, match="keys of 16 and values of 32 dimensions are not supported"):
        GgufCheckpoint(tmp_path / "model.gguf")
