"""Attention block of a layer: projections, with norms of queries and keys. The attention function is an argument."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from quire.core.kv_groups import StoredKind
from quire.kernels.contract import Rotation
from quire.layers.context import ForwardContext
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm, Norm, NormKind, make_norm

# norms of queries and keys; "head": over each head, with one weight for all; "each": over each head, with a weight per
# head; "projection": over all heads together
QKNorm = Literal["none", "head", "each", "projection"]


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes and options of an attention block."""

    num_heads: int
    kv: StoredKind
    qkv_bias: bool
    o_bias: bool
    qk_norm: QKNorm
    qk_norm_bias: bool
    norm: NormKind
    norm_eps: float

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.kv.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Numbers of a head of queries and keys."""
        return self.kv.head_dim


class Attention(nn.Module):
    """Query, key and value projections are fused, in this order, into one parameter."""

    def __init__(self, hidden: int, config: AttentionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Linear(hidden, (heads + 2 * kv_heads) * head_dim, bias=config.qkv_bias, dtype=dtype)
        self.o = Linear(heads * head_dim, hidden, bias=config.o_bias, dtype=dtype)
        if config.qk_norm != "none":
            self.q_norm = self._norm(heads, dtype)
            self.k_norm = self._norm(kv_heads, dtype)

    def _norm(self, heads: int, dtype: torch.dtype) -> Norm:
        config = self.config
        if config.qk_norm == "each":
            return LayerNorm((heads, config.head_dim), config.norm_eps, dtype, bias=config.qk_norm_bias)
        size = config.head_dim if config.qk_norm == "head" else heads * config.head_dim
        return make_norm(config.norm, size, config.norm_eps, dtype, bias=config.qk_norm_bias)

    def __call__(self, layer: int, x: Tensor, rotation: Rotation | None, context: ForwardContext) -> Tensor:
        """x (num_tokens, hidden_size) -> the same shape. rotation: None if the layer has no rotary embedding."""
        config = self.config
        qkv = self.qkv(x, context).view(x.shape[0], -1, config.head_dim)
        q, k, v = qkv.tensor_split((config.num_heads, config.num_heads + config.num_kv_heads), 1)
        if config.qk_norm == "projection":
            q = self.q_norm(q.flatten(1), context).view(q.shape)
            k = self.k_norm(k.flatten(1), context).view(k.shape)
        elif config.qk_norm != "none":
            q, k = self.q_norm(q, context), self.k_norm(k, context)
        return self.o(context.attend(layer, q, k, v, rotation), context)
