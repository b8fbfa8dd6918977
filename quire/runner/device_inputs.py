"""Device-resident inputs: tokens and block tables of all rows, at fixed addresses.

A step uploads its delta, and the rows and positions that it computes. Sampled tokens are written to their rows on the
device, where the next step reads them without waiting for the host. All operations run in stream order: a token of a
later step replaces the token that was sampled before.
"""

import numpy as np
import torch
from torch import Tensor

from quire.config import CacheConfig
from quire.core.step import Chunks, Step, TableUpdates
from quire.kernels.contract import Batch, ResidentTables
from quire.kv_store.upload import copy_to_device, to_device
from quire.runner.inputs import ForwardInputs

_ALIGNED = 4  # words of 4 bytes: kernels are compiled for pointers that are multiples of 16 bytes
_NO_BLOCK = -1


class ResidentInputs:
    """See Inputs. There is one row more than sequences. It has no blocks, and pads captured steps."""

    def __init__(self, cache: CacheConfig, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        num_rows, width = max_num_seqs + 1, -(-max_model_len // cache.block_size)
        self.padding_row = max_num_seqs
        self.stride = max_model_len + 1  # tokens of a row
        sizes = [num_rows * self.stride, *([num_rows * width] * len(cache.groups))]
        begins = np.cumsum([0, *(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]).tolist()
        self.words = torch.zeros(begins.pop(), dtype=torch.int32, device=device)  # tokens of all rows, then tables
        self.tokens = self.words[: sizes[0]].view(num_rows, self.stride)
        self.tables = [self.words[begin : begin + sizes[1]].view(num_rows, width) for begin in begins[1:]]
        self._regions = list(zip(begins, [self.stride, *([width] * len(cache.groups))], strict=True))
        self._device = device
        self._clear()

    def apply(self, step: Step) -> None:
        """See Inputs."""
        if step.reset:
            self._clear()
        delta = [
            _scatter_indices(writes, begin, width)
            for writes, (begin, width) in zip((step.tokens, *step.blocks), self._regions, strict=True)
            if len(writes.values)
        ]
        if not delta:
            return
        places, values = (np.concatenate(parts) for parts in zip(*delta, strict=True))
        there = to_device(np.concatenate((places.view(np.int32), values)), self._device)
        self.words.index_copy_(0, there[: 2 * len(places)].view(torch.int64), there[2 * len(places) :])

    def put_sampled(self, rows: np.ndarray, positions: np.ndarray, tokens: Tensor) -> None:
        """See Inputs."""
        places = to_device(self._token_indices(rows, positions), self._device)
        self.words.index_copy_(0, places, tokens.clamp(min=0).to(torch.int32))

    def forward_inputs(self, chunks: Chunks) -> ForwardInputs:
        """See Inputs."""
        positions = chunks.token_positions
        places = self._token_indices(chunks.token_rows, positions)
        there = to_device(_aligned_pair(places, positions), self._device)[:, : len(places)]
        return ForwardInputs(
            self.read_tokens(there[0]), there[1], self.batches(chunks.starts, chunks.stops, chunks.rows)
        )

    def captured_inputs(self, size: int) -> "CapturedResidentInputs":
        """See Inputs."""
        return CapturedResidentInputs(self, size, self._device)

    def read_tokens(self, indices: Tensor) -> Tensor:
        """The words at `indices` of `words` (tokens), as int64."""
        return self.words.index_select(0, indices).long()

    def batches(
        self, starts: np.ndarray, stops: np.ndarray, rows: np.ndarray, ends: np.ndarray | None = None
    ) -> list[Batch]:
        """The Batch of each KV group. The arguments have one entry per chunk."""
        starts, stops, rows = (column.astype(np.int64) for column in (starts, stops, rows))
        nothing = np.empty((len(rows), 0), np.int64)
        return [Batch(starts, stops, nothing, ResidentTables(table, rows), ends) for table in self.tables]

    def _token_indices(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Indices of tokens in `words`, int64."""
        places: np.ndarray = rows.astype(np.int64) * self.stride + positions
        return places

    def _clear(self) -> None:
        """Clear all rows."""
        self.words.zero_()
        for table in self.tables:
            table[self.padding_row].fill_(_NO_BLOCK)


class CapturedResidentInputs:
    """Rows and positions of a captured step. The captured step itself reads the tokens from the rows.

    Chunks of several tokens become chunks of one token, because a captured step cannot change the length of a chunk.
    """

    def __init__(self, inputs: ResidentInputs, size: int, device: torch.device) -> None:
        self._inputs = inputs
        self._uploaded = torch.zeros((2, size + size % 2), dtype=torch.int64, device=device)
        self._token_indices, self.positions = self._uploaded[:, :size].unbind()

    def token_ids(self) -> Tensor:
        """See CapturedInputs."""
        return self._inputs.read_tokens(self._token_indices)

    def refill(self, chunks: Chunks) -> list[Batch]:
        """See CapturedInputs."""
        rows, positions = chunks.token_rows, chunks.token_positions
        ends = np.repeat(chunks.stops.astype(np.int64), chunks.lengths)
        more = (0, len(self.positions) - len(rows))
        rows = np.pad(rows, more, constant_values=self._inputs.padding_row)
        positions, ends = np.pad(positions, more), np.pad(ends, more, constant_values=1)
        copy_to_device(self._uploaded, _aligned_pair(rows * self._inputs.stride + positions, positions))
        return self._inputs.batches(positions, positions + 1, rows, ends)


def _aligned_pair(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Two int64 columns as rows of one array. Their length is even, so that both are aligned to 16 bytes."""
    both = np.zeros((2, len(one) + len(one) % 2), np.int64)
    both[0, : len(one)], both[1, : len(one)] = one, other
    return both


def _scatter_indices(writes: TableUpdates, begin: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices, int64, and values, int32, of spans in a table that begins at `begin`. The indices are distinct.

    Of several values for one index, the last is used, as if the spans were written in order.
    """
    ends = np.cumsum(writes.lengths, dtype=np.int64)
    firsts = begin + writes.rows.astype(np.int64) * width + writes.starts - (ends - writes.lengths)
    places = np.arange(len(writes.values)) + np.repeat(firsts, writes.lengths)
    if len(np.unique(writes.rows)) == len(writes.rows):
        return places, writes.values
    places, last = np.unique(places[::-1], return_index=True)
    return places, writes.values[::-1][last]
