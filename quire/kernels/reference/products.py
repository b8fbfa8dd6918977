"""Matrix products with plain (unpacked) and low-bit weights, embedding lookup included."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.contract import PackedWeight, Routing, Scheme, Weight
from quire.kernels.exact import apply_to_whole_vectors
from quire.kernels.reference import codes
from quire.kernels.reference.rowwise import activate, gate


def allocate_weight(
    shape: Sequence[int], dtype: torch.dtype, parts: int = 1, scheme: Scheme | None = None
) -> PackedWeight | None:
    """A low-bit weight, or None without a scheme: other products read plain tensors."""
    return None if scheme is None else codes.allocate(shape, dtype, parts, scheme)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """x (num_rows, in) times weight (out, in), plus addend, float32 (num_rows, out), plus bias (out,)."""
    if isinstance(weight, PackedWeight):
        return codes.linear(x, weight, bias, addend)
    if addend is None:
        return F.linear(x, weight, bias)
    return (F.linear(x.float(), weight.float(), None if bias is None else bias.float()) + addend).to(x.dtype)


def gated_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, activation: str, addend: Tensor | None = None
) -> Tensor:
    """The gated product: see Kernels."""
    return gate(linear(x, weight, bias, addend), activation)


def embed(ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
    """Rows of the weight, times `scale`."""
    if isinstance(weight, PackedWeight):
        return codes.embed(ids, weight, scale)
    rows = F.embedding(ids, weight)
    return rows if scale == 1 else rows * scale


def route(
    logits: Tensor, k: int, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k experts of each token and their weights: see Kernels."""
    wide = logits.float()
    if routing.score == "sparsemixer":
        return _mixed(wide, k, routing.jitter)
    scores = wide.softmax(-1) if routing.score == "softmax" else apply_to_whole_vectors(torch.sigmoid, wide)
    values = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        groups = values.reshape(len(values), routing.num_groups, -1)
        best = groups.topk(2, -1).values.sum(-1).topk(routing.top_groups, -1).indices
        kept = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=logits.device).scatter_(-1, best, value=True)
        values = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = values.topk(k, -1).indices
    weights = scores.gather(-1, ids)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # the scores of sigmoids may all be 0
    return ids, weights * routing.scale if scales is None else weights * routing.scale * scales[ids]


def _mixed(logits: Tensor, k: int, jitter: float) -> tuple[Tensor, Tensor]:
    """The experts and weights of "sparsemixer"."""
    left, ids, weights = logits, [], []
    for _ in range(k):
        most, best = left.max(-1, keepdim=True)
        is_far = (most - logits) / torch.maximum(logits.abs(), most) > 2 * jitter
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(-1, best))
        ids.append(best)
        left = left.scatter(-1, best, -torch.inf)
    return torch.cat(ids, -1), torch.cat(weights, -1)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, activation: str, *, gated: bool = True
) -> Tensor:
    """The weighted sum of each token's experts: see Kernels. Terms are added in the order of expert ids."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(ids.flatten().tolist())):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        inner = linear(x[tokens], up[expert])
        inner = gate(inner, activation) if gated else activate(inner, activation)
        out[tokens] += linear(inner, down[expert]) * weights[tokens, places].unsqueeze(1)
    return out.to(x.dtype)
