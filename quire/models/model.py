"""What the rest of quire needs of a model, whoever describes it: the shared decoder, or a backend."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.kernels.contract import Kernels
from quire.layers.attend import Attend, Scores
from quire.models.checkpoint import Checkpoint

Progress = Callable[[int, int], None]  # bytes of weights loaded, bytes in all


class KVLayer(NamedTuple):
    """The keys and values that one layer keeps."""

    num_kv_heads: int
    head_dim: int
    window: int  # positions that a query sees, itself among them; 0 is all


class Description(Protocol):
    """A model as far as it is known without reading a weight."""

    @property
    def checkpoint(self) -> Checkpoint:
        """Its files."""

    @property
    def architecture(self) -> str:
        """As config.json calls it."""

    @property
    def vocab_size(self) -> int:
        """Logits per position."""

    @property
    def hidden_size(self) -> int:
        """Numbers in a hidden state."""

    @property
    def max_positions(self) -> int:
        """Tokens in the longest sequence that the model supports."""

    @property
    def activations_per_token(self) -> int:
        """Numbers that are alive at once, at most, while a layer computes one token."""

    @property
    def kv_layers(self) -> Sequence[KVLayer]:
        """What each layer keeps."""

    @property
    def num_parameters(self) -> int:
        """Numbers in the weights; a tied head counts once."""

    @property
    def dtype(self) -> str:
        """What the checkpoint asks to be computed in: "float32", "float16" or "bfloat16"."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""

    @property
    def sampling_defaults(self) -> Mapping[str, float | int]:
        """What generation_config.json recommends, by names of SamplingParams."""

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the weights when they are loaded as `dtype`."""


class Model(Protocol):
    """A decoder-only model with its weights.

    The kernels are an argument, so that one set of weights can run with several of them: with those that it was
    loaded for and their strict ones, or loaded for none, with any.
    """

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""

    @property
    def vocab_size(self) -> int:
        """Logits per position."""

    @property
    def scores(self) -> Sequence[Scores]:
        """How each layer makes attention scores."""

    @property
    def row_invariant(self) -> bool:
        """Whether all that a token's output depends on, besides its own sequence, are the kernels."""

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, kernels: Kernels) -> Tensor:
        """Hidden states (num_tokens, hidden_size) after the last norm; arguments int64 (num_tokens,)."""

    def logits(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """hidden (num_rows, hidden_size) -> (num_rows, vocab_size), all scaling and capping done."""
