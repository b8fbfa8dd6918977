"""Adapters of all products of a layer but its experts, in every family with experts, against PEFT in float32."""

import pytest
import random_checkpoints as checkpoints
from peft_adapters import assert_adapted_alike, merge, products, save_adapter, save_matrices

from quire.models.description import FAMILIES, describe

SPARSE = [kind for kind in checkpoints.EVERY if FAMILIES[checkpoints.architecture(kind)].config.experts is not None]


@pytest.mark.parametrize("kind", SPARSE)
def test_logits_equal_peft(saved, tmp_path, kind):
    folder, theirs = saved(kind)
    adapted = save_adapter(tmp_path, theirs)
    assert_adapted_alike(folder, adapted, tmp_path)


# kind -> name of its routers in checkpoints, and in transformers, where PEFT cannot adapt them
ROUTERS = {
    "mixtral": ("block_sparse_moe.gate", "mlp.gate"),
    "qwen3-moe": ("mlp.gate", "mlp.gate"),
    "phi-moe": ("block_sparse_moe.gate", "mlp.router"),
    "glm4-moe-groups": ("mlp.gate", "mlp.gate"),
    "hy3-listed": ("mlp.router.gate", "mlp.gate"),
}


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("spelling", ["checkpoint", "module"])
def test_routers_have_adapters_by_both_names(saved, tmp_path, kind, spelling):
    folder, theirs = saved(kind)
    names = {
        f"model.layers.{layer}.{ROUTERS[kind][spelling == 'module']}": f"model.layers.{layer}.{ROUTERS[kind][1]}"
        for layer in (0, 2)
    }
    shapes = {name: tuple(theirs.get_submodule(module).weight.shape) for name, module in names.items()}
    matrices = save_matrices(tmp_path, shapes)
    merged = merge(theirs, {names[name]: some for name, some in matrices.items()})
    assert_adapted_alike(folder, merged, tmp_path)


@pytest.mark.parametrize("kind", ["hy3", "laguna"])
def test_shared_experts_have_adapters_by_the_names_of_checkpoints(saved, tmp_path, kind):
    folder, theirs = saved(kind)
    source = describe(folder).names.shared.removesuffix(".")
    names = {
        f"model.layers.1.{source}.{last}": f"model.layers.1.mlp.shared_experts.{last}"
        for last in ("up_proj", "down_proj")
    }
    shapes = {name: tuple(theirs.get_submodule(module).weight.shape) for name, module in names.items()}
    matrices = save_matrices(tmp_path, shapes)
    assert_adapted_alike(folder, merge(theirs, {names[name]: some for name, some in matrices.items()}), tmp_path)


@pytest.mark.parametrize(("kind", "router"), [("trinity", "router.gate"), ("gemma4-moe", "router.proj")])
def test_some_routers_are_among_the_products_that_peft_adapts(saved, kind, router):
    """So that the first test has some."""
    assert any(name.endswith(router) for name in products(saved(kind)[1]))
