"""Attention as a model sees it: queries, keys and values go in, outputs come out.

The model does not learn where keys and values are kept; this file does not know what a model is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.kernels.contract import Batch, Kernels, Plan, Rotation, Storage


class Attend(Protocol):
    """What a model is handed for its attention."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Keep k and v (num_tokens, num_kv_heads, head_dim) and attend with q (num_tokens, num_heads, head_dim).

        rotation: of q and k, before all else. Returns (num_tokens, num_heads * head_dim).
        """


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer makes attention scores of products: s = scale * q k, then softcap * tanh(s / softcap)."""

    scale: float
    softcap: float = 0.0  # 0: none


class PagedAttend:
    """Attention over the blocks of all groups. It persists; `plan` tells it about the next step."""

    def __init__(self, kernels: Kernels, storages: Sequence[Storage], scores: Sequence[Scores]) -> None:
        """scores: one entry per layer of the model."""
        self._kernels = kernels
        self._storages = storages
        self._scores = scores
        self._plans: list[Plan] = []
        self._places = {
            layer: (group, index)
            for group, storage in enumerate(storages)
            for index, layer in enumerate(storage.group.layers)
        }

    def plan(self, batches: Sequence[Batch]) -> None:
        """Make ready for the chunks of a step, seen by each group in turn."""
        self.use([self._kernels.plan(batch, storage) for batch, storage in zip(batches, self._storages, strict=True)])

    def use(self, plans: Sequence[Plan]) -> None:
        """Go on with plans that were made before, one for each group."""
        self._plans = list(plans)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None = None) -> Tensor:
        """See Attend."""
        group, index = self._places[layer]
        storage, plan, scores = self._storages[group], self._plans[group], self._scores[layer]
        q = self._kernels.rotary_write(storage, index, q, k, v, rotation, plan)
        return self._kernels.attention(storage, index, q, plan, scores.scale, scores.softcap)
