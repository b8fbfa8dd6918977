"""What happened and why, for metrics, the dashboard and `explain`. Plain data on a bounded ring."""

import msgspec

from quire.core.explanation import Miss


class Event(msgspec.Struct, frozen=True, tag=True):
    """Something the scheduler decided or was told."""

    now: float
    request_id: str


class Arrived(Event, frozen=True, tag=True):
    """A request entered the queue."""

    num_prompt_tokens: int


class Admitted(Event, frozen=True, tag=True):
    """A sequence got a row and blocks."""

    seq_id: int
    waited: float  # seconds since it arrived or was preempted
    num_cached_tokens: int  # leading ones that were not computed again
    miss: Miss | None = None  # why they were not more; None where it goes on from another sequence of its request


class Preempted(Event, frozen=True, tag=True):
    """A sequence lost its blocks and will be computed again."""

    seq_id: int
    num_computed_tokens: int
    reason: str


class Evicted(Event, frozen=True, tag=True):
    """Blocks of the prefix index were given up, for whoever was planned at that time."""

    num_blocks: int


class Finished(Event, frozen=True, tag=True):
    """A sequence ended."""

    seq_id: int
    reason: str
    num_output_tokens: int


class StepFailed(Event, frozen=True, tag=True):
    """A step failed; its sequences are tried again, one to a step."""

    step_id: int
    error: str
