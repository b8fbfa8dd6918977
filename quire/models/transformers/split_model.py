"""A causal language model of transformers as two functions: tokens to hidden states, hidden states to logits.

transformers has one function for both. The second half is the same model with its inner decoder exchanged for one
that returns what it was given, so that scaling and capping of logits are what transformers does.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from quire.errors import ModelError
from quire.models.transformers.attention import Line, Listener


class _Outputs(MoeModelOutputWithPast):
    """A decoder's outputs. The head's half hands on whatever else its decoder returns, and nobody wants it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Given(nn.Module):
    """In place of the inner decoder: hidden states that are known already."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden: Tensor | None = None

    def take(self, hidden: Tensor) -> None:
        """To be returned next."""
        self._hidden = hidden

    @property
    def was_asked(self) -> bool:
        """Whether it has returned what it took."""
        return self._hidden is None

    def forward(self, *_inputs: Any, **_named: Any) -> _Outputs:  # noqa: ANN401  (all are answered)
        """As a decoder's output, once."""
        hidden, self._hidden = self._hidden, None
        return _Outputs(last_hidden_state=hidden)


class Halves:
    """The two functions, and the model they are made of."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ModelError where the model has no inner decoder."""
        if model.base_model is model:
            raise ModelError(f"{type(model).__name__} has no decoder inside that could run without its head")
        self.model = model
        self._line = Line(model)
        self._decoder = model.base_model
        self._given = _Given()
        self._head = copy.copy(model)
        # a copy has the same table of modules as the original, so it is given one of its own
        self._head.__dict__["_modules"] = {**model._modules, model.base_model_prefix: self._given}

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.model.parameters()).device

    def hidden(self, token_ids: Tensor, positions: Tensor, listener: Listener, mask: Tensor | None = None) -> Tensor:
        """(num_tokens, hidden_size) after the last norm; arguments (num_tokens,). Attention goes to `listener`.

        mask: what is real and what is padding, for a model whose masks are traced.
        """
        with self._line.to(listener):
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
        self._given.take(hidden[None])
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
        if not self._given.was_asked:
            raise ModelError(f"{type(self.model).__name__} makes logits without its decoder's hidden states")
        return logits
