"""Recurrent states in plain torch, token by token: the specification of `recur`.

The inputs of a token go through a causal convolution, depthwise over `conv_width` tokens, and silu; those of
"convolution" without silu. Then for each value head, in float32, with its state S (key_dim, value_dim):

delta     q and k are divided by sqrt(sum of squares + 1e-6), and q by sqrt(key_dim). beta = sigmoid(b),
          g = decay * softplus(a + time_bias). S = exp(g) S; S += k (beta (v - S^T k))^T; output S^T q.
kda       the same, but a, time_bias and so g are of each number of the key head, and exp(g) has a factor of each row:
          S = diag(exp(g)) S.
mamba2    t = softplus(time step + time_bias), limited to `time_limits`. S = exp(decay t) S + k (t v)^T;
          output S^T q + skip v.

Each output is rounded once to the type of the inputs, and S to the type of the storage where a block is written.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from quire.core.states import StateGroup, StateKind
from quire.kernels.state_contract import STATE_DTYPES, RecurrenceWeights, StateBatch, StateStorage

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class StatePlan:
    """The chunks of a step."""

    batch: StateBatch
    deterministic: bool = False


def allocate_states(group: StateGroup, device: torch.device) -> StateStorage:
    """See Kernels."""
    shape = (group.num_blocks, group.num_layers, group.kind.numbers(group.max_pending))
    return StateStorage(group, torch.zeros(shape, dtype=STATE_DTYPES[group.dtype], device=device))


def copy_states(storage: StateStorage, pairs: Tensor) -> None:
    """See Kernels."""
    storage.data.index_copy_(0, pairs[:, 1], storage.data.index_select(0, pairs[:, 0]))


def plan_states(batch: StateBatch, storage: StateStorage) -> StatePlan:
    """See Kernels."""
    del storage
    return StatePlan(batch)


def recur(storage: StateStorage, layer: int, inputs: Tensor, weights: RecurrenceWeights, plan: StatePlan) -> Tensor:
    """See Kernels."""
    kind, batch = storage.group.kind, plan.batch
    out = torch.zeros(len(inputs), kind.num_values, dtype=inputs.dtype, device=inputs.device)
    end = 0
    for i, (start, stop, block) in enumerate(zip(batch.starts, batch.stops, batch.blocks, strict=True)):
        begin, end = end, end + int(stop - start)
        if begin == end or block < 0:
            continue
        snapshots = [(int(at), int(to)) for chunk, at, to in batch.snapshots if chunk == i]
        _recur_chunk(
            storage,
            layer,
            (inputs[begin:end], out[begin:end]),
            weights,
            (int(start), int(batch.settled[i]), int(batch.settles[i]), int(block)),
            snapshots,
        )
    return out


def _recur_chunk(
    storage: StateStorage,
    layer: int,
    rows: tuple[Tensor, Tensor],
    weights: RecurrenceWeights,
    chunk: tuple[int, int, int, int],
    snapshots: list[tuple[int, int]],
) -> None:
    """Compute the outputs of one chunk and write its blocks. rows: inputs and outputs."""
    kind = storage.group.kind
    inputs, out = rows
    start, settled, settles, block = chunk
    tail = kind.conv_width - 1
    state, before = _read(storage, layer, block)
    if start == 0:
        state, before, settled = torch.zeros_like(state), torch.zeros_like(before), 0
    # of positions from settled - tail on
    every = torch.cat((before[: tail + start - settled], inputs.float()))
    to_write = dict(snapshots)

    def write(target: int, position: int, values: Tensor) -> None:
        first = position - settled
        _write(storage, layer, target, values, every[first : first + storage.num_inputs])

    kept = state
    for index in range(len(every) - tail):
        position = settled + index
        if position == settles:
            kept = state
        state, y = step(kind, state, every[index : index + tail + 1], weights)
        if position >= start:
            out[position - start] = y.to(out.dtype)
        if position + 1 in to_write:
            write(to_write[position + 1], position + 1, state)
    if settles == settled + len(every) - tail:
        kept = state
    write(block, settles, kept)


def _read(storage: StateStorage, layer: int, block: int) -> tuple[Tensor, Tensor]:
    """The recurrent state of a layer in a block, and its inputs (num_inputs, width), in float32."""
    kind = storage.group.kind
    state, inputs = storage.data[block, layer].float().tensor_split((storage.num_recurrent,))
    heads = (kind.num_value_heads, kind.key_dim, kind.value_dim)
    return state.view(heads if len(state) else (0,)), inputs.view(storage.num_inputs, kind.width)


def _write(storage: StateStorage, layer: int, block: int, state: Tensor, inputs: Tensor) -> None:
    """Write the state and the leading inputs of a layer in a block."""
    of_layer = storage.data[block, layer]
    of_layer[: storage.num_recurrent] = state.flatten()
    of_layer[storage.num_recurrent :][: inputs.numel()] = inputs.flatten()


def step(kind: StateKind, state: Tensor, inputs: Tensor, weights: RecurrenceWeights) -> tuple[Tensor, Tensor]:
    """The state after a token, and its output (num_values,), float32. inputs (conv_width, width): its own are last."""
    channels = kind.num_channels
    x = (inputs[:, :channels] * weights.conv_weight.float().t()).sum(0)
    if weights.conv_bias is not None:
        x = x + weights.conv_bias.float()
    if kind.rule == "convolution":
        return state, x
    x = x * torch.sigmoid(x)
    size = kind.num_keys
    shared = kind.num_value_heads // kind.num_key_heads
    q, k = (some.view(-1, kind.key_dim).repeat_interleave(shared, 0) for some in (x[:size], x[size : 2 * size]))
    v = x[2 * size :].view(-1, kind.value_dim)
    gates = inputs[-1, channels:]
    assert weights.decay is not None and weights.time_bias is not None, "a recurrence decays"
    if kind.rule in ("delta", "kda"):
        q, k = (some * torch.rsqrt((some * some).sum(1, keepdim=True) + _NORM_EPS) for some in (q, k))
        q = q * kind.key_dim**-0.5
        beta, a = torch.sigmoid(gates[: kind.num_value_heads]), gates[kind.num_value_heads :]
        times = softplus(a + weights.time_bias).view(-1, kind.key_dim if kind.rule == "kda" else 1)
        times = times.repeat_interleave(kind.num_value_heads // len(times), 0)
        state = state * torch.exp(weights.decay[:, None] * times)[:, :, None]
        added = (v - (state * k[:, :, None]).sum(1)) * beta[:, None]
    else:
        times = softplus(gates + weights.time_bias).clamp(*weights.time_limits)
        state = state * torch.exp(weights.decay * times)[:, None, None]
        added = v * times[:, None]
    state = state + k[:, :, None] * added[:, None, :]
    out = (state * q[:, :, None]).sum(1)
    if weights.skip is not None:
        out = out + weights.skip[:, None] * v
    return state, out.flatten()
