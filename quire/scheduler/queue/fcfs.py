"""Order by rank: priority class, then arrival."""

from bisect import bisect_left, insort

from quire.scheduler.queue.waiting_queue import RANK, Queue
from quire.scheduler.sequence import Sequence


class RankedQueue(Queue):
    """Sequences in the order of `Sequence.rank`. A preempted sequence keeps its rank."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []
        self._num_tokens: dict[int, int] = {}  # known tokens when it was queued, by sequence id
        self._tokens_by_class: dict[int, int] = {}  # sum of these, by class

    @property
    def head(self) -> Sequence | None:
        """See Queue."""
        return self._waiting[0] if self._waiting else None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._num_tokens

    def put(self, seq: Sequence) -> None:
        """See Queue."""
        insort(self._waiting, seq, key=RANK)
        self._num_tokens[seq.id] = len(seq.tokens)
        self._count(seq.rank[0], len(seq.tokens))

    def remove(self, seq: Sequence) -> None:
        """See Queue."""
        at = bisect_left(self._waiting, seq.rank, key=RANK)
        assert self._waiting[at] is seq, "not in the queue"
        del self._waiting[at]
        self._count(seq.rank[0], -self._num_tokens.pop(seq.id))

    def first(self, count: int) -> list[Sequence]:
        """See Queue."""
        return [seq for seq in self._waiting[:count] if seq.rank[0] == self._waiting[0].rank[0]]

    def num_tokens_before(self, seq: Sequence) -> int:
        """See Queue. Counts all sequences of the same or a better class."""
        return sum(count for of, count in self._tokens_by_class.items() if of <= seq.rank[0])

    def _count(self, priority_class: int, num_tokens: int) -> None:
        left = self._tokens_by_class.get(priority_class, 0) + num_tokens
        self._tokens_by_class[priority_class] = left
        if not left:
            del self._tokens_by_class[priority_class]
