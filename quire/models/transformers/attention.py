"""The attention of a transformers model, handed to whoever listens while the model runs.

transformers looks attention functions and mask functions up by name, so two names are registered here, once.
All that one model shares lies in its `Line`, which its modules carry. What the calls are good for is not known here.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from quire.errors import ModelError

SERVED = "quire"  # no masks are built: attention is causal within a sequence, which only the listener can tell
TRACED = "quire-traced"  # masks are built, empty, and remember what they hide
_LINE, _HIDES = "quire_line", "quire_hides"  # attributes of modules and of traced masks

_HARMLESS = frozenset(  # options that may come along and do not change what attention computes
    (
        *("position_ids", "cache_position", "past_key_values", "use_cache", "is_causal", "softcap", "sliding_window"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    )
)
_MEANINGS = {
    "s_aux": "attention sinks",
    "indices": "sparse attention over chosen positions",
    "position_bias": "biases of attention scores",
}


class Traits(NamedTuple):
    """What may not change from one call of a layer to the next."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float  # 0: none
    told_window: int  # the window as the layer mentions it, if it does; 0: it does not


class Call(NamedTuple):
    """One layer asks for attention."""

    layer: str  # its class, for messages
    q: Tensor  # (num_tokens, num_heads, head_dim), rotated
    k: Tensor  # (num_tokens, num_kv_heads, head_dim), rotated
    v: Tensor  # like k
    mask: Tensor | None
    traits: Traits


Listener = Callable[[Call], Tensor]  # returns (num_tokens, num_heads * head_dim)


class Hides(NamedTuple):
    """What a mask of transformers hides, not written out."""

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of (batch, head, query, key) indices: whether it is seen
    size: int  # of a window or the like; 0 where none is mentioned


class Line:
    """The way from the layers of one model to a listener."""

    def __init__(self, model: nn.Module) -> None:
        """All modules of the model are given the line: which ones will attend cannot be told from outside."""
        self._listener: Listener | None = None
        for module in model.modules():
            setattr(module, _LINE, self)

    @contextmanager
    def to(self, listener: Listener) -> Iterator[None]:
        """Calls go to `listener` meanwhile."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def send(self, call: Call) -> Tensor:
        """What the listener returns."""
        if self._listener is None:
            raise ValueError("nobody listens to this model's attention")
        return self._listener(call)


def hides(mask: Tensor | None) -> Hides | None:
    """What the mask of a traced call hides; None if it is not as it was built, so that nobody knows."""
    return getattr(mask, _HIDES, None)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401  (each model has its own)
) -> tuple[Tensor, None]:
    """The function that layers call: all of (1, heads, num_tokens, head_dim), to (1, num_tokens, heads, head_dim)."""
    layer = type(module).__name__
    _refuse_others(layer, query, key, value, options)
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    line: Line = getattr(module, _LINE)
    out = line.send(Call(layer, q, k, v, attention_mask, _traits(q, k, options)))
    return out.view(1, *q.shape), None


def _traits(q: Tensor, k: Tensor, options: Mapping[str, Any]) -> Traits:
    scale = options.get("scaling")
    return Traits(
        q.shape[1],
        k.shape[1],
        q.shape[2],
        1 / math.sqrt(q.shape[2]) if scale is None else scale,
        options.get("softcap") or 0.0,
        options.get("sliding_window") or 0,
    )


def _refuse_others(layer: str, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> None:
    """Raise ModelError unless this is attention of one row of tokens to itself, with nothing else to it."""
    for name, value_given in options.items():
        if name in ("scaling", "dropout"):
            if isinstance(value_given, Tensor) or (name == "dropout" and value_given):
                raise ModelError(f"{layer} attends with {name} = {value_given!r:.80}; quire's attention cannot")
        elif name not in _HARMLESS and value_given is not None:
            meaning = f", {_MEANINGS[name]}" if name in _MEANINGS else ""
            raise ModelError(f"{layer} attends with {name!r}{meaning}; quire's attention cannot")
    if value.shape != key.shape or key.shape[3] != query.shape[3]:
        raise ModelError(
            f"{layer} attends with queries, keys and values of {query.shape[3]}, {key.shape[3]} and {value.shape[3]} "
            f"numbers; quire's attention needs them alike"
        )
    if query.shape[0] != 1 or key.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise ModelError(f"{layer} attends to something else than the tokens it is computing; quire's attention cannot")


def _build_no_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    device: torch.device,
    local_size: int | None = None,
    **_options: Any,  # noqa: ANN401  (of other mask functions)
) -> Tensor:
    """In place of a mask: its shape, and what it would hide."""
    mask = torch.empty(1, 1, q_length, kv_length, device=device)
    setattr(mask, _HIDES, Hides(mask_function, local_size or 0))
    return mask


AttentionInterface.register(SERVED, _attend)
AttentionInterface.register(TRACED, _attend)
AttentionMaskInterface.register(TRACED, _build_no_mask)
