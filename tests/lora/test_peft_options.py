"""Fields of PEFT's configs that change what an adapter computes, against PEFT and against merged weights in float32."""

import pytest
import torch
from model_equality import assert_alike, prompt_of
from paged_model_forward import logits_of
from peft_adapters import (
    ALPHA,
    RANK,
    adapted_logits,
    assert_adapted_alike,
    change_config,
    change_tensors,
    save_adapter,
    save_matrices,
)

from quire.lora.peft import load_adapter, read_adapter
from quire.models.description import describe

Q_AND_V = ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen2", {"target_modules": Q_AND_V}),
        ("llama-gqa-tied", {"target_modules": "all-linear"}),
        ("phi3", {"target_modules": "all-linear"}),
        ("gpt2", {"target_modules": "all-linear", "fan_in_fan_out": True}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
        ("gpt-neox", {"target_modules": ["query_key_value"]}),
        ("falcon-40b", {"target_modules": ["query_key_value"]}),
        ("cohere", {"target_modules": r".*\.layers\.[01]\.self_attn\.(q|k)_proj", "r": 3}),
        ("qwen3-gqa", {"exclude_modules": ["layers.1.mlp.down_proj", "q_proj"]}),
        ("qwen3-gqa", {"target_modules": ["up_proj", "o_proj"], "exclude_modules": r".*\.0\..*"}),
        ("llama-mha", {"target_modules": ["q_proj", "k_proj", "v_proj"], "rank_pattern": {"q_proj": 1, "k_proj": 7}}),
        ("llama-mha", {"rank_pattern": {r"a|layers\.[12]\.mlp\.(up|down)_proj": 9, "down_proj": 2}}),
        (
            "llama-mha",
            {"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 64, "mlp.up_proj": 2}, "use_rslora": True},
        ),
        ("ernie4-5-biases", {"target_modules": Q_AND_V, "use_rslora": True, "rank_pattern": {"v_proj": 16}}),
        ("llama-mqa-biases", {"lora_bias": True}),
        ("glm4", {"lora_bias": True}),
        ("gpt2", {"lora_bias": True, "target_modules": ["c_attn", "c_proj"]}),
        ("qwen2", {"target_modules": Q_AND_V, "layers_to_transform": [0, 2]}),
        ("qwen2", {"target_modules": Q_AND_V, "layers_to_transform": 1, "layers_pattern": "layers"}),
        (
            "gpt2",
            {"target_modules": ["c_attn"], "layers_to_transform": [2], "layers_pattern": ["x", "h"], "strength": 0.5},
        ),
        ("llama-mha", {"target_modules": ["lm_head", "down_proj"]}),
        ("gpt-neox", {"target_modules": ["lm_head"]}),
        ("phi", {"target_modules": ["lm_head", "dense"]}),
        ("opt-post-norm", {"target_modules": ["project_in", "project_out", "fc1"]}),
        ("gemma4-shared-kv", {"target_modules": ["per_layer_model_projection", "per_layer_input_gate"]}),
        ("qwen2-moe", {"target_modules": ["shared_expert_gate", "o_proj"]}),
        ("llama-mha", {"init_lora_weights": "gaussian", "lora_dropout": 0.3}),
        ("llama-mha", {"init_lora_weights": "orthogonal"}),
        ("llama-mha", {"r": 64, "lora_alpha": 40, "task_type": None}),
    ],
)
def test_logits_equal_peft(saved, tmp_path, kind, config):
    folder, theirs = saved(kind)
    adapted = save_adapter(tmp_path, theirs, **config)
    assert_adapted_alike(folder, adapted, tmp_path)


@pytest.mark.parametrize("kind", ["qwen3-gqa", "gpt2", "phi3", "falcon-40b", "cohere"])
def test_logits_equal_those_of_the_model_that_peft_merges(saved, tmp_path, kind):
    folder, theirs = saved(kind)
    adapted = save_adapter(tmp_path / "adapter", theirs)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    prompt = prompt_of(40)
    merged = logits_of(tmp_path / "merged", prompt)
    assert_alike(adapted_logits(folder, tmp_path / "adapter", prompt), merged, 3e-5)


def test_names_with_the_name_of_the_adapter_are_read(saved, tmp_path):
    folder, theirs = saved("qwen2")
    adapted = save_adapter(tmp_path, theirs)
    change_tensors(tmp_path, lambda old: {name.replace(".weight", ".default.weight"): old[name] for name in old})
    assert_adapted_alike(folder, adapted, tmp_path)


@pytest.mark.parametrize(("kind", "prefix"), [("qwen3-tied", "model."), ("gpt2", "transformer."), ("opt", "model.")])
def test_names_may_lack_the_first_part_that_a_model_without_a_head_lacks(saved, tmp_path, kind, prefix):
    folder, theirs = saved(kind)
    adapted = save_adapter(tmp_path, theirs)
    change_tensors(tmp_path, lambda old: {name.replace(f".model.{prefix}", ".model."): old[name] for name in old})
    change_config(tmp_path, target_modules="all-linear")
    assert_adapted_alike(folder, adapted, tmp_path)


def test_matrices_of_float32_weights_stay_in_float32(saved, tmp_path):
    folder, _ = saved("glm4-moe")
    shapes = {
        f"model.layers.1.{last}": (8 if last == "mlp.gate" else 128, 64) for last in ("mlp.gate", "self_attn.q_proj")
    }
    matrices = save_matrices(tmp_path, shapes)
    description = describe(folder)
    adapter = read_adapter(tmp_path, "a", description, "bfloat16")
    (router,), (query,) = load_adapter(adapter, description, "bfloat16").values()
    assert (router.a.dtype, query.a.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(router.a, matrices["model.layers.1.mlp.gate"][0])
    assert adapter.rank == RANK and router.scale == ALPHA / RANK


def test_invocation_tokens_are_those_of_the_config(saved, tmp_path):
    folder, theirs = saved("qwen2")
    save_adapter(tmp_path, theirs, alora_invocation_tokens=[5, 9, 300])
    assert read_adapter(tmp_path, "a", describe(folder), "float32").invocation_tokens == (5, 9, 300)


def test_bytes_bound_those_of_the_matrices(saved, tmp_path):
    folder, theirs = saved("llama-mqa-biases")
    save_adapter(tmp_path, theirs, lora_bias=True)
    description = describe(folder)
    adapter = read_adapter(tmp_path, "a", description, "bfloat16")
    matrices = [one for some in load_adapter(adapter, description, "bfloat16").values() for one in some]
    held = sum(one.a.nbytes + one.b.nbytes + one.bias.nbytes for one in matrices)
    assert held <= adapter.num_bytes < 3 * held
    assert read_adapter(tmp_path, "a", description, "float32").num_bytes == 2 * adapter.num_bytes
