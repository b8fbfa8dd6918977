"""Kinds of KV: what a layer keeps of each token, and for how long. Memory, scheduler and kernels ask a kind.

A layer names its kind. Layers with equal kinds share a KV group: one block table and one pool. `FullKV` and `WindowKV`
have keys and values. A further kind is a subclass with other answers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import msgspec
import numpy as np

from quire.errors import ConfigError


class KVKind(msgspec.Struct, frozen=True):
    """The KV of a layer. A query attends to the last `span` positions up to its own, or to all if `span` is 0."""

    num_kv_heads: int
    head_dim: int  # numbers of a key

    name: ClassVar[str]

    @property
    def planes(self) -> tuple[int, ...]:
        """Numbers per head and token of each plane in the canonical layout: (num_layers, planes, num_blocks, ...)."""
        return self.head_dim, self.value_dim

    @property
    def value_dim(self) -> int:
        """Numbers of a value. With one plane a value is the first part of its key."""
        return self.head_dim

    @property
    def numbers_per_token(self) -> int:
        """Numbers of all planes and heads, of one layer."""
        return self.num_kv_heads * sum(self.planes)

    @property
    def span(self) -> int:
        """The most positions that a query attends to, its own included; 0: all."""
        return 0

    @property
    def shares_partial_blocks(self) -> bool:
        """Whether a sequence may continue behind a part of another one's block, of which it gets a copy."""
        return True

    @property
    def drops_blocks(self) -> bool:
        """Whether a sequence releases blocks before its end, because no later query attends to them."""
        return self.span > 0

    def first_attended(self, position: int) -> int:
        """The first position that a query at `position` attends to. KV before it is neither kept nor needed."""
        span = self.span
        return max(0, position - span + 1) if span else 0

    def attended(self, num_tokens: float) -> float:
        """The most positions that a sequence of `num_tokens` tokens attends to at once."""
        return min(num_tokens, self.span or inf)

    def blocks_for(self, num_tokens: int, block_size: int, reserve: int = 0) -> int:
        """Blocks of a block table for `num_tokens` tokens; for at least `reserve` tokens if none is dropped."""
        return -(-(num_tokens if self.drops_blocks else max(num_tokens, reserve)) // block_size)

    def max_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        """The most blocks that one sequence of `length` tokens holds at once if a step computes up to `step_tokens`.

        A step needs the blocks that it writes and the `span - 1` positions before its first query.
        """
        whole, span = -(-length // block_size), self.span
        return min(whole, -(-(span - 1 + step_tokens) // block_size) + 1) if span else whole

    def bytes_per_token(self, bytes_of: Callable[[int], int]) -> int:
        """Bytes of one token in one layer. bytes_of: those of a head's numbers in a plane, which may have a scale."""
        return self.num_kv_heads * sum(map(bytes_of, self.planes))

    def __str__(self) -> str:
        return f"{self.name} {self.span}" if self.span else self.name


class FullKV(KVKind, frozen=True, tag="full"):
    """Keys and values of all positions."""

    name = "full"

    def first_attended(self, position: int) -> int:
        del position
        return 0


class WindowKV(KVKind, frozen=True, tag="window"):
    """Keys and values of the last `window` positions."""

    window: int

    name = "window"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"a window has at least one position, not {self.window}")

    @property
    def span(self) -> int:
        return self.window

    def first_attended(self, position: int) -> int:
        return max(0, position - self.window + 1)


StoredKind = FullKV | WindowKV  # the kinds of models that quire loads


def kv_kind(num_kv_heads: int, head_dim: int, window: int = 0) -> StoredKind:
    """The kind of keys and values with this window; 0: none."""
    return WindowKV(num_kv_heads, head_dim, window) if window else FullKV(num_kv_heads, head_dim)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block pool, so that one block id is valid in all of them."""

    layers: tuple[int, ...]
    kind: StoredKind
    dtype: str  # a float type, or "fp8_e4m3", "int8" or "int4" with a scale for each head of each token
    num_blocks: int
    bytes_per_block: int
    num_host_blocks: int = 0  # blocks of the host pool, for swapped sequences


def num_attended(stop: np.ndarray, span: int) -> np.ndarray:
    """The pairs of all positions before `stop` with those that they attend to: the sum of min(position + 1, span)."""
    full: np.ndarray = stop * (stop + 1) / 2
    if not span:
        return full
    limited: np.ndarray = np.where(stop <= span, full, span * (span + 1) / 2 + (stop - span) * span)
    return limited


def num_read(starts: np.ndarray, stops: np.ndarray, span: int) -> np.ndarray:
    """The positions whose KV chunks [start, stop) read."""
    return np.minimum(stops, stops - starts + span - 1) if span else stops
