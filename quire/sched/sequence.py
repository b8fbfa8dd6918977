"""A sequence: the tokens known so far, how many of them have KV, and where it stands."""

from quire.cache.table import BlockTable
from quire.core.request import Request


class Sequence:
    """One of the `n` continuations of a request.

    Known tokens are the prompt and what commits brought; `num_pending` more have been sampled, or
    will be, by steps in flight. `num_computed` counts leading positions whose KV is written by steps
    that were launched. There are no phases: a sequence has work as long as `num_computed` lies below
    the smaller of `len(tokens) + num_pending` and `end - 1` (nobody needs the KV of the last token).
    """

    __slots__ = (
        "end",
        "epoch",
        "finished",
        "id",
        "index",
        "last_step",
        "num_computed",
        "num_pending",
        "request",
        "row",
        "since",
        "stop_ids",
        "suspect",
        "table",
        "tokens",
    )

    def __init__(self, seq_id: int, request: Request, index: int, now: float) -> None:
        self.id = seq_id
        self.request = request
        self.index = index
        self.tokens = list(request.prompt)
        self.end = len(request.prompt) + request.max_tokens
        self.stop_ids = request.stop_ids
        self.num_computed = 0
        self.num_pending = 0
        self.row = -1  # none while it waits
        self.table: BlockTable | None = None
        self.last_step = -1  # the newest step that it has a chunk in
        self.epoch = 0  # rises when steps in flight become void for it
        self.since = now  # when it arrived, or went back to the queue
        self.finished = False
        self.suspect = False  # was part of a failed step: runs alone until it is cleared

    @property
    def num_generated(self) -> int:
        """Output tokens that are known."""
        return len(self.tokens) - len(self.request.prompt)
