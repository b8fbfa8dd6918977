"""Mixtures of experts: each expert that some token wants runs once, on the tokens that want it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.reference.rowwise import gate


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """The weighted sum of each token's experts, added up in the order of the experts' numbers."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(ids.flatten().tolist())):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        inner = gate(F.linear(x[tokens], up[expert]), activation)
        out[tokens] += F.linear(inner, down[expert]) * weights[tokens, places].unsqueeze(1)
    return out.to(x.dtype)
