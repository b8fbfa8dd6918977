"""The plan of a step for state blocks, on the device, in one tensor that a captured step refills."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.kernels.state_contract import StateBatch, StateStorage
from quire.kernels.triton.upload import stage

LEAST_SETTLED = 16  # tokens that settle in a chunk that is computed in pieces


@dataclass(slots=True, eq=False)
class StatePlan:
    """The chunks of one step for the state blocks. All tensors are int32, on the device."""

    table: Tensor  # (num_chunks, 8): see `_table`
    token_chunks: Tensor  # (num_tokens,): the chunk of each token
    snapshots: Tensor  # (num_snapshots, 2): position, block
    order: Tensor  # (num_chunks,): the chunks, those that are computed in pieces last
    num_long: int  # chunks that are computed in pieces
    packed: Tensor  # contains the other tensors, which are views of it


def plan_states(batch: StateBatch, storage: StateStorage, *, refilled: bool = False) -> StatePlan:
    """See Kernels. A plan that is refilled computes no chunk in pieces."""
    device = storage.data.device
    arrays = _columns(batch, refilled=refilled)
    host, places = stage(arrays, device)
    packed = host.to(device, non_blocking=True) if device.type != "cpu" else host
    table, token_chunks, snapshots, order = (
        packed[place : place + array.size].view(array.shape) for place, array in zip(places, arrays, strict=True)
    )
    return StatePlan(table, token_chunks, snapshots, order, 0 if refilled else int(_are_long(batch).sum()), packed)


def refill_states(plan: StatePlan, batch: StateBatch) -> None:
    """Write another step with the same numbers of chunks and tokens into the tensors of `plan`.

    Raises ValueError if the numbers differ.
    """
    arrays = _columns(batch, refilled=True)
    old = [tuple(some.shape) for some in (plan.table, plan.token_chunks, plan.snapshots)]
    if [array.shape for array in arrays[:3]] != old:
        (chunks, _), (tokens,), (snapshots, _) = old
        raise ValueError(
            f"a plan for {chunks} chunks of {tokens} tokens and {snapshots} snapshots cannot hold {len(batch.starts)} "
            f"chunks of {(batch.stops - batch.starts).sum()} tokens and {len(batch.snapshots)} snapshots"
        )
    plan.packed.copy_(stage(arrays, plan.packed.device)[0], non_blocking=True)


def _columns(batch: StateBatch, *, refilled: bool) -> list[np.ndarray]:
    """The int32 arrays of a plan, in the order of its fields."""
    token_chunks = np.repeat(np.arange(len(batch.starts)), batch.stops - batch.starts)
    order = np.argsort(_are_long(batch) & (not refilled), kind="stable")
    return [some.astype(np.int32) for some in (_table(batch), token_chunks, batch.snapshots[:, 1:], order)]


def _are_long(batch: StateBatch) -> np.ndarray:
    """Which chunks are computed in pieces, bool (num_chunks,)."""
    many: np.ndarray = batch.settles - batch.settled >= LEAST_SETTLED
    return many & (batch.blocks >= 0) & (batch.stops > batch.starts)


def _table(batch: StateBatch) -> np.ndarray:
    """What kernels read of each chunk: start, stop, settled, settles, block, index of its first token, its snapshots.

    The snapshots are a range of indices. A chunk at position 0 is settled there. A chunk for which nothing is to be
    written has the block -1, and is at position 0.
    """
    lengths = batch.stops - batch.starts
    blocks = np.where(lengths > 0, batch.blocks, -1)
    starts, settles = (np.where(blocks < 0, 0, some) for some in (batch.starts, batch.settles))
    settled = np.where(starts == 0, 0, batch.settled)
    ends = np.cumsum(np.bincount(batch.snapshots[:, 0], minlength=len(lengths)))
    begins = np.concatenate(([0], ends[:-1]))
    columns = (starts, starts + lengths, settled, settles, blocks, np.cumsum(lengths) - lengths, begins, ends)
    return np.stack(columns, 1)
