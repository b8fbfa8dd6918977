"""Matrix products with exact sums, whose result does not depend on the order: see `quire.kernels.exact.product`.

The reference's products of low-bit weights have this property already.
"""

import torch
from torch import Tensor

from quire.kernels.contract import PackedWeight, Weight
from quire.kernels.deterministic.rowwise import activate, gate
from quire.kernels.exact import product
from quire.kernels.reference import codes


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """x (num_rows, in) times weight (out, in), plus addend, float32 (num_rows, out), plus bias (out,).

    An addend of zeros changes no bit.
    """
    if isinstance(weight, PackedWeight):
        return codes.linear(x, weight, bias, addend)
    if addend is None:
        return product(x, weight, bias, x.dtype)
    return (product(x, weight, bias) + addend).to(x.dtype)


def gated_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, activation: str, addend: Tensor | None = None
) -> Tensor:
    """The gated product: see Kernels."""
    return gate(linear(x, weight, bias, addend), activation)


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
