"""Orders that depend on what the prefix index has of each prompt."""

from abc import abstractmethod

from quire.scheduler.queue.fcfs import Ranked
from quire.scheduler.queue.matches import Matches
from quire.scheduler.queue.siblings import Siblings
from quire.scheduler.queue.waiting_queue import Queue
from quire.scheduler.sequence import Sequence

_MOST_HEADS = 4  # that prove to be out of date, one after the other, in a step


class ByMatch(Queue):
    """Who comes back is first, by rank: its memory was taken for others.

    Siblings of who was admitted last follow, then those who are new, in an order of theirs.
    """

    def __init__(self, matches: Matches) -> None:
        self.matches = matches
        self._back = Ranked()
        self._siblings = Siblings()

    @property
    def head(self) -> Sequence | None:
        """See Queue."""
        return self._back.head or self._siblings.head or self.first()

    def __len__(self) -> int:
        return len(self._back) + len(self.matches)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._back or seq in self.matches

    def put(self, seq: Sequence) -> None:
        """See Queue."""
        if seq.has_begun:
            self._back.put(seq)
        else:
            self.matches.add(seq)
            self._siblings.add(seq)
            self.enter(seq)

    def remove(self, seq: Sequence) -> None:
        """See Queue."""
        if seq in self._back:
            self._back.remove(seq)
        else:
            self.leave(seq)
            self._siblings.drop(seq)
            self.matches.drop(seq)

    def num_tokens_before(self, seq: Sequence) -> int:
        """See Queue. Anybody who is new may be passed."""
        return self._back.num_tokens_before(seq)

    def refresh(self) -> None:
        """See Queue."""
        for seq in self.matches.again():
            self.moved(seq)
        for _ in range(_MOST_HEADS):
            head = self.head
            if head is None or head in self._back:
                return
            self.matches.look(head)
            self.moved(head)
            if self.head is head:
                return

    def admitted(self, seq: Sequence, num_new: int) -> None:
        """See Queue."""
        del num_new
        self.matches.begun(seq)
        self._siblings.admitted(seq)
        for other in self.matches.overdue():
            self.moved(other)

    def moved(self, seq: Sequence) -> None:
        """A new one may have another match than before."""
        self.leave(seq)
        self.enter(seq)

    @abstractmethod
    def first(self) -> Sequence | None:
        """Who is next of those who are new."""

    @abstractmethod
    def enter(self, seq: Sequence) -> None:
        """A new one takes its place, by its match."""

    @abstractmethod
    def leave(self, seq: Sequence) -> None:
        """It gives that place up, whatever its match is now."""
