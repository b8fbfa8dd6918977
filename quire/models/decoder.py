"""The shared decoder of all families: embedding, layers of attention and MLP, head.

The context of a forward pass has the attention function and the kernels. The decoder has no access to the KV cache.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from quire.kernels.contract import Kernels, Rotation
from quire.layers.attend import ScoreScaling
from quire.layers.attention import Attention
from quire.layers.context import ForwardContext
from quire.layers.experts import Experts
from quire.layers.linear import Embedding, Linear
from quire.layers.mlp import MLP
from quire.layers.norm import NoNorm, Norm, make_norm
from quire.models.config import DecoderConfig
from quire.weights.schemes import NO_SCHEMES, Schemes


class Places(NamedTuple):
    """What the layers of a pass share about the positions of its tokens."""

    rotations: list[Rotation]  # of each rope of the config
    query_scales: Tensor | None  # float32 (num_tokens, 1), with `query_scaling`


class DecoderLayer(nn.Module):
    """One layer: attention, MLP or experts, and the norms of its `Order`."""

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.rope = config.layers[index].rope
        self.order = config.order
        self.residual_scale = config.residual_scale
        self.attention = Attention(config.hidden_size, config.layers[index].mixer, dtype)
        self.mlp = _mlp(config, index, dtype)
        self.attn_norm = self._norm("attn_norm", config, dtype)
        self.attn_out_norm = self._norm("attn_out_norm", config, dtype)
        self.mlp_norm = self._norm("mlp_norm", config, dtype)
        self.mlp_out_norm = self._norm("mlp_out_norm", config, dtype)

    @staticmethod
    def _norm(name: str, config: DecoderConfig, dtype: torch.dtype) -> Norm:
        return _norm(config, dtype) if name in config.layer_norms else NoNorm()

    def __call__(
        self, x: Tensor, residual: Tensor, next_norm: Norm, places: Places, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """(x, residual) for the next layer. x is the residual stream normalised by `next_norm`.

        x and residual are (num_tokens, hidden_size). Each residual sum is fused with the norm after it.
        """
        turned = None if self.rope is None else places.rotations[self.rope]
        branch = self.attention(self.index, x, turned, context, places.query_scales)
        if self.order.startswith("parallel"):
            y = x if self.order == "parallel" else self.mlp_norm(residual, context)
            both = context.kernels.multiply_add(branch, 1.0, self.mlp(y, context))
            return next_norm.add_and_norm(self._scaled(both, context), residual, context)
        if self.order == "post":
            x, _ = self.attn_out_norm.add_and_norm(branch, residual, context)
            x, _ = self.mlp_out_norm.add_and_norm(self.mlp(x, context), x, context)
            return x, x
        branch = self.attn_out_norm(branch, context)
        x, residual = self.mlp_norm.add_and_norm(self._scaled(branch, context), residual, context)
        branch = self.mlp_out_norm(self.mlp(x, context), context)
        return next_norm.add_and_norm(self._scaled(branch, context), residual, context)

    def _scaled(self, branch: Tensor, context: ForwardContext) -> Tensor:
        return branch if self.residual_scale == 1 else context.kernels.multiply_add(branch, self.residual_scale)


class Decoder(nn.Module):
    """A decoder-only transformer that implements `Model`. `loading.load` fills the parameters."""

    batch_invariant = True

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.embed_size or config.hidden_size
        self.embed = Embedding(config.vocab_size, width, dtype)
        self.device = torch.get_default_device()
        self.embed_scale = float(torch.tensor(config.embed_scale, dtype=dtype))  # rounded to the dtype, as in training
        if config.position_offset >= 0:
            rows = config.max_positions + config.position_offset
            self.positions = Embedding(rows, hidden, dtype)
        if config.embed_size:
            self.project_in = Linear(width, hidden, bias=False, dtype=dtype)
            self.project_out = Linear(hidden, width, bias=False, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, index, dtype) for index in range(config.num_layers))
        self.norm = _norm(config, dtype) if config.final_norm else NoNorm()
        self.head = None if config.tied else Linear(width, config.vocab_size, bias=config.head_bias, dtype=dtype)
        self.class_head = Linear(hidden, config.num_classes, bias=False, dtype=dtype) if config.num_classes else None
        self.frequencies = [rope.frequencies() for rope in config.ropes]
        scaling = config.query_scaling
        self.query_factors = None if scaling is None else scaling.factors(config.max_positions)

    @property
    def vocab_size(self) -> int:
        """See Model."""
        return self.config.vocab_size

    @property
    def score_scaling(self) -> tuple[ScoreScaling, ...]:
        """See Model."""
        return tuple(layer.score_scaling for layer in self.config.layers)

    def use_kernel_layout(self, kernels: Kernels, schemes: Schemes = NO_SCHEMES) -> None:
        """Replace the weights of products, before they are loaded, by weights in the layout of `kernels`."""
        for layer in cast(list[DecoderLayer], list(self.layers)):
            attention, place = layer.attention, f"layers.{layer.index}."
            attention.use_kernel_layout(kernels, schemes, f"{place}attention.")
            layer.mlp.use_kernel_layout(kernels, schemes, f"{place}mlp.")
        if self.head is not None:
            self.head.use_kernel_layout(kernels, scheme=schemes.get("head.weight"))
        if self.head is None or "embed.weight" in schemes:
            self.embed.use_kernel_layout(kernels, schemes.get("embed.weight"))
        if self.config.embed_size:
            self.project_in.use_kernel_layout(kernels)
            self.project_out.use_kernel_layout(kernels)

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states (num_tokens, hidden_size) after the last norm. token_ids: int64 (num_tokens,)."""
        places = self.places(context)
        layers = cast(list[DecoderLayer], list(self.layers))
        residual = self.embed_tokens(token_ids, context)
        x = layers[0].attn_norm(residual, context)
        afters = [*(layer.attn_norm for layer in layers[1:]), self.norm]
        for layer, after in zip(layers, afters, strict=True):
            x, residual = layer(x, residual, after, places, context)
        return x

    def logits(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """hidden (num_rows, hidden_size) -> (num_rows, vocab_size), including scaling and softcap."""
        config, kernels = self.config, context.kernels
        if config.embed_size:
            hidden = self.project_out(hidden, context)
        logits = kernels.linear(hidden, self.embed.weight) if self.head is None else self.head(hidden, context)
        if config.logit_scale != 1:
            logits = kernels.multiply_add(logits, config.logit_scale)
        if config.logit_softcap:
            capped = kernels.activate(kernels.multiply_add(logits, 1 / config.logit_softcap), "tanh")
            logits = kernels.multiply_add(capped, config.logit_softcap)
        return logits

    def places(self, context: ForwardContext) -> Places:
        """The rotations and scales of queries at the positions of a pass."""
        kernels, positions = context.kernels, context.positions
        rotations = [
            kernels.rotation(positions, frequencies, rope.magnitude)
            for rope, frequencies in zip(self.config.ropes, self.frequencies, strict=True)
        ]
        scales = None if self.query_factors is None else kernels.embed(positions, self.query_factors)
        return Places(rotations, scales)

    def embed_tokens(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Input of the first layer's norm, (num_tokens, hidden_size). token_ids: int64 (num_tokens,)."""
        config = self.config
        x = self.embed(token_ids, context, self.embed_scale)
        if config.embed_size:
            x = self.project_in(x, context)
        if config.position_offset >= 0:
            x = x + self.positions(context.positions + config.position_offset, context)
        return x


def _norm(config: DecoderConfig, dtype: torch.dtype) -> Norm:
    return make_norm(config.norm, config.hidden_size, config.norm_eps, dtype, bias=config.norm_bias)


def _mlp(config: DecoderConfig, index: int, dtype: torch.dtype) -> MLP | Experts:
    if config.experts is not None and config.layers[index].has_experts:
        return Experts(config.hidden_size, config.experts, activation=config.activation, dtype=dtype)
    return MLP(
        config.hidden_size,
        config.intermediate_size,
        activation=config.activation,
        gated=config.gated,
        bias=config.mlp_bias,
        dtype=dtype,
    )
