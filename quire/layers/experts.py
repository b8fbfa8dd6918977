"""Mixture of experts in place of an MLP: a router selects a few gated MLPs per token (Shazeer et al., 2017)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels.contract import Kernels, Scheme, Weight
from quire.layers.context import ForwardContext
from quire.layers.linear import Linear, allocate_weight
from quire.layers.mlp import MLP


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Number and sizes of experts, routing, and which layers have them."""

    num_experts: int
    per_token: int
    intermediate_size: int  # of one expert
    normalise: bool  # whether the weights of a token's experts are scaled to sum 1
    shared_size: int = 0  # intermediate size of an expert for all tokens, weighted by a gate; 0: none
    sparse_step: int = 1  # every step-th layer has experts,
    dense_layers: tuple[int, ...] = ()  # except these


class Experts(nn.Module):
    """Stacked weights of all experts, with router and optional shared expert."""

    def __init__(self, hidden: int, config: ExpertsConfig, *, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.activation = activation
        num_experts, inner = config.num_experts, config.intermediate_size
        self.router = Linear(hidden, num_experts, bias=False, dtype=dtype)
        gates_and_gated = torch.empty(num_experts, 2 * inner, hidden, dtype=dtype)  # gates first, as in MLP
        self.up: Weight = nn.Parameter(gates_and_gated)
        self.down: Weight = nn.Parameter(torch.empty(num_experts, hidden, inner, dtype=dtype))
        self.shared: MLP | None = None
        if config.shared_size:
            self.shared = MLP(hidden, config.shared_size, activation=activation, gated=True, bias=False, dtype=dtype)
            self.shared_gate = Linear(hidden, 1, bias=False, dtype=dtype)

    def use_kernel_layout(self, kernels: Kernels, schemes: Mapping[str, Scheme], prefix: str) -> None:
        """Replace the weights, before they are loaded, by weights in the layout of `kernels`: see MLP."""
        self.router.use_kernel_layout(kernels)
        self.up = allocate_weight(self, "up", kernels, 2, schemes.get(f"{prefix}up"))
        self.down = allocate_weight(self, "down", kernels, scheme=schemes.get(f"{prefix}down"))
        if self.shared is not None:
            self.shared.use_kernel_layout(kernels, schemes, f"{prefix}shared.")
            self.shared_gate.use_kernel_layout(kernels)

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x (num_tokens, hidden_size) -> the same shape."""
        config, kernels = self.config, context.kernels
        ids, weights = kernels.route(self.router(x, context), config.per_token, normalise=config.normalise)
        out = kernels.experts(x, ids, weights, self.up, self.down, self.activation)
        if self.shared is not None:
            share = kernels.activate(self.shared_gate(x, context), "sigmoid")
            out = out + share * self.shared(x, context)
        return out
