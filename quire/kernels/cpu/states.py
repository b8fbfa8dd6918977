"""Recurrent states by the C++ kernel `recur`: see `csrc/states.cpp`.

The bits of a token depend neither on chunks, nor on the rest of the batch, nor on the number of threads, unless states
are kept in bfloat16, which rounds them where a chunk ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from quire.core.states import Rule, StateGroup
from quire.kernels.cpu import _C
from quire.kernels.cpu.memory import empty, pages
from quire.kernels.cpu.views import dtype_code
from quire.kernels.reference import states as reference
from quire.kernels.state_contract import STATE_DTYPES, RecurrenceWeights, StateBatch, StateStorage

_RULES: Mapping[Rule, int] = MappingProxyType({"delta": 0, "mamba2": 1, "convolution": 2, "kda": 3})
_HUGE_FROM = 2**19  # bytes of a block; smaller ones would commit much memory of other blocks


@dataclass(frozen=True, slots=True, eq=False)
class CpuStatePlan:
    """The chunks of a step. int64; the addresses stay when it is refilled."""

    chunks: Tensor  # (num_chunks, 6): start, stop, block, settled, settles, and index of its first token in the step
    snapshots: Tensor  # (num_snapshots, 3)
    num_tokens: int


def allocate_states(group: StateGroup, device: torch.device) -> StateStorage:
    """Zeroed state blocks. Raises ValueError for a device that is no CPU."""
    if device.type != "cpu":
        raise ValueError(f"the CPU kernels cannot have states on {device}")
    dtype, numbers = STATE_DTYPES[group.dtype], group.num_layers * group.kind.numbers(group.max_pending)
    data = pages(group.num_blocks * numbers * dtype.itemsize, huge=numbers * dtype.itemsize >= _HUGE_FROM)
    return StateStorage(group, data.view(dtype).view(group.num_blocks, group.num_layers, -1))


def copy_states(storage: StateStorage, pairs: Tensor) -> None:
    """See Kernels."""
    if torch.isin(pairs[:, 1], pairs[:, 0]).any():  # all sources are read before the first target is written
        reference.copy_states(storage, pairs)
        return
    for source, target in pairs.tolist():
        storage.data[target].copy_(storage.data[source])


def plan_states(batch: StateBatch, storage: StateStorage) -> CpuStatePlan:
    """See Kernels."""
    del storage
    num_tokens = int((batch.stops - batch.starts).sum())
    plan = CpuStatePlan(
        chunks=torch.empty(len(batch.starts), 6, dtype=torch.int64),
        snapshots=torch.empty(len(batch.snapshots), 3, dtype=torch.int64),
        num_tokens=num_tokens,
    )
    refill_states(plan, batch)
    return plan


def refill_states(plan: CpuStatePlan, batch: StateBatch) -> None:
    """Replace the step of a plan by another one with the same numbers of chunks, tokens and snapshots.

    Raises ValueError if the numbers differ.
    """
    lengths = batch.stops - batch.starts
    found = (len(batch.starts), int(lengths.sum()), len(batch.snapshots))
    expected = (len(plan.chunks), plan.num_tokens, len(plan.snapshots))
    if found != expected:
        raise ValueError(
            "a plan of states for {} chunks of {} tokens with {} snapshots".format(*expected)
            + " cannot hold {} chunks of {} tokens with {} snapshots".format(*found)
        )
    columns = (batch.starts, batch.stops, batch.blocks, batch.settled, batch.settles, lengths.cumsum() - lengths)
    plan.chunks.numpy()[:] = np.stack(columns, 1)
    plan.snapshots.numpy()[:] = batch.snapshots


def recur(storage: StateStorage, layer: int, inputs: Tensor, weights: RecurrenceWeights, plan: CpuStatePlan) -> Tensor:
    """The recurrence of a layer: see Kernels. There may be gaps between tokens in memory.

    Raises ValueError for inputs or weights that do not fit, and IndexError for a layer that the blocks do not have.
    """
    group, kind = storage.group, storage.group.kind
    if inputs.shape != (plan.num_tokens, kind.width):
        raise ValueError(f"{plan.num_tokens} tokens of {kind.width} inputs are expected, not {tuple(inputs.shape)}")
    if not 0 <= layer < group.num_layers:
        raise IndexError(f"there is no layer {layer} of {group.num_layers} with states")
    conv_weight = weights.conv_weight
    if conv_weight.shape != (kind.num_channels, kind.conv_width) or not conv_weight.is_contiguous():
        raise ValueError(
            f"a contiguous convolution ({kind.num_channels}, {kind.conv_width}) is expected, not one of"
            f" {tuple(conv_weight.shape)} with strides {conv_weight.stride()}"
        )
    if inputs.stride(1) != 1:
        inputs = inputs.contiguous()
    out = empty((plan.num_tokens, kind.num_values), inputs.dtype)
    _C.recur(
        *(inputs, out, storage.data, plan.chunks, plan.snapshots, conv_weight, weights.conv_bias),
        *(weights.decay, weights.time_bias, weights.skip),
        *(dtype_code(inputs), dtype_code(storage.data), dtype_code(conv_weight), _RULES[kind.rule]),
        *(len(plan.chunks), len(plan.snapshots), inputs.stride(0)),
        *(kind.num_key_heads, kind.num_value_heads, kind.key_dim, kind.value_dim, kind.conv_width),
        *(storage.num_inputs, group.num_blocks, layer, group.num_layers, *weights.time_limits),
    )
    return out
