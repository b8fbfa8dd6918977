"""Explanation: what became of one request and why. Plain data, for `/v1/requests/{id}/explain` and RequestOutput."""

from typing import Literal

import msgspec

MissReason = Literal[
    "never_seen",  # nobody in this namespace has computed these tokens
    "evicted",  # they were computed, and given up at `evicted_at`
    "being_computed",  # another request is about to compute them
    "other_salt",  # computed under another cache_salt of the same tenant
    "other_adapter",  # computed with another adapter, or other kernels (deterministic), by the same tenant
    "last_token",  # all but what has to be computed for its logits was there
    "recomputed",  # the request asked for what only computing tells (prompt_logprobs, pooling)
    "off",  # no prefix index
]


RefusalReason = Literal[
    "deadline",  # it was predicted to take longer
    "queue_full",  # as many waited as may
]


class Refusal(msgspec.Struct, frozen=True):
    """Why a request was not taken in."""

    reason: RefusalReason
    predicted_seconds: float  # until its last token; where the queue is full, until there is room for it
    asked_seconds: float | None  # the deadline
    error: str  # as it was told


class Eviction(msgspec.Struct, frozen=True):
    """Blocks that were evicted, so that the request could begin or go on, while one step was planned."""

    at: float
    num_blocks: int
    policy: str  # CacheConfig.eviction
    reason: dict[str, float]  # of the first of them, see docs/eviction.md; empty where it was another tenant's


class Miss(msgspec.Struct, frozen=True):
    """Why the reuse of a prompt ended where it did."""

    position: int  # of the first token whose KV had to be computed
    token: int  # its id
    reason: MissReason
    evicted_at: float | None = None  # seconds of the engine's clock
    evicted_for: str | None = None  # the request that needed the memory; None where it was another tenant's


class Preemption(msgspec.Struct, frozen=True):
    """A time that a sequence of the request lost its blocks."""

    at: float
    index: int  # which of the request's sequences
    reason: str
    num_lost_tokens: int  # whose KV had been computed
    num_recomputed_tokens: int | None = None  # that were not there any more when it ran again; None before
    how: Literal["recompute", "swap"] = "recompute"
    why: str = ""  # that way and not the other
    num_bytes_out: int = 0  # copied to the host; blocks that several sequences share count for the first of them
    recompute_seconds: float | None = None  # predicted, of all sequences of the request that lost their blocks with it
    copy_seconds: float | None = None  # the same: to the host and back. None where it was not known
    num_swapped_in_tokens: int | None = None  # that came back from the host; None before it ran again
    num_bytes_in: int = 0


class Explanation(msgspec.Struct):
    """Times are seconds of the engine's clock. Blocks are counted once for all KV groups."""

    request_id: str
    tenant: str
    arrived: float
    num_prompt_tokens: int
    state: Literal["waiting", "running", "finished", "refused"] = "waiting"
    policy: str = "fcfs"  # who is next
    place: int = 0  # sequences of its tenant that waited when it came
    num_passed_by: int = 0  # requests of its tenant, at least, that came after it and began before it
    admitted: float | None = None  # first sequence, first time
    finished: float | None = None
    finish_reason: str | None = None  # of the sequence that ended last; "deadline" is an "abort" for whoever asked
    refusal: Refusal | None = None
    num_cached_tokens: int = 0  # of the prompt, whose KV was there when it was first admitted
    num_shared_blocks: int = 0  # whole blocks that it found
    num_copied_tokens: int = 0  # of the block that the match ended in
    miss: Miss | None = None  # None until it is admitted
    waited: dict[str, float] = {}  # seconds by cause, all its sequences together
    preemptions: list[Preemption] = []
    num_evicted_blocks: int = 0  # so that it could run
    evictions: list[Eviction] = []  # the first of them
    num_blocks_not_pinned: int = 0  # that it wanted pinned when it ended; pins held as much as they may
    num_pinned_blocks_yielded: int = 0  # that it had pinned, and the next sequence needed
    # When the first of its sequences ended: blocks that they would have had without sharing among each other and with
    # the cache, and blocks that they took themselves, those shared among them counted once.
    num_blocks_unshared: int = 0
    num_blocks_own: int = 0

    @property
    def saved(self) -> float:
        """Share of its memory that sharing saved, 0 to 1."""
        return 1 - self.num_blocks_own / self.num_blocks_unshared if self.num_blocks_unshared else 0.0
