"""Sequences that wait for a row and blocks, by arrival."""

from bisect import insort
from collections import deque
from operator import attrgetter

from quire.sched.sequence import Sequence

ARRIVAL = attrgetter("id")


class Queue:
    """Sequences that have neither row nor blocks. Those that end meanwhile are skipped, not searched for."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()

    @property
    def head(self) -> Sequence | None:
        """The earliest arrival that waits."""
        while self._waiting and self._waiting[0].finished:
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._waiting

    def remove(self, seq: Sequence) -> None:
        """Take one out, wherever it stands."""
        self._waiting.remove(seq)

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
