"""What a step's result says about its chunks besides the tokens that were sampled."""

from typing import NamedTuple

import numpy as np

from quire.core.step import Logprobs, StepResult
from quire.scheduler.step_builder import Entry


class News(NamedTuple):
    """Of one chunk: what its sequence asked to be told."""

    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    pooled: np.ndarray | None = None


NOTHING = News()


class Extras:
    """The columns of a result, handed out chunk by chunk, in order. Most steps have none."""

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self.has_logprobs = result.logprobs is not None
        self._scored = self._pooled = 0  # what belongs to earlier chunks

    def take(self, entry: Entry, token: int, count: int) -> News:
        """Those of the next chunk that has any; its `count` tokens begin at `token`."""
        result, (seq, _, _, _, num_told) = self._result, entry
        logprobs = scored = pooled = None
        if count and result.logprobs is not None and seq.num_logprobs >= 0:
            logprobs = result.logprobs.slice(token, token + count)
        if num_told and seq.pools:
            pooled = None if result.pooled is None else result.pooled[self._pooled]
            self._pooled += 1
        elif num_told:
            if result.prompt_logprobs is not None:
                scored = result.prompt_logprobs.slice(self._scored, self._scored + num_told)
            self._scored += num_told
        return News(logprobs, scored, pooled)
