"""Scheduler events with their reasons, for metrics, the dashboard and `explain`."""

import msgspec

from quire.core.explanation import Miss, RejectionReason


class Event(msgspec.Struct, frozen=True, tag=True):
    """An input or a decision of the scheduler."""

    now: float
    request_id: str


class Arrived(Event, frozen=True, tag=True):
    """A request entered the waiting queue."""

    num_prompt_tokens: int


class Refused(Event, frozen=True, tag=True):
    """A request was rejected."""

    reason: RejectionReason
    predicted_seconds: float  # until its last token; for a full queue: until there is room in it
    asked_seconds: float | None = None  # the deadline of the request


class Admitted(Event, frozen=True, tag=True):
    """A sequence was admitted: it has a row and a block table."""

    seq_id: int
    waited: float  # seconds since it arrived or was preempted
    num_cached_tokens: int  # leading tokens that are not computed again
    miss: Miss | None = None  # why the match ended; None if it branched off a sequence of its request or was swapped in


class Preempted(Event, frozen=True, tag=True):
    """A sequence was preempted: its KV is recomputed later or swapped to the host pool."""

    seq_id: int
    num_computed_tokens: int
    reason: str
    how: str = "recompute"  # or "swap"
    why: str = ""  # reason for that preemption mode
    num_bytes: int = 0  # copied to the host; a block that sequences of the request share counts for the first of them
    recompute_seconds: float | None = None  # predicted for all sequences preempted together; None: no prediction
    copy_seconds: float | None = None  # predicted for the same sequences: to the host and back


class Evicted(Event, frozen=True, tag=True):
    """Blocks of the prefix index were evicted for a request during planning, or by a flush (then no request)."""

    num_blocks: int
    policy: str = "lru"  # CacheConfig.eviction
    reason: dict[str, float] = {}  # eviction key of the first block, see docs/eviction.md


class AdmissionSlowed(Event, frozen=True, tag=True):
    """The admission watermark rose after preemptions, or fell after steps without one."""

    num_blocks: int  # that admission leaves free per running sequence


class Finished(Event, frozen=True, tag=True):
    """A sequence ended."""

    seq_id: int
    reason: str
    num_output_tokens: int


class StepFailed(Event, frozen=True, tag=True):
    """A step failed. Its sequences are run again, one per step."""

    step_id: int
    error: str


class PinsRefused(Event, frozen=True, tag=True):
    """Blocks of a request were not pinned because pins reached their limit."""

    num_blocks: int  # not pinned
    num_pinned: int  # pinned, of the same sequence


class PinsYielded(Event, frozen=True, tag=True):
    """A pin ended before its `ttl`: nothing ran, and the next sequence did not fit beside it.

    The request id of a session's pin is that of its latest request.
    """

    num_blocks: int
