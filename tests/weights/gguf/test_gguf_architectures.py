"""GGUF files of many architectures compute what their source computes, or are refused with the key that is wrong.

The rig converts as llama.cpp does. Its keys, names and numbers were compared with the files of llama.cpp's own
converter (that of llama-cpp-python 0.3.36), and quire's logits from these files with llama.cpp's.
"""

import shutil
from pathlib import Path

import gguf_writer
import numpy as np
import pytest
import random_checkpoints
import torch
from model_equality import assert_alike
from paged_model_forward import logits_of
from safetensors.torch import load_file, save_file

from quire.errors import ModelError
from quire.kernels.reference.codes import dequantize
from quire.models.description import describe
from quire.weights.gguf.checkpoint import GgufCheckpoint
from quire.weights.gguf.config import check_unread, hf_config
from quire.weights.gguf.info import GgufInfo
from quire.weights.gguf.reader import Metadata

PROMPT = [(7 * index + 3) % random_checkpoints.VOCAB for index in range(40)]  # longer than all windows
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128}
ATTENUATED = {
    "full_attention": {**YARN, "attention_factor": 1.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
AXES = {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3}

# name -> (architecture of the file, kind of checkpoint, changes of its config, options of write_gguf)
FILES = {
    "gptneox-all-rotated": ("gptneox", "gpt-neox-sequential", {}, {}),
    "gemma": ("gemma", "gemma", {}, {}),
    "mistral3": ("mistral3", "mistral", {}, {"architecture": "mistral3"}),
    "mistral3-scaled-queries": ("mistral3", "ministral3", {}, {}),
    "glm4": ("glm4", "glm4", {}, {}),
    "glm4-all-rotated": ("glm4", "glm4-all-rotated", {}, {}),
    "glm4moe": ("glm4moe", "glm4-moe", {}, {}),
    "glm4moe-groups": ("glm4moe", "glm4-moe-groups", {}, {}),
    "smollm3": ("smollm3", "smollm3", {}, {}),
    "seed_oss": ("seed_oss", "seed-oss", {}, {}),
    "seed_oss-biases": ("seed_oss", "seed-oss-biases", {}, {}),
    "ernie4_5": ("ernie4_5", "ernie4-5", {}, {}),
    "ernie4_5-moe": ("ernie4_5-moe", "ernie4-5-moe", {"intermediate_size": 128}, {}),
    "minimax-m2": ("minimax-m2", "minimax-m2", {}, {}),
    "cohere2": ("cohere2", "cohere2-every-fourth", {}, {}),
    "command-r": ("command-r", "cohere", {}, {}),
    "command-r-plus": ("command-r", "cohere-qk-norm", {}, {}),
    "qwen2moe": ("qwen2moe", "qwen2-moe", {"mlp_only_layers": []}, {}),
    "qwen3vl": ("qwen3vl", "qwen3-gqa", {}, {"architecture": "qwen3vl", "keys": AXES}),
    "qwen3vlmoe": ("qwen3vlmoe", "qwen3-moe", {}, {"architecture": "qwen3vlmoe", "keys": AXES}),
    "granitemoe": ("granitemoe", "granite-moe", {}, {}),
    "granitemoe-shared": ("granitemoe", "granite-moe-shared", {}, {}),
    "olmoe": ("olmoe", "olmoe", {}, {}),
    "olmo3": ("olmo2", "olmo3", {}, {}),
    "olmo3-attenuated": ("olmo2", "olmo3-every-fourth", {"rope_parameters": ATTENUATED}, {}),
    "exaone4": ("exaone4", "exaone4", {}, {}),
    "exaone4-no-window": ("exaone4", "exaone4-no-window", {}, {}),
    "hunyuan-dense": ("hunyuan-dense", "hunyuan", {}, {}),
    "hunyuan-moe": ("hunyuan-moe", "hunyuan-moe", {}, {}),
    "dots1": ("dots1", "dots1", {}, {}),
    "arcee": ("arcee", "arcee-biases", {}, {}),
    "nemotron": ("nemotron", "nemotron", {}, {}),
    "apertus": ("apertus", "apertus", {}, {}),
    "afmoe": ("afmoe", "trinity", {}, {}),
    "qwen3next": ("qwen3next", "qwen3-next", {}, {}),
    "qwen35": ("qwen35", "qwen3-5", {}, {}),
    "qwen35-tied": ("qwen35", "qwen3-5-tied", {"attention_bias": False}, {}),
    "qwen35moe": ("qwen35moe", "qwen3-5-moe", {}, {}),
    "lfm2": ("lfm2", "lfm2", {}, {}),
    "lfm2-own-head": ("lfm2", "lfm2-indices", {}, {}),
    "lfm2moe": ("lfm2moe", "lfm2-moe", {"routed_scaling_factor": 1.0}, {}),
}  # fmt: skip


def source_of(name, saved, folder):
    """The folder of the checkpoint of a file."""
    _, kind, changes, _ = FILES[name]
    if not changes:
        return saved(kind)[0]
    random_checkpoints.save(folder, kind, **changes)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_file_computes_what_its_source_computes(saved, tmp_path, name):
    architecture, _, _, options = FILES[name]
    folder = source_of(name, saved, tmp_path)
    checkpoint = GgufCheckpoint(gguf_writer.write_gguf(folder, tmp_path / "model.gguf", **options))
    assert checkpoint.metadata.architecture == architecture
    source, found = describe(folder), describe(checkpoint)
    assert (found.architecture, found.config) == (source.architecture, source.config)
    if architecture.startswith("qwen3") and source.state_layers:  # whose decays are rounded
        assert_alike(logits_of(checkpoint, PROMPT), logits_of(folder, PROMPT), 1e-5)
    else:
        assert torch.equal(logits_of(checkpoint, PROMPT), logits_of(folder, PROMPT))


@pytest.mark.parametrize(
    ("file_type", "value_dim", "is_kept"), [("Q8_0", 16, False), ("Q8_0", 32, True), ("Q4_K", 64, True)]
)
def test_codes_of_value_heads_that_were_moved_are_kept(tmp_path, file_type, value_dim, is_kept):
    """Columns of ssm_out are those of value heads. Groups of columns that share a factor may be torn apart."""
    random_checkpoints.save(tmp_path, "qwen3-5", linear_value_head_dim=value_dim, hidden_size=256)
    checkpoint = GgufCheckpoint(gguf_writer.write_gguf(tmp_path, tmp_path / "model.gguf", kind=file_type))
    recurrence = "model.layers.0.linear_attn."
    inputs = [f"{recurrence}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
    schemes = {
        name: stored.scheme
        for name, stored in checkpoint.tensors.items()
        if stored.scheme and name.startswith(recurrence)
    }
    assert {*schemes} == {*inputs, *([f"{recurrence}out_proj.weight"] if is_kept else [])}
    numbers = dict(checkpoint.read(schemes))
    for name, rows in checkpoint.read_codes(schemes):
        torch.testing.assert_close(
            dequantize(rows, schemes[name]), numbers[name], rtol=1e-2, atol=5e-4
        )  # scales in float16
    if file_type == "Q8_0":  # K-quants have random numbers
        found, exact = logits_of(checkpoint, PROMPT), logits_of(tmp_path, PROMPT)
        assert (found - exact).abs().median() < 0.01 * (exact.max() - exact.min())


def test_layers_for_drafts_are_not_read(saved, tmp_path):
    folder = shutil.copytree(saved("glm4-moe")[0], tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    drafts = {
        name.replace("layers.2.", "layers.3."): one.clone() for name, one in tensors.items() if "layers.2." in name
    }
    drafts["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors | drafts, folder / "model.safetensors")
    path = gguf_writer.write_gguf(folder, tmp_path / "model.gguf")
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.config["num_hidden_layers"] == 3
    assert checkpoint.tensors.keys() == tensors.keys()
    assert torch.equal(logits_of(checkpoint, PROMPT), logits_of(folder, PROMPT))


SIZES = {"block_count": 4, "context_length": 4096, "embedding_length": 64, "feed_forward_length": 96,
         "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
         "attention.layer_norm_epsilon": 1e-5}  # fmt: skip
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_count": 2}
SIGMOID = {**EXPERTS, "expert_gating_func": 2, "expert_weights_norm": True}
ERNIE = {**EXPERTS, "interleave_moe_layer_step": 1}


def config_of(architecture, keys):
    """The config.json of a file with these keys."""
    values = {f"{architecture}.{key}": value for key, value in (SIZES | keys).items() if value is not None}
    metadata = Metadata({"general.architecture": architecture, **values}, Path("a.gguf"))
    found = hf_config(GgufInfo(metadata, frozenset("abcd"), 301, lambda _: None))
    check_unread(metadata)
    return found


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("dots1", EXPERTS, "dots1.expert_gating_func is missing"),
        ("dots1", {**SIGMOID, "expert_gating_func": 1}, r"dots1.expert_gating_func must be 2 \(sigmoid\), not 1"),
        ("glm4moe", {**EXPERTS, "expert_gating_func": 3}, "glm4moe.expert_gating_func must be 2"),
        ("glm4moe", {**SIGMOID, "expert_shared_count": None}, "glm4moe.expert_shared_count is missing"),
        ("glm4moe", {**SIGMOID, "nextn_predict_layers": 4}, "4 of 4 layers are for drafts"),
        ("glm4", {"rope.dimension_sections": np.array([4, 2, 2, 0])}, "glm4.rope.dimension_sections, positions on"),
        ("minimax-m2", EXPERTS, "minimax-m2.expert_gating_func is missing"),
        ("minimax-m2", SIGMOID, "minimax-m2.expert_feed_forward_length = 32 does not fit .* make it 96"),
        ("afmoe", {**EXPERTS, "expert_weights_norm": False}, "afmoe.expert_weights_norm must be True"),
        ("afmoe", SIGMOID, "afmoe.attention.sliding_window is missing"),
        ("ernie4_5-moe", EXPERTS, "ernie4_5-moe.interleave_moe_layer_step is missing"),
        ("ernie4_5-moe", {**ERNIE, "expert_shared_feed_forward_length": 48}, "shared_feed_forward_length = 48 .* 64"),
        ("hunyuan-moe", EXPERTS, "hunyuan-moe.expert_feed_forward_length = 32 does not fit .* make it 96"),
        ("qwen3moe", {}, "qwen3moe.expert_count is missing"),
        ("qwen2moe", EXPERTS, "qwen2moe.expert_shared_feed_forward_length is missing"),
        ("cohere2", {"attention.sliding_window": 16}, "cohere2.logit_scale is missing"),
        ("cohere2", {"logit_scale": 0.5}, "cohere2.attention.sliding_window is missing"),
        ("mistral3", {"attention.temperature_scale": 0.1}, "temperature_scale = 0.1 needs rope.scaling.type = 'yarn'"),
        ("granite", {"rope.scaling.finetuned": False}, "without rotary embeddings .rope.scaling.finetuned = False"),
        (
            "exaone4",
            {"attention.sliding_window": 16, "attention.sliding_window_pattern": np.array([True])},
            "exaone4.attention.sliding_window_pattern must be a list of 4 numbers",
        ),
        ("smollm3", {"attention.sliding_window": 16}, "smollm3.attention.sliding_window = 16 is not supported"),
        (
            "qwen3moe",
            {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_group_count": 4},
            "qwen3moe.expert_group_count = 4 is not supported",
        ),
    ],
)
def test_a_missing_or_contradictory_key_is_named(architecture, keys, message):
    with pytest.raises(ModelError, match=message):
        config_of(architecture, keys)


def test_a_file_without_the_parameters_of_its_activation_is_refused(saved, tmp_path):
    path = gguf_writer.write_gguf(saved("apertus")[0], tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"xielu.beta", b"xielu.zeta"))
    with pytest.raises(ModelError, match=r"xielu.beta is missing; the file is incomplete"):
        GgufCheckpoint(path)
