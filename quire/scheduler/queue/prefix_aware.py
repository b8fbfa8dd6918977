"""Waiting queues that order new sequences by their prefix match."""

from abc import abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.cache.incremental_match import IncrementalMatch, IncrementalMatcher
from quire.scheduler.queue.fcfs import RankedQueue
from quire.scheduler.queue.waiting_queue import Queue
from quire.scheduler.sequence import Rank, Sequence, program_of

MAX_IN_A_ROW = 32  # sequences of one program that are admitted in a row


class WaitingByProgram:
    """Waiting sequences that have never run, by program, and the program admitted last.

    After a sequence of a program is admitted, the other waiting ones of the program are next. So their common prefix
    is computed once and is not evicted in between, and a program does not wait for a last request far back in the
    queue.
    """

    def __init__(self) -> None:
        self._by_program: dict[tuple[str, str], dict[int, Sequence]] = {}
        self._last_program: tuple[str, str] | None = None
        self._left = 0

    @property
    def head(self) -> Sequence | None:
        """The next sequence of the program admitted last; None without one, or after MAX_IN_A_ROW in a row."""
        waiting = None if self._last_program is None else self._by_program.get(self._last_program)
        return next(iter(waiting.values())) if waiting else None

    def add(self, seq: Sequence) -> None:
        """Add a new sequence. Ignores one without a program."""
        key = program_of(seq.request)
        if key is not None:
            self._by_program.setdefault(key, {})[seq.id] = seq

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that does not wait any more. Ignores one without a program."""
        key = program_of(seq.request)
        if key is not None:
            waiting = self._by_program[key]
            del waiting[seq.id]
            if not waiting:
                del self._by_program[key]

    def admitted(self, seq: Sequence) -> None:
        """Set the program of an admitted sequence as the one admitted last, and count it."""
        key = program_of(seq.request)
        if key is None or key != self._last_program:
            self._last_program, self._left = key, MAX_IN_A_ROW
        self._left -= 1
        if self._left <= 0:
            self._last_program = None


MAX_MATCH_UPDATES = 48  # sequences whose match is updated in one step
MOST_BLOCKS = 1024  # blocks compared in one step

Key = tuple[object, ...]


@dataclass(slots=True)
class _Waiting:
    seq: Sequence
    key: Key = ()
    match: IncrementalMatch = field(default_factory=IncrementalMatch)


class PrefixMatches:
    """Prefix matches of waiting sequences that have never run."""

    def __init__(self, matching: IncrementalMatcher, most: int = MAX_MATCH_UPDATES) -> None:
        self._matching = matching
        self._index = matching.index
        self._most = most
        self._left = most
        self._blocks_left = MOST_BLOCKS
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()  # least recently updated first
        self._by_next_block: dict[Key, dict[int, Sequence]] = {}  # sequences whose next block is the same, by id
        self._overdue: dict[Key, None] = {}  # keys of blocks that are being computed
        self._last_removed: tuple[int, Key] = (-1, ())  # id and key of the sequence dropped last

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._waiting

    def add(self, seq: Sequence) -> None:
        """Add a new sequence and compute its match."""
        one = self._waiting[seq.id] = _Waiting(seq)
        self._update_match(one)
        self._enter(one)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that does not wait any more."""
        one = self._waiting.pop(seq.id)
        self._leave(one)
        self._last_removed = seq.id, one.key

    def match(self, seq: Sequence) -> IncrementalMatch:
        """The match of a waiting sequence as of its last update."""
        return self._waiting[seq.id].match

    def mark_overdue(self, seq: Sequence) -> None:
        """Mark sequences with the same next block as overdue, because `seq` was admitted and computes that block."""
        if self._last_removed[0] == seq.id and self._last_removed[1] in self._by_next_block:
            self._overdue[self._last_removed[1]] = None

    def start_step(self) -> Iterator[Sequence]:
        """Start a step. Yields sequences with updated matches: overdue ones, then others up to half of the limit."""
        if self._matching.index is not self._index:  # a new index: the old nodes are invalid
            self._index = self._matching.index
            for one in self._waiting.values():
                one.match.node, one.match.num_blocks = None, 0
        self._left, self._blocks_left = self._most, MOST_BLOCKS
        yield from self.update_overdue()
        for _ in range(min(len(self._waiting), self._left - self._most // 2)):
            if self._blocks_left <= 0:
                return
            seq = next(iter(self._waiting.values())).seq
            self.update(seq)
            yield seq

    def update_overdue(self) -> Iterator[Sequence]:
        """Update and yield sequences whose next block is being computed, within the step's limits.

        If the match of one of them does not change, the others with the same next block are skipped.
        """
        while self._overdue and self._left > 0 and self._blocks_left > 0:
            key = next(iter(self._overdue))
            seq = next(iter(self._by_next_block[key].values()))
            self.update(seq)
            yield seq
            if seq.id in self._by_next_block.get(key, ()):
                self._overdue.pop(key, None)

    def update(self, seq: Sequence) -> None:
        """Update the match of one sequence, regardless of the step's limits."""
        one = self._waiting[seq.id]
        self._waiting.move_to_end(seq.id)
        match = one.match
        before = match.node, match.num_blocks
        self._update_match(one)
        if before != (match.node, match.num_blocks):
            self._leave(one)
            self._enter(one)

    def _update_match(self, one: _Waiting) -> None:
        seq = one.seq
        self._blocks_left -= self._matching.update(one.match, seq.request.namespace, seq.tokens, seq.reusable)
        self._left -= 1

    def _enter(self, one: _Waiting) -> None:
        seq = one.seq
        one.key = self._matching.next_block_key(one.match, seq.request.namespace, seq.tokens, seq.reusable)
        self._by_next_block.setdefault(one.key, {})[seq.id] = seq

    def _leave(self, one: _Waiting) -> None:
        alike = self._by_next_block[one.key]
        del alike[one.seq.id]
        if not alike:
            del self._by_next_block[one.key]
            self._overdue.pop(one.key, None)


_MOST_HEADS = 4  # heads whose match is updated one after the other in a step


class PrefixAwareQueue(Queue):
    """Base class of prefix-aware orders.

    Sequences that have run before are first, by rank. Those of the program admitted last follow, then other new ones
    in the order of the subclass.
    """

    def __init__(self, matches: PrefixMatches) -> None:
        self.matches = matches
        self._returning = RankedQueue()
        self._by_program = WaitingByProgram()

    @property
    def head(self) -> Sequence | None:
        """See Queue."""
        return self._returning.head or self._by_program.head or self.head_of_new()

    def __len__(self) -> int:
        return len(self._returning) + len(self.matches)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._returning or seq in self.matches

    def put(self, seq: Sequence) -> None:
        """See Queue."""
        if seq.has_run:
            self._returning.put(seq)
        else:
            self.matches.add(seq)
            self._by_program.add(seq)
            self.insert_new(seq)

    def remove(self, seq: Sequence) -> None:
        """See Queue."""
        if seq in self._returning:
            self._returning.remove(seq)
        else:
            self.remove_new(seq)
            self._by_program.remove(seq)
            self.matches.remove(seq)

    def num_tokens_before(self, seq: Sequence) -> int:
        """See Queue. New sequences may be overtaken, so they do not count."""
        return self._returning.num_tokens_before(seq)

    def refresh(self) -> None:
        """See Queue."""
        for seq in self.matches.start_step():
            self.reposition(seq)
        for _ in range(_MOST_HEADS):
            head = self.head
            if head is None or head in self._returning:
                return
            self.matches.update(head)
            self.reposition(head)
            if self.head is head:
                return

    def admitted(self, seq: Sequence, num_new: int) -> None:
        """See Queue."""
        del num_new
        self.matches.mark_overdue(seq)
        self._by_program.admitted(seq)
        for other in self.matches.update_overdue():
            self.reposition(other)

    def reposition(self, seq: Sequence) -> None:
        """Move a new sequence to the place of its updated match."""
        self.remove_new(seq)
        self.insert_new(seq)

    @abstractmethod
    def head_of_new(self) -> Sequence | None:
        """The next new sequence; None without one."""

    @abstractmethod
    def insert_new(self, seq: Sequence) -> None:
        """Insert a new sequence by its match."""

    @abstractmethod
    def remove_new(self, seq: Sequence) -> None:
        """Remove a new sequence from its place, even if its match has changed since."""


class CacheAwareQueue(PrefixAwareQueue):
    """Order by matched tokens + wait_weight x seconds waited, the highest first; equal ones by rank.

    A weight of 0 is the longest prefix first. The order equals that by matched tokens - wait_weight x arrival, which
    does not change with time. So no request is overtaken by one that arrives more than (longest prompt / wait_weight)
    seconds later. Arrivals are effective ones: see Programs in scheduler/sequence.py.
    """

    def __init__(self, matches: PrefixMatches, block_size: int, wait_weight: float) -> None:
        super().__init__(matches)
        self._block_size = block_size
        self._wait_weight = wait_weight
        self._order: list[tuple[float, Rank, Sequence]] = []
        self._places: dict[int, float] = {}  # negative score by sequence id: the lowest is first

    def head_of_new(self) -> Sequence | None:
        """See PrefixAwareQueue."""
        return self._order[0][2] if self._order else None

    def insert_new(self, seq: Sequence) -> None:
        """See PrefixAwareQueue."""
        place = self._place(seq)
        self._places[seq.id] = place
        insort(self._order, (place, seq.rank, seq))

    def remove_new(self, seq: Sequence) -> None:
        """See PrefixAwareQueue."""
        del self._order[bisect_left(self._order, (self._places.pop(seq.id), seq.rank))]

    def reposition(self, seq: Sequence) -> None:
        """See PrefixAwareQueue."""
        if self._place(seq) != self._places[seq.id]:
            super().reposition(seq)

    def _place(self, seq: Sequence) -> float:
        return -score(self.matches.match(seq).num_blocks * self._block_size, -seq.rank[1], self._wait_weight)


def score(num_matched: int, waited: float, wait_weight: float) -> float:
    """The score in tokens. waited: seconds; wait_weight: tokens per second of waiting."""
    return num_matched + wait_weight * waited
