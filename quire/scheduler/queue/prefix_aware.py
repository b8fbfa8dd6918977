"""Orders that depend on what the prefix index has of each prompt."""

from abc import abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.cache.incremental_match import Match, Matching
from quire.scheduler.queue.fcfs import Ranked
from quire.scheduler.queue.waiting_queue import Queue
from quire.scheduler.sequence import Rank, Sequence, program_of

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


MOST_LOOKED_AT = 48  # sequences, in a step
MOST_BLOCKS = 1024  # that are compared in a step

Key = tuple[object, ...]


@dataclass(slots=True)
class _Waiting:
    seq: Sequence
    key: Key = ()
    match: Match = field(default_factory=Match)


class Matches:
    """Matches of waiting sequences that have not run yet."""

    def __init__(self, matching: Matching, most: int = MOST_LOOKED_AT) -> None:
        self._matching = matching
        self._index = matching.index
        self._most = most
        self._left = most
        self._blocks_left = MOST_BLOCKS
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()  # looked at longest ago first
        self._alike: dict[Key, dict[int, Sequence]] = {}  # those who go on with the same block, by id
        self._due: dict[Key, None] = {}  # of those, the ones somebody computes that block for
        self._taken: tuple[int, Key] = (-1, ())  # who was dropped last

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._waiting

    def add(self, seq: Sequence) -> None:
        """A sequence waits."""
        one = self._waiting[seq.id] = _Waiting(seq)
        self._renew(one)
        self._enter(one)

    def drop(self, seq: Sequence) -> None:
        """It does not wait any more."""
        one = self._waiting.pop(seq.id)
        self._leave(one)
        self._taken = seq.id, one.key

    def of(self, seq: Sequence) -> Match:
        """What was found for a sequence that waits."""
        return self._waiting[seq.id].match

    def path(self, seq: Sequence) -> tuple[int, ...]:
        """Nodes on the way to what was found."""
        return self._matching.path(self._waiting[seq.id].match)

    def begun(self, seq: Sequence) -> None:
        """The sequence that was dropped last has begun to compute what it lacks."""
        if self._taken[0] == seq.id and self._taken[1] in self._alike:
            self._due[self._taken[1]] = None

    def again(self) -> Iterator[Sequence]:
        """A new step: sequences that were looked at again, half as many as a step may look at."""
        if self._matching.index is not self._index:  # what it said is void
            self._index = self._matching.index
            for one in self._waiting.values():
                one.match.node, one.match.num_blocks = None, 0
        self._left, self._blocks_left = self._most, MOST_BLOCKS
        yield from self.overdue()
        for _ in range(min(len(self._waiting), self._left - self._most // 2)):
            if self._blocks_left <= 0:
                return
            seq = next(iter(self._waiting.values())).seq
            self.look(seq)
            yield seq

    def overdue(self) -> Iterator[Sequence]:
        """Those who waited for a block that is being computed now, looked at again, as far as the step's bounds allow.

        Of those who go on alike, one that finds no more speaks for the others.
        """
        while self._due and self._left > 0 and self._blocks_left > 0:
            key = next(iter(self._due))
            seq = next(iter(self._alike[key].values()))
            self.look(seq)
            yield seq
            if seq.id in self._alike.get(key, ()):
                self._due.pop(key, None)

    def look(self, seq: Sequence) -> None:
        """Look at one again, whatever it costs."""
        one = self._waiting[seq.id]
        self._waiting.move_to_end(seq.id)
        match = one.match
        before = match.node, match.num_blocks
        self._renew(one)
        if before != (match.node, match.num_blocks):
            self._leave(one)
            self._enter(one)

    def _renew(self, one: _Waiting) -> None:
        seq = one.seq
        self._blocks_left -= self._matching.renew(one.match, seq.request.namespace, seq.tokens, seq.reusable)
        self._left -= 1

    def _enter(self, one: _Waiting) -> None:
        seq = one.seq
        one.key = self._matching.next_key(one.match, seq.request.namespace, seq.tokens, seq.reusable)
        self._alike.setdefault(one.key, {})[seq.id] = seq

    def _leave(self, one: _Waiting) -> None:
        alike = self._alike[one.key]
        del alike[one.seq.id]
        if not alike:
            del self._alike[one.key]
            self._due.pop(one.key, None)


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


class Weighed(ByMatch):
    """By matched tokens + wait_weight x seconds waited, the most first; equals by arrival, as their programs began.

    With a weight of 0 that is the longest prefix first. As all wait equally fast, what counts does not change with
    time: matched tokens - wait_weight x time of arrival. So nobody is passed by one that came more than (longest
    prompt / wait_weight) seconds later, as arrivals of programs count (scheduler/sequence.py).
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
