"""Tracing of the attention calls of a model, by running it on torch's meta device.

Windows, scales and softcaps are those that transformers' modules use. The configuration is not read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.transformers.attention import AttentionCall, AttentionParams, MaskFunction, mask_function_of
from quire.models.transformers.split_model import SplitModel

_NUM_TOKENS = 3
_MAX_MASK_POSITIONS = 2**17  # most positions on which a mask function is tested


class Layer(NamedTuple):
    """One attention call of a forward pass. It has its own KV."""

    params: AttentionParams
    window: int  # positions that a query attends to, including its own; 0: all


class TraceResult(NamedTuple):
    """Result of a trace."""

    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int


def trace(split_model: SplitModel, max_positions: int) -> TraceResult:
    """Run a model that was constructed with `attention.TRACING_ATTENTION` and parameters on the meta device.

    Raises ModelError for attention that quire does not support, and if the model's code needs values, not only shapes.
    """
    calls: list[AttentionCall] = []

    def listen(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.q.new_empty(call.q.shape).flatten(1)

    name = type(split_model.model).__name__
    row = torch.zeros(_NUM_TOKENS, dtype=torch.int64, device=split_model.device)
    try:
        hidden = split_model.hidden(row, row, listen, torch.ones_like(row)[None])
        logits = split_model.logits(hidden)
    except ModelError:
        raise
    except Exception as error:  # a model's code may raise any exception on the meta device
        if "on meta tensors" in str(error):
            reason = "its code depends on values in a batch, such as the longest position, and not on its shape alone"
        else:
            reason = f"tracing it without weights failed with {error!s:.200}"
        raise ModelError(f"{name} cannot be run through quire's attention: {reason}") from error
    if not calls:
        raise ModelError(f"{name} has no attention that uses transformers' attention interface")
    known: dict[MaskFunction, int] = {}
    return TraceResult(
        tuple(Layer(call.params, _window(call, max_positions, known)) for call in calls),
        hidden.shape[1],
        logits.shape[1],
    )


def _window(call: AttentionCall, max_positions: int, known: dict[MaskFunction, int]) -> int:
    """The window of a call's mask; 0: full attention. known: cache, by mask function."""
    mask = mask_function_of(call.mask)
    if mask is None:
        raise ModelError(f"{call.layer} attends with a mask of its own; quire's attention does not support this")
    if mask not in known:
        known[mask] = _checked_window(call.layer, mask, max_positions)
    window, declared = known[mask], call.params.sliding_window
    if declared and declared != window:
        raise ModelError(f"{call.layer} mentions a window of {declared} positions, but its mask has {window or 'none'}")
    return window


def _checked_window(layer: str, mask: MaskFunction, max_positions: int) -> int:
    """The window of a mask, checked for some queries against all positions. Raises ModelError for another mask."""
    size = mask.window
    length = min(max_positions, max(_MAX_MASK_POSITIONS, 4 * size))
    keys, zero = torch.arange(length), torch.zeros((), dtype=torch.int64)
    for position in {0, 1, size - 1, size, size + 1, 3 * size, length // 2, length - 1} & set(range(length)):
        query = torch.tensor(position)
        expected = keys <= query
        if size:
            expected &= keys > query - size
        try:
            seen = mask.is_visible(zero, zero, query, keys)
        except (RuntimeError, IndexError) as error:  # the mask function needs data of the run
            raise ModelError(f"{layer} attends with a mask that depends on more than positions") from error
        if not torch.equal(seen.expand(length), expected):
            raise ModelError(f"{layer} attends with a mask that is neither causal nor a sliding window")
    return size
