"""What constraints answered, written down and read back, so that a replay needs neither grammar nor tokenizer."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from quire.core.constraint import OPEN, Constraints, Verdict
from quire.core.request import Request


class Heard:
    """Constraints whose verdicts are written down as they are given."""

    def __init__(self, constraints: Constraints, heard: list[Verdict]) -> None:
        self._constraints = constraints
        self._heard = heard

    def begin(self, seq_id: int, request: Request, known: Sequence[int]) -> Verdict:
        """See Constraints."""
        return self._note(self._constraints.begin(seq_id, request, known))

    def advance(self, seq_id: int, tokens: Sequence[int]) -> Verdict:
        """See Constraints."""
        return self._note(self._constraints.advance(seq_id, tokens))

    def end(self, seq_id: int) -> None:
        """See Constraints."""
        self._constraints.end(seq_id)

    def masks(self, seq_ids: Sequence[int]) -> np.ndarray:
        """See Constraints. Masks are for the body alone, and are not written down."""
        return self._constraints.masks(seq_ids)

    def _note(self, verdict: Verdict) -> Verdict:
        self._heard.append(verdict)
        return verdict


class Recorded:
    """Constraints that answer what is in `verdicts`, in that order; where nothing is left, that all is open."""

    def __init__(self) -> None:
        self.verdicts: deque[Verdict] = deque()

    def begin(self, seq_id: int, request: Request, known: Sequence[int]) -> Verdict:
        """See Constraints."""
        return self._next()

    def advance(self, seq_id: int, tokens: Sequence[int]) -> Verdict:
        """See Constraints."""
        return self._next()

    def end(self, seq_id: int) -> None:
        """See Constraints."""

    def masks(self, seq_ids: Sequence[int]) -> np.ndarray:
        """Nobody samples in a replay."""
        return np.zeros((len(seq_ids), 0), np.uint32)

    def _next(self) -> Verdict:
        return self.verdicts.popleft() if self.verdicts else OPEN
