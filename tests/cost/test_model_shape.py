"""ModelShape: what start-up fills in from a checkpoint, and the KV groups that follow from it."""

import pytest

from quire.core.kv_groups import kv_kind
from quire.cost.model_shape import ModelShape
from quire.models.description import describe
from quire.startup.memory_demand import shape_of

FULL, WINDOW, WIDE = kv_kind(2, 16, 0), kv_kind(2, 16, 32), kv_kind(4, 16, 0)


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        ((FULL, FULL), [(FULL, (0, 1))]),
        ((WINDOW, FULL, WINDOW, FULL), [(FULL, (1, 3)), (WINDOW, (0, 2))]),
        ((WINDOW, WIDE, FULL), [(WIDE, (1,)), (FULL, (2,)), (WINDOW, (0,))]),
    ],
)
def test_equal_layers_share_a_group_and_groups_without_a_window_come_first(layers, groups):
    shape = ModelShape(
        vocab_size=10,
        max_positions=64,
        num_parameters=100,
        weight_bytes=400,
        weight_types="float32",
        activations_per_token=8,
        layers=layers,
    )
    assert list(shape.kv_groups.items()) == groups


@pytest.mark.parametrize("kind", ["qwen3-gqa", "gemma2"])
def test_the_shape_of_a_checkpoint_agrees_with_transformers(saved, kind):
    folder, theirs = saved(kind)
    shape = shape_of(describe(folder), "float32")
    assert shape.num_parameters == sum(weight.numel() for weight in theirs.parameters())
    assert shape.weight_bytes == 4 * shape.num_parameters
    assert shape.vocab_size == theirs.config.vocab_size
    windows = {"full_attention": 0, "sliding_attention": theirs.config.sliding_window}
    assert shape.layers == tuple(
        kv_kind(theirs.config.num_key_value_heads, theirs.config.head_dim, windows[layer])
        for layer in theirs.config.layer_types
    )
