"""Deterministic operations on each token alone. `quire.kernels.reference.rowwise` cites the papers."""

from functools import partial

import torch
from torch import Tensor

from quire.kernels.contract import Rotation
from quire.kernels.exact import apply_to_whole_vectors, exact_sum
from quire.kernels.reference import rowwise as reference


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding with separate products and sums: a fused multiply-add would round differently."""
    return _rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)), _rotate(k, cos.unsqueeze(1), sin.unsqueeze(1))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x (num_tokens, num_heads, head_dim) rotated as by `rotary`."""
    cos, sin = rotation
    return _rotate(x, cos.unsqueeze(1), sin.unsqueeze(1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(turned, -1).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis."""
    wide = x.float()
    mean = _mean(wide.double().square_())
    return (wide / (mean + eps).sqrt() * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last axis."""
    wide = x.float()
    centred = wide - _mean(wide)
    variance = _mean(centred.double().square_())
    normed = centred / (variance + eps).sqrt() * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def _mean(x: Tensor) -> Tensor:
    """The mean over the last axis, which is kept: float32."""
    return (exact_sum(x) / x.shape[-1]).float()


def activate(x: Tensor, activation: str) -> Tensor:
    """activation(x), for an MLP without a gate."""
    return apply_to_whole_vectors(partial(reference.activate, activation=activation), x)


def gate(x: Tensor, activation: str) -> Tensor:
    """activation(first half of the last axis) * second half."""
    first, second = x.chunk(2, -1)
    return activate(first, activation) * second
