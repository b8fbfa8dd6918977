"""Deterministic paged attention: fixed splits of keys, and products with exact sums.

A split is the KEYS positions from a multiple of KEYS on, in whichever blocks they are. Queries process their splits in
order, with a running maximum and sum (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018). A split
in which a query attends to no key does not change that query's state. Sums of products are exact, as in
`exact.product`, in fixed point below the largest number of the query, or of the key, alone. So the result does not
depend on the tile of a query or on the other queries in it, and tiles have the size that is fastest. Scores and their
exponentials are float32 for all types of queries and keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.kv_groups import KVGroup
from quire.kernels.contract import Batch, Rotation, Storage
from quire.kernels.deterministic.rowwise import rotary
from quire.kernels.exact import LEFT_BITS, RIGHT_BITS, TERMS, apply_to_whole_vectors, fixed_point, row_power, sum_bits
from quire.kernels.reference.quantized import from_stored, to_stored

QUERIES = 32  # positions of a tile, padded with the last one of the chunk; 1 for chunks of one position
KEYS = TERMS  # positions of a split: the most terms of one exact sum
SCRATCH_BYTES = 2**24  # of the tiles that are computed together, unless one tile needs more
_LOWEST = torch.finfo(torch.float32).min


class Tiles(NamedTuple):
    """Tiles with the same number of queries, one array per field."""

    chunks: np.ndarray  # int64 (num_tiles,)
    begins: np.ndarray  # int64 (num_tiles,): first split that some query attends to
    ends: np.ndarray  # int64 (num_tiles,): end of the splits (exclusive)
    tokens: np.ndarray  # int64 (num_tiles, queries): indices among the step's tokens
    positions: np.ndarray  # int64 (num_tiles, queries)


@dataclass(frozen=True, slots=True, eq=False)
class DeterministicPlan:
    """The slots that the step's tokens are written to, and the keys that they attend to."""

    slots: Tensor  # int64 (num_tokens,): block * block_size + offset in the block
    new_blocks: Tensor  # int64: blocks whose first slot is written
    keys: Tensor  # int64 (num_chunks, whole splits): slot of each position; any valid slot if no query attends to it
    tiles: list[Tiles]


class SoftmaxState(NamedTuple):
    """Online softmax state of queries, (num_tiles, num_kv_heads, rows, 1 or head_dim)."""

    largest: Tensor  # float32: largest score
    total: Tensor  # float64: sum of exponentials
    output: Tensor  # float64: sum of values, weighted by exponentials


def plan(batch: Batch, storage: Storage) -> DeterministicPlan:
    """The plan of a step: slots, and chunks cut into tiles."""
    device = storage.data.device
    lengths = batch.stops - batch.starts
    chunks = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(chunks)) + np.repeat(batch.stops - np.cumsum(lengths), lengths)
    every = np.arange(-(-int(batch.stops.max()) // KEYS) * KEYS)
    indices = np.minimum(every // storage.block_size, batch.tables.shape[1] - 1)
    keys = np.maximum(batch.tables[:, indices], 0) * storage.block_size + every % storage.block_size
    keys = np.minimum(keys, storage.group.num_blocks * storage.block_size - 1)
    slots = keys[chunks, positions]
    return DeterministicPlan(
        _tensor(slots, device),
        _tensor(slots[positions % storage.block_size == 0] // storage.block_size, device),
        _tensor(keys, device),
        list(_tiles(batch, storage.group.kind.span)),
    )


def _tiles(batch: Batch, window: int) -> Iterator[Tiles]:
    """Tiles of one query for chunks of one position, tiles of QUERIES for the others."""
    lengths = batch.stops - batch.starts
    for queries, chunks in ((1, np.flatnonzero(lengths == 1)), (QUERIES, np.flatnonzero(lengths > 1))):
        if not len(chunks):
            continue
        numbers = -(-lengths[chunks] // queries)
        offsets = queries * (np.arange(numbers.sum()) - np.repeat(np.cumsum(numbers) - numbers, numbers))
        chunks = np.repeat(chunks, numbers)
        places = np.minimum(offsets[:, None] + np.arange(queries), lengths[chunks, None] - 1)  # offsets in the chunk
        tokens = (np.cumsum(lengths) - lengths)[chunks, None] + places
        positions = batch.starts[chunks, None] + places
        first_seen = np.maximum(positions[:, 0] - window + 1, 0) if window else np.zeros(len(chunks), np.int64)
        yield Tiles(chunks, first_seen // KEYS, positions[:, -1] // KEYS + 1, tokens, positions)


def portions(tiles: Tiles, group: KVGroup, shared: int) -> Iterator[Tiles]:
    """Tiles in portions that need at most SCRATCH_BYTES, or are one tile. shared: query heads per KV head."""
    rows = tiles.tokens.shape[1] * shared
    per_tile = 32 * KEYS * group.kind.num_kv_heads * (group.kind.head_dim + rows)
    at_once = max(1, SCRATCH_BYTES // per_tile)
    for first in range(0, len(tiles.chunks), at_once):
        yield Tiles(*(column[first : first + at_once] for column in tiles))


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def write_kv(storage: Storage, layer: int, k: Tensor, v: Tensor, plan: DeterministicPlan) -> None:
    """Zero the blocks in `plan.new_blocks`, then store keys and values (num_tokens, num_kv_heads, head_dim).

    With one plane the values are in the keys.
    """
    for blocks, new in zip(storage.data[layer], (k, v), strict=False):
        blocks.index_fill_(0, plan.new_blocks, 0)
        blocks.flatten(0, 1).index_copy_(0, plan.slots, to_stored(new, storage.group.dtype))


def rotary_write(
    storage: Storage, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, plan: DeterministicPlan
) -> Tensor:
    """Rotate q and k, then `write_kv`. Returns the rotated q."""
    if rotation is not None:
        q, k = rotary(q, k, *rotation)
    write_kv(storage, layer, k, v, plan)
    return q


def attention(
    storage: Storage, layer: int, q: Tensor, plan: DeterministicPlan, scale: float, softcap: float = 0.0
) -> Tensor:
    """Causal attention of q (num_tokens, num_heads, head_dim) -> (num_tokens, num_heads * value_dim)."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, value_dim = storage.group.kind.num_kv_heads, storage.group.kind.value_dim
    out = q.new_empty(len(q), num_heads, value_dim)
    shared = num_heads // num_kv_heads
    for tiles in (some for every in plan.tiles for some in portions(every, storage.group, shared)):
        tokens = _tensor(tiles.tokens, q.device)
        queries = q[tokens].view(*tokens.shape, num_kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
        queries = queries.float() * scale  # (num_tiles, num_kv_heads, queries * query heads of each, head_dim)
        found = _attend(queries, storage, layer, plan, tiles, softcap)
        found = found.view(len(tokens), num_kv_heads, tokens.shape[1], -1, value_dim).transpose(1, 2)
        out[tokens] = found.reshape(*tokens.shape, num_heads, value_dim).to(q.dtype)
    return out.flatten(1)


def _attend(q: Tensor, storage: Storage, layer: int, plan: DeterministicPlan, tiles: Tiles, softcap: float) -> Tensor:
    """q (num_tiles, num_kv_heads, rows, head_dim) -> (num_tiles, num_kv_heads, rows, value_dim), float64."""
    group, kind = storage.group, storage.group.kind
    positions = _tensor(tiles.positions, q.device)
    chunks = _tensor(tiles.chunks, q.device)
    wide = q.new_zeros((*q.shape[:3], kind.value_dim), dtype=torch.float64)
    state = SoftmaxState(q.new_full((*q.shape[:3], 1), _LOWEST), wide[..., :1].clone(), wide)
    shared = q.shape[2] // positions.shape[1]
    for split in range(int(tiles.begins.min()), int(tiles.ends.max())):
        which = (tiles.begins <= split) & (split < tiles.ends)
        if not which.any():
            continue
        seeing = slice(None) if which.all() else _tensor(np.flatnonzero(which), q.device)
        stop = min((split + 1) * KEYS, int(tiles.positions[which, -1].max()) + 1)  # no query attends to later keys
        keys = torch.arange(split * KEYS, stop, device=q.device)
        seen = _attention_mask(keys, positions[seeing], kind.span)  # (num seeing, queries, num_keys)
        slots = plan.keys[chunks[seeing], split * KEYS : stop]
        planes = [
            _gather(blocks, slots, group.dtype, size)
            for blocks, size in zip(storage.data[layer], kind.planes, strict=True)
        ]
        v = planes[-1][..., : kind.value_dim]
        scores = _scores(q[seeing], planes[0])
        if softcap:
            scores = apply_to_whole_vectors(torch.tanh, scores / softcap) * softcap
        seen = seen.repeat_interleave(shared, 1).unsqueeze(1)  # (num seeing, 1, rows, num_keys)
        scores.masked_fill_(~seen, -torch.inf)
        met = _update_state(SoftmaxState(*(part[seeing] for part in state)), scores, v, seen)
        for part, new in zip(state, met, strict=True):
            part[seeing] = new
    return state.output / state.total


def _attention_mask(keys: Tensor, positions: Tensor, window: int) -> Tensor:
    """bool (num_tiles, queries, num_keys): whether queries at positions (num_tiles, queries) attend to keys."""
    ages = positions.unsqueeze(-1) - keys
    return (ages >= 0) & (ages < window) if window else ages >= 0


def _gather(blocks: Tensor, slots: Tensor, dtype: str, head_dim: int) -> Tensor:
    """Keys or values at `slots` (num_tiles, num_keys): float32 (num_tiles, num_kv_heads, num_keys, head_dim)."""
    found = blocks.flatten(0, 1).index_select(0, slots.flatten()).view(*slots.shape, *blocks.shape[2:])
    return from_stored(found.transpose(1, 2).contiguous(), dtype, head_dim).float()


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Products of queries (..., rows, head_dim) with keys (..., num_keys, head_dim), float32 (..., rows, num_keys)."""
    total: Tensor | None = None
    for first in range(0, q.shape[-1], TERMS):
        left, right = (x[..., first : first + TERMS] for x in (q, k))
        part = fixed_point(left, row_power(left), LEFT_BITS) @ fixed_point(right, row_power(right), RIGHT_BITS).mT
        total = part if total is None else total + part
    assert total is not None
    return total.float()


def _update_state(state: SoftmaxState, scores: Tensor, v: Tensor, seen: Tensor) -> SoftmaxState:
    """The state after a split. scores (num_tiles, num_kv_heads, rows, num_keys): -inf for keys outside of `seen`."""
    largest = torch.maximum(state.largest, scores.amax(-1, keepdim=True))
    kept = apply_to_whole_vectors(torch.exp, state.largest - largest)
    weights = apply_to_whole_vectors(torch.exp, scores - largest)
    output = state.output * kept + _weighted_sums(weights, v, seen)
    return SoftmaxState(
        largest, state.total * kept + fixed_point(weights, 1.0, sum_bits(KEYS)).sum(-1, keepdim=True), output
    )


def _weighted_sums(weights: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """weights (..., rows, num_keys) times v (..., num_keys, head_dim), float64; num_keys is at most KEYS.

    Each value vector is rounded to fixed point below its own largest number and scaled to at most 1. Its weights are
    multiplied by the scale instead.
    """
    powers = row_power(v)
    v = fixed_point(v, powers, RIGHT_BITS).div_(powers)
    unusable = powers.isinf()  # the value has a number that is not finite
    spoiled = bool(unusable.any())
    if spoiled:
        v, powers = v.masked_fill_(unusable, 0), powers.masked_fill(unusable, 0)
    weights = weights * powers.mT
    found = fixed_point(weights, row_power(weights), LEFT_BITS) @ v
    if spoiled:  # the output is NaN for queries that attend to such a value; other queries ignore it
        found.masked_fill_((unusable.mT & seen).any(-1, keepdim=True), torch.nan)
    return found
