"""Pooling of hidden states to one vector per prompt."""

from collections.abc import Iterator, Sequence
from uuid import uuid4

import numpy as np

from quire.core.output import Output
from quire.core.request import NO_NAMESPACE, Namespace
from quire.core.scheduling_params import DEFAULT_SCHEDULING_PARAMS, SchedulingParams
from quire.core.step import Pooling
from quire.engine.inputs import Generation, prompt_request_id
from quire.errors import QuireError, RequestError

_POOLINGS = {"last": Pooling.LAST, "mean": Pooling.MEAN}


class EmbeddingFailed(QuireError):
    """The engine failed to compute a prompt."""


class EmbeddingDeadlineMissed(EmbeddingFailed):
    """A prompt was aborted because it could not meet its deadline any more."""


def parse_pooling(name: str) -> Pooling:
    """The pooling "last" or "mean". Raises RequestError for another name."""
    if name not in _POOLINGS:
        raise RequestError(f"pooling must be one of {', '.join(_POOLINGS)}, not {name!r:.80}", "pooling")
    return _POOLINGS[name]


class PooledPrompt:
    """The vector of one prompt, accumulated over its chunks."""

    def __init__(self, request_id: str, prompt_token_ids: list[int], pooling: Pooling) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.finish_reason: str | None = None
        self.num_cached_tokens = 0
        self._pooling = pooling
        self._vector = np.zeros(0, np.float32)

    def accumulate(self, output: Output) -> None:
        """Add the output of a chunk: LAST keeps the newest vector, MEAN the sum."""
        if output.pooled is not None:
            more = self._pooling is Pooling.MEAN and len(self._vector)
            self._vector = self._vector + output.pooled if more else output.pooled.astype(np.float32)
        self.finish_reason = output.finish_reason
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)

    def vector(self, *, normalized: bool) -> np.ndarray:
        """float32 (hidden_size,), valid once the prompt is computed; of length 1 if normalized."""
        vector = self._vector / len(self.prompt_token_ids) if self._pooling is Pooling.MEAN else self._vector
        length = np.linalg.norm(vector.astype(np.float64))
        return (vector / length).astype(np.float32) if normalized and length > 0 else vector.astype(np.float32)


class EmbeddingBatch:
    """Prompts that are embedded together. `requests` are the requests for the engine. id: of the whole batch."""

    def __init__(
        self,
        generations: Sequence[Generation],
        pooling: Pooling,
        namespace: Namespace = NO_NAMESPACE,
        scheduling_params: SchedulingParams = DEFAULT_SCHEDULING_PARAMS,
        id: str | None = None,
    ) -> None:
        self.id = id or f"embd-{uuid4().hex}"
        self.requests = [
            generation.request(prompt_request_id(self.id, i), pooling, namespace, scheduling_params=scheduling_params)
            for i, generation in enumerate(generations)
        ]
        self._pooled = {each.id: PooledPrompt(each.id, each.prompt, pooling) for each in self.requests}

    def __iter__(self) -> Iterator[PooledPrompt]:
        """The prompts in their order."""
        return iter(self._pooled.values())

    @property
    def finished(self) -> bool:
        """Whether all prompts are computed."""
        return not any(map(self.is_open, self._pooled))

    def is_open(self, request_id: str) -> bool:
        """Whether a prompt has not finished."""
        return self._pooled[request_id].finish_reason is None

    def process_output(self, output: Output) -> PooledPrompt:
        """Add an output and return its prompt. Raises EmbeddingFailed, EmbeddingDeadlineMissed."""
        one = self._pooled[output.request_id]
        one.accumulate(output)
        if output.finish_reason == "error":
            raise EmbeddingFailed(f"a prompt could not be embedded: {output.error}")
        if output.finish_reason == "abort":
            raise EmbeddingDeadlineMissed(output.error)
        return one
