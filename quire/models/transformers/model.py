"""A transformers model as a Model: `attend` replaces its attention, and all else is transformers' code."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.layers.attend import Attend, ScoreScaling
from quire.layers.context import ForwardContext
from quire.models.transformers.attention import AttentionCall
from quire.models.transformers.split_model import SplitModel
from quire.models.transformers.tracing import Layer


class TransformersModel:
    """A decoder-only model with its weights. transformers computes all but attention, without quire's kernels."""

    batch_invariant = False
    class_head = None

    def __init__(self, split_model: SplitModel, layers: Sequence[Layer], vocab_size: int) -> None:
        """layers: traced attention calls, in order."""
        self._split_model = split_model
        self._layers = tuple(layers)
        self.vocab_size = vocab_size
        self.score_scaling = tuple(ScoreScaling(layer.params.scale, layer.params.softcap) for layer in layers)

    @property
    def device(self) -> torch.device:
        """See Model."""
        return self._split_model.device

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states (num_tokens, hidden_size) after the last norm. token_ids: int64 (num_tokens,).

        Raises ModelError if a layer's attention call differs from its description.
        """
        one = _PassListener(self._layers, context.attend)
        hidden = self._split_model.hidden(token_ids, context.positions, one)
        one.finish()
        return hidden

    def logits(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """hidden (num_rows, hidden_size) -> (num_rows, vocab_size), including scaling and softcap."""
        del context
        return self._split_model.logits(hidden)


class _PassListener:
    """The listener of one forward pass. Call i is that of layer i."""

    def __init__(self, layers: Sequence[Layer], attend: Attend) -> None:
        self._layers = layers
        self._attend = attend
        self._done = 0

    def __call__(self, call: AttentionCall) -> Tensor:
        """See Listener. Raises ModelError if the call differs from the description."""
        index = self._done
        if index == len(self._layers):
            raise ModelError(f"{call.layer} called attention more than the {index} times per pass that were traced")
        expected = self._layers[index].params
        if call.params != expected:
            raise ModelError(f"{call.layer}, layer {index}, attends with {call.params}; traced were {expected}")
        if call.mask is not None:
            raise ModelError(
                f"{call.layer}, layer {index}, attends with a mask of its own; quire's attention does not support this"
            )
        self._done += 1
        return self._attend(index, call.q, call.k, call.v)

    def finish(self) -> None:
        """Raise ModelError unless all layers have called."""
        if self._done != len(self._layers):
            raise ModelError(
                f"the model called attention {self._done} times in a pass; {len(self._layers)} calls were traced"
            )
