"""What a decoder layer does to each token alone, besides matrix products."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al., RoFormer, 2021), halves of a head paired as in Hugging Face's Llama."""
    # x * (cos, cos) + swapped halves of x * (-sin, sin)
    wide_cos = torch.cat((cos, cos), -1).unsqueeze(1)  # (num_tokens, 1, head_dim)
    wide_sin = torch.cat((-sin, sin), -1).unsqueeze(1)
    return _rotate(q, wide_cos, wide_sin), _rotate(k, wide_cos, wide_sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = x.roll(x.shape[-1] // 2, -1)
    return (x * cos).addcmul_(swapped, sin).to(x.dtype)  # float32 cos and sin promote x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation (Zhang and Sennrich, 2019)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual sum and its norm, which always come together in a decoder layer."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: Tensor) -> Tensor:
    """The gate of SwiGLU (Shazeer, 2020)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)
