"""MLP of a layer: up projection, activation or gate, down projection."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from quire.kernels.contract import Kernels, Scheme
from quire.layers.context import ForwardContext
from quire.layers.linear import Linear


class MLP(nn.Module):
    """With a gate, gate and up projections are fused into `up`: first the rows of the gate."""

    def __init__(
        self, hidden: int, inner: int, *, activation: str, gated: bool, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gated = gated
        self.up = Linear(hidden, 2 * inner if gated else inner, bias=bias, dtype=dtype)
        self.down = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.xielu = nn.Parameter(torch.empty(4)) if activation == "xielu" else None

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x (num_tokens, hidden_size) -> the same shape."""
        if self.gated:
            addend = self.up.addend(x, context)
            x = context.kernels.gated_linear(x, self.up.weight, self.up.bias, self.activation, addend)
        elif self.xielu is not None:
            x = context.kernels.xielu(self.up(x, context), self.xielu)
        else:
            x = context.kernels.activate(self.up(x, context), self.activation)
        return self.down(x, context)

    def use_kernel_layout(self, kernels: Kernels, schemes: Mapping[str, Scheme], prefix: str) -> None:
        """Replace the weights, before they are loaded, by weights in the layout of `kernels`.

        schemes: of low-bit weights, by name. prefix: of the names of this module's weights.
        """
        self.up.use_kernel_layout(kernels, 2 if self.gated else 1, schemes.get(f"{prefix}up.weight"))
        self.down.use_kernel_layout(kernels, scheme=schemes.get(f"{prefix}down.weight"))
