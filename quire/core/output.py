"""The update that the scheduler gives to the front end about one sequence after a step."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

import msgspec
import numpy as np

from quire.core.step import Logprobs

FinishReason = Literal["stop", "length", "repetition", "abort", "error"]

_OBJECT_BYTES = 160  # of an Output with its lists, and of an array without its data
NOTHING_PREDICTED = (0, 0)  # one object: defaults are left out of messages by identity
NO_SEQUENCE = -1  # seq_id of an Output for a request that never had a sequence


class EndCause(StrEnum):
    """Why a sequence ended. It crosses processes; code decides by it, never by the text of an error."""

    STOP = "stop"  # a stop or end token or a stop string; the constraint or pooling is complete
    LENGTH = "length"  # max_tokens, or the context is full
    REPETITION = "repetition"  # the output repeats itself, and the request asked to detect it
    ABORT = "abort"  # the client or the front end aborted the request
    DEADLINE = "deadline"  # the request could not meet its deadline any more
    DEAD_END = "dead_end"  # the constraint allows no token that could be sampled
    NO_TOKEN = "no_token"  # no token could be sampled: the request allows none, or the logits are not finite
    NOT_COMPILED = "not_compiled"  # the constraint could not be compiled
    NOT_READY = "not_ready"  # another prerequisite of the request could not be prepared
    NO_HYPOTHESIS = "no_hypothesis"  # the beam search found fewer results than requested
    STEP_FAILED = "step_failed"  # a step failed that computed no other sequence
    ENGINE_LOST = "engine_lost"  # engine processes ended while they computed the request

    @property
    def finish_reason(self) -> FinishReason:
        """What clients get as the finish reason."""
        return _FINISH_REASONS.get(self, "error")


_FINISH_REASONS: Mapping[EndCause, FinishReason] = MappingProxyType(
    {
        EndCause.STOP: "stop",
        EndCause.LENGTH: "length",
        EndCause.REPETITION: "repetition",
        EndCause.ABORT: "abort",
        EndCause.DEADLINE: "abort",
    }
)


class Output(msgspec.Struct, frozen=True, eq=False, array_like=True, omit_defaults=True, gc=False):
    """New tokens of one sequence, and its end.

    The prompt logprobs of a request are in the Outputs of its sequence 0. end: None while the sequence continues.
    stop_token: the stop or end token that ended it, the last one of token_ids. error: a text for people, with the
    causes whose finish reason is "error" or "abort".
    """

    request_id: str
    index: int  # of the sequence in its request
    seq_id: int
    token_ids: list[int]
    end: EndCause | None = None
    stop_token: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # of the next prompt tokens; the first prompt token has none
    pooled: np.ndarray | None = None  # float32 (hidden_size,) or (classes,): see Pooling; of a chunk
    num_cached_tokens: int = 0  # prompt tokens of the prefix match at the first admission of the sequence
    cumulative_logprob: float | None = None  # of all its tokens: for results of a beam search and of best_of
    error: str = ""
    queue_seconds: float | None = None  # with its first tokens: from arrival to the first admission of the request
    forced: tuple[int, ...] = ()  # indices of the forced tokens in token_ids; `logprobs` has rows for the others only

    predicted: tuple[int, int] = NOTHING_PREDICTED  # accepted and rejected drafts from the prediction of the request
    drafted: tuple[int, ...] = ()  # indices of the accepted drafts in token_ids, forced ones excluded

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory that this object takes."""
        arrays = [self.pooled] if self.pooled is not None else []
        for rows in (self.logprobs, self.prompt_logprobs):
            arrays += [] if rows is None else [rows.ids, rows.values, rows.ranks]
        return _OBJECT_BYTES * (1 + len(arrays)) + 32 * len(self.token_ids) + sum(array.nbytes for array in arrays)

    @property
    def finish_reason(self) -> FinishReason | None:
        """What clients get as the finish reason; None while the sequence continues."""
        return None if self.end is None else self.end.finish_reason
