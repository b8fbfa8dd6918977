"""Redirection of a transformers model's attention calls to a listener.

transformers looks up attention functions and mask functions by name. This module registers two names at import. The
attention function finds the current listener through the `AttentionRouter`, an attribute of all modules of a model.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from quire.errors import ModelError

SERVING_ATTENTION = "quire"  # without masks: the listener's attention is causal within each sequence
TRACING_ATTENTION = "quire-traced"  # masks are uninitialised tensors with a `MaskFunction`, which has the mask function
_ROUTER_ATTRIBUTE, _MASK_ATTRIBUTE = "quire_line", "quire_hides"  # attributes of modules and of traced masks

_IGNORED_OPTIONS = frozenset(  # options that do not change the result of attention
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


class AttentionParams(NamedTuple):
    """Parameters of a layer's attention, which must be the same in each call."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float  # 0: none
    sliding_window: int  # the option sliding_window; 0: none


class AttentionCall(NamedTuple):
    """One attention call of a layer."""

    layer: str  # its class, for error messages
    q: Tensor  # (num_tokens, num_heads, head_dim), rotated
    k: Tensor  # (num_tokens, num_kv_heads, head_dim), rotated
    v: Tensor  # like k
    mask: Tensor | None
    params: AttentionParams


Listener = Callable[[AttentionCall], Tensor]  # returns (num_tokens, num_heads * head_dim)


class MaskFunction(NamedTuple):
    """The mask function of transformers for one mask."""

    is_visible: Callable[
        [Tensor, Tensor, Tensor, Tensor], Tensor
    ]  # (batch, head, query, key) indices -> whether visible
    window: int  # of a sliding window; 0: none


class AttentionRouter:
    """Passes the attention calls of one model to its current listener."""

    def __init__(self, model: nn.Module) -> None:
        """Sets an attribute of all modules, as it is not known which ones will call attention."""
        self._listener: Listener | None = None
        for module in model.modules():
            setattr(module, _ROUTER_ATTRIBUTE, self)

    @contextmanager
    def route_to(self, listener: Listener) -> Iterator[None]:
        """Context manager in which calls go to `listener`."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def dispatch(self, call: AttentionCall) -> Tensor:
        """The listener's result for a call. Raises ValueError outside of `route_to`."""
        if self._listener is None:
            raise ValueError("this model's attention has no listener")
        return self._listener(call)


def mask_function_of(mask: Tensor | None) -> MaskFunction | None:
    """The mask function of a traced call's mask; None if the model replaced or modified the mask."""
    return getattr(mask, _MASK_ATTRIBUTE, None)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401  (each model has its own)
) -> tuple[Tensor, None]:
    """The attention function: tensors (1, heads, num_tokens, head_dim) to (1, num_tokens, heads, head_dim)."""
    layer = type(module).__name__
    _check_supported(layer, query, key, value, options)
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    line: AttentionRouter = getattr(module, _ROUTER_ATTRIBUTE)
    out = line.dispatch(AttentionCall(layer, q, k, v, attention_mask, _attention_params(q, k, options)))
    return out.view(1, *q.shape), None


def _attention_params(q: Tensor, k: Tensor, options: Mapping[str, Any]) -> AttentionParams:
    scale = options.get("scaling")
    return AttentionParams(
        q.shape[1],
        k.shape[1],
        q.shape[2],
        1 / math.sqrt(q.shape[2]) if scale is None else scale,
        options.get("softcap") or 0.0,
        options.get("sliding_window") or 0,
    )


def _check_supported(layer: str, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> None:
    """Raise ModelError unless this is plain self-attention of one row of tokens."""
    for name, value_given in options.items():
        if name in ("scaling", "dropout"):
            if isinstance(value_given, Tensor) or (name == "dropout" and value_given):
                raise ModelError(
                    f"{layer} attends with {name} = {value_given!r:.80}; quire's attention does not support this"
                )
        elif name not in _IGNORED_OPTIONS and value_given is not None:
            meaning = f", {_MEANINGS[name]}" if name in _MEANINGS else ""
            raise ModelError(f"{layer} attends with {name!r}{meaning}; quire's attention does not support this")
    if value.shape != key.shape or key.shape[3] != query.shape[3]:
        raise ModelError(
            f"{layer} attends with queries, keys and values of {query.shape[3]}, {key.shape[3]} and {value.shape[3]} "
            f"numbers; quire's attention needs equal sizes"
        )
    if query.shape[0] != 1 or key.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise ModelError(
            f"{layer} attends to other tokens than those of its input; quire's attention does not support this"
        )


def _build_no_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    device: torch.device,
    local_size: int | None = None,
    **_options: Any,  # noqa: ANN401  (of other mask functions)
) -> Tensor:
    """An uninitialised mask of the right shape, with its mask function as an attribute."""
    mask = torch.empty(1, 1, q_length, kv_length, device=device)
    setattr(mask, _MASK_ATTRIBUTE, MaskFunction(mask_function, local_size or 0))
    return mask


AttentionInterface.register(SERVING_ATTENTION, _attend)
AttentionInterface.register(TRACING_ATTENTION, _attend)
AttentionMaskInterface.register(TRACING_ATTENTION, _build_no_mask)
