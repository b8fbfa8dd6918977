"""Mixture of experts in place of an MLP: a router selects a few MLPs per token (Shazeer et al., 2017)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels.contract import Kernels, Routing, Scheme, Weight
from quire.layers.context import ForwardContext
from quire.layers.linear import Linear, allocate_weight
from quire.layers.mlp import MLP
from quire.layers.norm import Norm, RMSNorm


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Number and sizes of experts, and routing."""

    num_experts: int
    per_token: int
    intermediate_size: int  # of one expert
    routing: Routing
    is_router_float32: bool = False  # whether the router's weight and product are float32 in models of any type
    has_router_bias: bool = False  # whether a bias of each expert is added to its score where experts are selected
    shared_size: int = 0  # intermediate size of an expert for all tokens; 0: none
    num_shared: int = 1  # of these experts, which are one MLP
    has_shared_gate: bool = True  # whether a gate weights the shared expert
    gated: bool = True  # whether experts are gated MLPs, the shared one included
    latent_size: int = 0  # numbers of a row between two projections that all experts but the shared one share; 0: none
    bias: bool = False  # whether the shared expert and these two projections have biases
    is_beside_mlp: bool = False  # whether they are added to an MLP: see MLPAndExperts

    @property
    def shared_intermediate_size(self) -> int:
        """Intermediate size of all shared experts together; 0: there are none."""
        return self.shared_size * self.num_shared


class Experts(nn.Module):
    """Stacked weights of all experts, with router and optional shared expert."""

    def __init__(self, hidden: int, config: ExpertsConfig, *, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.activation = activation
        num_experts, inner = config.num_experts, config.intermediate_size
        router_dtype = torch.float32 if config.is_router_float32 else dtype
        self.router = Linear(hidden, num_experts, bias=False, dtype=router_dtype)
        self.router_bias = nn.Parameter(torch.empty(num_experts)) if config.has_router_bias else None
        self.scales = nn.Parameter(torch.empty(num_experts)) if config.is_beside_mlp else None
        size = config.latent_size or hidden
        if config.latent_size:
            self.latent_in = Linear(hidden, size, bias=config.bias, dtype=dtype)
            self.latent_out = Linear(size, hidden, bias=config.bias, dtype=dtype)
        up = torch.empty(num_experts, 2 * inner if config.gated else inner, size, dtype=dtype)  # gates first, as in MLP
        self.up: Weight = nn.Parameter(up)
        self.down: Weight = nn.Parameter(torch.empty(num_experts, size, inner, dtype=dtype))
        self.shared: MLP | None = None
        if shared := config.shared_intermediate_size:
            self.shared = MLP(hidden, shared, activation=activation, gated=config.gated, bias=config.bias, dtype=dtype)
            self.shared_gate = Linear(hidden, 1, bias=False, dtype=dtype) if config.has_shared_gate else None

    def use_kernel_layout(self, kernels: Kernels, schemes: Mapping[str, Scheme], prefix: str) -> None:
        """Replace the weights, before they are loaded, by weights in the layout of `kernels`: see MLP."""
        self.router.use_kernel_layout(kernels)
        self.up = allocate_weight(self, "up", kernels, 2 if self.config.gated else 1, schemes.get(f"{prefix}up"))
        self.down = allocate_weight(self, "down", kernels, scheme=schemes.get(f"{prefix}down"))
        if self.config.latent_size:
            for name in ("latent_in", "latent_out"):
                getattr(self, name).use_kernel_layout(kernels, scheme=schemes.get(f"{prefix}{name}.weight"))
        if self.shared is not None:
            self.shared.use_kernel_layout(kernels, schemes, f"{prefix}shared.")
            if self.shared_gate is not None:
                self.shared_gate.use_kernel_layout(kernels)

    def __call__(self, x: Tensor, context: ForwardContext, routed: Tensor | None = None) -> Tensor:
        """x (num_tokens, hidden_size) -> the same shape. routed: input of the router; None: x."""
        config, kernels = self.config, context.kernels
        routed = x if routed is None else routed
        logits = self.router(kernels.widen(routed) if config.is_router_float32 else routed, context)
        ids, weights = kernels.route(logits, config.per_token, config.routing, self.router_bias, self.scales)
        rows = self.latent_in(x, context) if config.latent_size else x
        out = kernels.experts(rows, ids, weights, self.up, self.down, self.activation, gated=config.gated)
        if config.latent_size:
            out = self.latent_out(out, context)
        if self.shared is None:
            return out
        share = 1.0 if self.shared_gate is None else kernels.activate(self.shared_gate(x, context), "sigmoid")
        return kernels.multiply_add(self.shared(x, context), share, out)


class MLPAndExperts(nn.Module):
    """Gemma 4's sum of an MLP and experts. Each has a norm of its output; the experts have norms of their inputs."""

    def __init__(
        self, mlp: MLP, experts: Experts, hidden: int, norm: Callable[[], Norm], *, eps: float, dtype: torch.dtype
    ) -> None:
        """norm: makes a norm over `hidden` numbers, with a weight."""
        super().__init__()
        self.mlp = mlp
        self.experts = experts
        self.mlp_out_norm, self.experts_norm, self.experts_out_norm = norm(), norm(), norm()
        self.router_norm = RMSNorm(hidden, eps, dtype)
        self.router_scale = hidden**-0.5

    def use_kernel_layout(self, kernels: Kernels, schemes: Mapping[str, Scheme], prefix: str) -> None:
        """Replace the weights, before they are loaded, by weights in the layout of `kernels`: see MLP."""
        self.mlp.use_kernel_layout(kernels, schemes, f"{prefix}mlp.")
        self.experts.use_kernel_layout(kernels, schemes, f"{prefix}experts.")

    def __call__(self, x: Tensor, context: ForwardContext, residual: Tensor) -> Tensor:
        """x and residual (num_tokens, hidden_size) -> the same shape. x: normalised residual, input of the MLP."""
        kernels = context.kernels
        routed = kernels.multiply_add(self.router_norm(residual, context), self.router_scale)
        chosen = self.experts(self.experts_norm(residual, context), context, routed)
        dense = self.mlp_out_norm(self.mlp(x, context), context)
        return kernels.multiply_add(dense, 1.0, self.experts_out_norm(chosen, context))
