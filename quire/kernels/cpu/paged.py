"""Paged attention by the C++ kernels. csrc/attention.cpp describes the layout of blocks and the division of work.

A plan holds the tensors that all layers of a step read. They keep their addresses when the plan is refilled for
another step of the same shape, so that captured calls can be replayed.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.contract import Batch, Storage
from quire.kernels.cpu import _C
from quire.kernels.cpu.blocks import STORED, padded_head_dim
from quire.kernels.cpu.memory import empty
from quire.kernels.cpu.views import dtype_code

SCRATCH_ROWS_PER_CPU = (
    1024  # per CPU: rows of scratch for split contexts; one row per query, head and part of the context
)


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan:
    """The slots that the step's tokens are written to, and the keys that they attend to. int64 except `scratch`."""

    starts: Tensor  # (num_chunks,)
    stops: Tensor  # (num_chunks,)
    tables: Tensor  # (num_chunks, width): width may be larger than that of a batch
    slots: Tensor  # (num_tokens,): block * block_size + offset in the block
    scratch: Tensor  # float32 (rows, padded head_dim + 16): partial results of split items
    block_size: int
    deterministic: bool  # whether the bits of a row may depend on its own sequence only


def plan(batch: Batch, storage: Storage, *, deterministic: bool = False, width: int = 0) -> CpuPlan:
    """A plan for `batch`. `refill` accepts tables of up to `width` blocks, or of the batch's own width if larger."""
    num_chunks, batch_width = batch.tables.shape
    num_tokens = int((batch.stops - batch.starts).sum())
    rows = 0 if deterministic else (os.cpu_count() or 1) * SCRATCH_ROWS_PER_CPU
    padded = padded_head_dim(storage.group.kind.head_dim, storage.group.dtype)
    new = CpuPlan(
        starts=torch.empty(num_chunks, dtype=torch.int64),
        stops=torch.empty(num_chunks, dtype=torch.int64),
        tables=torch.full((num_chunks, max(width, batch_width)), -1, dtype=torch.int64),
        slots=torch.empty(num_tokens, dtype=torch.int64),
        scratch=torch.empty(rows, padded + 16, dtype=torch.float32),
        block_size=storage.block_size,
        deterministic=deterministic,
    )
    refill(new, batch)
    write_slots(new)
    return new


def refill(plan: CpuPlan, batch: Batch) -> None:
    """Write another step with the same numbers of tokens and chunks into the tensors of `plan`, except for its slots.

    Raises ValueError if the numbers differ or the tables are too wide.
    """
    num_chunks, width = batch.tables.shape
    num_tokens = int((batch.stops - batch.starts).sum())
    (plan_chunks, most_blocks), (plan_tokens,) = plan.tables.shape, plan.slots.shape
    if (num_chunks, num_tokens) != (plan_chunks, plan_tokens) or width > most_blocks:
        raise ValueError(
            f"a plan for {plan_chunks} chunks of {plan_tokens} tokens and {most_blocks} blocks at most cannot hold"
            f" {num_chunks} chunks of {num_tokens} tokens and {width} blocks"
        )
    plan.starts.numpy()[:] = batch.starts
    plan.stops.numpy()[:] = batch.stops
    plan.tables.numpy()[:, :width] = batch.tables


def write_slots(plan: CpuPlan) -> None:
    """Write the slots of the step in the other tensors of `plan`."""
    num_chunks, width = plan.tables.shape
    _C.attention_plan(plan.starts, plan.stops, plan.tables, plan.slots, num_chunks, width, plan.block_size)


def attention(
    storage: Storage,
    layer: int,
    q: Tensor,
    plan: CpuPlan,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of q (num_tokens, num_heads, head_dim) -> (num_tokens, num_heads * head_dim).

    q has the type of the storage, unless that is quantized. There may be gaps between tokens in memory.
    """
    num_tokens, num_heads, head_dim = q.shape
    dtype = storage.data.dtype if storage.data.is_floating_point() else q.dtype
    if q.stride(2) != 1 or q.stride(1) != head_dim or q.dtype != dtype:
        q = q.to(dtype).contiguous()
    out = empty((num_tokens, num_heads * head_dim), q.dtype)
    _C.attention(*kernel_arguments(storage, layer, q, out, plan, scale, softcap))
    return out


def kernel_arguments(
    storage: Storage, layer: int, q: Tensor, out: Tensor, plan: CpuPlan, scale: float, softcap: float
) -> tuple[Tensor | int | float, ...]:
    """The arguments of the kernels `attention` and `attention_contiguous`."""
    group = storage.group
    return (
        *(q, out, storage.data, plan.starts, plan.stops, plan.tables, plan.scratch),
        *(dtype_code(q), STORED[group.dtype], int(plan.deterministic), layer, len(plan.starts)),
        *(q.shape[1], group.kind.num_kv_heads, group.kind.head_dim, storage.block_size, group.num_blocks),
        *(plan.tables.stride(0), q.stride(0), group.kind.span, plan.scratch.shape[0]),
        *(scale, softcap),
    )
