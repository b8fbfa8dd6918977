"""The one decoder that all families share: embedding, layers of attention and gated MLP, head.

It never sees a cache, a block table or a backend: attention is something it is handed.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.kernels.contract import Kernels
from quire.layers.attend import Attend
from quire.models.families import DecoderConfig


class DecoderLayer(nn.Module):
    """Parameters of one layer, and its two halves."""

    def __init__(self, config: DecoderConfig, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.input_norm = nn.Parameter(torch.empty(hidden))
        self.qkv = nn.Linear(hidden, q_size + 2 * kv_size, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.empty(config.head_dim))
            self.k_norm = nn.Parameter(torch.empty(config.head_dim))
        self.o = nn.Linear(q_size, hidden, bias=config.attention_bias)
        self.post_norm = nn.Parameter(torch.empty(hidden))
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down = nn.Linear(inner, hidden, bias=config.mlp_bias)

    def attention(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x (num_tokens, hidden_size) -> the same shape. cos and sin: see Kernels.rotary."""
        config, kernels = self.config, self.kernels
        qkv = self.qkv(x).view(x.shape[0], -1, config.head_dim)
        q, k, v = qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), 1)
        if config.qk_norm:
            q = kernels.rms_norm(q, self.q_norm, config.rms_norm_eps)
            k = kernels.rms_norm(k, self.k_norm, config.rms_norm_eps)
        q, k = kernels.rotary(q, k, cos, sin)
        out: Tensor = self.o(attend(layer, q, k, v))
        return out

    def mlp(self, x: Tensor) -> Tensor:
        """x (num_tokens, hidden_size) -> the same shape."""
        out: Tensor = self.down(self.kernels.silu_and_mul(self.gate_up(x)))
        return out


class Decoder(nn.Module):
    """A decoder-only transformer. Its parameters are not initialised: `loading.load` fills them."""

    def __init__(self, config: DecoderConfig, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, kernels) for _ in range(config.num_layers))
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        self.head = None if config.tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.norm.device

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states (num_tokens, hidden_size) of token_ids and positions, both int64 (num_tokens,)."""
        eps, add_rms_norm = self.config.rms_norm_eps, self.kernels.add_rms_norm
        cos, sin = self._angles(positions)
        layers = cast(list[DecoderLayer], list(self.layers))
        residual = self.embed(token_ids)
        x = self.kernels.rms_norm(residual, layers[0].input_norm, eps)
        # a layer's last sum is normalised by the norm of what comes next
        norms = [*(layer.input_norm for layer in layers[1:]), self.norm]
        for index, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
            x, residual = add_rms_norm(layer.attention(index, x, cos, sin, attend), residual, layer.post_norm, eps)
            x, residual = add_rms_norm(layer.mlp(x), residual, norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (num_rows, hidden_size) -> (num_rows, vocab_size), in the model's dtype."""
        return F.linear(hidden, self.embed.weight if self.head is None else self.head.weight)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of rotary positions, float32 (num_tokens, head_dim / 2)."""
        exponents = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device=positions.device)
        frequencies = 1.0 / self.config.rope_theta ** (exponents / self.config.head_dim)
        angles = positions.float().unsqueeze(1) * frequencies
        return angles.cos(), angles.sin()
