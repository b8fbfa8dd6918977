"""What a step's result says about each of its chunks."""

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from typing import NamedTuple

import numpy as np

from quire.core.output import Output
from quire.core.step import Logprobs, StepResult
from quire.sched.builder import Entry
from quire.sched.sequence import Sequence


class News(NamedTuple):
    """Of one chunk: sampled tokens, and what its sequence asked to be told."""

    tokens: list[int]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    pooled: np.ndarray | None = None

    def output(self, seq: Sequence, kept: list[int], reason: str | None, error: str) -> Output:
        """As the front end gets it: `kept` are the tokens that count, `reason` is why the sequence ends."""
        return Output(
            seq.request.id,
            seq.index,
            seq.id,
            kept,
            reason,
            stop_token=kept[-1] if kept and reason == "stop" else None,
            logprobs=None if self.logprobs is None else self.logprobs.slice(0, len(kept)),
            prompt_logprobs=self.prompt_logprobs,
            pooled=self.pooled,
            error=error,
        )


def read(entries: Listing[Entry], result: StepResult) -> Iterator[tuple[Entry, News]]:
    """The chunks of a step in turn, each with its part of the result's columns."""
    tokens = result.tokens.tolist()
    token = scored = pooled = 0  # what belongs to earlier chunks
    for entry, count in zip(entries, result.counts.tolist(), strict=True):
        seq = entry.seq
        params = seq.request.params
        news = News(tokens[token : token + count])
        if count and result.logprobs is not None and params.logprobs is not None:
            news = news._replace(logprobs=result.logprobs.slice(token, token + count))
        if entry.num_told and seq.pools:
            if result.pooled is not None:
                news = news._replace(pooled=result.pooled[pooled])
            pooled += 1
        elif entry.num_told:
            if result.prompt_logprobs is not None:
                news = news._replace(prompt_logprobs=result.prompt_logprobs.slice(scored, scored + entry.num_told))
            scored += entry.num_told
        token += count
        yield entry, news
