"""Recurrent states: what a layer with a recurrence keeps of a sequence, whose size does not depend on its length.

All such layers of a model have the same kind. A state block holds the states of all these layers of one sequence. It
is the live block of a running sequence, or a snapshot: a state behind a prefix, which other sequences start from.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from quire.errors import ConfigError

# delta         gated delta rule (Yang et al., 2024)
# kda           gated delta rule with a decay for each number of a key: Kimi delta attention (Kimi Team, 2025)
# mamba2        "delta" without the correction term: Mamba-2 (Dao and Gu, 2024)
# convolution   no recurrence but a short causal convolution
Rule = Literal["delta", "kda", "mamba2", "convolution"]


class StateKind(msgspec.Struct, frozen=True):
    """The recurrence of a layer.

    The inputs of a token are `width` numbers: queries and keys of all key heads, values of all value heads, then gates.
    All but the gates go through a causal convolution. A value head has a state of (key_dim, value_dim) numbers.
    Consecutive value heads share a key head. The gates of "delta" are b, then a, of each value head; those of "kda" are
    b of each value head, then a of each number of all keys; that of "mamba2" is the time step of each value head.
    "convolution" has values only.
    """

    rule: Rule
    num_value_heads: int
    value_dim: int
    conv_width: int  # tokens that the convolution sees, the newest included
    num_key_heads: int = 0
    key_dim: int = 0

    def __post_init__(self) -> None:
        if self.conv_width < 2:
            raise ConfigError(f"a convolution over {self.conv_width} tokens is none; it needs at least 2")
        if self.rule == "convolution":
            return
        if self.num_key_heads < 1 or self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"{self.num_value_heads} value heads of a recurrence cannot share {self.num_key_heads} key heads: the "
                "number of value heads must be a multiple of the number of key heads"
            )

    @property
    def num_channels(self) -> int:
        """Numbers of a token that go through the convolution."""
        return 2 * self.num_keys + self.num_values

    @property
    def num_keys(self) -> int:
        """Numbers of the keys of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def num_values(self) -> int:
        """Numbers of all value heads, which are those of a token's output."""
        return self.num_value_heads * self.value_dim

    @property
    def num_gates(self) -> int:
        """Gates of a token."""
        heads = self.num_value_heads
        return {"delta": 2 * heads, "kda": heads + self.num_keys, "mamba2": heads, "convolution": 0}[self.rule]

    @property
    def num_time_biases(self) -> int:
        """Biases of the gates that decays follow from."""
        return self.num_keys if self.rule == "kda" else self.num_value_heads

    @property
    def width(self) -> int:
        """Numbers of a token's inputs."""
        return self.num_channels + self.num_gates

    @property
    def num_recurrent(self) -> int:
        """Numbers of the recurrent state of all heads, without the inputs of tokens."""
        return self.num_values * self.key_dim

    def numbers(self, max_pending: int) -> int:
        """Numbers of one layer in a block. max_pending: see StateGroup."""
        return self.num_recurrent + (self.conv_width - 1 + max_pending) * self.width

    def __str__(self) -> str:
        return f"{self.rule} state"


@dataclass(frozen=True, slots=True)
class StateGroup:
    """The state blocks of all layers with a recurrence.

    Each layer of a block has the recurrent state behind some position s, and the inputs of the tokens around it: of the
    `conv_width` - 1 before s, and of up to `max_pending` from s on, which are not applied to it.
    """

    num_layers: int
    kind: StateKind
    dtype: str  # "float32" or "bfloat16"
    num_blocks: int
    max_pending: int
    bytes_per_block: int
    num_host_blocks: int = 0  # blocks of the host pool, for swapped sequences
