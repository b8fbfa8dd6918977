"""Hessians of a model's projections over sequences of tokens: the sums of xᵀ x over the rows x that each multiplies."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from quire.config import CacheConfig
from quire.kernels.contract import Addend, Batch, Kernels, Weight, replace_kernels
from quire.layers.attend import PagedAttend
from quire.layers.context import ForwardContext
from quire.layers.norm import NoNorm
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.loading import weight_of

Hessians = Mapping[tuple[str, int], Tensor]  # by parameter, and index in a stack of experts, else 0


class _Recording:
    """Sums xᵀ x of the products with the weights in `names`, which are computed with `kernels`."""

    def __init__(self, kernels: Kernels, names: Mapping[int, str]) -> None:
        """names: parameter by id() of its weight."""
        self._kernels = kernels
        self._names = names
        self.hessians: dict[tuple[str, int], Tensor] = {}

    @property
    def kernels(self) -> Kernels:
        """The kernels with products that are recorded."""
        return replace_kernels(
            self._kernels, linear=self._linear, gated_linear=self._gated_linear, experts=self._experts
        )

    def _linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None, addend: Addend | None = None) -> Tensor:
        self._add(x, weight)
        return self._kernels.linear(x, weight, bias, addend)

    def _gated_linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str, addend: Addend | None = None
    ) -> Tensor:
        self._add(x, weight)
        return self._kernels.gated_linear(x, weight, bias, activation, addend)

    def _experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, activation: str, *, gated: bool = True
    ) -> Tensor:
        for expert in sorted(set(ids.flatten().tolist())):
            rows = x[(ids == expert).any(1)]
            self._add(rows, up, expert)
            if gated:
                inner = self._kernels.gated_linear(rows, up[expert], None, activation)
            else:
                inner = self._kernels.activate(self._kernels.linear(rows, up[expert]), activation)
            self._add(inner, down, expert)
        return self._kernels.experts(x, ids, weights, up, down, activation, gated=gated)

    def _add(self, x: Tensor, weight: Weight, index: int = 0) -> None:
        if id(weight) not in self._names:
            return
        key, rows = (self._names[id(weight)], index), x.float()
        total = self.hessians.setdefault(key, torch.zeros((rows.shape[1],) * 2, device=rows.device))
        total.addmm_(rows.T, rows)


@torch.inference_mode()
def layer_hessians(
    model: Decoder,
    sequences: Sequence[Tensor],
    parameters: Collection[str],
    *,
    kernels: Kernels,
    cache: CacheConfig,
) -> Iterator[Hessians]:
    """Yield the Hessians, float32 (columns, columns), of one layer after another, which is then removed from the model.

    An expert that no token selects has none. sequences: token ids, int64. parameters: those of which Hessians are
    summed. kernels: those for which the model was loaded. cache: has blocks for the longest sequence.
    """
    storages = [kernels.allocate(group, cache.block_size, model.device) for group in cache.groups]
    attend = PagedAttend(kernels, storages, model.score_scaling)
    contexts = [ForwardContext(kernels, attend, torch.arange(len(ids))) for ids in sequences]
    embedded = [model.embed_tokens(*pair) for pair in zip(sequences, contexts, strict=True)]
    residuals = list(embedded)
    for index, layer in enumerate(cast(list[DecoderLayer], list(model.layers))):
        own = [parameter for parameter in parameters if parameter.startswith(f"layers.{index}.")]
        recording = _Recording(kernels, {id(weight_of(model, parameter)): parameter for parameter in own})
        for i, (context, residual) in enumerate(zip(contexts, residuals, strict=True)):
            length = len(context.positions)
            blocks = np.arange(-(-length // cache.block_size), dtype=np.int64)[None]
            attend.plan([Batch(np.zeros(1, np.int64), np.array([length]), blocks) for _ in storages])
            x, inputs = layer.attn_norm(residual, context), model.inputs(sequences[i], embedded[i], context)
            recorded = replace(context, kernels=recording.kernels)
            _, residuals[i] = layer(x, residual, NoNorm(), inputs, recorded)
        model.layers[index] = nn.Identity()
        yield recording.hessians
