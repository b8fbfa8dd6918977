"""The plan of a step on the device, in tensors with fixed addresses, so that a captured step can be refilled.

It is copied asynchronously from pinned memory. Resident block tables are not copied: a plan has the row of each chunk
in them.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.kernels.contract import Batch, Storage
from quire.kernels.triton.upload import stage, upload


@dataclass(slots=True, eq=False)
class TritonPlan:
    """The chunks of one step for one KV group. All tensors are int32, on the device."""

    chunks: Tensor  # (num_tokens,): the chunk of each token
    positions: Tensor  # (num_tokens,)
    query_start_loc: Tensor  # (num_chunks + 1,): index of each chunk's first token, and num_tokens
    starts: Tensor  # (num_chunks,): position of a chunk's first token
    stops: Tensor  # (num_chunks,): position after its last token
    ends: Tensor  # (num_chunks,): position after the last token of its sequence in this step
    table_rows: Tensor  # (num_chunks,): row of each chunk in `tables`
    tables: Tensor  # (num_tables, width)
    max_query_len: int  # tokens of the longest chunk
    max_context: int  # the most keys of a query, in this step and in those that it is refilled with
    lengths: np.ndarray  # int64 (num_chunks,): tokens of each chunk
    packed_columns: Tensor  # contains chunks, positions, begins, starts, stops, ends and rows, which are views of it
    resident: bool  # whether `tables` are resident; then a refill does not write them
    tiles: dict[tuple[int, range], Tensor] = field(default_factory=dict)  # see `tiles_of`

    def tiles_of(self, queries: int, lengths: range | None = None) -> Tensor:
        """int32 (num_tiles, 2): chunks cut into tiles of up to `queries` tokens, as chunk and first token in the chunk.

        lengths: only chunks with these numbers of tokens are cut; default is all. Cached for all layers. For captured
        steps it is computed before the capture.
        """
        lengths = range(1, self.max_query_len + 1) if lengths is None else lengths
        if (queries, lengths) not in self.tiles:
            wanted = (self.lengths >= lengths.start) & (self.lengths < lengths.stop)
            numbers = np.where(wanted, -(-self.lengths // queries), 0)
            chunks = np.repeat(np.arange(len(numbers)), numbers)
            firsts = queries * (np.arange(len(chunks)) - np.repeat(np.cumsum(numbers) - numbers, numbers))
            (tiles,) = upload([np.stack((chunks, firsts), 1).astype(np.int32)], self.packed_columns.device)
            self.tiles[queries, lengths] = tiles.view(-1, 2)
        return self.tiles[queries, lengths]


def plan(batch: Batch, storage: Storage, *, width: int | None = None) -> TritonPlan:
    """The plan of a step, on the device.

    width: the most blocks of a chunk in the steps that it is refilled with; None for a plan that is not refilled.
    """
    device = storage.data.device
    lengths = batch.stops - batch.starts
    arrays = _columns(batch)
    host, places = stage(arrays, device)
    columns = host.to(device, non_blocking=True) if device.type != "cpu" else host
    if batch.resident is None:
        num_chunks, known = batch.tables.shape
        tables = torch.full((num_chunks, known if width is None else width), -1, dtype=torch.int32, device=device)
        _write_tables(tables, batch.tables)
    else:
        tables = batch.resident.tables
    chunks, positions, begins, starts, stops, ends, rows = (
        columns[place : place + len(array)] for place, array in zip(places, arrays, strict=True)
    )
    return TritonPlan(
        *(chunks, positions, begins, starts, stops, ends, rows, tables),
        max_query_len=int(lengths.max()),
        max_context=int(batch.stops.max()) if width is None else width * storage.block_size,
        lengths=lengths,
        packed_columns=columns,
        resident=batch.resident is not None,
    )


def refill(plan: TritonPlan, batch: Batch) -> None:
    """Write another step with the same numbers of chunks and tokens into the tensors of `plan`.

    Table entries after the width of the batch keep their old content, which is not read. Tiles are kept if every chunk
    has the same number of tokens as before; otherwise they are computed again into new tensors, so the chunks of a
    captured step must keep their lengths. Raises ValueError if the numbers differ, the tables are too wide, or only
    one of plan and batch has resident tables.
    """
    lengths = batch.stops - batch.starts
    if (batch.resident is not None) != plan.resident:
        raise ValueError("a plan uses one kind of tables: those of its steps, or resident ones")
    shape = (len(plan.starts), len(plan.chunks), plan.tables.shape[1])
    new = (len(lengths), int(lengths.sum()), batch.tables.shape[1])
    if new[:2] != shape[:2] or new[2] > shape[2]:
        raise ValueError(
            f"a plan for {shape[0]} chunks of {shape[1]} tokens and {shape[2]} blocks at most cannot hold"
            f" {new[0]} chunks of {new[1]} tokens and {new[2]} blocks"
        )
    plan.packed_columns.copy_(stage(_columns(batch), plan.packed_columns.device)[0], non_blocking=True)
    if batch.resident is None:
        _write_tables(plan.tables, batch.tables)
    plan.max_context = max(plan.max_context, int(batch.stops.max()))
    if not np.array_equal(lengths, plan.lengths):
        plan.lengths, plan.max_query_len = lengths, int(lengths.max())
        plan.tiles.clear()


def _columns(batch: Batch) -> list[np.ndarray]:
    """The int32 arrays of a plan except tables, in the order of its fields."""
    lengths = batch.stops - batch.starts
    ends = np.cumsum(lengths)
    chunks = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(chunks)) + np.repeat(batch.stops - ends, lengths)
    rows = np.arange(len(lengths)) if batch.resident is None else batch.resident.rows
    last = batch.stops if batch.ends is None else batch.ends
    columns = (chunks, positions, np.concatenate(([0], ends)), batch.starts, batch.stops, last, rows)
    return [column.astype(np.int32) for column in columns]


def _write_tables(target: Tensor, tables: np.ndarray) -> None:
    """Write tables (num_chunks, up to width) to the first columns of `target` (num_chunks, width)."""
    (there,) = upload([tables.astype(np.int32)], target.device)
    target[:, : tables.shape[1]].copy_(there.view(tables.shape))
