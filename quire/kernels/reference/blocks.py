"""KV blocks in the canonical layout: allocation and copies."""

import numpy as np
import torch
from torch import Tensor

from quire.core.kv_groups import KVGroup
from quire.kernels.contract import Storage
from quire.kernels.reference.quantized import stored_dtype_and_size


def allocate(group: KVGroup, block_size: int, device: torch.device) -> Storage:
    """Zeros (num_layers, planes, num_blocks, block_size, num_kv_heads, head_dim).

    Quantized types have another last axis, with scales: see `quantized`. Raises ValueError for planes of several sizes.
    """
    kind = group.kind
    if len(set(kind.planes)) > 1:
        raise ValueError(f"planes of {kind.planes} numbers have no canonical layout")
    dtype, width = stored_dtype_and_size(group.dtype, kind.planes[0])
    shape = (len(group.layers), len(kind.planes), group.num_blocks, block_size, kind.num_kv_heads, width)
    if device.type == "cpu":
        # np.zeros gets zeroed pages from the system without touching them; torch.zeros writes them all
        pages = torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8))
        return Storage(group, block_size, pages.view(dtype).view(shape))
    return Storage(group, block_size, torch.zeros(shape, dtype=dtype, device=device))


def pack(storage: Storage, blocks: Tensor) -> Tensor:
    """A copy of `blocks` (num_blocks,) in the canonical layout."""
    return storage.data.index_select(2, blocks)


def unpack(storage: Storage, blocks: Tensor, canonical: Tensor) -> None:
    """Write `canonical` into `blocks` (num_blocks,)."""
    storage.data.index_copy_(2, blocks, canonical)


def copy_blocks(storage: Storage, pairs: Tensor, num_tokens: int) -> None:
    """Copy the first `num_tokens` of each source and zero the rest of its target: see Kernels."""
    canonical = pack(storage, pairs[:, 0])
    canonical[:, :, :, num_tokens:] = 0
    unpack(storage, pairs[:, 1], canonical)
