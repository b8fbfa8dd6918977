"""Random steps of recurrent states: sequences that grow in chunks, keep tokens pending, replace them, and are forked.

Kernels may be called with them as with the steps of a scheduler. What the outputs must be follows from the inputs of
each sequence from its first position on: `histories`.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.core.states import StateGroup, StateKind
from quire.kernels.state_contract import RecurrenceWeights, StateBatch

KINDS = {
    "delta": StateKind("delta", 4, 16, 4, num_key_heads=2, key_dim=16),
    "delta, odd sizes": StateKind("delta", 3, 80, 3, num_key_heads=1, key_dim=24),
    "delta, a key head each": StateKind("delta", 3, 21, 2, num_key_heads=3, key_dim=33),
    "delta, 128": StateKind("delta", 2, 128, 4, num_key_heads=1, key_dim=128),
    "kda": StateKind("kda", 4, 16, 4, num_key_heads=4, key_dim=16),
    "kda, odd sizes": StateKind("kda", 4, 72, 3, num_key_heads=2, key_dim=21),
    "mamba2": StateKind("mamba2", 6, 64, 4, num_key_heads=2, key_dim=32),
    "mamba2, odd sizes": StateKind("mamba2", 5, 10, 3, num_key_heads=1, key_dim=18),
    "convolution": StateKind("convolution", 1, 70, 3),
    "convolution over 4": StateKind("convolution", 1, 32, 4),
}


def group_of(kind: StateKind, dtype: str = "float32", max_pending: int = 3, num_blocks: int = 24) -> StateGroup:
    """State blocks of two layers."""
    size = 2 * kind.numbers(max_pending) * (4 if dtype == "float32" else 2)
    return StateGroup(2, kind, dtype, num_blocks, max_pending, size)


def weights_of(kind: StateKind, dtype: torch.dtype = torch.float32, seed: int = 0) -> RecurrenceWeights:
    """Random weights under which a state keeps some of its past for tens of tokens. An odd seed gives biases."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    conv = (0.5 * normal(kind.num_channels, kind.conv_width)).to(dtype)
    bias = (0.2 * normal(kind.num_channels)).to(dtype) if seed % 2 else None
    if kind.rule == "convolution":
        return RecurrenceWeights(conv, bias)
    heads = kind.num_value_heads
    decay, times = -torch.exp(0.5 * normal(heads) - 2), normal(kind.num_time_biases)
    if kind.rule != "mamba2":
        return RecurrenceWeights(conv, bias, decay, times)
    return RecurrenceWeights(conv, bias, decay, times, normal(heads), (0.3, 1.5) if seed % 2 else (0.0, float("inf")))


def batch_of(
    chunks: list[tuple[int, int, int, int, int]], snapshots: list[tuple[int, int, int]] | None = None
) -> StateBatch:
    """A step from (start, stop, block, settled, settles) of each chunk."""
    columns = np.array(chunks, np.int64).reshape(-1, 5).T.copy()
    return StateBatch(*columns, np.array(snapshots or [], np.int64).reshape(-1, 3))


@dataclass(frozen=True, slots=True)
class Step:
    """A step with what it computes."""

    batch: StateBatch
    inputs: Tensor  # (num_tokens, width)
    histories: list[Tensor]  # of each chunk: inputs of its sequence up to its stop
    blocks: list[
        tuple[int, Tensor, int]
    ]  # each that is written: its number, inputs from 0 on, the position it is behind


@dataclass
class _Sequence:
    history: Tensor
    block: int
    settled: int


@dataclass
class Schedule:
    """Sequences over the blocks of a group."""

    group: StateGroup
    dtype: torch.dtype
    seed: int
    most_tokens: int = 40  # of a chunk
    _sequences: list[_Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._generator = torch.Generator().manual_seed(self.seed)
        self._free = list(range(self.group.num_blocks))

    def step(self, *, snapshots: bool = True, padding: bool = True) -> Step:
        """A step of some sequences, often with a new one. Snapshots are the beginnings of sequences of later steps."""
        if len(self._sequences) < 4 or self._random.random() < 0.3:
            self._sequences.append(_Sequence(self._tokens(0), self._take(), 0))
        count = self._random.integers(1, min(6, len(self._sequences)) + 1)
        chunks, taken, rows = [], [], []
        histories, blocks, forks = [], [], []
        for place in self._random.permutation(len(self._sequences))[:count].tolist():
            sequence = self._sequences[place]
            if padding and self._random.random() < 0.3:
                chunks.append((5, 5, self._free[0] if self._random.random() < 0.5 else -1, 5, 5))
                histories.append(self._tokens(0))
            block, settled, pending = sequence.block, sequence.settled, self.group.max_pending
            start = int(self._random.integers(settled, min(settled + pending, len(sequence.history)) + 1))
            most = 1 if self._random.random() < 0.4 else self.most_tokens
            stop = start + int(self._random.integers(1, most + 1))
            settles = int(self._random.integers(max(start, stop - pending), stop + 1))
            new = self._tokens(stop - start)
            sequence.history, sequence.settled = torch.cat((sequence.history[:start], new)), settles
            ends = set(self._random.integers(start + 1, settles + 1, 2).tolist()) if settles > start else set()
            for end in sorted(ends) if snapshots and self._random.random() < 0.4 and len(self._free) > 2 else ():
                taken.append((len(chunks), end, self._take()))
                forks.append(_Sequence(sequence.history[:end], taken[-1][2], end))
                blocks.append((taken[-1][2], sequence.history, end))
            chunks.append((start, stop, block, settled, settles))
            rows.append(new)
            histories.append(sequence.history)
            blocks.append((block, sequence.history, settles))
        self._sequences += forks
        while len(self._sequences) > 8:
            self._free.append(self._sequences.pop(int(self._random.integers(len(self._sequences)))).block)
        return Step(batch_of(chunks, taken), torch.cat(rows), histories, blocks)

    def _take(self) -> int:
        return self._free.pop(int(self._random.integers(len(self._free))))

    def _tokens(self, count: int) -> Tensor:
        return torch.randn(count, self.group.kind.width, generator=self._generator).to(self.dtype)
