"""What a queue of waiting sequences is. Which of them is next is the policy: see `queues/`."""

from collections.abc import Iterable
from operator import attrgetter
from typing import Protocol

from quire.scheduler.sequence import Sequence
from quire.scheduler.step_builder import Entry

RANK = attrgetter("rank")


class Queue(Protocol):
    """Sequences that have neither row nor blocks. One that ends meanwhile is taken out.

    The order may follow what the prefix index has, and what was served: `refresh`, `admitted` and `served` are how a
    queue hears of it, and most do not care. However long the queue is, `refresh` and `admitted` look for the matches of
    a bounded number of sequences, in one step together.
    """

    @property
    def head(self) -> Sequence | None:
        """Who is next."""

    def __len__(self) -> int: ...

    def __contains__(self, seq: Sequence) -> bool: ...

    def put(self, seq: Sequence) -> None:
        """One more waits: new, or back after it lost its row."""

    def remove(self, seq: Sequence) -> None:
        """Take one out, wherever it stands."""

    def num_tokens_before(self, seq: Sequence) -> int:
        """Known tokens of those that come before a sequence, which is not in the queue, as far as that is certain."""

    def refresh(self) -> None:
        """A step is about to be planned."""
        return

    def admitted(self, seq: Sequence, num_new: int) -> None:
        """The head has been taken out and its first chunk is planned.

        num_new: tokens of its prompt that were not found, and have not been computed for it before.
        """
        return

    def served(self, entries: Iterable[Entry], counts: Iterable[int]) -> None:
        """A step has sampled so many tokens for each of its chunks."""
        return
