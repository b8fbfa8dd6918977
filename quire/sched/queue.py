"""Sequences that wait, by arrival; and those that are not even in the queue yet, because another computes for them."""

from bisect import insort
from collections import deque
from collections.abc import Sequence as Listing
from operator import attrgetter

from quire.sched.sequence import Sequence

ARRIVAL = attrgetter("id")


class Queue:
    """Sequences that have neither row nor blocks. Those that end meanwhile are skipped, not searched for.

    Of a request's n sequences the first queues; the others are held until its prompt is computed.
    """

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()
        self._held: dict[str, deque[Sequence]] = {}  # by request id

    @property
    def head(self) -> Sequence | None:
        """The earliest arrival that waits."""
        while self._waiting and self._waiting[0].finished:
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def pop(self) -> None:
        """Take the head out."""
        self._waiting.popleft()

    def put(self, seq: Sequence) -> None:
        """Where its arrival places it."""
        if not self._waiting or seq.id < self._waiting[0].id:
            self._waiting.appendleft(seq)
        elif seq.id > self._waiting[-1].id:
            self._waiting.append(seq)
        else:
            insort(self._waiting, seq, key=ARRIVAL)

    def hold(self, request_id: str, sequences: Listing[Sequence]) -> None:
        """Keep them out of the queue for now."""
        if sequences:
            self._held[request_id] = deque(sequences)

    def release(self, request_id: str) -> list[Sequence]:
        """Those held for a request, which are held no longer. Most requests hold none."""
        if not self._held:
            return []
        return [seq for seq in self._held.pop(request_id, ()) if not seq.finished]

    def promote(self, request_id: str) -> None:
        """The one that the others waited for has ended: the next takes its part, and queues."""
        held = [seq for seq in self._held.pop(request_id, ()) if not seq.finished]
        if held:
            self.put(held[0])
            self.hold(request_id, held[1:])
