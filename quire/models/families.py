"""The architectures quire runs, as data: what an architecture fixes and its config.json does not say.

To add one that is a Llama with other numbers, add a line to FAMILIES. No torch here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from Llama."""

    qk_norm: bool = False  # queries and keys are normalised per head before rotary
    default_head_dim: int | None = None  # where config.json has none; None: hidden_size / num_heads


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(),
        "Qwen3ForCausalLM": Family(qk_norm=True, default_head_dim=128),
    }
)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything the shared decoder has to know."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool  # the head is the embedding
    qk_norm: bool
    attention_bias: bool  # of all four projections
    mlp_bias: bool

    @property
    def scale(self) -> float:
        """Of attention scores."""
        return 1 / math.sqrt(self.head_dim)
