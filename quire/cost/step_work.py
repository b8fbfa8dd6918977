"""The work of a Step: floating point operations and bytes of memory traffic, from the sizes of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.core.kv_groups import num_attended, num_read
from quire.core.runner import MAX_UNUSED_LOGITS


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Attention of the layers of one KV group."""

    window: int  # positions that a query attends to, its own included; 0: all
    flops_per_pair: float  # of a token and one that it attends to: a score and a weighted sum in each head and layer
    kv_bytes_per_token: int  # of all layers of the group


@dataclass(frozen=True, slots=True)
class StateWork:
    """The recurrence of all layers that have one."""

    bytes_per_chunk: int  # of the states of a sequence, which a chunk of any length reads and writes once
    flops_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeShape:
    """Sizes of a model that the work of a Step depends on.

    Projections multiply every token. Each token chooses `experts_per_token` of `num_experts` experts in each of
    `num_sparse_layers` layers. The head multiplies only rows from which logits are needed.
    """

    num_layers: int
    compute_dtype: str  # in which projections are multiplied: a float type, or "int8"
    projection_parameters: int
    projection_bytes: int
    expert_parameters: int = 0  # of one expert of one layer
    expert_bytes: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    num_sparse_layers: int = 0
    head_parameters: int
    head_bytes: int
    activation_bytes_per_token: int  # of one layer
    attention: tuple[AttentionWork, ...]  # per KV group
    states: StateWork = StateWork(0, 0.0)

    def linear_flops(self, num_tokens: float, num_logits: float) -> float:
        """Operations of all products with weights: two for each parameter and token."""
        experts = self.expert_parameters * self.experts_per_token * self.num_sparse_layers
        return 2.0 * ((self.projection_parameters + experts) * num_tokens + self.head_parameters * num_logits)

    def linear_bytes(self, num_tokens: float, num_logits: float) -> float:
        """Bytes of the weights that are read once, and of activations that are written and read in each layer."""
        experts = self.expert_bytes * self.num_sparse_layers * self.distinct_experts(num_tokens)
        activations = 2.0 * self.activation_bytes_per_token * self.num_layers * num_tokens
        return self.projection_bytes + experts + (self.head_bytes if num_logits else 0) + activations

    def distinct_experts(self, num_tokens: float) -> float:
        """Expected number of experts of a layer that any of the tokens chooses, if all are equally likely."""
        if not self.num_experts:
            return 0.0
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return float(self.num_experts * (1 - missed))


class StepWork(NamedTuple):
    """Counts of a Step from which its work follows."""

    num_tokens: int
    num_chunks: int
    pairs: tuple[float, ...]  # per KV group: tokens times tokens that they attend to, of chunks with several tokens
    kv_tokens: tuple[int, ...]  # per KV group: positions whose KV the chunks read
    num_opened: int = 0  # sequences that begin to run

    @property
    def is_replayed(self) -> bool:
        """Whether it is small enough that a runner may replay it from a capture."""
        return self.num_tokens - self.num_chunks <= MAX_UNUSED_LOGITS


def step_work(starts: np.ndarray, stops: np.ndarray, windows: Sequence[int], num_opened: int = 0) -> StepWork:
    """The counts of chunks [start, stop). windows: of the KV groups."""
    lengths = stops - starts
    num_tokens = int(lengths.sum())
    longer = lengths > 1
    several = bool(longer.any())
    pairs, kv_tokens = [], []
    for window in windows:
        kv_tokens.append(int(num_read(starts, stops, window).sum()))
        if not several:
            pairs.append(0.0)
            continue
        first, last = starts[longer].astype(np.float64), stops[longer].astype(np.float64)
        attended = num_attended(last, window) - num_attended(first, window)
        pairs.append(float(attended.sum()))
    return StepWork(num_tokens, len(starts), tuple(pairs), tuple(kv_tokens), num_opened)
