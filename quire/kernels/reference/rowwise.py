"""Operations on each token alone: rotary embedding, norms, activations."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.exact import apply_to_whole_vectors


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": _gelu_tanh,
        "relu": F.relu,
        "relu2": _relu_squared,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "softplus": F.softplus,
    }
)


def rotation(positions: Tensor, frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, times `magnitude`, of positions (num_tokens,): float32 (num_tokens, dim / 2).

    The bits for a position do not depend on the other positions.
    """
    angles = positions.float().unsqueeze(1) * frequencies
    cos, sin = apply_to_whole_vectors(torch.cos, angles), apply_to_whole_vectors(torch.sin, angles)
    return (cos, sin) if magnitude == 1 else (cos * magnitude, sin * magnitude)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al., RoFormer, 2021). The halves of a head are paired as in transformers' Llama.

    Returns the rotated q and k.
    """
    # x * (cos, cos) + swapped halves of x * (-sin, sin)
    wide_cos = torch.cat((cos, cos), -1).unsqueeze(1)  # (num_tokens, 1, rotary_dim)
    wide_sin = torch.cat((-sin, sin), -1).unsqueeze(1)
    return _rotate(q, wide_cos, wide_sin), _rotate(k, wide_cos, wide_sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((_rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), -1)
    swapped = x.roll(rotary_dim // 2, -1)
    return (x * cos).addcmul_(swapped, sin).to(x.dtype)  # float32 cos and sin promote x


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x (num_tokens, num_heads, head_dim) rotated as by `rotary`."""
    return rotary(x, x[:, :0], *rotation)[0]


def multiply_add(x: Tensor, factors: Tensor | float, addend: Tensor | None = None) -> Tensor:
    """x * factors + addend: see Kernels."""
    if isinstance(factors, Tensor):
        out = (x.float().reshape(len(x), factors.shape[1], -1) * factors.float().unsqueeze(-1)).flatten(-2)
    else:
        out = x.float() * factors
    return (out if addend is None else out + addend.float()).to(x.dtype)


def concatenate(x: Tensor, y: Tensor) -> Tensor:
    """x (num_rows, n) and y (num_rows, m), side by side."""
    return torch.cat((x, y), 1)


def widen(x: Tensor) -> Tensor:
    """x in float32."""
    return x.float()


def xielu(x: Tensor, parameters: Tensor) -> Tensor:
    """The activation of Apertus: see Kernels."""
    a, b, beta, eps = parameters.unbind()
    positive, negative = F.softplus(a), beta + F.softplus(b)
    wide = x.float()
    below = (apply_to_whole_vectors(torch.expm1, torch.minimum(wide, eps)) - wide) * negative
    return (torch.where(wide > 0, positive * wide * wide, below) + beta * wide).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis (Zhang and Sennrich, 2019)."""
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last axis (Ba et al., 2016)."""
    if weight.dim() == 1 and weight.dtype == x.dtype:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def activate(x: Tensor, activation: str) -> Tensor:
    """activation(x), for an MLP without a gate."""
    return _ACTIVATIONS[activation](x)


def gate(x: Tensor, activation: str) -> Tensor:
    """activation(first half of the last axis) * second half, as in SwiGLU and other GLU variants (Shazeer, 2020)."""
    first, second = x.chunk(2, -1)
    return _ACTIVATIONS[activation](first).mul_(second)
