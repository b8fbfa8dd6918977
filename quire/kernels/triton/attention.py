"""Paged attention: choice of tiles and splits, and launch of the kernels in `attention_kernels`.

Chunks of few queries, as in decoding, are cut into tiles of few rows, others into large tiles. A step with both needs
two launches. If the tiles are too few to fill the device, several programs share each tile's context. The host chooses
their number, from data that a captured step does not change. The device computes where each split begins, from the
actual positions. A program without keys returns at once.

In deterministic steps all tiles have one shape and no context is split. So the bits of a row do not depend on the
batch.
"""

import functools
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.contract import Storage
from quire.kernels.reference.quantized import SCALE_BYTES
from quire.kernels.triton.attention_kernels import SPLITS_PER_STEP, attend, merge
from quire.kernels.triton.launch import INTERPRETED, pow2
from quire.kernels.triton.plan import TritonPlan

SCRATCH_BYTES = 2**26  # of partial results
MIN_TILE_ROWS = 16  # the fewest rows of tl.dot
KEY_BYTES = 2**14  # of a tile of keys in the type of queries: two such tiles in flight saturate the memory
WAVES = 2  # target number of programs per multiprocessor
MIN_SPLIT_KEYS = 256  # of a split
MAX_SPLIT_KEYS = 2**14  # of a split of a small tile: one long context among short ones must not prolong the step
DEFAULT_NUM_SMS = 132  # assumed multiprocessors of a device that is not CUDA

_STORED = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
_WEIGHTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_LOG2E = 1.4426950408889634


class TileShape(NamedTuple):
    """Shape and launch parameters of a tile."""

    rows: int  # pairs of a query and a head
    keys: int  # keys per step
    warps: int
    stages: int


class LayerBlocks(NamedTuple):
    """Keys and values of one layer."""

    keys: Tensor  # (num_blocks, num_kv_heads, ...) of the stored type
    values: Tensor
    key_scales: Tensor  # for 8-bit types the same memory as float32, else not read
    value_scales: Tensor
    stride: int  # stored numbers of one head in a block
    quantized: bool


def attention(
    storage: Storage,
    layer: int,
    q: Tensor,
    plan: TritonPlan,
    scale: float,
    softcap: float = 0.0,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Causal attention of q (num_tokens, num_heads, head_dim) -> (num_tokens, num_heads * head_dim).

    There may be gaps between tokens in memory. deterministic: see the module.
    """
    assert scale > 0, "the largest score is scaled after it was found"
    num_tokens, num_heads, head_dim = q.shape
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        q = q.contiguous()
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    shared = num_heads // storage.group.kind.num_kv_heads
    blocks = _layer_blocks(storage, layer)
    factor, cap = (scale / softcap, softcap * _LOG2E) if softcap else (scale * _LOG2E, 0.0)
    for lengths, rows in _tile_rows_by_length(plan, shared, deterministic=deterministic):
        shape = _tile_shape(rows, shared, q, quantized=blocks.quantized)
        queries = shape.rows // shared
        tiles = plan.tiles_of(queries, lengths)
        used = min(queries, lengths.stop - 1) * shared
        splits = 1 if deterministic else _splits(storage, plan, len(tiles), used, small=rows == MIN_TILE_ROWS)
        partials, states = _scratch(splits, len(tiles) * storage.group.kind.num_kv_heads * used, head_dim, q.device)
        spans = (tiles, plan.query_start_loc, plan.starts, plan.stops)
        sizes = {"SHARED": shared, "KV_HEADS": storage.group.kind.num_kv_heads, "HEAD_DIM": head_dim}
        attend[len(tiles), storage.group.kind.num_kv_heads, splits](
            *(q, *blocks[:4], *spans, plan.table_rows, plan.tables, out, partials, states),
            *(q.stride(0), plan.tables.stride(0), used, factor, cap),
            **sizes,
            BLOCK_SIZE=storage.block_size,
            BLOCK_STRIDE=blocks.stride,
            WINDOW=storage.group.kind.span,
            SOFTCAP=softcap > 0,
            QUANTIZED=blocks.quantized,
            WEIGHT=_weight(q, quantized=blocks.quantized),
            SPLIT=splits > 1,
            LEAST=max(1, MIN_SPLIT_KEYS // shape.keys),
            ROWS=shape.rows,
            QUERIES=queries,
            KEYS=shape.keys,
            DIM=max(16, pow2(head_dim)),
            INTERPRET=INTERPRETED,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        if splits > 1:
            merge[len(tiles), used, storage.group.kind.num_kv_heads](
                *(partials, states, *spans, out, splits),
                **sizes,
                DIM=pow2(head_dim),
                TOGETHER=SPLITS_PER_STEP,
                num_warps=2,
            )
    return out


def _tile_rows_by_length(plan: TritonPlan, shared: int, *, deterministic: bool) -> list[tuple[range, int]]:
    """Ranges of chunk lengths, each with the rows of the tiles for these chunks."""
    every = range(1, plan.max_query_len + 1)
    few = max(1, MIN_TILE_ROWS // shared)
    if deterministic or plan.max_query_len <= few:
        return [(every, MIN_TILE_ROWS)]
    large = (range(few + 1, plan.max_query_len + 1), 64 if plan.max_query_len * shared <= 64 else 128)
    return [(range(1, few + 1), MIN_TILE_ROWS), large] if plan.lengths.min() <= few else [large]


def _tile_shape(rows: int, shared: int, q: Tensor, *, quantized: bool) -> TileShape:
    """The tile shape for `rows` rows: fewer if registers do not suffice, more if more heads share a KV head."""
    dim = pow2(max(16, q.shape[2]))
    num_keys = min(max(KEY_BYTES // (dim * q.element_size()), 16), 128)
    if q.dtype == torch.float32:  # tensor cores do not multiply it
        return TileShape(max(32 if dim <= 256 else 16, pow2(shared)), num_keys, warps=8, stages=3)
    rows = max(min(rows, 128 if dim <= 128 else 64 if dim <= 256 else 32), MIN_TILE_ROWS, pow2(shared))
    if dim > 256:  # the output of more rows would not fit into registers
        if rows < 32:
            return TileShape(rows, num_keys, warps=4, stages=4)
        return TileShape(rows, 2 * num_keys if rows == 32 else num_keys, warps=8, stages=3)
    if rows < 64:  # loads through a block table take two stages
        return TileShape(rows, num_keys, warps=2, stages=5 if quantized and dim <= 128 else 4)
    if quantized:  # half the bytes leave room for more keys
        return TileShape(rows, min(2 * num_keys, 128), warps=8, stages=3)
    return TileShape(rows, num_keys, warps=8 if rows >= 128 else 4, stages=5 if dim <= 128 else 4)


def _splits(storage: Storage, plan: TritonPlan, num_tiles: int, used: int, *, small: bool) -> int:
    """The number of splits of each tile's context. It depends on the plan alone, so a captured step keeps it."""
    group = storage.group
    context = min(plan.max_context, group.kind.span + used) if group.kind.span else plan.max_context
    programs = num_tiles * group.kind.num_kv_heads
    wanted = -(-WAVES * _num_sms(plan.starts.device) // programs)
    if small:
        wanted = max(wanted, -(-context // MAX_SPLIT_KEYS))
    held = SCRATCH_BYTES // (4 * programs * used * (group.kind.head_dim + 2))
    return max(1, min(wanted, context // MIN_SPLIT_KEYS, held))


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return DEFAULT_NUM_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _scratch(splits: int, num_rows: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial outputs and states, see `attend`; empty without splits."""
    num = num_rows * splits if splits > 1 else 0
    partials = torch.empty((num, head_dim), dtype=torch.float32, device=device)
    return partials, torch.empty((num, 2), dtype=torch.float32, device=device)


def _layer_blocks(storage: Storage, layer: int) -> LayerBlocks:
    keys, values = storage.data[layer].unbind()
    dtype, head_dim = storage.group.dtype, storage.group.kind.head_dim
    if dtype not in _STORED:
        return LayerBlocks(keys, values, keys, values, storage.block_size * head_dim, quantized=False)
    scales = keys.view(torch.float32), values.view(torch.float32)
    keys, values = keys.view(_STORED[dtype]), values.view(_STORED[dtype])
    return LayerBlocks(keys, values, *scales, storage.block_size * (head_dim + SCALE_BYTES), quantized=True)


def _weight(q: Tensor, *, quantized: bool) -> tl.dtype:
    """The type in which softmax weights and values are multiplied.

    Weights times the scales of 8-bit values can be below the range of float16. bfloat16 has the range, and holds 8-bit
    values exactly.
    """
    if INTERPRETED:
        return tl.float32
    return tl.bfloat16 if quantized and q.dtype == torch.float16 else _WEIGHTS[q.dtype]
