"""What a decoder layer does to each token alone, besides mixing experts."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.exact import by_vectors


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
    }
)


def rotation(positions: Tensor, frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (num_tokens,), float32 (num_tokens, dim / 2).

    A position has the same ones, bit for bit, whichever others there are.
    """
    angles = positions.float().unsqueeze(1) * frequencies
    cos, sin = by_vectors(torch.cos, angles), by_vectors(torch.sin, angles)
    return (cos, sin) if magnitude == 1 else (cos * magnitude, sin * magnitude)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al., RoFormer, 2021), halves of a head paired as in Hugging Face's Llama."""
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation (Zhang and Sennrich, 2019)."""
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual sum and its norm, which always come together in a decoder layer."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer normalisation (Ba et al., 2016) over the last axis."""
    if weight.dim() == 1:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation of an MLP without a gate."""
    return _ACTIVATIONS[activation](x)


def gate(x: Tensor, activation: str) -> Tensor:
    """The gate of SwiGLU and its kin (Shazeer, 2020)."""
    first, second = x.chunk(2, -1)
    return _ACTIVATIONS[activation](first).mul_(second)
