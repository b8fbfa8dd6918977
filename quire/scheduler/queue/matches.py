"""Which waiting sequences find how much in the prefix index, kept up to date a bounded number at a time.

A match is looked for when a sequence comes, and again: when it stands at the head as a step begins; when one that goes
on with the same block has just been admitted, and so computes that block for all of them; and otherwise in turn.
However long the queue is, a step looks at no more than `most` sequences and about MOST_BLOCKS blocks.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.cache.incremental_match import Match, Matching
from quire.scheduler.sequence import Sequence

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
