"""Recurrence of a layer in place of attention: projections, gates and norms. The recurrence function is an argument."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.core.states import StateKind
from quire.kernels.contract import Kernels, Scheme
from quire.kernels.state_contract import RecurrenceWeights
from quire.layers.context import ForwardContext
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class RecurrenceConfig:
    """Sizes and options of a recurrence block."""

    kind: StateKind
    bias: bool  # of the projections
    conv_bias: bool
    norm_eps: float
    time_limits: tuple[float, float] = (0.0, float("inf"))  # see RecurrenceWeights

    @property
    def has_gate_projection(self) -> bool:
        """Whether the gates have a projection of their own, which always has the model's type."""
        return self.kind.rule in ("delta", "kda")

    @property
    def gate_rank(self) -> int:
        """Numbers between the two projections of gates that have low rank; 0: none have."""
        return self.kind.value_dim if self.kind.rule == "kda" else 0

    @property
    def num_gates_projected(self) -> int:
        """Numbers of a token that the projection of gates computes."""
        return self.kind.num_value_heads + 2 * self.gate_rank if self.gate_rank else self.kind.num_gates

    @property
    def num_projected(self) -> int:
        """Numbers of a token that the input projection computes."""
        kind = self.kind
        if kind.rule == "convolution":
            return 3 * kind.num_values
        if kind.rule == "kda":
            return kind.num_channels
        return (kind.num_channels if self.has_gate_projection else kind.width) + kind.num_values

    @property
    def norm_size(self) -> int:
        """Numbers of the weight of the norm."""
        return self.kind.num_values if self.kind.rule == "mamba2" else self.kind.value_dim

    @property
    def activations_per_token(self) -> int:
        """The most activation numbers that one token needs at the same time."""
        kind = self.kind
        gates = self.num_gates_projected + 2 * kind.num_gates if self.gate_rank else 0
        return self.num_projected + gates + max(kind.width + kind.num_values, 3 * kind.num_values)


class Recurrence(nn.Module):
    """The recurrence of all kinds.

    delta, mamba2   The input projection has queries, keys and values, in mamba2 then gates, and last the output gate z.
                    delta normalises each head of the outputs, then multiplies by silu(z); mamba2 multiplies first, and
                    normalises the value heads of a key head together.
    kda             as delta, but the gates a and z have two projections each, of low rank in between, and the factors
                    are sigmoid(z). The first projections are those of `gates`, behind b.
    convolution     The input projection has b, c and x (LFM2). The result is c * convolution(b * x).
    """

    def __init__(self, hidden: int, config: RecurrenceConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        kind = config.kind
        self.inputs = Linear(hidden, config.num_projected, bias=config.bias, dtype=dtype)
        self.gates, self.decay_gates, self.output_gates = None, None, None
        if config.has_gate_projection:
            self.gates = Linear(hidden, config.num_gates_projected, bias=False, dtype=dtype)
        if config.gate_rank:
            self.decay_gates = Linear(config.gate_rank, kind.num_keys, bias=False, dtype=dtype)
            self.output_gates = Linear(config.gate_rank, kind.num_values, bias=False, dtype=dtype)
        self.conv_weight = nn.Parameter(torch.empty(kind.num_channels, kind.conv_width, dtype=dtype))
        self.conv_bias = nn.Parameter(torch.empty(kind.num_channels, dtype=dtype)) if config.conv_bias else None
        self.decay, self.time_bias, self.skip = None, None, None
        if kind.rule != "convolution":
            self.decay = nn.Parameter(torch.empty(kind.num_value_heads))
            self.time_bias = nn.Parameter(torch.empty(kind.num_time_biases))
            self.norm = RMSNorm(config.norm_size, config.norm_eps, dtype)
        if kind.rule == "mamba2":
            self.skip = nn.Parameter(torch.empty(kind.num_value_heads))
            self.ones = torch.ones(kind.num_values // kind.num_key_heads, dtype=dtype)  # weight of the norm of a group
        self.o = Linear(kind.num_values, hidden, bias=config.bias, dtype=dtype)

    def use_kernel_layout(self, kernels: Kernels, schemes: Mapping[str, Scheme], prefix: str) -> None:
        """Replace the weights, before they are loaded, by weights in the layout of `kernels`: see MLP."""
        self.inputs.use_kernel_layout(kernels, scheme=schemes.get(f"{prefix}inputs.weight"))
        self.o.use_kernel_layout(kernels, scheme=schemes.get(f"{prefix}o.weight"))
        for gates in (self.gates, self.decay_gates, self.output_gates):
            if gates is not None:
                gates.use_kernel_layout(kernels)

    def __call__(self, layer: int, x: Tensor, context: ForwardContext) -> Tensor:
        """x (num_tokens, hidden_size) -> the same shape. layer: number among the layers with a state."""
        if context.recur is None:
            raise ValueError("a layer with a recurrence needs the states of the sequences")
        kind, kernels = self.config.kind, context.kernels
        projected = self.inputs(x, context)
        if kind.rule == "convolution":
            b, c, values = projected.tensor_split(3, 1)
            out = context.recur(layer, kernels.multiply_add(values, b), self._weights())
            return self.o(kernels.multiply_add(out, c), context)
        if self.decay_gates is not None and self.output_gates is not None and self.gates is not None:
            ends = (kind.num_value_heads, kind.num_value_heads + self.config.gate_rank)
            b, a, z = self.gates(x, context).tensor_split(ends, 1)
            gates = kernels.concatenate(b, self.decay_gates(a, context))
            out = context.recur(layer, kernels.concatenate(projected, gates), self._weights())
            factors = kernels.activate(self.output_gates(z, context), "sigmoid")
            return self.o(self._gated(out, factors, context), context)
        channels, gates, z = projected.tensor_split((kind.num_channels, self.config.num_projected - kind.num_values), 1)
        if self.gates is not None:
            gates = self.gates(x, context)
        out = context.recur(layer, kernels.concatenate(channels, gates), self._weights())
        return self.o(self._gated(out, kernels.activate(z, "silu"), context), context)

    def _weights(self) -> RecurrenceWeights:
        limits = self.config.time_limits
        return RecurrenceWeights(self.conv_weight, self.conv_bias, self.decay, self.time_bias, self.skip, limits)

    def _gated(self, out: Tensor, factors: Tensor, context: ForwardContext) -> Tensor:
        """Outputs (num_tokens, num_values), normalised and multiplied by the output gate's factors."""
        kind, kernels = self.config.kind, context.kernels
        if kind.rule != "mamba2":
            normed = self.norm(out.view(len(out), kind.num_value_heads, kind.value_dim), context)
            return kernels.multiply_add(normed.view(out.shape), factors)
        gated = kernels.multiply_add(out, factors)
        if kind.num_key_heads == 1:
            return self.norm(gated, context)
        grouped = gated.view(len(gated), kind.num_key_heads, len(self.ones))
        normed = kernels.rms_norm(grouped, self.ones, self.norm.eps).view(gated.shape)
        return kernels.multiply_add(normed, self.norm.weight.unsqueeze(0))
