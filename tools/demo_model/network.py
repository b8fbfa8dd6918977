"""The training network: a Qwen3 decoder in plain torch, with the parameter names of transformers.

It is separate from quire's model, because training needs whole rows, gradients and no KV cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

QK_GAIN = 1.35  # see Network.__init__


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes, named as in config.json."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    """Root mean square normalization with a gain, computed in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> the same."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon) * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped heads, normalized queries and keys, and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads, kv_heads = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj = nn.Linear(shape.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_heads, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(rows, length, hidden_size) -> the same; cosine and sine are (length, head_dim)."""
        rows, length, _ = x.shape
        q, k, v = (
            projection(x).view(rows, length, -1, self.shape.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # (rows, heads, length, head_dim)
        q = rotate(self.q_norm(q), cosine, sine).to(v.dtype)
        k = rotate(self.k_norm(k), cosine, sine).to(v.dtype)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(o.transpose(1, 2).reshape(rows, length, -1))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) by the angle of its position (Su et al., 2021)."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class MLP(nn.Module):
    """MLP with a SiLU gate (Shazeer, 2020)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) -> the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention, then MLP. Each gets the normalized residual stream and is added to it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(rows, length, hidden_size) -> the same."""
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """The decoder. Its embedding is also the output matrix."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: Shape) -> None:
        """Random weights from torch's generator.

        Normalized queries and keys bound an attention score by sqrt(head_dim) = 5.7. That is too low for heads that
        select one of hundreds of tokens. With a larger initial gain (QK_GAIN) such heads form far sooner.
        """
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        halves = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_position_embeddings), shape.rope_theta**-halves).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)  # (max_position_embeddings, head_dim)
        self.register_buffer("sine", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                nn.init.constant_(weight, QK_GAIN)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):  # what is added to the stream: less per layer
                nn.init.normal_(weight, std=(2 * shape.num_hidden_layers * weight.shape[1]) ** -0.5)
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=0.02 if "embed" in name else weight.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (rows, length) -> logits (rows, length, vocab_size)."""
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))  # or the stream would stay float32
        for layer in self.layers:
            x = layer(x, self.cosine[: ids.shape[1]], self.sine[: ids.shape[1]])
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Mean cross-entropy, weighted by `weights`. All arguments are (rows, length)."""
        logits = self(ids).flatten(0, 1).float()
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum()
