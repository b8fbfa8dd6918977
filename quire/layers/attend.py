"""Attention interface of models: queries, keys and values to outputs. The KV cache is behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.kernels.contract import Batch, Kernels, Plan, Rotation, Storage


class Attend(Protocol):
    """The attention function that a model gets as an argument."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, rotation: Rotation | None = None
    ) -> Tensor:
        """Store k and v (num_tokens, num_kv_heads, head_dim), and attend with q (num_tokens, num_heads, head_dim).

        layer: number of the KV layer; k and v are None if an earlier layer has stored its KV in this step.
        rotation: applied to q and k first. Returns (num_tokens, num_heads * head_dim).
        """


@dataclass(frozen=True, slots=True)
class ScoreScaling:
    """Scaling of a layer's attention scores: s = scale * q k, then softcap * tanh(s / softcap)."""

    scale: float
    softcap: float = 0.0  # 0: none


class PagedAttend:
    """Attention over the blocks of all KV groups. One instance serves all steps; `plan` prepares the next one."""

    def __init__(self, kernels: Kernels, storages: Sequence[Storage], score_scaling: Sequence[ScoreScaling]) -> None:
        """score_scaling: one entry per KV layer of the model."""
        self._kernels = kernels
        self._storages = storages
        self._score_scaling = score_scaling
        self._plans: list[Plan] = []
        self._layer_index = {
            layer: (group, index)
            for group, storage in enumerate(storages)
            for index, layer in enumerate(storage.group.layers)
        }

    def plan(self, batches: Sequence[Batch]) -> None:
        """Prepare the next step from one Batch per KV group."""
        self.set_plans(
            [self._kernels.plan(batch, storage) for batch, storage in zip(batches, self._storages, strict=True)]
        )

    def set_plans(self, plans: Sequence[Plan]) -> None:
        """Use given kernel plans for the next step, one per KV group."""
        self._plans = list(plans)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, rotation: Rotation | None = None
    ) -> Tensor:
        """See Attend."""
        group, index = self._layer_index[layer]
        storage, plan, scores = self._storages[group], self._plans[group], self._score_scaling[layer]
        if k is not None and v is not None:
            q = self._kernels.rotary_write(storage, index, q, k, v, rotation, plan)
        elif rotation is not None:
            q = self._kernels.rotate(q, rotation)
        return self._kernels.attention(storage, index, q, plan, scores.scale, scores.softcap)
