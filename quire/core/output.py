"""What the scheduler tells the front end about a sequence after a step."""

import msgspec

from quire.core.step import Logprobs


class Output(msgspec.Struct, frozen=True, eq=False):
    """New tokens of one sequence, and whether it ended.

    finish_reason: "stop" (an end or stop token: `stop_token`, which is the last of token_ids),
    "length" or "error" (`error` says what happened); None while it goes on.
    """

    request_id: str
    index: int  # which of the request's n sequences
    seq_id: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token: int | None = None
    logprobs: Logprobs | None = None
    num_cached_tokens: int = 0
    error: str = ""
