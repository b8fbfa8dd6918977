"""Latent attention (MLA; DeepSeek-AI, 2024) without rotary embedding. The KV cache has whole keys and values."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from quire.kernels.contract import Kernels, Rotation, Scheme
from quire.layers.attention import AttentionConfig
from quire.layers.context import ForwardContext
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm

_NORM_EPS = 1e-6  # whatever the other norms have


class LatentAttention(nn.Module):
    """The projections of queries, of the latent vector and of the shared numbers of keys are one parameter.

    `expand` computes keys and values: see `Latent.expanded`.
    """

    def __init__(self, hidden: int, config: AttentionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        if config.latent is None:
            raise ValueError("latent attention needs the sizes of its latent vector")
        self.config, self.latent = config, config.latent
        size = config.num_heads * config.head_dim
        self.qkv = Linear(hidden, size + self.latent.width, bias=False, dtype=dtype)
        self.latent_norm = RMSNorm(self.latent.rank, _NORM_EPS, dtype)
        self.expand = Linear(self.latent.width, 2 * size, bias=False, dtype=dtype)
        self.o = Linear(config.num_heads * self.latent.value_dim, hidden, bias=False, dtype=dtype)

    def use_kernel_layout(self, kernels: Kernels, schemes: Mapping[str, Scheme], prefix: str) -> None:
        """Replace the weights, before they are loaded, by weights in the layout of `kernels`: see MLP."""
        self.qkv.use_kernel_layout(kernels, scheme=schemes.get(f"{prefix}qkv.weight"))
        self.expand.use_kernel_layout(kernels)
        self.o.use_kernel_layout(kernels, scheme=schemes.get(f"{prefix}o.weight"))

    def __call__(
        self,
        layer: int,
        x: Tensor,
        rotation: Rotation | None,
        context: ForwardContext,
        query_scales: Tensor | None = None,
    ) -> Tensor:
        """x (num_tokens, hidden_size) -> the same shape. layer: number of the KV layer.

        rotation and query_scales must be None.
        """
        if rotation is not None or query_scales is not None:
            raise ValueError("latent attention has no rotary embedding and no scales of queries")
        kernels, latent, heads, head_dim = context.kernels, self.latent, self.config.num_heads, self.config.head_dim
        ends = (heads * head_dim, heads * head_dim + latent.rank)
        q, vector, shared = self.qkv(x, context).tensor_split(ends, 1)
        both = kernels.concatenate(self.latent_norm(vector, context), shared)
        k, v = self.expand(both, context).view(len(x), 2 * heads, head_dim).tensor_split(2, 1)
        out = context.attend(layer, q.view(len(x), heads, head_dim), k, v, None)
        values = kernels.multiply_add(out.view(-1, head_dim)[:, : latent.value_dim], 1.0)
        return self.o(values.view(len(x), -1), context)
