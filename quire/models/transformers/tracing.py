"""Tracing of the attention calls of a model, by running it on torch's meta device.

Windows, scales and softcaps are those that transformers' modules use. The configuration is not read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.transformers.attention import Call, Hides, Traits, hides
from quire.models.transformers.split_model import Halves

_NUM_TOKENS = 3
_SIGHT = 2**17  # most positions on which a mask function is tested


class Layer(NamedTuple):
    """One attention call of a forward pass. It has its own KV."""

    traits: Traits
    window: int  # positions that a query attends to, including its own; 0: all


class Traced(NamedTuple):
    """Result of a trace."""

    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int


def trace(halves: Halves, max_positions: int) -> Traced:
    """Run a model that was constructed with `attention.TRACED` and parameters on the meta device.

    Raises ModelError for attention that quire does not support, and if the model's code needs values, not only shapes.
    """
    calls: list[Call] = []

    def listen(call: Call) -> Tensor:
        calls.append(call)
        return call.q.new_empty(call.q.shape).flatten(1)

    name = type(halves.model).__name__
    row = torch.zeros(_NUM_TOKENS, dtype=torch.int64, device=halves.device)
    try:
        hidden = halves.hidden(row, row, listen, torch.ones_like(row)[None])
        logits = halves.logits(hidden)
    except ModelError:
        raise
    except Exception as error:  # a model's code may raise any exception on the meta device
        raise ModelError(
            f"{name} cannot be run through quire's attention: without weights it stops with {error!s:.200}"
        ) from error
    if not calls:
        raise ModelError(f"{name} has no attention that goes through transformers' attention interface")
    known: dict[Hides, int] = {}
    return Traced(
        tuple(Layer(call.traits, _window(call, max_positions, known)) for call in calls),
        hidden.shape[1],
        logits.shape[1],
    )


def _window(call: Call, max_positions: int, known: dict[Hides, int]) -> int:
    """The window of a call's mask; 0: full attention. known: cache, by mask function."""
    mask = hides(call.mask)
    if mask is None:
        raise ModelError(f"{call.layer} attends with a mask of its own; quire's attention cannot")
    if mask not in known:
        known[mask] = _tried(call.layer, mask, max_positions)
    window, told = known[mask], call.traits.told_window
    if told and told != window:
        raise ModelError(f"{call.layer} mentions a window of {told} positions, but its mask has {window or 'none'}")
    return window


def _tried(layer: str, mask: Hides, max_positions: int) -> int:
    """The window of a mask, checked for some queries against all positions. Raises ModelError for another mask."""
    size = mask.size
    length = min(max_positions, max(_SIGHT, 4 * size))
    keys, zero = torch.arange(length), torch.zeros((), dtype=torch.int64)
    for position in {0, 1, size - 1, size, size + 1, 3 * size, length // 2, length - 1} & set(range(length)):
        query = torch.tensor(position)
        expected = keys <= query
        if size:
            expected &= keys > query - size
        try:
            seen = mask.sees(zero, zero, query, keys)
        except (RuntimeError, IndexError) as error:  # the mask function needs data of the run
            raise ModelError(f"{layer} attends with a mask that depends on more than positions") from error
        if not torch.equal(seen.expand(length), expected):
            raise ModelError(f"{layer} attends with a mask that is neither causal nor a sliding window")
    return size
