"""Hessians of layers against the inputs that transformers' modules get."""

import pytest
import torch
from paged_model_forward import Sequences

from quire.config import CacheConfig
from quire.kernels.reference import REFERENCE as reference
from quire.models.description import describe
from quire.models.hessians import layer_hessians
from quire.models.loading import load

TOKENS = [[(7 * i + 3) % 301 for i in range(61)], [(11 * i + 5) % 301 for i in range(40)]]


def hessians_of(folder):
    """The Hessians of all layers, by parameter and expert."""
    description = describe(folder)
    model = load(description, dtype="float32")
    cache = CacheConfig(16, tuple(Sequences(description, model, [64]).groups))
    parameters = {place.parameter for place in description.weight_map.values()}
    found = {}
    sequences = [torch.tensor(ids) for ids in TOKENS]
    for layer in layer_hessians(model, sequences, parameters, kernels=reference, cache=cache):
        found |= layer
    return found


@torch.no_grad()
def inputs_of(model, names):
    """xᵀ x of the inputs of modules, by name, summed over TOKENS."""
    sums, hooks = {}, []
    for name in names:

        def add(module, args, name=name):
            x = args[0].flatten(0, -2).float()
            sums[name] = sums.get(name, 0) + x.T @ x

        hooks.append(model.get_submodule(name).register_forward_pre_hook(add))
    for ids in TOKENS:
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return sums


def close(found, expected):
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "gemma2", "mistral-window", "olmo2"])
def test_each_projection_has_the_hessian_of_its_inputs(saved, kind):
    folder, model = saved(kind)
    found = hessians_of(folder)
    modules = {"attention.qkv": "self_attn.k_proj", "attention.o": "self_attn.o_proj"}
    modules |= {"mlp.up": "mlp.gate_proj", "mlp.down": "mlp.down_proj"}
    sums = inputs_of(model, [f"model.layers.{i}.{module}" for i in range(3) for module in modules.values()])
    assert len(found) == len(sums)
    for i in range(3):
        for parameter, module in modules.items():
            assert close(found[f"layers.{i}.{parameter}.weight", 0], sums[f"model.layers.{i}.{module}"])


def test_parallel_blocks_have_the_hessians_of_their_inputs(saved):
    folder, model = saved("gpt-neox")
    found, sums = hessians_of(folder), inputs_of(model, ["gpt_neox.layers.2.mlp.dense_4h_to_h"])
    assert close(found["layers.2.mlp.down.weight", 0], sums["gpt_neox.layers.2.mlp.dense_4h_to_h"])


def test_an_expert_has_the_hessian_of_its_tokens(saved):
    folder, model = saved("mixtral")
    found, sums = hessians_of(folder), inputs_of(model, ["model.layers.1.mlp", "model.layers.2.self_attn.q_proj"])
    experts = [hessian for (parameter, _), hessian in found.items() if parameter == "layers.1.mlp.up"]
    assert len(experts) == 4 and close(sum(experts), 2 * sums["model.layers.1.mlp"])  # each token has two experts
    assert found["layers.1.mlp.down", 3].shape == (96, 96)
    assert ("layers.1.mlp.router.weight", 0) in found
    assert close(found["layers.2.attention.qkv.weight", 0], sums["model.layers.2.self_attn.q_proj"])
