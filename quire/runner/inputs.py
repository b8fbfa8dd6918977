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


class LastTokens:
    """The last sampled token of each row, on the device."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def put(self, rows: np.ndarray, tokens: Tensor) -> None:
        """Store tokens int64 (len(rows),). -1 becomes 0, a valid index of the embedding; its result is not used."""
        self._tokens.index_copy_(0, to_device(rows.astype(np.int64), tokens.device), tokens.clamp(min=0))

    def fill(self, token_ids: Tensor, pending: tuple[np.ndarray, np.ndarray]) -> None:
        """Write into `token_ids` the tokens that the host does not have: see `Rows.pending_tokens`."""
        indices, rows = pending
        if len(rows):
            tokens = self._tokens.index_select(0, to_device(rows, token_ids.device))
            token_ids.index_copy_(0, to_device(indices, token_ids.device), tokens)


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
    """Inputs that each step copies from the host, except for tokens that the host does not have yet."""

    def __init__(self, rows: Rows, max_num_seqs: int, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._last_tokens = LastTokens(max_num_seqs, device)

    def apply(self, step: Step) -> None:
        """See Inputs."""

    def put_sampled(self, rows: np.ndarray, positions: np.ndarray, tokens: Tensor) -> None:
        """See Inputs."""
        del positions  # the host can lack only the last token of a row
        self._last_tokens.put(rows, tokens)

    def forward_inputs(self, chunks: Chunks) -> ForwardInputs:
        """See Inputs."""
        token_ids, positions = (to_device(array, self._device) for array in self._rows.inputs(chunks))
        self._last_tokens.fill(token_ids, self._rows.pending_tokens(chunks))
        return ForwardInputs(token_ids, positions, self._rows.batches(chunks))

    def captured_inputs(self, size: int) -> "CapturedHostInputs":
        """See Inputs."""
        return CapturedHostInputs(self._rows, self._last_tokens, size, self._device)


class CapturedHostInputs:
    """Tensors into which each step is copied."""

    def __init__(self, rows: Rows, last_tokens: LastTokens, size: int, device: torch.device) -> None:
        self._rows = rows
        self._last_tokens = last_tokens
        self._token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)

    def token_ids(self) -> Tensor:
        """See CapturedInputs."""
        return self._token_ids

    def refill(self, chunks: Chunks) -> list[Batch]:
        """See CapturedInputs."""
        columns, batches = self._rows.inputs(chunks), self._rows.batches(chunks)
        size, more = len(self.positions), len(self.positions) - len(columns[0])
        if more:
            columns = (np.pad(columns[0], (0, more)), np.pad(columns[1], (0, more)))
        if size != len(chunks):
            batches = [_padded(batch, more, size) for batch in batches]
        for target, column in zip((self._token_ids, self.positions), columns, strict=True):
            target.copy_(to_device(column, target.device))
        self._last_tokens.fill(self._token_ids, self._rows.pending_tokens(chunks))
        return batches


def _padded(batch: Batch, num_tokens: int, num_chunks: int) -> Batch:
    """The batch with `num_tokens` more chunks of one token, and `num_chunks` chunks in all: the rest has no tokens.

    The added tokens have no blocks. Their KV is not written, and their results are not used.
    """
    more = num_chunks - len(batch.starts)
    stops = np.pad(batch.stops, (0, more))
    stops[len(batch.starts) : len(batch.starts) + num_tokens] = 1
    return Batch(
        np.pad(batch.starts, (0, more)),
        stops,
        np.pad(batch.tables, ((0, more), (0, 0)), constant_values=-1),
    )
