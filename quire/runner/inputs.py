"""What a step's forward passes read: token ids, positions, block tables.

There are two ways. Where a CPU computes, and for kernels that want tables from the host, each step brings its own from
the arrays of `Rows`. Other kernels read rows that are kept on the device: see `resident`.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.core.step import Chunks, Step
from quire.kernels.contract import Batch
from quire.kv_store.upload import uploaded
from quire.runner.rows import Rows


class Latest:
    """One token per row."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def put(self, rows: np.ndarray, tokens: Tensor) -> None:
        """tokens int64 (len(rows),); -1 becomes 0, as nothing may come of it, but it is looked up."""
        self._tokens.index_copy_(0, uploaded(rows.astype(np.int64), tokens.device), tokens.clamp(min=0))

    def fill(self, token_ids: Tensor, missing: tuple[np.ndarray, np.ndarray]) -> None:
        """Write into token ids what the host does not know: see `Rows.missing`."""
        indices, rows = missing
        if len(rows):
            tokens = self._tokens.index_select(0, uploaded(rows, token_ids.device))
            token_ids.index_copy_(0, uploaded(indices, token_ids.device), tokens)


class Fed(NamedTuple):
    """The inputs of one forward pass, chunk after chunk."""

    token_ids: Tensor  # int64 (num_tokens,)
    positions: Tensor  # int64 (num_tokens,)
    batches: list[Batch]  # of each group


class Fixed(Protocol):
    """The inputs of a recorded step, in which every chunk has one token: tensors that stay where they are."""

    positions: Tensor  # int64 (size,)

    def token_ids(self) -> Tensor:
        """int64 (size,): a part of what is recorded."""

    def refill(self, chunks: Chunks) -> list[Batch]:
        """Put another step, of up to `size` chunks, in the place of the one before, filled up as Recorder says."""


class Inputs(Protocol):
    """Where forward passes find their inputs."""

    def apply(self, step: Step) -> None:
        """Take in what a step says about rows. `Rows` knows it already."""

    def put(self, rows: np.ndarray, positions: np.ndarray, tokens: Tensor) -> None:
        """Tokens int64 (len(rows),) were sampled, and the next step may read them at `positions` of their rows.

        -1 becomes 0: nothing may come of it, but it is looked up.
        """

    def of(self, chunks: Chunks) -> Fed:
        """The inputs of one pass over `chunks`, at least one."""

    def fixed(self, size: int) -> Fixed:
        """Place for steps of `size` chunks."""


class HostInputs:
    """Each step's inputs come from the host, but for tokens that it does not know yet."""

    def __init__(self, rows: Rows, max_num_seqs: int, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._latest = Latest(max_num_seqs, device)

    def apply(self, step: Step) -> None:
        """See Inputs."""

    def put(self, rows: np.ndarray, positions: np.ndarray, tokens: Tensor) -> None:
        """See Inputs."""
        del positions  # a row's last token is the only one that the host may be without
        self._latest.put(rows, tokens)

    def of(self, chunks: Chunks) -> Fed:
        """See Inputs."""
        token_ids, positions = (uploaded(array, self._device) for array in self._rows.inputs(chunks))
        self._latest.fill(token_ids, self._rows.missing(chunks))
        return Fed(token_ids, positions, self._rows.batches(chunks))

    def fixed(self, size: int) -> "FixedHostInputs":
        """See Inputs."""
        return FixedHostInputs(self._rows, self._latest, size, self._device)


class FixedHostInputs:
    """Tensors that each step is copied into."""

    def __init__(self, rows: Rows, latest: Latest, size: int, device: torch.device) -> None:
        self._rows = rows
        self._latest = latest
        self._token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)

    def token_ids(self) -> Tensor:
        """See Fixed."""
        return self._token_ids

    def refill(self, chunks: Chunks) -> list[Batch]:
        """See Fixed."""
        size, more = len(self.positions), len(self.positions) - len(chunks)
        columns, batches = self._rows.inputs(chunks), self._rows.batches(chunks)
        if more:
            columns = (np.pad(columns[0], (0, more)), np.pad(columns[1], (0, more)))
            batches = [_padded(batch, size) for batch in batches]
        for target, column in zip((self._token_ids, self.positions), columns, strict=True):
            target.copy_(uploaded(column, target.device))
        self._latest.fill(self._token_ids, self._rows.missing(chunks))
        return batches


def _padded(batch: Batch, size: int) -> Batch:
    """With chunks of one token that have no block: what they compute is written nowhere, and nobody reads it."""
    more = size - len(batch.starts)
    return Batch(
        np.pad(batch.starts, (0, more)),
        np.pad(batch.stops, (0, more), constant_values=1),
        np.pad(batch.tables, ((0, more), (0, 0)), constant_values=-1),
    )
