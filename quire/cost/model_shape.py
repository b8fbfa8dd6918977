"""ModelShape: the sizes of a model that its memory depends on, without weights and without torch."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from quire.core.kv_groups import StoredKind
from quire.core.states import StateKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model in the dtype that its weights are loaded as. Start-up fills it from the checkpoint."""

    vocab_size: int
    max_positions: int  # of the longest sequence that the model supports
    num_parameters: int  # a tied head counts once
    weight_bytes: int
    weight_types: str  # in words: "int4 and bfloat16"
    activations_per_token: int  # the most numbers alive at once while a layer computes one token
    layers: tuple[StoredKind, ...]  # the KV of each layer
    state_layers: tuple[StateKind, ...] = ()  # of each layer with a recurrence; all are equal

    @property
    def kv_groups(self) -> Mapping[StoredKind, tuple[int, ...]]:
        """Layer indices by KV group, groups of all positions first."""
        groups: dict[StoredKind, list[int]] = defaultdict(list)
        for index, kind in enumerate(self.layers):
            groups[kind].append(index)
        return {kind: tuple(groups[kind]) for kind in sorted(groups, key=lambda kind: kind.span)}
