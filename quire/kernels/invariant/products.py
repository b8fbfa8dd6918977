"""Products with weights, in tiles of one shape."""

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.contract import Weight
from quire.kernels.invariant.rowwise import gate
from quire.kernels.reference.products import plain

ROWS = 16  # of a tile; the last one is filled up with anything
TERMS = 256  # that one product adds up; with more, libraries were seen to share out a sum by threads


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x (num_rows, in) times weight (out, in), plus bias (out,).

    Partial sums of short types are rounded before they are added in float32: where there are many, that is
    about as much error as the rounding at the end.
    """
    weight = plain(weight)
    out = x.new_empty(len(x), len(weight))
    tile = x.new_zeros(ROWS, x.shape[1])
    for first in range(0, len(x), ROWS):
        rows = min(ROWS, len(x) - first)
        tile[:rows] = x[first : first + rows]
        out[first : first + rows] = _tile(tile, weight, bias)[:rows]
    return out


def _tile(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (ROWS, in) -> float32 (ROWS, out)."""
    total = F.linear(x[:, :TERMS], weight[:, :TERMS]).float()
    for first in range(TERMS, x.shape[1], TERMS):
        total += F.linear(x[:, first : first + TERMS], weight[:, first : first + TERMS])
    return total if bias is None else total + bias


def gated_linear(x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
    """The product of a gated MLP and its gate."""
    return gate(linear(x, weight, bias), activation)


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, activation: str) -> Tensor:
    """The weighted sum of each token's experts, added up in the order of the experts' numbers."""
    ups, downs = plain(up), plain(down)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(ids.flatten().tolist())):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        inner = gated_linear(x[tokens], ups[expert], None, activation)
        out[tokens] += linear(inner, downs[expert]) * weights[tokens, places].unsqueeze(1)
    return out.to(x.dtype)
