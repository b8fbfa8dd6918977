"""ModelShape: the sizes of a model that its memory depends on, without weights and without torch."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class KVLayer(NamedTuple):
    """Keys and values of one layer. Layers with equal values share a KV group."""

    num_kv_heads: int
    head_dim: int
    window: int  # positions that a query attends to, its own included; 0: all


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model in the dtype that its weights are loaded as. Start-up fills it from the checkpoint."""

    vocab_size: int
    max_positions: int  # of the longest sequence that the model supports
    num_parameters: int  # a tied head counts once
    weight_bytes: int
    weight_types: str  # in words: "int4 and bfloat16"
    activations_per_token: int  # the most numbers alive at once while a layer computes one token
    layers: tuple[KVLayer, ...]

    @property
    def kv_groups(self) -> Mapping[KVLayer, tuple[int, ...]]:
        """Layer indices by KV group, groups without a window first."""
        groups: dict[KVLayer, list[int]] = defaultdict(list)
        for index, layer in enumerate(self.layers):
            groups[layer].append(index)
        return {layer: tuple(groups[layer]) for layer in sorted(groups, key=lambda layer: layer.window)}
