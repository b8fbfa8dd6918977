"""Paged attention in tiles of queries and splits of keys that are always the same.

A tile is QUERIES consecutive positions of a chunk, a split the KEYS positions from a multiple of KEYS on,
whichever blocks they lie in. A tile meets the splits that its queries see in turn, with one product of one
shape for each, and keeps a running maximum and sum (Milakov and Gimelshein, Online normalizer calculation
for softmax, 2018). A split of which a query sees nothing leaves that query as it was, so it does not matter
which others share its tile. All in float32, whatever the types of queries and keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.contract import Batch, Rotation, Storage
from quire.kernels.exact import by_vectors, tree_sum
from quire.kernels.invariant.rowwise import rotary
from quire.kernels.reference.quantized import numbers, stored

QUERIES = 4  # positions of a tile, of which the last may stand for several
KEYS = 256  # positions of a split: few enough terms for a sum that is not shared out, see `products`
SCRATCH_BYTES = 2**27  # of the tiles that are computed together, unless one alone takes more
_LOWEST = torch.finfo(torch.float32).min


class Tiles(NamedTuple):
    """Tiles that are computed together, one array per field."""

    chunks: np.ndarray  # int64 (num_tiles,)
    begins: np.ndarray  # int64 (num_tiles,): first split that some query sees
    ends: np.ndarray  # int64 (num_tiles,): behind the last one
    tokens: np.ndarray  # int64 (num_tiles, QUERIES): among those of the step
    positions: np.ndarray  # int64 (num_tiles, QUERIES)


@dataclass(frozen=True, slots=True, eq=False)
class InvariantPlan:
    """Where the step's tokens are written and what they attend to."""

    slots: Tensor  # int64 (num_tokens,): block * block_size + place in the block
    begun: Tensor  # int64: blocks whose first slot is written
    keys: Tensor  # int64 (num_chunks, whole splits): slot of each position; anything where it is never seen
    tiles: list[Tiles]


class State(NamedTuple):
    """What queries know of the keys they have met, float32 (num_tiles, num_kv_heads, rows, 1 or head_dim)."""

    largest: Tensor
    total: Tensor  # of exponentials
    output: Tensor  # values weighed by exponentials


def plan(batch: Batch, storage: Storage) -> InvariantPlan:
    """Cut the chunks of a step into tiles."""
    device = storage.data.device
    lengths = batch.stops - batch.starts
    chunks = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(chunks)) + np.repeat(batch.stops - np.cumsum(lengths), lengths)
    every = np.arange(-(-int(batch.stops.max()) // KEYS) * KEYS)
    indices = np.minimum(every // storage.block_size, batch.tables.shape[1] - 1)
    keys = np.maximum(batch.tables[:, indices], 0) * storage.block_size + every % storage.block_size
    keys = np.minimum(keys, storage.group.num_blocks * storage.block_size - 1)
    slots = keys[chunks, positions]
    return InvariantPlan(
        _tensor(slots, device),
        _tensor(slots[positions % storage.block_size == 0] // storage.block_size, device),
        _tensor(keys, device),
        list(_groups(_tiles(batch, storage.group.window), storage)),
    )


def _tiles(batch: Batch, window: int) -> Tiles:
    lengths = batch.stops - batch.starts
    numbers = -(-lengths // QUERIES)
    chunks = np.repeat(np.arange(len(lengths)), numbers)
    offsets = QUERIES * (np.arange(len(chunks)) - np.repeat(np.cumsum(numbers) - numbers, numbers))
    places = np.minimum(offsets[:, None] + np.arange(QUERIES), lengths[chunks, None] - 1)  # within the chunk
    tokens = (np.cumsum(lengths) - lengths)[chunks, None] + places
    positions = batch.starts[chunks, None] + places
    first_seen = np.maximum(positions[:, 0] - window + 1, 0) if window else np.zeros(len(chunks), np.int64)
    return Tiles(chunks, first_seen // KEYS, positions[:, -1] // KEYS + 1, tokens, positions)


def _groups(tiles: Tiles, storage: Storage) -> Iterator[Tiles]:
    """Tiles in portions that keep to SCRATCH_BYTES, with an allowance for heads that share keys."""
    per_tile = 32 * KEYS * storage.group.num_kv_heads * max(storage.group.head_dim, 16 * QUERIES)
    at_once = max(1, SCRATCH_BYTES // per_tile)
    for first in range(0, len(tiles.chunks), at_once):
        yield Tiles(*(column[first : first + at_once] for column in tiles))


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def write_kv(storage: Storage, layer: int, k: Tensor, v: Tensor, plan: InvariantPlan) -> None:
    """Store the step's keys and values (num_tokens, num_kv_heads, head_dim), clearing blocks that begin."""
    for blocks, new in zip(storage.data[layer], (k, v), strict=True):
        blocks.index_fill_(0, plan.begun, 0)
        blocks.flatten(0, 1).index_copy_(0, plan.slots, stored(new, storage.group.dtype))


def rotary_write(
    storage: Storage, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, plan: InvariantPlan
) -> Tensor:
    """Rotate q and k, then `write_kv`. Returns q."""
    if rotation is not None:
        q, k = rotary(q, k, *rotation)
    write_kv(storage, layer, k, v, plan)
    return q


def attention(
    storage: Storage, layer: int, q: Tensor, plan: InvariantPlan, scale: float, softcap: float = 0.0
) -> Tensor:
    """Causal attention of q (num_tokens, num_heads, head_dim) -> (num_tokens, num_heads * head_dim)."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = storage.group.num_kv_heads
    out = torch.empty_like(q)
    for tiles in plan.tiles:
        tokens = _tensor(tiles.tokens, q.device)
        queries = q[tokens].view(len(tokens), QUERIES, num_kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
        queries = queries.float() * scale  # (num_tiles, num_kv_heads, QUERIES * query heads of each, head_dim)
        found = _attend(queries, storage, layer, plan, tiles, softcap)
        found = found.view(len(tokens), num_kv_heads, QUERIES, -1, head_dim).transpose(1, 2)
        out[tokens] = found.reshape(*tokens.shape, num_heads, head_dim).to(q.dtype)
    return out.flatten(1)


def _attend(q: Tensor, storage: Storage, layer: int, plan: InvariantPlan, tiles: Tiles, softcap: float) -> Tensor:
    """q (num_tiles, num_kv_heads, rows, head_dim) -> the same shape."""
    group = storage.group
    positions = _tensor(tiles.positions, q.device)
    chunks = _tensor(tiles.chunks, q.device)
    state = State(q.new_full((*q.shape[:3], 1), _LOWEST), q.new_zeros(*q.shape[:3], 1), torch.zeros_like(q))
    for split in range(int(tiles.begins.min()), int(tiles.ends.max())):
        seeing = _tensor(np.flatnonzero((tiles.begins <= split) & (split < tiles.ends)), q.device)
        keys = torch.arange(split * KEYS, (split + 1) * KEYS, device=q.device)
        seen = _seen(keys, positions[seeing], group.window)  # (num seeing, QUERIES, KEYS)
        slots = plan.keys[chunks[seeing], split * KEYS : (split + 1) * KEYS]
        k, v = (_gather(blocks, slots, group.dtype) for blocks in storage.data[layer])
        v.masked_fill_(~seen.any(1)[:, None, :, None], 0)  # what nobody sees may be anything, NaN too
        scores = _products(q[seeing], k.mT)
        if softcap:
            scores = by_vectors(torch.tanh, scores / softcap) * softcap
        scores.masked_fill_(~seen.repeat_interleave(q.shape[2] // QUERIES, 1).unsqueeze(1), -torch.inf)
        met = _meet(State(*(part[seeing] for part in state)), scores, v)
        for part, new in zip(state, met, strict=True):
            part[seeing] = new
    return state.output / state.total


def _seen(keys: Tensor, positions: Tensor, window: int) -> Tensor:
    """Whether queries at positions (num_tiles, QUERIES) see keys (KEYS,)."""
    ages = positions.unsqueeze(-1) - keys
    return (ages >= 0) & (ages < window) if window else ages >= 0


def _gather(blocks: Tensor, slots: Tensor, dtype: str) -> Tensor:
    """Slots (num_tiles, KEYS) of blocks, float32 (num_tiles, num_kv_heads, KEYS, head_dim)."""
    found = blocks.flatten(0, 1).index_select(0, slots.flatten()).view(*slots.shape, *blocks.shape[2:])
    return numbers(found.transpose(1, 2).contiguous(), dtype).float()


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for each tile alone, so that their number changes no shape."""
    out = a.new_empty(*a.shape[:3], b.shape[-1])
    for left, right, target in zip(a, b, out, strict=True):
        torch.bmm(left, right, out=target)
    return out


def _meet(state: State, scores: Tensor, v: Tensor) -> State:
    """The state after a split. scores (num_tiles, num_kv_heads, rows, KEYS): -inf where a key is not seen."""
    largest = torch.maximum(state.largest, scores.amax(-1, keepdim=True))
    kept = by_vectors(torch.exp, state.largest - largest)
    weights = by_vectors(torch.exp, scores - largest)
    return State(
        largest,
        state.total * kept + tree_sum(weights),
        state.output * kept + _products(weights, v),
    )
