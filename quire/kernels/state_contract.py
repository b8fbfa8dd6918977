"""The data types of the functions of a kernel module for recurrent states. `contract.Kernels` has the functions.

All modules keep states in the same layout: (num_blocks, num_layers, numbers). The numbers of a layer in a block are
its recurrent state (num_value_heads, key_dim, value_dim), then the inputs (conv_width - 1 + max_pending, width) of the
tokens at positions [s - conv_width + 1, s + max_pending), where s is the position that the state stands behind. Inputs
of positions below 0 are zeros, and those of positions that are not computed yet have undefined numbers.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.core.states import StateGroup

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class StateStorage:
    """The state blocks of a model."""

    group: StateGroup
    data: Tensor  # (num_blocks, num_layers, numbers)

    @property
    def by_block(self) -> Tensor:
        """The data with the axis of blocks first."""
        return self.data

    @property
    def num_recurrent(self) -> int:
        """Numbers of a layer's recurrent state; behind them are the inputs."""
        return self.group.kind.num_recurrent

    @property
    def num_inputs(self) -> int:
        """Tokens whose inputs a layer of a block has."""
        return self.group.kind.conv_width - 1 + self.group.max_pending


class StateBatch(msgspec.Struct, frozen=True, eq=False):
    """The chunks of one step for the state blocks: chunk i computes positions [starts[i], stops[i]).

    The tokens of all chunks are concatenated in order. When the step begins, block blocks[i] stands behind position
    settled[i] and has the inputs of positions up to starts[i] at least. They are applied to the state; inputs that the
    block has of later positions are not used. Then the tokens up to settles[i] are applied. The block stands behind
    settles[i] when the step ends, and has the inputs of positions up to stops[i]. A chunk that starts at position 0
    begins with zeros, whatever its block has.

    settled <= starts <= settles <= stops; starts - settled and stops - settles are at most `max_pending`. No block is
    in two chunks. In captured steps a chunk may have no tokens, or one token and the block -1: then nothing is written,
    and results are undefined.
    """

    starts: np.ndarray  # int64 (num_chunks,)
    stops: np.ndarray  # int64 (num_chunks,)
    blocks: np.ndarray  # int64 (num_chunks,)
    settled: np.ndarray  # int64 (num_chunks,)
    settles: np.ndarray  # int64 (num_chunks,)
    snapshots: np.ndarray  # int64 (num_snapshots, 3): chunk, position p, block. The block is to stand behind p.
    # starts < p <= settles of the chunk. They are sorted by chunk, then by position.


@dataclass(frozen=True, slots=True, eq=False)
class RecurrenceWeights:
    """The parameters of a layer's recurrence, in float32 but for `conv_weight`."""

    conv_weight: Tensor  # (num_channels, conv_width), of the model's type; the last column is that of the newest token
    conv_bias: Tensor | None  # (num_channels,), of the model's type
    decay: Tensor | None = None  # (num_value_heads,): -exp(A_log)
    time_bias: Tensor | None = None  # (num_time_biases,): dt_bias
    skip: Tensor | None = None  # (num_value_heads,): D of Mamba-2
    time_limits: tuple[float, float] = (0.0, float("inf"))  # of the time steps of Mamba-2
