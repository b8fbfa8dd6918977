"""Capabilities: what a runner can execute. The engine refuses requests, and the runner Steps, that need more."""

from dataclasses import dataclass

import numpy as np

from quire.core.adapter import NO_ADAPTERS
from quire.core.request import Request
from quire.core.step import Pooling, Step
from quire.errors import ConfigError, RequestError

_ONLY_CLASSIFIES = "this model has a classification head: it generates no text and no embeddings; use classify"
_ONLY_EMBEDS = "this model has no head over its vocabulary: it generates no text; use embed, or a ...ForCausalLM"
_NO_CLASSES = "this model has no classification head; use a checkpoint of ...ForSequenceClassification"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a runner has besides sampling from one model."""

    deterministic: bool = False  # kernels for deterministic sequences
    classifies: bool = False  # a classification head
    generates: bool = True  # a head over the vocabulary
    adapters: bool = False
    steps_in_flight: int = 2  # the most

    def check_steps_in_flight(self, number: int) -> None:
        """Raise ConfigError for more steps in flight than the runner takes."""
        if number > self.steps_in_flight:
            raise ConfigError(
                f"steps_in_flight {number} is more than the {self.steps_in_flight} that this runner takes; lower it"
            )

    def check_adapters(self) -> None:
        """Raise RequestError if the runner has no adapters."""
        if not self.adapters:
            raise RequestError(NO_ADAPTERS, "adapter")

    def check_request(self, request: Request) -> None:
        """Raise RequestError for a request that the runner cannot execute."""
        if request.params.deterministic and not self.deterministic:
            raise RequestError(
                "this model cannot be run deterministically, or not with its state_dtype; leave `deterministic` out",
                "deterministic",
            )
        if request.adapter is not None:
            self.check_adapters()
        if self.classifies is not (request.pooling is Pooling.CLASS):
            raise RequestError(_ONLY_CLASSIFIES if self.classifies else _NO_CLASSES, "model")
        if not (self.generates or request.pooling):
            raise RequestError(_ONLY_EMBEDS, "model")

    def check_step(self, step: Step) -> None:
        """Raise ValueError for a Step that the runner cannot execute."""
        chunks = step.chunks
        if step.adapters and not self.adapters:
            raise ValueError("this runner has no adapters")
        if len(step.opens):
            if step.opens.adapters.any() and not self.adapters:
                raise ValueError("this runner has no adapters")
            if step.opens.deterministic.any() and not self.deterministic:
                raise ValueError("this runner has no kernels for deterministic sequences")
        if (chunks.lengths < np.maximum(chunks.num_logits, 1)).any():
            raise ValueError("each chunk needs at least one position, and one for each of its logits")
        if not chunks.only_samples and (chunks.num_logits < chunks.num_samples).any():
            raise ValueError("a chunk needs logits at each position from which it samples")
        if chunks.have_drafts and chunks.num_drafts[~chunks.samples].any():
            raise ValueError("only chunks that sample can have drafts")
