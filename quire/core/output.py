"""The update that the scheduler gives to the front end about one sequence after a step."""

import msgspec
import numpy as np

from quire.core.step import Logprobs

NO_SEQUENCE = -1  # seq_id of an Output for a request that never had a sequence
NO_TOKEN_ERROR = "no token could be sampled: the request allows none, or the logits are not finite"


class Output(msgspec.Struct, frozen=True, eq=False, array_like=True, omit_defaults=True):
    """New tokens of one sequence, and its end.

    The prompt logprobs of a request are in the Outputs of its sequence 0. finish_reason: "stop" (a stop or end token:
    `stop_token`, the last one of token_ids; or pooling is complete), "length", "error", or "abort" if the request could
    no longer meet its deadline (`error` has the text of both); None while the sequence continues.
    """

    request_id: str
    index: int  # of the sequence in its request
    seq_id: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # of the next prompt tokens; the first prompt token has none
    pooled: np.ndarray | None = None  # float32 (hidden_size,): see Pooling; with MEAN, a part of the sum
    num_cached_tokens: int = 0  # prompt tokens of the prefix match at the first admission of the sequence
    cumulative_logprob: float | None = None  # of all its tokens: for results of a beam search and of best_of
    error: str = ""
    queue_seconds: float | None = None  # with its first tokens: from arrival to the first admission of the request
    forced: list[int] = []  # indices of the forced tokens in token_ids; `logprobs` has rows for the others only
