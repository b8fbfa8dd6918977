"""Matrix products with plain (unpacked) weights, embedding lookup included."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.contract import PackedWeight, Weight
from quire.kernels.reference.rowwise import gate


def allocate_weight(shape: Sequence[int], dtype: torch.dtype, parts: int = 1) -> None:
    """None: products read plain tensors."""
    del shape, dtype, parts


def write_rows(weight: PackedWeight, rows: Tensor, start: int, index: int = 0) -> None:
    """Raises TypeError if the weight is packed: this module has no packed weights."""
    del rows, start, index
    require_unpacked(weight)


def require_unpacked(weight: Weight) -> Tensor:
    """The weight as a tensor. Raises TypeError for one that another module packed."""
    if isinstance(weight, PackedWeight):
        raise TypeError("this weight was packed by another kernel module")
    return weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x (num_rows, in) times weight (out, in), plus bias (out,)."""
    return F.linear(x, require_unpacked(weight), bias)


def gated_linear(x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
    """The gated product: see Kernels."""
    return gate(linear(x, weight, bias), activation)


def embed(ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
    """Rows of the weight, times `scale`."""
    rows = F.embedding(ids, require_unpacked(weight))
    return rows if scale == 1 else rows * scale


def route(logits: Tensor, k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """The k experts of each token and their weights: see Kernels."""
    weights, ids = logits.float().softmax(-1).topk(k, -1)
    return ids, weights / weights.sum(-1, keepdim=True) if normalise else weights


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, activation: str) -> Tensor:
    """The weighted sum of each token's experts: see Kernels. Terms are added in the order of expert ids."""
    ups, downs = require_unpacked(up), require_unpacked(down)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(ids.flatten().tolist())):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        inner = gated_linear(x[tokens], ups[expert], None, activation)
        out[tokens] += linear(inner, downs[expert]) * weights[tokens, places].unsqueeze(1)
    return out.to(x.dtype)
