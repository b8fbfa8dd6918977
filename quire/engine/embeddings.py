"""Embeddings: hidden states of one prompt, as the engine's outputs bring them, to one vector. Knows no format."""

import numpy as np

from quire.core.output import Output
from quire.core.step import Pooling
from quire.errors import RequestError

_POOLINGS = {"last": Pooling.LAST, "mean": Pooling.MEAN}


def pooling_of(name: str) -> Pooling:
    """The pooling that callers call by this name. Raises RequestError."""
    if name not in _POOLINGS:
        raise RequestError(f"pooling must be one of {', '.join(_POOLINGS)}, not {name!r:.80}", "pooling")
    return _POOLINGS[name]


class Pooled:
    """The vector of one prompt while its chunks are computed."""

    def __init__(self, request_id: str, prompt_token_ids: list[int], pooling: Pooling) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.finish_reason: str | None = None
        self.error = ""
        self._pooling = pooling
        self._vector = np.zeros(0, np.float32)

    def add(self, output: Output) -> None:
        """Take in what a chunk brought: LAST keeps the newest, MEAN adds up."""
        if output.pooled is not None:
            more = self._pooling is Pooling.MEAN and len(self._vector)
            self._vector = self._vector + output.pooled if more else output.pooled.astype(np.float32)
        self.finish_reason = output.finish_reason
        self.error = output.error

    def vector(self, *, normalized: bool) -> np.ndarray:
        """float32 (hidden_size,), once the prompt is computed; of length 1 where normalized."""
        vector = self._vector / len(self.prompt_token_ids) if self._pooling is Pooling.MEAN else self._vector
        length = np.linalg.norm(vector.astype(np.float64))
        return (vector / length).astype(np.float32) if normalized and length > 0 else vector.astype(np.float32)
