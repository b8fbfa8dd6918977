"""What happened and why, for metrics, the dashboard and `explain`. Plain data on a bounded ring."""

import msgspec

from quire.core.explanation import Miss, RefusalReason


class Event(msgspec.Struct, frozen=True, tag=True):
    """Something the scheduler decided or was told."""

    now: float
    request_id: str


class Arrived(Event, frozen=True, tag=True):
    """A request entered the queue."""

    num_prompt_tokens: int


class Refused(Event, frozen=True, tag=True):
    """A request was not taken in."""

    reason: RefusalReason
    predicted_seconds: float  # until its last token; where the queue is full, until there is room for it
    asked_seconds: float | None = None  # the deadline


class Admitted(Event, frozen=True, tag=True):
    """A sequence got a row and blocks."""

    seq_id: int
    waited: float  # seconds since it arrived or was preempted
    num_cached_tokens: int  # leading ones that were not computed again
    miss: Miss | None = None  # why they were not more; None where it goes on from another sequence of its request


class Preempted(Event, frozen=True, tag=True):
    """A sequence lost its blocks: it will be computed again, or was copied to host memory."""

    seq_id: int
    num_computed_tokens: int
    reason: str
    how: str = "recompute"  # or "swap"
    why: str = ""  # that way and not the other
    num_bytes: int = 0  # copied to the host; blocks that its family shares count for the first of them
    recompute_seconds: float | None = (
        None  # predicted of it and those of its family that left with it; None: of nothing
    )
    copy_seconds: float | None = None  # the same: to the host and back


class Evicted(Event, frozen=True, tag=True):
    """Blocks of the prefix index were given up for a request, while a step was planned; or for none, in a flush."""

    num_blocks: int
    policy: str = "lru"  # CacheConfig.eviction
    reason: dict[str, float] = {}  # of the first of them: what the policy went by, see docs/eviction.md


class AdmissionSlowed(Event, frozen=True, tag=True):
    """More, or less, memory is left to those who run before others are admitted: preemptions came, or stayed away."""

    num_blocks: int  # for each of them


class Finished(Event, frozen=True, tag=True):
    """A sequence ended."""

    seq_id: int
    reason: str
    num_output_tokens: int


class StepFailed(Event, frozen=True, tag=True):
    """A step failed; its sequences are tried again, one to a step."""

    step_id: int
    error: str


class PinsRefused(Event, frozen=True, tag=True):
    """A request wanted its blocks never to be evicted, and pins held as much as they may."""

    num_blocks: int  # that were not pinned
    num_pinned: int  # of the same sequence's, that were


class PinsYielded(Event, frozen=True, tag=True):
    """A pin ended early: nothing ran, and the next sequence did not fit beside it.

    Of a session it is the latest request's.
    """

    num_blocks: int
