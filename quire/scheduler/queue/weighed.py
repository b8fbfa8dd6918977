"""Longest prefix first, and the same weighed against waiting (SGLang: Zheng et al., 2024, section 3)."""

from bisect import bisect_left, insort

from quire.scheduler.queue.matches import Matches
from quire.scheduler.queue.prefix_aware import ByMatch
from quire.scheduler.sequence import Rank, Sequence


class Weighed(ByMatch):
    """By matched tokens + wait_weight x seconds waited, the most first; equals by arrival, as their programs began.

    With a weight of 0 that is the longest prefix first. As all wait equally fast, what counts does not change with
    time: matched tokens - wait_weight x time of arrival. So nobody is passed by one that came more than (longest
    prompt / wait_weight) seconds later, as arrivals of programs count (scheduler/programs.py).
    """

    def __init__(self, matches: Matches, block_size: int, wait_weight: float) -> None:
        super().__init__(matches)
        self._block_size = block_size
        self._wait_weight = wait_weight
        self._order: list[tuple[float, Rank, Sequence]] = []
        self._places: dict[int, float] = {}  # where each stands: less is earlier

    def first(self) -> Sequence | None:
        """See ByMatch."""
        return self._order[0][2] if self._order else None

    def enter(self, seq: Sequence) -> None:
        """See ByMatch."""
        place = self._place(seq)
        self._places[seq.id] = place
        insort(self._order, (place, seq.rank, seq))

    def leave(self, seq: Sequence) -> None:
        """See ByMatch."""
        del self._order[bisect_left(self._order, (self._places.pop(seq.id), seq.rank))]

    def moved(self, seq: Sequence) -> None:
        """See ByMatch."""
        if self._place(seq) != self._places[seq.id]:
            super().moved(seq)

    def _place(self, seq: Sequence) -> float:
        return -score(self.matches.of(seq).num_blocks * self._block_size, -seq.rank[1], self._wait_weight)


def score(num_matched: int, waited: float, wait_weight: float) -> float:
    """Who has more goes first. waited: seconds; wait_weight: tokens that a second is worth."""
    return num_matched + wait_weight * waited
