"""Interface of the waiting queue. The policies of `quire/scheduler/queue/` implement it."""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Protocol

from quire.scheduler.sequence import Sequence
from quire.scheduler.step_builder import ScheduledChunk

RANK = attrgetter("rank")
MOST_REPORTED = 1024  # tenants in one report of service
MOST_SERVICE = 2**32  # of one tenant in one report, in weighted tokens


class Queue(Protocol):
    """Waiting sequences, which have neither row nor blocks, in the order of the policy.

    `refresh`, `admitted` and `served` update orders that depend on the prefix index or on service. They do nothing in
    other orders. In one step `refresh` and `admitted` update a bounded number of prefix matches, however long the
    queue is.
    """

    @property
    def head(self) -> Sequence | None:
        """The next sequence; None if the queue is empty."""

    def __len__(self) -> int: ...

    def __contains__(self, seq: Sequence) -> bool: ...

    def put(self, seq: Sequence) -> None:
        """Add a new or preempted sequence."""

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence at any place."""

    def first(self, count: int) -> list[Sequence]:
        """Up to `count` sequences in their order, the head first: those among which others may pass the head."""

    def num_tokens_before(self, seq: Sequence) -> int:
        """Known tokens of queued sequences that certainly precede `seq`. If `seq` is queued, its own may count, too."""

    def refresh(self) -> None:
        """Update the order before a step is planned."""
        return

    def admitted(self, seq: Sequence, num_new: int) -> None:
        """Update the order after the admission of `seq`, which was among the first and is removed.

        num_new: prompt tokens outside the prefix match; 0 if it has run before.
        """
        return

    def served(self, scheduled: Iterable[ScheduledChunk], counts: Iterable[int]) -> None:
        """Update the order after a step. counts: sampled tokens per chunk."""
        return

    def served_elsewhere(self, service: Mapping[str, int]) -> None:
        """Update the order after service of other engines of a fleet: weighted tokens by tenant."""
        return

    def report_service(self) -> None:
        """Begin to count the service of each tenant for `take_service`, if the order depends on it."""
        return

    def take_service(self) -> dict[str, int]:
        """Return and clear service that this engine gave: weighted tokens by tenant, at most MOST_REPORTED tenants."""
        return {}
