"""Attention block of a layer: projections, with norms of queries and keys. The attention function is an argument."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from quire.core.kv_groups import StoredKind
from quire.kernels.contract import Kernels, Rotation, Scheme
from quire.layers.context import ForwardContext
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm, Norm, NormKind, make_norm
from quire.weights.latent import Latent

# norms of queries and keys; "head": over each head, with one weight for all; "each": over each head, with a weight per
# head; "projection": over all heads together
QKNorm = Literal["none", "head", "each", "projection"]
# activation of a gate on the outputs of heads, one factor for each number of the output; ":head": one for each head
Gate = Literal["", "sigmoid", "softplus", "softplus:head"]


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes and options of an attention block."""

    num_heads: int
    kv: StoredKind
    qkv_bias: bool
    o_bias: bool
    qk_norm: QKNorm
    qk_norm_bias: bool
    qk_norm_first: bool  # whether queries and keys are normalised before they are rotated, not after
    gate: Gate
    gate_in_queries: bool  # whether the gate's factors are rows of the fused parameter, behind the queries
    v_norm: bool  # whether each head of values is normalised, without a weight
    values_are_keys: bool  # whether values are the keys before their norm, so that there is no projection of values
    has_own_kv: bool  # whether it has keys and values, or attends to those that an earlier layer has stored
    norm: NormKind
    norm_eps: float
    latent: Latent | None = None  # of latent attention, which has no options but sizes

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.kv.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Numbers of a head of queries and keys."""
        return self.kv.head_dim

    @property
    def num_projections(self) -> int:
        """Projections of the layer's own KV heads: of keys and values, of keys alone, or none."""
        return (1 if self.values_are_keys else 2) if self.has_own_kv else 0

    @property
    def num_gate_factors(self) -> int:
        """Factors of a token's gate."""
        return self.num_heads if self.gate.endswith(":head") else self.num_heads * self.head_dim

    @property
    def num_query_heads(self) -> int:
        """Heads of the fused parameter before those of keys: of queries, and of a gate that is part of it."""
        return self.num_heads * (2 if self.gate_in_queries else 1)

    @property
    def activations_per_token(self) -> int:
        """The most activation numbers that one token needs at the same time."""
        size = self.num_heads * self.head_dim
        if self.latent is not None:
            return 5 * size + 2 * self.latent.width
        return (5 if self.gate_in_queries else 3) * size


class Attention(nn.Module):
    """The projections of queries, keys and values that a layer has are fused, in this order, into one parameter.

    The gate has a parameter of its own, or follows the queries in the fused one.
    """

    def __init__(self, hidden: int, config: AttentionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (config.num_query_heads + config.num_projections * kv_heads) * head_dim
        self.qkv = Linear(hidden, rows, bias=config.qkv_bias, dtype=dtype)
        self.o = Linear(heads * head_dim, hidden, bias=config.o_bias, dtype=dtype)
        self.gate: Linear | None = None
        if config.gate and not config.gate_in_queries:
            self.gate = Linear(hidden, config.num_gate_factors, bias=False, dtype=dtype)
        if config.qk_norm != "none":
            self.q_norm = self._norm(heads, dtype)
            self.k_norm = self._norm(kv_heads, dtype) if config.has_own_kv else None
        self.ones = torch.ones(head_dim, dtype=dtype) if config.v_norm else None  # weight of the norm of values

    def _norm(self, heads: int, dtype: torch.dtype) -> Norm:
        config = self.config
        if config.qk_norm == "each":
            return LayerNorm((heads, config.head_dim), config.norm_eps, dtype, bias=config.qk_norm_bias)
        size = config.head_dim if config.qk_norm == "head" else heads * config.head_dim
        return make_norm(config.norm, size, config.norm_eps, dtype, bias=config.qk_norm_bias)

    def use_kernel_layout(self, kernels: Kernels, schemes: Mapping[str, Scheme], prefix: str) -> None:
        """Replace the weights, before they are loaded, by weights in the layout of `kernels`: see MLP."""
        self.qkv.use_kernel_layout(kernels, scheme=schemes.get(f"{prefix}qkv.weight"))
        self.o.use_kernel_layout(kernels, scheme=schemes.get(f"{prefix}o.weight"))
        if self.gate is not None:
            self.gate.use_kernel_layout(kernels)

    def __call__(
        self,
        layer: int,
        x: Tensor,
        rotation: Rotation | None,
        context: ForwardContext,
        query_scales: Tensor | None = None,
    ) -> Tensor:
        """x (num_tokens, hidden_size) -> the same shape.

        layer: number of the KV layer. rotation: None if the layer has no rotary embedding. query_scales: float32
        (num_tokens, 1).
        """
        config, kernels = self.config, context.kernels
        qkv = self.qkv(x, context).view(x.shape[0], -1, config.head_dim)
        ends = (config.num_heads, config.num_query_heads, config.num_query_heads + config.num_kv_heads)
        q, gates, keys, values = qkv.tensor_split(ends, 1)
        k, v = (keys, keys if config.values_are_keys else values) if config.has_own_kv else (None, None)
        if rotation is not None and not config.qk_norm_first:
            q, k, rotation = kernels.rotate(q, rotation), None if k is None else kernels.rotate(k, rotation), None
        if config.qk_norm != "none":
            q = self._normalised(q, self.q_norm, context)
            k = None if k is None else self._normalised(k, self.k_norm, context)
        if self.ones is not None and v is not None:
            v = kernels.rms_norm(v, self.ones, config.norm_eps)
        if query_scales is not None:
            q = kernels.multiply_add(q.flatten(1), query_scales).view(q.shape)
        out = context.attend(layer, q, k, v, rotation)
        if config.gate:
            logits = gates.flatten(1) if self.gate is None else self.gate(x, context)
            out = kernels.multiply_add(out, kernels.activate(logits, config.gate.removesuffix(":head")))
        return self.o(out, context)

    def _normalised(self, x: Tensor, norm: Norm | None, context: ForwardContext) -> Tensor:
        """x (num_tokens, heads, head_dim) normalised as `qk_norm` says."""
        if norm is None:
            raise ValueError("a layer without keys has no norm of keys")
        return norm(x.flatten(1), context).view(x.shape) if self.config.qk_norm == "projection" else norm(x, context)
