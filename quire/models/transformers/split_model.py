"""A transformers causal language model as two functions: tokens to hidden states, hidden states to logits.

transformers has one function for both. The second function is the same model with its inner decoder replaced by one
that returns given hidden states, so that scaling and softcap of logits are transformers' own.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from quire.errors import ModelError
from quire.models.transformers.attention import AttentionRouter, Listener


class _Outputs(MoeModelOutputWithPast):
    """A decoder's outputs. Other fields, which the head may read and pass on, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenHidden(nn.Module):
    """Replacement of the inner decoder that returns given hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden: Tensor | None = None

    def set_hidden(self, hidden: Tensor) -> None:
        """Set the hidden states that the next `forward` returns."""
        self._hidden = hidden

    @property
    def decoder(self) -> "_GivenHidden":
        """This module: some heads call the decoder inside of the base model (OPT)."""
        return self

    @property
    def was_called(self) -> bool:
        """Whether `forward` was called after `set_hidden`."""
        return self._hidden is None

    def forward(self, *_inputs: Any, **_named: Any) -> _Outputs:  # noqa: ANN401  (all arguments are ignored)
        """The given hidden states as a decoder's outputs."""
        hidden, self._hidden = self._hidden, None
        return _Outputs(last_hidden_state=hidden)


class SplitModel:
    """The two functions of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ModelError if the model has no inner decoder."""
        if model.base_model is model:
            raise ModelError(f"{type(model).__name__} has no inner decoder that could run without its head")
        self.model = model
        self._router = AttentionRouter(model)
        self._decoder = model.base_model
        self._given_hidden = _GivenHidden()
        self._head = copy.copy(model)
        # a shallow copy shares the dict of modules with the original, so it gets its own
        self._head.__dict__["_modules"] = {**model._modules, model.base_model_prefix: self._given_hidden}

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.model.parameters()).device

    def hidden(self, token_ids: Tensor, positions: Tensor, listener: Listener, mask: Tensor | None = None) -> Tensor:
        """(num_tokens, hidden_size) after the last norm; arguments (num_tokens,). `listener` gets the attention calls.

        mask: attention_mask (1, num_tokens), 1 for tokens and 0 for padding; needed to trace masks.
        """
        with self._router.route_to(listener):
            outputs = self._decoder(
                input_ids=token_ids[None],
                position_ids=positions[None],
                attention_mask=mask,
                use_cache=False,
                return_dict=True,
            )
        hidden: Tensor = outputs.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (num_rows, hidden_size) -> (num_rows, vocab_size)."""
        self._given_hidden.set_hidden(hidden[None])
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
        if not self._given_hidden.was_called:
            raise ModelError(f"{type(self.model).__name__} computes logits without its decoder's hidden states")
        return logits
