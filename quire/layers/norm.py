"""Norms, also fused with a residual sum: RMS norm, layer norm, or none. The three have the same interface."""

from typing import Literal

import torch
from torch import Tensor, nn

from quire.layers.context import ForwardContext

NormKind = Literal["rms", "rms_plus_one", "layer", "layer_plus_one"]  # plus_one: checkpoints hold the weight minus 1


class RMSNorm(nn.Module):
    """Root mean square norm of the last axis."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x normalised over its last axis."""
        return context.kernels.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """(x + residual normalised, x + residual)."""
        return context.kernels.add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm. A shape (heads, head_dim) gives each head a weight of its own."""

    def __init__(self, shape: tuple[int, ...], eps: float, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape, dtype=dtype)) if bias else None

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x normalised over its last axis."""
        return context.kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """(x + residual normalised, x + residual)."""
        total = context.kernels.multiply_add(x, 1.0, residual)
        return context.kernels.layer_norm(total, self.weight, self.bias, self.eps), total


class NoNorm(nn.Module):
    """Identity, for families without a norm at this place."""

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x unchanged."""
        del context
        return x

    def add_and_norm(self, x: Tensor, residual: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """(x + residual, x + residual)."""
        total = context.kernels.multiply_add(x, 1.0, residual)
        return total, total


Norm = RMSNorm | LayerNorm | NoNorm


def make_norm(kind: NormKind, size: int, eps: float, dtype: torch.dtype, *, bias: bool) -> Norm:
    """A norm over `size` numbers.

    Weights of the kinds "plus_one" stay float32: 1 + w has digits that a 16-bit type would drop.
    """
    dtype = torch.float32 if kind.endswith("plus_one") else dtype
    if kind.startswith("layer"):
        return LayerNorm((size,), eps, dtype, bias=bias)
    return RMSNorm(size, eps, dtype)
