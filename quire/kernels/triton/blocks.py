"""KV blocks on GPUs: layout, allocation, copies.

The tokens of one head are contiguous, so that attention, which reads one head at a time, reads long ranges:
(num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim).

For 8-bit types the last two axes are one axis of block_size * (head_dim + 4) bytes: the numbers, token after token,
then the block_size float32 scales of the head. In the canonical layout each scale follows its own numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.core.kv_groups import KVGroup
from quire.kernels.contract import DTYPES, Storage
from quire.kernels.reference.quantized import MAX_QUANTIZED, SCALE_BYTES
from quire.kernels.triton.launch import pow2
from quire.kernels.triton.writing import rotary_write

__all__ = ["allocate", "copy_blocks", "pack", "rotary_write", "unpack"]

BLOCK_SIZE_MULTIPLE = 16  # block_size is a multiple of it
_MAX_COPIED = 2048  # the most elements that one program copies


def allocate(group: KVGroup, block_size: int, device: torch.device) -> Storage:
    """Zeroed blocks. Raises ValueError for a block_size or a type that the kernels do not support."""
    if block_size % BLOCK_SIZE_MULTIPLE:
        raise ValueError(f"the Triton kernels need a block_size that is a multiple of 16, not {block_size}")
    shape: tuple[int, ...] = (len(group.layers), 2, group.num_blocks, group.kind.num_kv_heads)
    if group.dtype in MAX_QUANTIZED:
        shape, dtype = (*shape, block_size * (group.kind.head_dim + SCALE_BYTES)), torch.uint8
    elif group.dtype in DTYPES:
        shape, dtype = (*shape, block_size, group.kind.head_dim), DTYPES[group.dtype]
    else:
        names = ", ".join([*DTYPES, *MAX_QUANTIZED])
        raise ValueError(f"the Triton kernels keep keys and values as {names}, not as {group.dtype}")
    return Storage(group, block_size, torch.zeros(shape, dtype=dtype, device=device))


def pack(storage: Storage, blocks: Tensor) -> Tensor:
    """A copy of `blocks` int64 (num_blocks,) in the canonical layout."""
    rows = storage.data.index_select(2, blocks.to(storage.data.device))
    if storage.group.dtype in MAX_QUANTIZED:
        head_dim = storage.group.kind.head_dim
        values, scales = rows.split((storage.block_size * head_dim, storage.block_size * SCALE_BYTES), -1)
        rows = torch.cat([part.unflatten(-1, (storage.block_size, -1)) for part in (values, scales)], -1)
    return rows.transpose(3, 4).contiguous()


def unpack(storage: Storage, blocks: Tensor, canonical: Tensor) -> None:
    """Write `canonical` into `blocks` int64 (num_blocks,): the inverse of `pack`."""
    rows = canonical.transpose(3, 4)
    if storage.group.dtype in MAX_QUANTIZED:
        values, scales = rows.split((storage.group.kind.head_dim, SCALE_BYTES), -1)
        rows = torch.cat((values.flatten(-2), scales.flatten(-2)), -1)
    storage.data.index_copy_(2, blocks.to(storage.data.device), rows)


def copy_blocks(storage: Storage, pairs: Tensor, num_tokens: int) -> None:
    """Copy the first `num_tokens` of each source and zero the rest of its target: see Kernels.

    A target may be the source of another pair, because the sources of several pairs are copied out of the storage
    first. No block may be the target of two pairs.
    """
    if not len(pairs):
        return
    group, data = storage.group, storage.data
    pairs = pairs.to(data.device).contiguous()
    source = data if len(pairs) == 1 else data.index_select(2, pairs[:, 0])
    row = data.stride(3)  # elements of one head
    tile = min(_MAX_COPIED, pow2(row))
    _copy[(len(pairs) * group.kind.num_kv_heads * -(-row // tile), 2 * len(group.layers))](
        *(source, data, pairs, source.shape[2], group.num_blocks, min(num_tokens, storage.block_size)),
        GATHERED=source is not data,
        NUM_HEADS=group.kind.num_kv_heads,
        ROW=row,
        HEAD_DIM=group.kind.head_dim,
        VALUES=storage.block_size * group.kind.head_dim,
        SCALE_BYTES=SCALE_BYTES,
        TILE=tile,
    )


@triton.jit(do_not_specialize=["num_sources", "num_blocks", "num_tokens"])
def _copy(
    source_ptr, data_ptr, pairs_ptr, num_sources, num_blocks, num_tokens,
    GATHERED: tl.constexpr, NUM_HEADS: tl.constexpr, ROW: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUES: tl.constexpr, SCALE_BYTES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy TILE elements of a head of a pair's block. Grid (num_pairs * heads * tiles, 2 * num_layers)."""
    TILES: tl.constexpr = (ROW + TILE - 1) // TILE
    pair = tl.program_id(0) // (NUM_HEADS * TILES)
    head = tl.program_id(0) // TILES % NUM_HEADS
    places = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)  # offsets in the row of a head
    layer = tl.program_id(1).to(tl.int64)
    source = pair.to(tl.int64) if GATHERED else tl.load(pairs_ptr + 2 * pair)
    target = tl.load(pairs_ptr + 2 * pair + 1)
    kept = places < num_tokens * HEAD_DIM
    if ROW > VALUES:
        kept |= (places >= VALUES) & (places < VALUES + num_tokens * SCALE_BYTES)
    source_ptr += ((layer * num_sources + source) * NUM_HEADS + head) * ROW
    data_ptr += ((layer * num_blocks + target) * NUM_HEADS + head) * ROW
    tl.store(data_ptr + places, tl.load(source_ptr + places, mask=kept, other=0), mask=places < ROW)
