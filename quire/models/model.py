"""Interfaces of a model and its description, for the shared decoder and for models of transformers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.config import Classification
from quire.core.kv_groups import StoredKind
from quire.core.states import StateKind
from quire.layers.attend import ScoreScaling
from quire.layers.context import ForwardContext
from quire.layers.linear import Linear
from quire.weights.checkpoint import Checkpoint
from quire.weights.schemes import NO_SCHEMES, Schemes

Progress = Callable[[int, int], None]  # bytes of weights loaded, bytes in all


class Description(Protocol):
    """Properties of a model that are known before its weights are read."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint of the weights."""

    @property
    def architecture(self) -> str:
        """The class name in config.json's `architectures`."""

    @property
    def classification(self) -> Classification | None:
        """The classes of the classification head; None for a language model."""

    @property
    def generates(self) -> bool:
        """Whether it has a head over the vocabulary."""

    @property
    def vocab_size(self) -> int:
        """Number of logits per position."""

    @property
    def hidden_size(self) -> int:
        """Size of a hidden state."""

    @property
    def max_positions(self) -> int:
        """The most tokens of a sequence that the model supports."""

    @property
    def activations_per_token(self) -> int:
        """The most activation numbers that one token needs at the same time within a layer."""

    @property
    def kv_layers(self) -> Sequence[StoredKind]:
        """The kind of KV of each layer that has its own."""

    @property
    def state_layers(self) -> Sequence[StateKind]:
        """The kind of recurrence of each layer that has one. All are equal."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied head counts once."""

    @property
    def dtype(self) -> str:
        """The checkpoint's compute dtype: "float32", "float16" or "bfloat16"."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a sequence."""

    @property
    def sampling_defaults(self) -> Mapping[str, float | int]:
        """Defaults from generation_config.json, by names of SamplingParams."""

    def schemes(self, quantization: str | None) -> Schemes:
        """The schemes of low-bit weights. quantization: of EngineOptions; None: as the checkpoint stores them.

        Raises ModelError for a model whose weights cannot be rounded at load.
        """

    def weight_bytes(self, dtype: str, schemes: Schemes = NO_SCHEMES) -> int:
        """Bytes of the weights if they are loaded in their schemes, and others as `dtype`, without padding."""


class Model(Protocol):
    """A decoder-only model with its weights.

    The kernels are part of the context of a pass, so that one set of weights can run with several kernel modules: those
    for which it was loaded and their deterministic kernels, or, if it has the reference layout, any.
    """

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""

    @property
    def vocab_size(self) -> int:
        """Number of logits per position."""

    @property
    def class_head(self) -> Linear | None:
        """The classification head, on hidden states after the last norm; None for a language model."""

    @property
    def score_scaling(self) -> Sequence[ScoreScaling]:
        """Scaling of each layer's attention scores."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's output depends only on its own sequence and the kernels, not on the rest of the batch."""

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states (num_tokens, hidden_size) after the last norm. token_ids: int64 (num_tokens,)."""

    def logits(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """hidden (num_rows, hidden_size) -> (num_rows, vocab_size), including scaling and softcap."""
