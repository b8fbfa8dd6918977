"""The state blocks of a step's chunks as the kernels take them."""

import numpy as np

from quire.core.step import Chunks, StateChunks
from quire.kernels.state_contract import StateBatch

_NO_BLOCK = -1
_NO_SNAPSHOTS = np.zeros((0, 3), np.int64)


def select_states(states: StateChunks, which: np.ndarray) -> StateChunks:
    """The state blocks of the chunks that the mask `which` selects."""
    if which.all():
        return states
    place = which.cumsum(dtype=np.int32) - 1  # of each selected chunk among those
    kept = which[states.snapshot_chunks]
    return StateChunks(
        states.blocks[which],
        states.settled[which],
        states.settles[which],
        place[states.snapshot_chunks[kept]],
        states.snapshot_positions[kept],
        states.snapshot_blocks[kept],
    )


def state_batch(chunks: Chunks, states: StateChunks) -> StateBatch:
    """The batch of a step."""
    snapshots = np.stack([states.snapshot_chunks, states.snapshot_positions, states.snapshot_blocks], 1)
    return StateBatch(
        chunks.starts.astype(np.int64),
        chunks.stops.astype(np.int64),
        states.blocks.astype(np.int64),
        states.settled.astype(np.int64),
        states.settles.astype(np.int64),
        snapshots.astype(np.int64),
    )


def captured_batch(chunks: Chunks, states: StateChunks, size: int) -> StateBatch:
    """The batch of a captured step of `size` tokens, with as many chunks, for a step without snapshots.

    Tokens that the step lacks are those of chunks without a block. The other missing chunks have no tokens.
    """
    number, num_padding = len(chunks), size - chunks.num_tokens
    starts, stops, settled, settles = np.zeros((4, size), np.int64)
    blocks = np.full(size, _NO_BLOCK, np.int64)
    starts[:number], stops[:number], blocks[:number] = chunks.starts, chunks.stops, states.blocks
    settled[:number], settles[:number] = states.settled, states.settles
    stops[number : number + num_padding] = 1
    return StateBatch(starts, stops, blocks, settled, settles, _NO_SNAPSHOTS)


def check_states(states: StateChunks, chunks: Chunks, num_blocks: int, max_pending: int) -> None:
    """Raise ValueError for a block out of bounds or twice, or positions that do not fit, which kernels do not check."""
    if not len(states.blocks) == len(states.settled) == len(states.settles) == len(chunks):
        raise ValueError(f"the step has state blocks of {len(states.blocks)} chunks, and {len(chunks)} chunks")
    blocks = np.concatenate((states.blocks, states.snapshot_blocks)).tolist()
    if blocks and (min(blocks) < 0 or max(blocks) >= num_blocks or len(set(blocks)) < len(blocks)):
        raise ValueError(f"the step writes state blocks {blocks!s:.80}, not different ones below {num_blocks}")
    starts, stops = chunks.starts, chunks.stops
    ordered = (states.settled <= starts) & (starts <= states.settles) & (states.settles <= stops)
    if not ordered.all() or (np.maximum(starts - states.settled, stops - states.settles) > max_pending).any():
        raise ValueError(f"the step's states do not fit its chunks with {max_pending} pending tokens at most")
    owners, positions = states.snapshot_chunks, states.snapshot_positions
    places = list(zip(owners.tolist(), positions.tolist(), strict=True))
    if places != sorted(places) or (places and not 0 <= places[0][0] <= places[-1][0] < len(chunks)):
        raise ValueError(f"the step's snapshots are not sorted by chunk and position: {places!s:.80}")
    if len(owners) and not ((starts[owners] < positions) & (positions <= states.settles[owners])).all():
        raise ValueError(f"some of the step's snapshots are not within their chunks: {positions.tolist()!s:.80}")
