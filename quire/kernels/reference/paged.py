"""Paged attention: gathers the blocks of each sequence, then computes one dense product per bucket of pieces.

What layers share (slots, blocks to gather, masks) is planned once per step. Chunks are cut into pieces of at most
MAX_QUERIES positions. Pieces whose numbers of queries and of keys have the same next power of two share a bucket, so
padding less than doubles either number, except below MIN_CONTEXT keys. Decode rows have one query each: they are one
bucket unless their contexts differ widely.

Queries are in reverse order in a bucket: query t of a piece that ends at `stop` attends to the keys j with
j + t < stop, in a window also j + t >= stop - window. That depends on j + t alone, so the mask (queries, keys) is a
strided view of one row of keys + queries - 1 numbers, and the memory of masks is linear in the context. Blocks before
the window of a piece's first query are not gathered: keys and `stop` of a piece are counted from its first block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.contract import DTYPES, Batch, Rotation, Storage
from quire.kernels.reference.quantized import from_stored, read_bytes, to_stored
from quire.kernels.reference.rowwise import rotary

MAX_QUERIES = 256  # of one piece: keys after the last position of a piece are not gathered
MIN_CONTEXT = 256  # shorter contexts share a bucket: another call would cost more than the padding
GATHERED_BYTES = 2**28  # of keys and values of one bucket, unless one sequence alone has more


class Pieces(NamedTuple):
    """Parts of chunks, one array per field."""

    chunks: np.ndarray
    first_blocks: np.ndarray  # index of the first needed block in the block table
    stops: np.ndarray  # end position (exclusive), counted from that block
    counts: np.ndarray  # number of positions
    last_tokens: np.ndarray  # index of the last position among the step's tokens


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Pieces that are computed together, padded to the same number of queries and of keys."""

    queries: Tensor  # int64 (num_pieces * num_queries,): indices of tokens
    blocks: Tensor  # int64 (num_pieces * width,): blocks to gather
    mask: Tensor  # (num_pieces, 1, num_queries, num_keys): 0 or -inf; rows overlap in memory


@dataclass(frozen=True, slots=True, eq=False)
class ReferencePlan:
    """The slots that the step's tokens are written to, and the keys that they attend to."""

    slots: Tensor  # int64 (num_tokens,): block * block_size + offset in the block
    new_blocks: Tensor  # int64: blocks whose first slot is written
    buckets: list[Bucket]
    order: Tensor  # int64 (num_tokens,): index of each token in the concatenated outputs of the buckets
    gather_scratch: Tensor  # (planes, blocks of the widest bucket, block_size, num_kv_heads, head_dim): scratch


def plan(batch: Batch, storage: Storage) -> ReferencePlan:
    """The plan of a step: slots to write and buckets for attention."""
    device = storage.data.device
    lengths = batch.stops - batch.starts
    chunks = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(chunks)) + np.repeat(batch.stops - np.cumsum(lengths), lengths)
    blocks = batch.tables[chunks, positions // storage.block_size]
    places = positions % storage.block_size

    buckets = []
    order = np.empty(len(chunks), np.int64)
    size = 0
    for pieces in _group_by_size(_cut(batch, lengths, storage), storage):
        bucket, tokens, rows = _bucket(pieces, batch.tables, storage)
        buckets.append(bucket)
        order[tokens] = rows + size
        size += len(bucket.queries)
    slots = blocks * storage.block_size + places
    widest = max(len(bucket.blocks) for bucket in buckets)
    return ReferencePlan(
        _tensor(slots, device),
        _tensor(blocks[places == 0], device),
        buckets,
        _tensor(order, device),
        # shared by all layers: fresh memory for every gather would cost more than the copy
        storage.data.new_empty(storage.data.shape[1], widest, *storage.data.shape[3:]),
    )


def _cut(batch: Batch, lengths: np.ndarray, storage: Storage) -> Pieces:
    numbers = -(-lengths // MAX_QUERIES)
    chunks = np.repeat(np.arange(len(lengths)), numbers)
    offsets = MAX_QUERIES * (np.arange(len(chunks)) - np.repeat(np.cumsum(numbers) - numbers, numbers))
    counts = np.minimum(lengths[chunks] - offsets, MAX_QUERIES)
    firsts = (np.cumsum(lengths) - lengths)[chunks] + offsets
    starts = batch.starts[chunks] + offsets
    begins = np.zeros_like(starts)
    if span := storage.group.kind.span:
        begins = np.maximum(starts - span + 1, 0) // storage.block_size
    return Pieces(chunks, begins, starts + counts - begins * storage.block_size, counts, firsts + counts - 1)


def _group_by_size(pieces: Pieces, storage: Storage) -> Iterator[Pieces]:
    """Pieces grouped by the next powers of two of their queries and context, in groups of limited bytes."""
    group = storage.group
    bytes_per_token = group.kind.numbers_per_token * read_bytes(group.dtype, _compute_dtype(storage))
    classes = 64 * _bit_length(pieces.counts - 1) + _bit_length(np.maximum(pieces.stops, MIN_CONTEXT) - 1)
    for one in np.unique(classes):
        members = np.flatnonzero(classes == one)
        num_keys = int(pieces.stops[members].max()) + storage.block_size
        at_once = max(1, GATHERED_BYTES // (num_keys * bytes_per_token))
        for first in range(0, len(members), at_once):
            some = members[first : first + at_once]
            yield Pieces(*(column[some] for column in pieces))


def _bit_length(values: np.ndarray) -> np.ndarray:
    exponents: np.ndarray = np.frexp(values.astype(np.float64))[1]
    return exponents


def _bucket(pieces: Pieces, tables: np.ndarray, storage: Storage) -> tuple[Bucket, np.ndarray, np.ndarray]:
    """A bucket, the tokens that it computes, and their rows in its output."""
    device = storage.data.device
    num_pieces, num_queries = len(pieces.chunks), int(pieces.counts.max())
    counts, stops = pieces.counts[:, None], pieces.stops[:, None]
    steps = np.arange(num_queries)  # backwards from the last position; padding repeats the first position
    queries = pieces.last_tokens[:, None] - np.minimum(steps, counts - 1)
    real = steps < counts

    num_blocks = -(-stops // storage.block_size)
    width = int(num_blocks.max())  # padding repeats the last block of the sequence, whose numbers are finite
    blocks = tables[pieces.chunks[:, None], pieces.first_blocks[:, None] + np.minimum(np.arange(width), num_blocks - 1)]
    num_keys = width * storage.block_size
    length = num_keys + num_queries - 1
    places = np.arange(length)
    seen = places < stops
    if span := storage.group.kind.span:
        seen &= places >= stops - span
    band = np.where(seen, np.float32(0), np.float32(-np.inf))
    rows = _tensor(band, device).to(_compute_dtype(storage))
    mask = rows.as_strided((num_pieces, 1, num_queries, num_keys), (length, length, 1, 1))
    bucket = Bucket(_tensor(queries.ravel(), device), _tensor(blocks.ravel(), device), mask)
    return bucket, queries[real], np.flatnonzero(real)


def _compute_dtype(storage: Storage) -> torch.dtype:
    return DTYPES.get(storage.group.dtype, torch.float32)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def write_kv(storage: Storage, layer: int, k: Tensor, v: Tensor, plan: ReferencePlan) -> None:
    """Zero the blocks in `plan.new_blocks`, then store keys and values (num_tokens, num_kv_heads, head_dim).

    With one plane the values are in the keys.
    """
    for blocks, new in zip(storage.data[layer], (k, v), strict=False):
        if len(plan.new_blocks):
            blocks.index_fill_(0, plan.new_blocks, 0)
        blocks.flatten(0, 1).index_copy_(0, plan.slots, to_stored(new, storage.group.dtype))


def rotary_write(
    storage: Storage, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, plan: ReferencePlan
) -> Tensor:
    """Rotate q and k, then `write_kv`. Returns the rotated q."""
    if rotation is not None:
        q, k = rotary(q, k, *rotation)
    write_kv(storage, layer, k, v, plan)
    return q


def attention(
    storage: Storage, layer: int, q: Tensor, plan: ReferencePlan, scale: float, softcap: float = 0.0
) -> Tensor:
    """Causal attention of q (num_tokens, num_heads, head_dim) -> (num_tokens, num_heads * value_dim)."""
    outputs, kind = [], storage.group.kind
    for bucket in plan.buckets:
        num_pieces, _, num_queries, _ = bucket.mask.shape
        queries = q.index_select(0, bucket.queries).view(num_pieces, num_queries, *q.shape[1:])
        planes = [
            from_stored(
                torch.index_select(blocks, 0, bucket.blocks, out=scratch[: len(bucket.blocks)]),
                storage.group.dtype,
                size,
            )
            .reshape(num_pieces, -1, blocks.shape[2], size)
            .to(q.dtype)
            for blocks, scratch, size in zip(storage.data[layer], plan.gather_scratch, kind.planes, strict=True)
        ]
        k, v = planes[0], planes[-1][..., : kind.value_dim]
        outputs.append(_dense(queries, k, v, bucket.mask.to(q.dtype), scale, softcap))
    return torch.cat(outputs).index_select(0, plan.order)


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """q (pieces, queries, heads, dim), k and v (pieces, keys, kv heads, dim) -> (pieces * queries, heads * v's dim).

    KV heads are not copied for the query heads that share them. With one query, these heads are rows of one product;
    otherwise there is one product per KV head, with these heads as its batch.
    """
    num_pieces, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    shared = num_heads // num_kv_heads
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # (pieces, kv heads, keys, dim)
    if num_queries == 1 or shared == 1:
        rows = q.view(num_pieces, num_queries, num_kv_heads, shared, head_dim).transpose(1, 2).flatten(2, 3)
        out = _attend(rows, k, v, mask, scale, softcap)
        out = out.view(num_pieces, num_kv_heads, num_queries, shared, -1).transpose(1, 2)
        return out.reshape(num_pieces * num_queries, -1)
    q = q.transpose(1, 2)
    parts = []
    for head in range(num_kv_heads):
        queries = q[:, head * shared : (head + 1) * shared]
        one_k, one_v = (x[:, head : head + 1].expand(-1, shared, -1, -1) for x in (k, v))
        parts.append(_attend(queries, one_k, one_v, mask, scale, softcap))
    return torch.cat(parts, 1).transpose(1, 2).reshape(num_pieces * num_queries, -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """q (pieces, heads, queries, dim), k and v (pieces, heads, keys, dim) -> (pieces, heads, queries, v's dim)."""
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    bytes_per_piece = q.shape[1] * q.shape[2] * k.shape[2] * torch.float32.itemsize
    at_once = max(1, GATHERED_BYTES // bytes_per_piece)  # bounds the memory of the scores
    parts = []
    for first in range(0, len(q), at_once):
        some = slice(first, first + at_once)
        capped = torch.tanh((q[some] @ k[some].mT).float() * (scale / softcap)) * softcap
        parts.append((capped + mask[some]).softmax(-1).to(v.dtype) @ v[some])
    return torch.cat(parts)
