"""The explanation of one request, for `/v1/requests/{id}/explain` and RequestOutput. Plain data."""

from typing import Literal

import msgspec

MissReason = Literal[
    "never_seen",  # no request of this namespace has computed these tokens
    "evicted",  # computed, then evicted at `evicted_at`
    "being_computed",  # another request is computing them
    "other_salt",  # computed under another cache_salt of the same tenant
    "other_adapter",  # computed with another adapter, or other kernels (deterministic), by the same tenant
    "last_token",  # everything matched but the last token, which is computed for its logits
    "recomputed",  # the request needs outputs of its prompt positions (prompt_logprobs, pooling)
    "no_state",  # keys and values matched further, but no snapshot of recurrent states was taken behind them
    "state_evicted",  # a snapshot was taken there, then evicted at `evicted_at`
    "state_being_computed",  # another request is about to take one there
    "off",  # no prefix index
]


RejectionReason = Literal[
    "deadline",  # the prediction exceeds the deadline
    "queue_full",  # a queue limit was reached
]


class Rejection(msgspec.Struct, frozen=True):
    """Why a request was rejected."""

    reason: RejectionReason
    predicted_seconds: float  # until its last token; for a full queue: until there is room in it
    asked_seconds: float | None  # the deadline of the request
    error: str  # the error text that the client got


class Eviction(msgspec.Struct, frozen=True):
    """Blocks that were evicted for the request during the planning of one step."""

    at: float
    num_blocks: int
    policy: str  # CacheConfig.eviction
    reason: dict[str, float]  # of the first block, see docs/eviction.md; empty if another tenant owned that block


class Miss(msgspec.Struct, frozen=True):
    """Why the prefix match of a prompt ended."""

    position: int  # of the first token whose KV had to be computed
    token: int  # id of that token
    reason: MissReason
    evicted_at: float | None = None  # seconds of the engine's clock
    evicted_for: str | None = None  # the request that needed the memory; None if it belongs to another tenant


class Preemption(msgspec.Struct, frozen=True):
    """One preemption of a sequence of the request."""

    at: float
    index: int  # of the sequence in its request
    reason: str
    num_lost_tokens: int  # tokens whose KV had been computed
    num_recomputed_tokens: int | None = None  # tokens to compute again at its next admission; None before that
    how: Literal["recompute", "swap"] = "recompute"
    why: str = ""  # reason for that preemption mode
    num_bytes_out: int = 0  # copied to the host; a block that several sequences share counts for the first of them
    recompute_seconds: float | None = None  # predicted for all sequences of the request that were preempted together
    copy_seconds: float | None = None  # the same, to the host and back; None without a prediction
    num_swapped_in_tokens: int | None = None  # tokens copied from the host at its next admission; None before that
    num_bytes_in: int = 0


SkipReason = Literal[
    "cost",  # verifying a draft was not expected to save time
    "blocks",  # no free KV block, or no tokens left in the step
    "constraint",  # the constraint does not allow the first draft
]


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """Drafts of one drafter."""

    num_chains: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    def with_chain(self, num_drafts: int, num_accepted: int) -> "DraftCounts":
        """The counts with another verified chain."""
        return self.plus(DraftCounts(1, num_drafts, num_accepted))

    def plus(self, other: "DraftCounts") -> "DraftCounts":
        """The counts of both."""
        return DraftCounts(
            self.num_chains + other.num_chains,
            self.num_drafts + other.num_drafts,
            self.num_accepted + other.num_accepted,
        )


class RoutingCandidate(msgspec.Struct, frozen=True):
    """A replica on which a request could be placed. Seconds are predicted."""

    replica: int
    num_cached_tokens: int  # of the prompt, that it has or computes for a request before this one
    first_token_seconds: float  # until the first token
    added_seconds: float  # of waiting, for all requests that are there


class Placement(msgspec.Struct, frozen=True):
    """Why a request is on its replica."""

    replica: int
    routing: str  # the option
    candidates: list[RoutingCandidate]
    predicted_seconds: float  # from its placing to its first token
    actual_seconds: float | None = None  # None before the first token


class Explanation(msgspec.Struct):
    """The explanation of one request. Times are in seconds of the engine's clock.

    The blocks of all groups at one table index count as one, except for pins and for evictions from window groups.
    """

    request_id: str
    tenant: str
    arrived: float
    num_prompt_tokens: int
    state: Literal["waiting", "running", "finished", "refused"] = "waiting"
    policy: str = "fcfs"  # order of the waiting queue
    place: int = 0  # waiting sequences of its tenant when it arrived
    num_passed_by: int = 0  # requests of its tenant that arrived later and were admitted earlier: a lower bound
    admitted: float | None = None  # first admission of its first sequence
    finished: float | None = None
    finish_reason: str | None = None  # the EndCause of the sequence that ended last
    refusal: Rejection | None = None
    num_cached_tokens: int = 0  # prompt tokens of the prefix match at its first admission
    num_prompt_done: int = 0  # leading prompt tokens that were found in the prefix cache or computed
    num_shared_blocks: int = 0  # whole blocks of the prefix match
    num_copied_tokens: int = 0  # of the block in which the match ended
    num_kv_tokens: int = 0  # prompt tokens whose keys and values matched: more, if no snapshot of states was deeper
    state_position: int | None = None  # behind which the snapshot stands that it started from; None without one
    miss: Miss | None = None  # None until it is admitted
    waited: dict[str, float] = {}  # seconds by cause, summed over its sequences
    preemptions: list[Preemption] = []
    num_evicted_blocks: int = 0  # evicted for this request
    evictions: list[Eviction] = []  # the first ones; their number is limited
    num_blocks_not_pinned: int = 0  # that its retention asked to pin, beyond the limit of pins
    num_pinned_blocks_yielded: int = 0  # whose pin ended early because the next sequence needed memory
    drafts: dict[str, DraftCounts] = {}  # verified, by drafter
    proposals_skipped: dict[SkipReason, int] = {}  # proposals of which no draft was verified, by reason
    # When the first of its sequences ended: blocks of group 0 that its sequences would have without any sharing, and
    # blocks that are not from the prefix index, each counted once.
    num_blocks_unshared: int = 0
    num_blocks_own: int = 0
    adapter: str = ""  # name of its adapter; empty for the model alone
    adapter_digest: str = ""
    placement: Placement | None = None  # on one of several replicas; the front end knows it

    @property
    def saved(self) -> float:
        """Share of its blocks that sharing saved, 0 to 1."""
        return 1 - self.num_blocks_own / self.num_blocks_unshared if self.num_blocks_unshared else 0.0
