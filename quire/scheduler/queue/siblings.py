"""Siblings: waiting requests of one program, which follow each other. Knows no order but arrival."""

from quire.scheduler.programs import program_of
from quire.scheduler.sequence import Sequence

MOST_TOGETHER = 32  # sequences in a row; then the order says again who is next


class Siblings:
    """Sequences that wait and have never run, by program, and the program whose turn it is.

    Once one of a program was admitted, those that wait with it follow. So what they share is computed once, while it
    is sure to be there, and who waits for all of them does not wait for the last of a long queue.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], dict[int, Sequence]] = {}
        self._turn: tuple[str, str] | None = None
        self._left = 0

    @property
    def head(self) -> Sequence | None:
        """Who follows the one that was admitted last; None where its program's turn is over."""
        line = None if self._turn is None else self._lines.get(self._turn)
        return next(iter(line.values())) if line else None

    def add(self, seq: Sequence) -> None:
        """One waits."""
        key = program_of(seq.request)
        if key is not None:
            self._lines.setdefault(key, {})[seq.id] = seq

    def drop(self, seq: Sequence) -> None:
        """It does not wait any more."""
        key = program_of(seq.request)
        if key is not None:
            line = self._lines[key]
            del line[seq.id]
            if not line:
                del self._lines[key]

    def admitted(self, seq: Sequence) -> None:
        """One begins to run."""
        key = program_of(seq.request)
        if key is None or key != self._turn:
            self._turn, self._left = key, MOST_TOGETHER
        self._left -= 1
        if self._left <= 0:
            self._turn = None
