"""Inputs of a step's forward passes: token ids, positions, block tables.

There are two implementations. On CPUs, and for kernels that read block tables from the host, inputs are copied from
the arrays of `Rows` for each step. Other kernels read rows that stay on the device: see `device_inputs.py`.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.core.step import Chunks, Step
from quire.kernels.contract import Batch
from quire.kv_store.upload import to_device
from quire.runner.rows import Rows


class ForwardInputs(NamedTuple):
    """The inputs of one forward pass. Chunks are concatenated."""

    token_ids: Tensor  # int64 (num_tokens,)
    positions: Tensor  # int64 (num_tokens,)
    batches: list[Batch]  # one per KV group


class CapturedInputs(Protocol):
    """The inputs of a captured step. The tensors keep their addresses."""

    positions: Tensor  # int64 (size,)

    def token_ids(self) -> Tensor:
        """int64 (size,). Called inside the capture."""

    def refill(self, chunks: Chunks) -> list[Batch]:
        """Set the inputs to those of another step with at most `size` tokens, padded as StepCapture specifies."""


class Inputs(Protocol):
    """Provides the inputs of forward passes."""

    def apply(self, step: Step) -> None:
        """Apply a step's new rows, tokens and blocks. Called after `Rows.apply`."""

    def put_sampled(self, rows: np.ndarray, positions: np.ndarray, tokens: Tensor) -> None:
        """Store sampled tokens int64 (len(rows),), which the next step may read at `positions` of their rows.

        -1 becomes 0, a valid index of the embedding; its result is not used.
        """

    def forward_inputs(self, chunks: Chunks) -> ForwardInputs:
        """The inputs of one pass over `chunks`, at least one."""

    def captured_inputs(self, size: int) -> CapturedInputs:
        """Inputs of captured steps of `size` tokens."""


class HostInputs:
    """Inputs that each step copies from the host."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self._rows = rows
        self._device = device

    def apply(self, step: Step) -> None:
        """See Inputs."""

    def put_sampled(self, rows: np.ndarray, positions: np.ndarray, tokens: Tensor) -> None:
        """See Inputs. Waits for the tokens."""
        self._rows.write_sampled(rows, positions, tokens.numpy(force=True))

    def forward_inputs(self, chunks: Chunks) -> ForwardInputs:
        """See Inputs."""
        token_ids, positions = (to_device(array, self._device) for array in self._rows.inputs(chunks))
        return ForwardInputs(token_ids, positions, self._rows.batches(chunks))

    def captured_inputs(self, size: int) -> "CapturedHostInputs":
        """See Inputs."""
        return CapturedHostInputs(self._rows, size)


class CapturedHostInputs:
    """Arrays on a CPU into which each step is copied."""

    def __init__(self, rows: Rows, size: int) -> None:
        self._rows = rows
        self._columns = np.zeros((2, size), np.int64)  # token ids, positions
        self._token_ids, self.positions = torch.from_numpy(self._columns).unbind()

    def token_ids(self) -> Tensor:
        """See CapturedInputs."""
        return self._token_ids

    def refill(self, chunks: Chunks) -> list[Batch]:
        """See CapturedInputs."""
        size, number = self._columns.shape[1], chunks.num_tokens
        self._columns[0, :number], self._columns[1, :number] = self._rows.inputs(chunks)
        self._columns[:, number:] = 0
        batches = self._rows.batches(chunks)
        return batches if size == len(chunks) else [_padded(batch, size - number, size) for batch in batches]


def _padded(batch: Batch, num_tokens: int, num_chunks: int) -> Batch:
    """The batch with `num_tokens` more chunks of one token, and `num_chunks` chunks in all: the rest has no tokens.

    The added tokens have no blocks. Their KV is not written, and their results are not used.
    """
    number, width = batch.tables.shape
    starts, stops = np.zeros((2, num_chunks), np.int64)
    tables = np.full((num_chunks, width), -1, np.int64)
    starts[:number], stops[:number], tables[:number] = batch.starts, batch.stops, batch.tables
    stops[number : number + num_tokens] = 1
    return Batch(starts, stops, tables)
