"""KV blocks on CPUs: allocation, writes, copies. `csrc/blocks.cpp` describes the layout."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.kv_groups import KVGroup
from quire.kernels.contract import Storage
from quire.kernels.cpu import _C
from quire.kernels.cpu.memory import empty, pages
from quire.kernels.cpu.views import dtype_code, with_contiguous_heads
from quire.kernels.reference.quantized import INT4_UNIT, stored_dtype_and_size

PART_TOKENS = 16  # tokens of one head that are stored as one unit
STORED: Mapping[str, int] = MappingProxyType(
    {"float32": 0, "bfloat16": 1, "int8": 2, "fp8_e4m3": 3, "int4": 4}
)  # of the kernels

Rotation = tuple[Tensor, Tensor]  # cosines and sines, float32 (num_tokens, rotary_dim / 2)


def padded_head_dim(head_dim: int, dtype: str) -> int:
    """head_dim as stored: rounded up to a multiple of 16, in int4 of 32. The additional numbers are zeros."""
    unit = INT4_UNIT if dtype == "int4" else PART_TOKENS
    return -(-head_dim // unit) * unit


def allocate(group: KVGroup, block_size: int, device: torch.device) -> Storage:
    """Zeros (num_layers, 2, num_blocks, num_kv_heads, block_size / 16, 16 * padded head_dim).

    For quantized types the last axis has other numbers, and the scales of 16 tokens. The system commits memory page by
    page when it is first written. Raises ValueError for a device, block_size or type that the kernels do not have.
    """
    if device.type != "cpu":
        raise ValueError(f"the CPU kernels cannot have blocks on {device}")
    if block_size % PART_TOKENS:
        raise ValueError(f"the CPU kernels need a block_size that is a multiple of {PART_TOKENS}, not {block_size}")
    if group.dtype not in STORED:
        raise ValueError(f"the CPU kernels keep keys and values as {', '.join(STORED)}, not as {group.dtype}")
    dtype, width = stored_dtype_and_size(group.dtype, padded_head_dim(group.kind.head_dim, group.dtype))
    parts = (block_size // PART_TOKENS, PART_TOKENS * width)
    shape = (len(group.layers), 2, group.num_blocks, group.kind.num_kv_heads, *parts)
    data = pages(torch.Size(shape).numel() * dtype.itemsize, huge=False)  # blocks are written one by one
    return Storage(group, block_size, data.view(dtype).view(shape))


def write_kv(storage: Storage, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store k and v (num_tokens, num_kv_heads, head_dim) at `slots`, block * block_size + offset, int64 (num_tokens,).

    Tokens of one block must be consecutive, with consecutive slots. If slot 0 of a block is written, its slots after
    these tokens are zeroed. Tokens with slots outside of the storage are skipped.
    """
    _write(storage, layer, k, v, slots, _RotaryArguments())


def rotary_write(
    storage: Storage, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, slots: Tensor
) -> Tensor:
    """Rotate q and k, then `write_kv`. Returns the rotated q, or q itself if `rotation` is None."""
    if rotation is None:
        write_kv(storage, layer, k, v, slots)
        return q
    cos, sin = rotation
    if q.dtype != k.dtype or not len(q) == len(k) == len(cos) or cos.shape != sin.shape:
        raise ValueError(f"queries, keys and cosines of {len(q)}, {len(k)} and {len(cos)} tokens do not match")
    out = empty(q.shape, q.dtype)
    _write(
        storage, layer, k, v, slots, _RotaryArguments(with_contiguous_heads(q), cos.contiguous(), sin.contiguous(), out)
    )
    return out


class _RotaryArguments(NamedTuple):
    """Queries to rotate, the rotation and the output; all None without a rotation."""

    q: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    out: Tensor | None = None


def _write(storage: Storage, layer: int, k: Tensor, v: Tensor, slots: Tensor, rotary: _RotaryArguments) -> None:
    group, k, v = storage.group, with_contiguous_heads(k), with_contiguous_heads(v)
    kind = group.kind
    num_tokens, *shape = k.shape
    if v.shape != k.shape or v.dtype != k.dtype or len(slots) != num_tokens:
        raise ValueError(f"keys {tuple(k.shape)}, values {tuple(v.shape)} and {len(slots)} slots do not match")
    if shape != [kind.num_kv_heads, kind.head_dim]:
        raise ValueError(f"blocks of {kind.num_kv_heads} heads of {kind.head_dim} cannot hold keys {tuple(k.shape)}")
    if not 0 <= layer < len(group.layers):
        raise IndexError(f"there is no layer {layer} of {len(group.layers)}")
    heads, stride = (0, 0) if rotary.q is None else (rotary.q.shape[1], rotary.q.stride(0))
    half = 0 if rotary.cos is None else rotary.cos.shape[1]
    _C.rotary_write(
        *(rotary.q, k, v, rotary.cos, rotary.sin, rotary.out, slots.contiguous(), storage.data),
        *(dtype_code(k), STORED[group.dtype], num_tokens, heads, *shape),
        *(stride, k.stride(0), v.stride(0), storage.block_size, group.num_blocks, layer, half),
    )


def pack(storage: Storage, blocks: Tensor) -> Tensor:
    """A copy of `blocks` int64 (num_blocks,) in the canonical layout."""
    canonical = torch.empty(_canonical_shape(storage, blocks), dtype=storage.data.dtype)
    _C.pack_blocks(storage.data, *_layout_arguments(storage, blocks, canonical))
    return canonical


def unpack(storage: Storage, blocks: Tensor, canonical: Tensor) -> None:
    """Write `canonical` into `blocks` int64 (num_blocks,): the inverse of `pack`."""
    if canonical.shape != _canonical_shape(storage, blocks) or canonical.dtype != storage.data.dtype:
        raise ValueError(
            f"{tuple(canonical.shape)} of {canonical.dtype} does not fit into {len(blocks)} of these blocks"
        )
    _C.unpack_blocks(storage.data, *_layout_arguments(storage, blocks, canonical.contiguous()))


def copy_blocks(storage: Storage, pairs: Tensor, num_tokens: int) -> None:
    """Copy the first `num_tokens` of each source and zero the rest of its target: see Kernels."""
    if torch.isin(pairs[:, 1], pairs[:, 0]).any():  # a target is also a source: read all before the first is written
        canonical = pack(storage, pairs[:, 0])
        canonical[:, :, :, num_tokens:] = 0
        unpack(storage, pairs[:, 1], canonical)
        return
    _check_block_ids(storage, pairs)
    stored, sizes = STORED[storage.group.dtype], _sizes(storage, len(pairs))
    _C.copy_blocks(storage.data, pairs.contiguous(), stored, *sizes, min(num_tokens, storage.block_size))


def _sizes(storage: Storage, num_blocks: int) -> tuple[int, ...]:
    """The sizes that copies of `num_blocks` blocks need."""
    group, kind = storage.group, storage.group.kind
    return (
        *(len(group.layers), group.num_blocks, num_blocks),
        *(kind.num_kv_heads, storage.block_size, kind.head_dim),
    )


def _canonical_shape(storage: Storage, blocks: Tensor) -> tuple[int, ...]:
    group = storage.group
    _, width = stored_dtype_and_size(group.dtype, group.kind.head_dim)
    return (len(group.layers), 2, len(blocks), storage.block_size, group.kind.num_kv_heads, width)


def _layout_arguments(storage: Storage, blocks: Tensor, canonical: Tensor) -> tuple[Tensor | int, ...]:
    """Arguments of the pack and unpack kernels after the storage. Raises IndexError for blocks out of range."""
    _check_block_ids(storage, blocks)
    return (blocks.contiguous(), canonical, STORED[storage.group.dtype], *_sizes(storage, len(blocks)))


def _check_block_ids(storage: Storage, blocks: Tensor) -> None:
    if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < storage.group.num_blocks:
        raise IndexError(f"some of blocks {blocks.flatten().tolist()!s:.80} are not among {storage.group.num_blocks}")
