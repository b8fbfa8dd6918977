"""The fixed rows of a runner: tokens, block tables and sampling parameters of running sequences, in host memory."""

import numpy as np

from quire.cache.block_table import ABSENT
from quire.config import CacheConfig
from quire.core.step import Chunks, SamplingMasks, StateChunks, Step, TableUpdates
from quire.kernels.contract import Batch
from quire.kernels.sampling_contract import SamplingMetadata
from quire.runner.state_batches import check_states
from quire.sampling.metadata import SamplingColumns

_NONE = -1  # no position


class Rows:
    """One row per running sequence. num_slots: of adapters, without slot 0, which is for none."""

    def __init__(
        self, cache: CacheConfig, max_num_seqs: int, max_model_len: int, vocab_size: int, num_slots: int = 0
    ) -> None:
        width = -(-max_model_len // cache.block_size)
        self._tokens = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._tables = [np.zeros((max_num_seqs, width), np.int32) for _ in cache.groups]
        self._num_blocks = [group.num_blocks for group in cache.groups]
        self._state_group = cache.states
        self._vocab_size = vocab_size
        self._num_slots = num_slots
        self._block_size = cache.block_size
        self.sampling = SamplingColumns(max_num_seqs, vocab_size)
        self.deterministic = np.zeros(max_num_seqs, np.bool_)
        self.poolings = np.zeros(max_num_seqs, np.uint8)
        self._adapters = np.zeros((2, max_num_seqs), np.int32)  # slot, and first position at which the adapter applies
        self._pending_positions = np.full(
            max_num_seqs, _NONE, np.int64
        )  # position of a sampled token that the host lacks

    def _check(self, step: Step) -> None:
        """Raises ValueError for a row, slot, position, token or block out of bounds, which kernels do not check."""
        num_rows, num_positions = self._tokens.shape
        _check_range("rows", step.opens.rows, num_rows)
        _check_range("slots", step.opens.adapters, self._num_slots + 1)
        _check_range("rows", step.chunks.rows, num_rows)
        _check_range("positions", step.chunks.starts, num_positions)
        _check_range("positions", step.chunks.stops, num_positions)
        _check_range("tokens", step.tokens.values, self._vocab_size)
        _check_spans(step.tokens, self._tokens)
        for updates, table, num_blocks in zip(step.blocks, self._tables, self._num_blocks, strict=True):
            _check_range("blocks", updates.values, num_blocks, ABSENT)
            _check_spans(updates, table)
        if self._state_group is None:
            return
        if not isinstance(step.states, StateChunks):
            raise ValueError("the model has recurrent states, and the step has none")
        check_states(step.states, step.chunks, self._state_group.num_blocks, self._state_group.max_pending)

    def apply(self, step: Step) -> None:
        """Apply a step's reset, new rows, tokens and blocks. Raises ValueError for a step out of bounds."""
        self._check(step)
        if step.reset:
            for table in (self._tokens, *self._tables):
                table.fill(0)
            self._pending_positions.fill(_NONE)
        if len(step.opens):
            self._pending_positions[step.opens.rows] = _NONE
            self.sampling.set_rows(step.opens)
            self.deterministic[step.opens.rows] = step.opens.deterministic
            self.poolings[step.opens.rows] = step.opens.poolings
            self._adapters[:, step.opens.rows] = step.opens.adapters, step.opens.adapter_starts
        step.tokens.apply(self._tokens)
        self._clear_pending(step.tokens)
        for writes, table in zip(step.blocks, self._tables, strict=True):
            writes.apply(table)

    def _clear_pending(self, writes: TableUpdates) -> None:
        """Tokens of the step replace sampled tokens that are not on the host yet."""
        if not len(writes.rows):
            return
        awaited = self._pending_positions[writes.rows]
        settled = (writes.starts <= awaited) & (awaited < writes.starts + writes.lengths)
        self._pending_positions[writes.rows[settled]] = _NONE

    def inputs(self, chunks: Chunks) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and positions of all chunks, concatenated, int64."""
        positions = chunks.token_positions
        return self._tokens[chunks.token_rows, positions].astype(np.int64), positions

    def adapter_slots(self, chunks: Chunks) -> np.ndarray | None:
        """The slot of the adapter of each token, int32, 0 for none; None if no token has one."""
        slots, starts = self._adapters
        if not slots[chunks.rows].any():
            return None
        rows = chunks.token_rows
        found: np.ndarray = np.where(chunks.token_positions >= starts[rows], slots[rows], np.int32(0))
        return found if found.any() else None

    def batches(self, chunks: Chunks) -> list[Batch]:
        """The Batch of each KV group."""
        starts, stops = chunks.starts.astype(np.int64), chunks.stops.astype(np.int64)
        width = -(-int(stops.max()) // self._block_size)
        return [Batch(starts, stops, table[chunks.rows, :width].astype(np.int64)) for table in self._tables]

    def tokens(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The token at one position of each of `rows`, int32."""
        found: np.ndarray = self._tokens[rows, positions]
        return found

    def sampling_metadata(
        self, rows: np.ndarray, positions: np.ndarray, sampling_masks: SamplingMasks
    ) -> SamplingMetadata:
        """The sampling metadata for the tokens at `positions` of `rows`."""
        return self.sampling.metadata(rows, positions, self._tokens, sampling_masks)

    def mark_pending(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Record that a token was sampled at `positions` of `rows`, which `write_pending` will write."""
        self._pending_positions[rows] = positions

    def write_pending(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Write tokens that were marked as pending, one per row. Rows that have another sequence by now are skipped."""
        here = self._pending_positions[rows] == positions
        rows = rows[here]
        self.write_sampled(rows, positions[here], tokens[here])
        self._pending_positions[rows] = _NONE

    def write_sampled(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Write sampled tokens, one per row. -1 becomes 0, a valid index of the embedding; its result is not used."""
        self._tokens[rows, positions] = np.maximum(tokens, 0)


def _check_range(what: str, values: np.ndarray, stop: int, start: int = 0) -> None:
    """As unsigned numbers, values below `start` are larger than all others."""
    unsigned = np.uint32 if values.itemsize == 4 else np.uint64
    if len(values) and int((values - start if start else values).view(unsigned).max()) >= stop - start:
        raise ValueError(f"some of the step's {what} are not from {start} to {stop - 1}: {values.tolist()!s:.80}")


def _check_spans(updates: TableUpdates, table: np.ndarray) -> None:
    if len(updates.rows):
        num_rows, width = table.shape
        _check_range("rows", updates.rows, num_rows)
        _check_range("columns", updates.starts, width + 1)
        _check_range("columns", updates.starts + updates.lengths, width + 1)
        if int(updates.lengths.sum()) != len(updates.values):
            raise ValueError(f"the step's spans have {updates.lengths.sum()} values, not {len(updates.values)}")
