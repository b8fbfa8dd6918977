"""The shared decoder of all families: embedding, layers of attention or a recurrence and of an MLP, head.

The context of a forward pass has the attention function and the kernels. The decoder has no access to the KV cache.
"""

from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from quire.kernels.contract import Kernels, Rotation
from quire.layers.attend import ScoreScaling
from quire.layers.attention import Attention, AttentionConfig
from quire.layers.context import ForwardContext
from quire.layers.experts import Experts, MLPAndExperts
from quire.layers.latent_attention import LatentAttention
from quire.layers.linear import Embedding, Linear
from quire.layers.mlp import MLP
from quire.layers.norm import NoNorm, Norm, make_norm
from quire.layers.recurrence import Recurrence
from quire.models.config import DecoderConfig
from quire.weights.schemes import NO_SCHEMES, Schemes


class LayerInputs(NamedTuple):
    """What the layers of a pass share about its tokens."""

    rotations: list[Rotation]  # of each rope of the config
    query_scales: Tensor | None  # float32 (num_tokens, 1), with `query_scaling`
    embeddings: Tensor | None  # (num_tokens, num_layers * layer_input_size), with embeddings for each layer


class LayerInput(nn.Module):
    """Branch of a token's embedding for one layer (Gemma 3n): gated by the residual stream, and added to it."""

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.layer_input_size
        self.columns = slice(index * size, (index + 1) * size)  # of the embeddings for all layers
        self.activation = config.activation
        self.gate = Linear(hidden, size, bias=False, dtype=dtype)
        self.out = Linear(size, hidden, bias=False, dtype=dtype)
        self.norm = _norm(config, dtype)

    def use_kernel_layout(self, kernels: Kernels) -> None:
        """Replace the weights, before they are loaded, by weights in the layout of `kernels`."""
        self.gate.use_kernel_layout(kernels)
        self.out.use_kernel_layout(kernels)

    def __call__(self, residual: Tensor, embeddings: Tensor, context: ForwardContext) -> Tensor:
        """residual (num_tokens, hidden_size) -> the same shape. embeddings: those for all layers."""
        kernels = context.kernels
        gates = kernels.activate(self.gate(residual, context), self.activation)
        gated = kernels.multiply_add(embeddings[:, self.columns], gates)
        return kernels.multiply_add(self.norm(self.out(gated, context), context), 1.0, residual)


class DecoderLayer(nn.Module):
    """One layer: attention or a recurrence, MLP or experts, and the norms of its `Order`."""

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        layer = config.layers[index]
        self.kv_layer = layer.kv_layer
        self.state_layer = layer.state_layer
        self.rope = layer.rope
        self.order = config.order
        self.residual_scale = config.residual_scale
        self.attention: Attention | LatentAttention | None = None
        self.recurrence: Recurrence | None = None
        if isinstance(layer.mixer, AttentionConfig):
            kind = Attention if layer.mixer.latent is None else LatentAttention
            self.attention = kind(config.hidden_size, layer.mixer, dtype)
        elif layer.mixer is not None:
            self.recurrence = Recurrence(config.hidden_size, layer.mixer, dtype)
        self.mlp = _mlp(config, index, dtype) if layer.has_mlp else None
        self.attn_norm = self._norm("attn_norm", config, dtype)
        self.attn_out_norm = self._norm("attn_out_norm", config, dtype)
        self.mlp_norm = self._norm("mlp_norm", config, dtype)
        self.mlp_out_norm = self._norm("mlp_out_norm", config, dtype)
        self.input = LayerInput(config, index, dtype) if config.layer_input_size else None
        self.scale = nn.Parameter(torch.empty(1, 1, dtype=dtype)) if config.has_layer_scale else None

    @staticmethod
    def _norm(name: str, config: DecoderConfig, dtype: torch.dtype) -> Norm:
        return _norm(config, dtype) if name in config.layer_norms else NoNorm()

    def __call__(
        self, x: Tensor, residual: Tensor, next_norm: Norm, inputs: LayerInputs, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """(x, residual) for the next layer. x is the residual stream normalised by `next_norm`.

        x and residual are (num_tokens, hidden_size). Each residual sum is fused with the norm after it.
        """
        if self.order == "single":
            branch = self._mixer(x, inputs, context) if self.mlp is None else self._mlp(x, residual, context)
            return next_norm.add_and_norm(self._scaled(branch, context), residual, context)
        branch = self._mixer(x, inputs, context)
        if self.order.startswith("parallel"):
            y = x if self.order == "parallel" else self.mlp_norm(residual, context)
            both = context.kernels.multiply_add(branch, 1.0, self._mlp(y, residual, context))
            return next_norm.add_and_norm(self._scaled(both, context), residual, context)
        if self.order == "post":
            x, _ = self.attn_out_norm.add_and_norm(branch, residual, context)
            x, _ = self.mlp_out_norm.add_and_norm(self._mlp(x, residual, context), x, context)
            return x, x
        branch = self.attn_out_norm(branch, context)
        x, residual = self.mlp_norm.add_and_norm(self._scaled(branch, context), residual, context)
        branch = self._scaled(self.mlp_out_norm(self._mlp(x, residual, context), context), context)
        if self.input is None and self.scale is None:
            return next_norm.add_and_norm(branch, residual, context)
        residual = context.kernels.multiply_add(branch, 1.0, residual)
        if self.input is not None and inputs.embeddings is not None:
            residual = self.input(residual, inputs.embeddings, context)
        if self.scale is not None:
            residual = context.kernels.multiply_add(residual, self.scale)
        return next_norm(residual, context), residual

    def _mixer(self, x: Tensor, inputs: LayerInputs, context: ForwardContext) -> Tensor:
        if self.recurrence is not None:
            return self.recurrence(self.state_layer, x, context)
        assert self.attention is not None, "a layer has attention or a recurrence"
        turned = None if self.rope is None else inputs.rotations[self.rope]
        return self.attention(self.kv_layer, x, turned, context, inputs.query_scales)

    def _mlp(self, x: Tensor, residual: Tensor, context: ForwardContext) -> Tensor:
        assert self.mlp is not None, "a layer of this order has an MLP"
        return self.mlp(x, context, residual) if isinstance(self.mlp, MLPAndExperts) else self.mlp(x, context)

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
        if size := config.num_layers * config.layer_input_size:
            self.layer_inputs = Embedding(config.layer_input_rows, size, dtype)
            self.layer_input_scale = float(torch.tensor(config.layer_input_size**0.5, dtype=dtype))
            self.layer_input_projection = Linear(hidden, size, bias=False, dtype=dtype)
            self.layer_input_norm = make_norm(config.norm, config.layer_input_size, config.norm_eps, dtype, bias=False)
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
        return tuple(
            layer.score_scaling
            for layer in self.config.layers
            if isinstance(layer.mixer, AttentionConfig) and layer.mixer.has_own_kv
        )

    def use_kernel_layout(self, kernels: Kernels, schemes: Schemes = NO_SCHEMES) -> None:
        """Replace the weights of products, before they are loaded, by weights in the layout of `kernels`."""
        for layer in cast(list[DecoderLayer], list(self.layers)):
            place = f"layers.{layer.index}."
            if layer.attention is not None:
                layer.attention.use_kernel_layout(kernels, schemes, f"{place}attention.")
            if layer.recurrence is not None:
                layer.recurrence.use_kernel_layout(kernels, schemes, f"{place}recurrence.")
            if layer.mlp is not None:
                layer.mlp.use_kernel_layout(kernels, schemes, f"{place}mlp.")
            if layer.input is not None:
                layer.input.use_kernel_layout(kernels)
        if self.head is not None:
            self.head.use_kernel_layout(kernels, scheme=schemes.get("head.weight"))
        if self.head is None or "embed.weight" in schemes:
            self.embed.use_kernel_layout(kernels, schemes.get("embed.weight"))
        if self.config.embed_size:
            self.project_in.use_kernel_layout(kernels)
            self.project_out.use_kernel_layout(kernels)
        if self.config.layer_input_size:
            self.layer_input_projection.use_kernel_layout(kernels)

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states (num_tokens, hidden_size) after the last norm. token_ids: int64 (num_tokens,)."""
        layers = cast(list[DecoderLayer], list(self.layers))
        residual = self.embed_tokens(token_ids, context)
        inputs = self.inputs(token_ids, residual, context)
        x = layers[0].attn_norm(residual, context)
        afters = [*(layer.attn_norm for layer in layers[1:]), self.norm]
        for layer, after in zip(layers, afters, strict=True):
            x, residual = layer(x, residual, after, inputs, context)
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

    def inputs(self, token_ids: Tensor, embedded: Tensor, context: ForwardContext) -> LayerInputs:
        """The inputs of all layers. embedded: of `embed_tokens`."""
        kernels, positions = context.kernels, context.positions
        rotations = [
            kernels.rotation(positions, frequencies, rope.magnitude)
            for rope, frequencies in zip(self.config.ropes, self.frequencies, strict=True)
        ]
        scales = None if self.query_factors is None else kernels.embed(positions, self.query_factors)
        return LayerInputs(rotations, scales, self._layer_embeddings(token_ids, embedded, context))

    def _layer_embeddings(self, token_ids: Tensor, embedded: Tensor, context: ForwardContext) -> Tensor | None:
        """The mean of a token's embeddings for each layer and of a projection of its embedding, times sqrt(2)."""
        config, kernels = self.config, context.kernels
        if not config.layer_input_size:
            return None
        rows = self.layer_inputs(token_ids, context, self.layer_input_scale)
        projected = kernels.multiply_add(self.layer_input_projection(embedded, context), config.hidden_size**-0.5)
        by_layer = projected.view(len(projected), config.num_layers, config.layer_input_size)
        normed = self.layer_input_norm(by_layer, context).view(projected.shape)
        return kernels.multiply_add(kernels.multiply_add(normed, 1.0, rows), 0.5**0.5)

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


def _mlp(config: DecoderConfig, index: int, dtype: torch.dtype) -> MLP | Experts | MLPAndExperts:
    hidden, experts, layer = config.hidden_size, config.experts, config.layers[index]
    chosen = None
    if experts is not None and layer.has_experts:
        chosen = Experts(hidden, experts, activation=config.activation, dtype=dtype)
        if not experts.is_beside_mlp:
            return chosen
    mlp = MLP(
        hidden,
        layer.mlp_factor * config.intermediate_size,
        activation=config.activation,
        gated=config.gated,
        bias=config.mlp_bias,
        dtype=dtype,
    )
    if chosen is None:
        return mlp
    return MLPAndExperts(mlp, chosen, hidden, partial(_norm, config, dtype), eps=config.norm_eps, dtype=dtype)
