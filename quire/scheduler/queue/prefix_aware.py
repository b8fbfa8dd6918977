"""Waiting queue that orders new sequences by their prefix match."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from quire.cache.manager import KVCacheManager
from quire.cache.prefix.index import NO_MATCH
from quire.core.request import Namespace
from quire.scheduler.queue.fcfs import RankedQueue
from quire.scheduler.queue.waiting_queue import Queue
from quire.scheduler.sequence import Rank, Sequence, program_of

MAX_IN_A_ROW = 32  # sequences of one program that are admitted in a row
# Tokens of waiting prompts that are matched again per step. A longer prompt uses those of later steps, too.
MAX_MATCHED_TOKENS = 16384
MAX_UPDATES_IN_TURN, MAX_TOKENS_IN_TURN = 4, 1024  # sequences that are updated in turn in one step, and their tokens
_MAX_HEADS = 4  # heads whose match is updated one after the other in a step


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
    def next_ones(self) -> Iterable[Sequence]:
        """The waiting sequences of the program admitted last; none without one, or after MAX_IN_A_ROW in a row."""
        return () if self._last_program is None else self._by_program.get(self._last_program, {}).values()

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


Key = tuple[Namespace, int, tuple[int, ...]]  # of a block: namespace, position, tokens


@dataclass(slots=True)
class _Waiting:
    seq: Sequence
    place: float = 0.0  # negative score as of the last update: the lowest is first
    next_block: Key | None = None  # the block behind the match


class PrefixAwareQueue(Queue):
    """Order by matched tokens + wait_weight x seconds waited, the highest first; equal ones by rank.

    A weight of 0 is the longest prefix first. The order equals that by matched tokens - wait_weight x arrival, which
    does not change with time. So no request is overtaken by one that arrives more than (longest prompt / wait_weight)
    seconds later. Arrivals are effective ones: see Programs in scheduler/sequence.py.

    Sequences that have run before are first, by rank. Those of the program admitted last follow, then other new ones.
    A step updates the matches of the head, of sequences whose next block another one computes, and of a few in turn.
    """

    def __init__(self, cache: KVCacheManager, wait_weight: float) -> None:
        self._cache = cache
        self._wait_weight = wait_weight
        self._returning = RankedQueue()
        self._by_program = WaitingByProgram()
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()  # new sequences, least recently updated first
        self._order: list[tuple[float, Rank, Sequence]] = []  # of the new sequences
        self._by_next_block: dict[Key, dict[int, Sequence]] = {}  # new sequences whose next block is the same, by id
        self._overdue: dict[Key, None] = {}  # blocks that are being computed, and for which others wait
        self._last_removed: tuple[int, Key | None] = (-1, None)  # id and next block of the new sequence removed last
        self._tokens_left = MAX_MATCHED_TOKENS  # that may be matched before the next step

    @property
    def head(self) -> Sequence | None:
        """See Queue."""
        return next(iter(self.first(1)), None)

    def __len__(self) -> int:
        return len(self._returning) + len(self._waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._returning or seq.id in self._waiting

    def put(self, seq: Sequence) -> None:
        """See Queue."""
        if seq.has_run:
            self._returning.put(seq)
            return
        self._by_program.add(seq)
        self._waiting[seq.id] = _Waiting(seq)
        self._insert(self._waiting[seq.id])

    def remove(self, seq: Sequence) -> None:
        """See Queue."""
        if seq in self._returning:
            self._returning.remove(seq)
            return
        self._by_program.remove(seq)
        one = self._waiting.pop(seq.id)
        self._remove_from_order(one)
        self._last_removed = seq.id, one.next_block

    def first(self, count: int) -> list[Sequence]:
        """See Queue."""
        returning = self._returning.first(count)
        return returning or list(islice(self._by_program.next_ones, count)) or [one for *_, one in self._order[:count]]

    def num_tokens_before(self, seq: Sequence) -> int:
        """See Queue. New sequences may be overtaken, so they do not count."""
        return self._returning.num_tokens_before(seq)

    def refresh(self) -> None:
        """See Queue."""
        self._tokens_left = min(self._tokens_left, 0) + MAX_MATCHED_TOKENS
        self._update_overdue()
        at_end = max(self._tokens_left - MAX_TOKENS_IN_TURN, MAX_MATCHED_TOKENS // 2)
        for _ in range(min(len(self._waiting), MAX_UPDATES_IN_TURN)):
            if self._tokens_left <= at_end:
                break
            self._update(next(iter(self._waiting)))
        for _ in range(_MAX_HEADS):
            head = self.head
            if head is None or head in self._returning or self._tokens_left <= 0:
                return
            self._update(head.id)
            if self.head is head:
                return

    def admitted(self, seq: Sequence, num_new: int) -> None:
        """See Queue."""
        del num_new
        removed, next_block = self._last_removed
        if removed == seq.id and next_block in self._by_next_block:
            self._overdue[next_block] = None
        self._by_program.admitted(seq)
        self._update_overdue()

    def _update_overdue(self) -> None:
        """Update sequences whose next block is being computed, within the limit.

        If the match of one of them does not change, the others with the same next block are skipped.
        """
        while self._overdue and self._tokens_left > 0:
            key = next(iter(self._overdue))
            seq_id = next(iter(self._by_next_block[key]))
            self._update(seq_id)
            if seq_id in self._by_next_block.get(key, ()):
                self._overdue.pop(key, None)

    def _update(self, seq_id: int) -> None:
        """Match the prompt of a new sequence again, and move the sequence."""
        one = self._waiting[seq_id]
        self._waiting.move_to_end(seq_id)
        self._tokens_left -= max(one.seq.reusable, 0)
        self._remove_from_order(one)
        self._insert(one)

    def _insert(self, one: _Waiting) -> None:
        """Match the prompt of a new sequence and insert the sequence."""
        seq, size = one.seq, self._cache.block_size
        num_tokens = max(seq.reusable, 0)
        found = self._cache.match_prefix(seq.request.namespace, seq.tokens[:num_tokens]) if num_tokens else NO_MATCH
        begin = found.num_tokens // size * size
        one.place = -score(begin, -seq.rank[1], self._wait_weight)
        insort(self._order, (one.place, seq.rank, seq))
        namespace = seq.request.namespace.of_block(begin // size, size)
        one.next_block = namespace, begin, tuple(seq.tokens[begin : min(begin + size, num_tokens)])
        self._by_next_block.setdefault(one.next_block, {})[seq.id] = seq

    def _remove_from_order(self, one: _Waiting) -> None:
        del self._order[bisect_left(self._order, (one.place, one.seq.rank))]
        assert one.next_block is not None
        alike = self._by_next_block[one.next_block]
        del alike[one.seq.id]
        if not alike:
            del self._by_next_block[one.next_block]
            self._overdue.pop(one.next_block, None)


def score(num_matched: int, waited: float, wait_weight: float) -> float:
    """The score in tokens. waited: seconds; wait_weight: tokens per second of waiting."""
    return num_matched + wait_weight * waited
