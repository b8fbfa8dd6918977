"""Wrong fields of a config.json and tensors of another shape are named, before a weight is read."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelError
from quire.models.description import describe
from quire.models.loading import load

SLIDING = ["sliding_attention", "full_attention"]


@pytest.fixture
def unread(monkeypatch):
    """No weight is read."""

    def read(*args):
        raise AssertionError("a weight is read")

    monkeypatch.setattr("quire.weights.checkpoint.FolderCheckpoint.read", read)


def changed(source, folder, values):
    """A checkpoint of the same weights with other values in its config.json; None removes a field."""
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({name: one for name, one in config.items() if one is not None}))
    return folder


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("olmo3", {"layer_types": SLIDING}, "layer_types must have one of .* for each of 3 layers, it has 2"),
        (
            "exaone4",
            {"layer_types": [*SLIDING, "sliding_atention"]},
            r"layers, not 'sliding_atention' \(did you mean 'sliding_attention'\?\)",
        ),
        ("mellum", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types must .* 3 layers, it has 2"),
        (
            "laguna",
            {"mlp_layer_types": ["dense", "sparse", "spars"]},
            r"mlp_layer_types must have one of dense, sparse .* not 'spars' \(did you mean 'sparse'\?\)",
        ),
        ("hy3", {"mlp_layer_types": ["dense", 1, "sparse"]}, "mlp_layer_types must be a list of strings"),
        ("laguna", {"num_attention_heads_per_layer": [4, 6]}, "num_attention_heads_per_layer must have a multiple of"),
        ("laguna", {"num_attention_heads_per_layer": [4, 5, 4]}, r"multiple of num_key_value_heads \(2\)"),
        ("laguna", {"num_attention_heads_per_layer": [4, 0, 4]}, r"for each of 3 layers, not \[4, 0, 4\]"),
        ("laguna", {"gating": "per-elment"}, r"gating = 'per-elment' .*did you mean 'per-element'\?\); supported: "),
        ("laguna", {"gating": False}, "gating = False is not supported; supported: True, per-head, per-element"),
        (
            "gemma4-shared-kv",
            {"num_kv_shared_layers": 5},
            "num_kv_shared_layers = 5 leaves no layer of 6 with the KV of the layers with full attention",
        ),
        ("gemma4-shared-kv", {"num_kv_shared_layers": 7}, "leaves no layer of 6 with the KV of .* window 13 attention"),
        ("gemma4", {"per_layer_config": {"2": {"sliding_window": 4}}}, "of layer 2 has sliding_window, which is not"),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": 2000}}}, "head_dim must be at most 1024"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 24}}}, "one head_dim for all full layers, and one for all"),
        (
            "gemma4",
            {"per_layer_config": {"2": {"num_key_value_heads": 3}}},
            r"KV heads of layer 2 \(3\) do not divide 4",
        ),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        ("exaone4", {"sliding_window_pattern": "LLGL"}, "Ls and a last G, not 'LLGL'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must have 1 .* or 0 for each of 4 layers"),
        ("arcee", {"hidden_act": "relu3"}, r"hidden_act = 'relu3' is not supported \(did you mean 'relu.*supported: "),
        ("glm4", {"head_dim": 30}, r"an even number of at most head_dim \(30\) dimensions, not 15"),
        ("apertus", {"head_dim": 15}, r"an even number of at most head_dim \(15\) dimensions, not 15"),
        ("minimax-m2", {"rotary_dim": 15, "rope_parameters": None}, r"head_dim \(32\) dimensions, not 15"),
        ("minimax-m2", {"rotary_dim": 48, "rope_parameters": None}, r"head_dim \(32\) dimensions, not 48"),
        ("minimax-m2", {"use_qk_norm": False}, "use_qk_norm = False is not supported; supported: True"),
        ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported; supported: sigmoid"),
        ("hy3", {"route_norm": False}, "route_norm = False is not supported for this architecture"),
        ("hy3", {"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid = False is not supported"),
        ("trinity", {"score_func": "softmax"}, "score_func = 'softmax' is not supported"),
        ("laguna", {"norm_topk_prob": False}, "norm_topk_prob = False is not supported for this architecture"),
        ("laguna", {"moe_router_score_func": "sqrtsoftplus"}, "moe_router_score_func = 'sqrtsoftplus' is not"),
        ("hunyuan", {"use_cla": True}, "use_cla = True is not supported"),
        ("cohere2", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi' is not supported"),
        ("dots1", {"n_routed_experts": None}, "n_routed_experts is missing"),
        (
            "qwen3-next-listed",
            {"layer_types": ["full_attention", "linear_attention", "linear_atention"]},
            r"layers, not 'linear_atention' \(did you mean 'linear_attention'\?\)",
        ),
        ("qwen3-5-tied", {"layer_types": ["linear_attention"] * 3}, "none of 3 layers attends; quire serves models"),
        ("qwen3-5-tied", {"layer_types": None}, "none of 3 layers attends"),
        (
            "qwen3-5",
            {"linear_num_value_heads": 3},
            r"\(3\) must be a multiple of linear_num_key_heads \(2\)",
        ),
        ("qwen3-5", {"linear_num_key_heads": 0}, "linear_num_key_heads must be at least 1, not 0"),
        ("qwen3-5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2, not 1"),
        ("qwen3-5", {"linear_value_head_dim": 2048}, "linear_value_head_dim must be at most 1024"),
        ("qwen3-5", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: silu, swish"),
        ("qwen3-5", {"attn_output_gate": False}, "attn_output_gate = False is not supported; supported: True"),
        ("qwen3-5-moe", {"norm_topk_prob": False}, "norm_topk_prob = False is not supported for this architecture"),
        ("qwen3-5", {"full_attention_interval": 1, "layer_types": None}, "full_attention_interval must be at least 2"),
        ("lfm2", {"layer_types": ["conv", "linear_attention", "conv"]}, "one of conv, full_attention for each of 3"),
        ("lfm2", {"layer_types": None}, "layer_types is missing; it must say which of the 3 layers attend"),
        (
            "lfm2-indices",
            {"layer_types": None, "full_attn_idxs": [1, 5]},
            "full_attn_idxs has 5, which is none of layers 0 to 4",
        ),
        ("granite-hybrid", {"num_experts_per_tok": "auto"}, "num_experts_per_tok must be of type int, not 'auto'"),
        ("lfm2-moe", {"num_experts_per_tok": 7}, r"num_experts_per_tok \(7\) is above num_experts \(6\)"),
        (
            "granite-hybrid",
            {"mamba_n_heads": 7},
            r"mamba_n_heads \(7\) heads of 16 numbers are not mamba_expand \(2\)",
        ),
        ("granite-hybrid", {"mamba_n_groups": 3}, r"mamba_n_heads \(8\) must be a multiple of mamba_n_groups \(3\)"),
        (
            "granite-hybrid",
            {"time_step_limit": [0.5, 0.1]},
            r"time_step_limit must be two numbers, .* not \[0\.5, ",
        ),
        ("granite-hybrid", {"num_experts_per_tok": 0}, "num_experts_per_tok must be at least 1, not 0"),
        ("nemotron-3", {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is above n_routed_experts \(8\)"),
        ("nemotron-3", {"n_shared_experts": 2}, "n_shared_experts = 2 is not supported; supported: 1"),
        (
            "nemotron-h",
            {"layers_block_type": None, "hybrid_override_pattern": "M-M*X"},
            "hybrid_override_pattern must have one of mamba, .* for each of 5 layers, not 'X'",
        ),
        ("nemotron-h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu' is not supported"),
        ("granite-hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi' is not supported"),
        ("kimi-linear", {"num_key_value_heads": 2}, r"num_key_value_heads \(2\) must be num_attention_heads \(4\)"),
        ("kimi-linear", {"v_head_dim": 30}, r"v_head_dim \(30\) is above the 24 numbers of a key"),
        ("kimi-linear", {"q_lora_rank": 8}, "q_lora_rank = 8 is not supported"),
        ("kimi-linear", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("kimi-linear", {"linear_attn_config": {"rank": 3}}, "linear_attn_config has rank, which is not supported"),
        (
            "kimi-linear",
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 3]}},
            "linear_attn_config must list each of layers 1 to 4 once",
        ),
        ("glm4-moe", {"n_routed_experts": 0}, "n_routed_experts must be at least 1, not 0"),
        ("glm4-moe", {"n_routed_experts": 5000}, "n_routed_experts must be at most 4096"),
        ("olmoe", {"num_experts": "6"}, "num_experts must be of type int, not '6'"),
        ("dots1", {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is above n_routed_experts \(8\)"),
        ("ernie4-5-moe", {"moe_k": 7}, r"moe_k \(7\) is above moe_num_experts \(6\)"),
        ("hunyuan-moe", {"moe_topk": [2, 2, 1]}, "moe_topk must be the same for all layers"),
        ("glm4-moe-groups", {"n_group": 3}, "n_group = 3 and topk_group = 2 do not divide 8 experts into groups"),
        ("glm4-moe-groups", {"n_group": 8}, "n_group = 8 and topk_group = 2 do not divide 8 experts into groups"),
        ("glm4-moe-groups", {"topk_group": 5}, "n_group = 4 and topk_group = 5 do not divide 8 experts"),
        (
            "glm4-moe-groups",
            {"topk_group": 1},
            r"num_experts_per_tok \(3\) is above the 2 experts of topk_group = 1 groups",
        ),
    ],
)
def test_the_wrong_field_is_named(saved, tmp_path, kind, values, message):
    with pytest.raises(ModelError, match=message):
        describe(changed(saved(kind)[0], tmp_path / "model", values))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("qwen3-moe", ("num_experts", 6), ("num_local_experts", 4)),
        ("mixtral", ("num_local_experts", 4), ("num_experts", 8)),
        ("glm4-moe", ("n_routed_experts", 8), ("num_local_experts", 6)),
        ("ernie4-5-moe", ("moe_k", 2), ("num_experts_per_tok", 3)),
        ("hunyuan-moe-listed", ("moe_topk", [2, 2, 2]), ("num_experts_per_tok", 1)),
        ("gemma3", ("sliding_window_pattern", 3), ("_sliding_window_pattern", 6)),
        ("falcon-mqa", ("num_hidden_layers", 3), ("n_layer", 2)),
        ("stablelm", ("partial_rotary_factor", 0.5), ("rope_pct", 0.25)),
    ],
)
def test_two_names_of_a_field_must_have_one_value(saved, tmp_path, kind, one, other):
    text = f"{one[0]} = {one[1]} and {other[0]} = {other[1]} are two names of one field with different values"
    with pytest.raises(ModelError, match=re.escape(text)):
        describe(changed(saved(kind)[0], tmp_path / "wrong", dict([one, other])))
    alone = describe(changed(saved(kind)[0], tmp_path / "alone", dict([one]))).config
    assert describe(changed(saved(kind)[0], tmp_path / "both", {one[0]: one[1], other[0]: one[1]})).config == alone


STACKED = {
    "qwen3-moe": "mlp.experts.gate_up_proj",
    "granite-moe": "block_sparse_moe.input_linear.weight",
}


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("kind", STACKED)
def test_experts_stacked_in_another_order_are_named_with_the_expected_shape(saved, tmp_path, kind):
    folder = Path(shutil.copytree(saved(kind)[0], tmp_path / "model"))
    name = f"model.layers.1.{STACKED[kind]}"
    tensors = load_file(folder / "model.safetensors")
    tensors = {one: tensor for one, tensor in tensors.items() if "mlp.experts" not in one}
    for layer in range(3):
        tensors[f"model.layers.{layer}.{STACKED[kind]}"] = torch.zeros(6, 64, 64)  # (expert, gate and up, hidden)
        if kind == "qwen3-moe":
            tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.zeros(6, 64, 32)
    tensors[name] = torch.zeros(64, 6, 64)
    save_file(tensors, folder / "model.safetensors")
    expected = re.escape(f"{name}: expected shape (6, 64, 64), found (64, 6, 64)")
    with pytest.raises(ModelError, match=expected):
        load(describe(folder), dtype="float32")


CONV, LOG = "model.layers.0.linear_attn.conv1d.weight", "model.layers.2.linear_attn.A_log"


def with_tensors(source, folder, change):
    """A copy of a checkpoint with changed tensors."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(CONV), rf"lacks 1 of the .*: expected {CONV} with shape \(128, 1, 4\)"),
        (
            lambda tensors: tensors.update({CONV: torch.zeros(128, 1, 3)}),
            rf"{CONV}: expected shape \(128, 1, 4\), found \(128, 1, 3\)",
        ),
        (lambda tensors: tensors.update({LOG: torch.zeros(5)}), rf"{LOG}: expected shape \(4,\), found \(5,\)"),
    ],
)
def test_tensors_of_a_recurrence_that_do_not_fit_are_named(saved, tmp_path, change, message):
    with pytest.raises(ModelError, match=message):
        load(describe(with_tensors(saved("qwen3-5")[0], tmp_path / "model", change)), dtype="float32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 100.0])
def test_a_decay_that_is_no_number_is_named(saved, tmp_path, value):
    folder = with_tensors(saved("qwen3-5")[0], tmp_path / "model", lambda tensors: tensors[LOG].fill_(value))
    with pytest.raises(ModelError, match=f"{LOG} has numbers that are NaN or beyond the range of float32"):
        load(describe(folder), dtype="float32")
