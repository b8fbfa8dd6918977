"""What the scheduler tells the front end about a sequence after a step."""

import msgspec
import numpy as np

from quire.core.step import Logprobs

NO_SEQUENCE = -1  # the seq_id of what is said of a request that never had one
NO_TOKEN = "no token could be sampled: the request allows none, or the logits are not finite"


class Output(msgspec.Struct, frozen=True, eq=False, array_like=True, omit_defaults=True):
    """What is new of one sequence, and whether it ended.

    Logprobs of a request's prompt come with its sequence 0.
    finish_reason: "stop" (an end or stop token: `stop_token`, which is the last of token_ids; or all is
    pooled), "length", "error", or "abort" where it could not meet its deadline any more (`error` says what happened
    in both); None while it goes on.
    """

    request_id: str
    index: int  # which of the request's n sequences
    seq_id: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # of the next tokens of the prompt, beginning with the second
    pooled: np.ndarray | None = None  # float32 (hidden_size,): see Pooling; with MEAN, a part of the sum
    num_cached_tokens: int = 0  # of the prompt, whose KV was there when the sequence was first admitted
    cumulative_logprob: float | None = None  # of all its tokens: with a beam search's result, and any of best_of
    error: str = ""
    queue_seconds: float | None = None  # with its first tokens: until one of its request was admitted
    forced: list[int] = []  # which of token_ids had to come: their indices; `logprobs` has rows for the others only
