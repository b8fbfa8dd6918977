"""A step as kernels read it: on the device, with fixed places, so that a recorded step can be refilled.

It comes there by copies from pinned memory that nobody waits for. Tables that are resident are not copied at all:
kernels look a chunk's up in its row.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.kernels.contract import Batch, Storage
from quire.kernels.triton.upload import staged, upload


@dataclass(slots=True, eq=False)
class TritonPlan:
    """The chunks of one step as one group sees them. All tensors are int32, on the device."""

    chunks: Tensor  # (num_tokens,): which chunk a token is of
    positions: Tensor  # (num_tokens,)
    begins: Tensor  # (num_chunks + 1,): where a chunk's tokens begin, and behind the last ones
    starts: Tensor  # (num_chunks,): position of a chunk's first token
    stops: Tensor  # (num_chunks,): position behind its last one
    rows: Tensor  # (num_chunks,): which of the tables is a chunk's
    tables: Tensor  # (num_tables, width)
    longest: int  # tokens of the longest chunk
    context: int  # the most positions that a query may see: `stops` of this step and of those it is refilled with
    lengths: np.ndarray  # int64 (num_chunks,): tokens of each chunk
    columns: Tensor  # where all of these but tables lie
    resident: bool  # whether the tables are others', and a step says no more than whose they are
    tiles: dict[tuple[int, range], Tensor] = field(default_factory=dict)  # see `tiles_of`

    def tiles_of(self, queries: int, lengths: range | None = None) -> Tensor:
        """int32 (num_tiles, 2): chunks cut into tiles of up to so many tokens; which chunk, and its first token there.

        lengths: only chunks with so many tokens are cut; default is all. Computed once for all layers, and for
        recorded steps before they are recorded.
        """
        lengths = range(1, self.longest + 1) if lengths is None else lengths
        if (queries, lengths) not in self.tiles:
            wanted = (self.lengths >= lengths.start) & (self.lengths < lengths.stop)
            numbers = np.where(wanted, -(-self.lengths // queries), 0)
            chunks = np.repeat(np.arange(len(numbers)), numbers)
            firsts = queries * (np.arange(len(chunks)) - np.repeat(np.cumsum(numbers) - numbers, numbers))
            (tiles,) = upload([np.stack((chunks, firsts), 1).astype(np.int32)], self.columns.device)
            self.tiles[queries, lengths] = tiles.view(-1, 2)
        return self.tiles[queries, lengths]


def plan(batch: Batch, storage: Storage, *, width: int | None = None) -> TritonPlan:
    """Bring a step to the device.

    width: the most blocks that a chunk has in the steps that it is refilled with; none for a plan that is not.
    """
    device = storage.data.device
    lengths = batch.stops - batch.starts
    arrays = _columns(batch)
    host, places = staged(arrays, device)
    columns = host.to(device, non_blocking=True) if device.type != "cpu" else host
    if batch.resident is None:
        num_chunks, known = batch.tables.shape
        tables = torch.full((num_chunks, known if width is None else width), -1, dtype=torch.int32, device=device)
        _write_tables(tables, batch.tables)
    else:
        tables = batch.resident.tables
    chunks, positions, begins, starts, stops, rows = (
        columns[place : place + len(array)] for place, array in zip(places, arrays, strict=True)
    )
    return TritonPlan(
        *(chunks, positions, begins, starts, stops, rows, tables),
        longest=int(lengths.max()),
        context=int(batch.stops.max()) if width is None else width * storage.block_size,
        lengths=lengths,
        columns=columns,
        resident=batch.resident is not None,
    )


def refill(plan: TritonPlan, batch: Batch) -> None:
    """Put another step with as many chunks and tokens into the tensors of `plan`, which stay where they are.

    Tables keep what they had behind the batch's, which nobody reads. Tiles stay too where every chunk has as many
    tokens as before. Otherwise they are cut anew, into new tensors: in a recorded step, chunks keep their lengths.
    Raises ValueError where the step has another shape.
    """
    lengths = batch.stops - batch.starts
    if (batch.resident is not None) != plan.resident:
        raise ValueError("a plan keeps to tables of one kind: those of its steps, or resident ones")
    shape = (len(plan.starts), len(plan.chunks), plan.tables.shape[1])
    new = (len(lengths), int(lengths.sum()), batch.tables.shape[1])
    if new[:2] != shape[:2] or new[2] > shape[2]:
        raise ValueError(
            f"a plan for {shape[0]} chunks of {shape[1]} tokens and {shape[2]} blocks at most cannot hold"
            f" {new[0]} chunks of {new[1]} tokens and {new[2]} blocks"
        )
    plan.columns.copy_(staged(_columns(batch), plan.columns.device)[0], non_blocking=True)
    if batch.resident is None:
        _write_tables(plan.tables, batch.tables)
    plan.context = max(plan.context, int(batch.stops.max()))
    if not np.array_equal(lengths, plan.lengths):
        plan.lengths, plan.longest = lengths, int(lengths.max())
        plan.tiles.clear()


def _columns(batch: Batch) -> list[np.ndarray]:
    """What the tensors of a plan hold but for tables, in the order of its fields, int32."""
    lengths = batch.stops - batch.starts
    ends = np.cumsum(lengths)
    chunks = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(chunks)) + np.repeat(batch.stops - ends, lengths)
    rows = np.arange(len(lengths)) if batch.resident is None else batch.resident.rows
    columns = (chunks, positions, np.concatenate(([0], ends)), batch.starts, batch.stops, rows)
    return [column.astype(np.int32) for column in columns]


def _write_tables(target: Tensor, tables: np.ndarray) -> None:
    """Write tables (num_chunks, up to width) to where `target` (num_chunks, width) begins."""
    (there,) = upload([tables.astype(np.int32)], target.device)
    target[:, : tables.shape[1]].copy_(there.view(tables.shape))
