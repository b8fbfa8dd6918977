"""Lives: which sequences there are, and how each comes to wait, to run, and to end. Plans nothing."""

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from quire.cache.block_table import BlockTable
from quire.cache.block_tables import Admission
from quire.cache.kv_cache import KVCache
from quire.cache.prefix.index import Cause
from quire.cache.retention import Keep
from quire.config import SchedulerConfig
from quire.core.request import Request
from quire.core.scheduling_params import Retention
from quire.cost.step_time import Costs
from quire.scheduler.admission_watermark import Caution
from quire.scheduler.preemption import NOTHING_LOST, VOID, Way, Ways
from quire.scheduler.queue.select import class_of, new_queue
from quire.scheduler.queue.waiting_queue import RANK, Queue
from quire.scheduler.request_stats import Accounts
from quire.scheduler.sequence import Programs, Sequence, program_of
from quire.scheduler.step_builder import Entry


class Families:
    """Unfinished sequences by request.

    The first of a family queues; the others are held, in nobody's way, until the KV of what they share is there.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._members: dict[str, list[Sequence]] = {}
        self._held: dict[str, list[Sequence]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._members

    def members(self, request_id: str) -> list[Sequence]:
        """Those that have not ended; none of an unknown request."""
        return list(self._members.get(request_id, ()))

    def add(self, request_id: str, sequences: list[Sequence]) -> list[Sequence]:
        """A request arrives: queue those that have to compute its prompt, which it returns, and hold the others."""
        self._members[request_id] = list(sequences)
        held_back = sequences[0].num_shared or sequences[0].request.beams
        num_first = 1 if held_back else len(sequences)
        for seq in sequences[:num_first]:
            self._queue.put(seq)
        if sequences[num_first:]:
            self._held[request_id] = sequences[num_first:]
        return sequences[:num_first]

    def hold(self, seq: Sequence) -> None:
        """One that has no part for now."""
        self._held.setdefault(seq.request.id, []).append(seq)

    def release(self, request_id: str) -> list[Sequence]:
        """Those that were held, and are no longer."""
        return [seq for seq in self._held.pop(request_id, ()) if not seq.finished] if self._held else []

    def donor(self, seq: Sequence) -> Sequence | None:
        """A relative that runs and has the KV of what they share."""
        if not seq.num_shared or seq.swapped:
            return None
        relatives = self._members[seq.request.id]
        return next((one for one in relatives if one.has_written(seq.num_shared)), None)

    def remove(self, seq: Sequence) -> Sequence | None:
        """A sequence has ended. If the others still waited for it, the next takes its part, and is returned."""
        request_id = seq.request.id
        relatives = self._members[request_id]
        relatives.remove(seq)
        if not relatives:
            del self._members[request_id]
        held = self.release(request_id)
        if not held:
            return None
        self._queue.put(held[0])
        if held[1:]:
            self._held[request_id] = held[1:]
        return held[0]


class Rows:
    """`running` is sorted by rank; `unmet` are those of it that the runner has not met, or knows wrongly."""

    def __init__(self, num_rows: int, cache: KVCache) -> None:
        self.running: list[Sequence] = []
        self.unmet: list[Sequence] = []
        self.corrected: list[tuple[Sequence, int]] = []  # from this position on its tokens are not what the runner has
        self._cache = cache
        self._free = list(range(num_rows))[::-1]

    @property
    def has_free(self) -> bool:
        """Whether one more sequence could run."""
        return bool(self._free)

    def take(self, seq: Sequence, table: BlockTable, num_computed: int) -> None:
        """A sequence that waited has a block table and gets a row."""
        seq.row = self._free.pop()
        insort(self.running, seq, key=RANK)
        self.hold(seq, table, num_computed)

    def hold(self, seq: Sequence, table: BlockTable, num_computed: int) -> None:
        """A sequence goes on with this table, of which so many positions are computed."""
        seq.table = table
        seq.num_computed = seq.num_written = num_computed

    def meet(self, seq: Sequence) -> None:
        """The runner has to be told all that a running sequence's row holds."""
        if seq not in self.unmet:
            self.unmet.append(seq)

    def told(self) -> None:
        """A step is planned that tells the runner what it did not know."""
        self.unmet.clear()
        self.corrected.clear()

    def give_up(self, seq: Sequence, num_valid: int) -> None:
        """A sequence's row and blocks are free as soon as no step in flight needs them.

        num_valid: leading positions whose KV is what its tokens say; it may be found again.
        """
        self.running.remove(seq)
        self.unmet = [one for one in self.unmet if one is not seq]
        self.corrected = [one for one in self.corrected if one[0] is not seq]
        self._cache.release(seq.id, num_valid)
        self._free.append(seq.row)
        seq.row, seq.table, seq.arriving = -1, None, -1

    def slots(self) -> tuple[int, int]:
        """Of the tables of group 0: how many slots they have, and how many of them hold a known token."""
        slots = tokens = 0
        for seq in self.running:
            table = seq.table
            assert table is not None, "it runs"
            num_slots = len(table.blocks[0]) * self._cache.block_size
            gone = table.firsts[0] * self._cache.block_size  # behind the window
            slots += num_slots - gone
            tokens += min(num_slots, len(seq.tokens)) - gone
        return slots, tokens


class Newcomers:
    """Requests of which no sequence has had a row yet, and the tokens of their prompts."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tokens

    def add(self, request: Request) -> None:
        """One comes."""
        self._tokens[request.id] = len(request.prompt)
        self.num_tokens += len(request.prompt)

    def drop(self, request_id: str) -> None:
        """One begins, or has ended; it may have begun before."""
        self.num_tokens -= self._tokens.pop(request_id, 0)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight."""

    id: int
    entries: list[Entry]
    num_tokens: int
    alone: bool  # whether no other step may be in flight beside it
    arrivals: list[Sequence]  # whose KV it brings from the host
    num_bytes: tuple[int, int] = (0, 0)  # that it copies to the host, and from it


class Lives:
    """All unfinished sequences. Each is held by its family, queued, or runs in a row."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, costs: Costs) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.queue = new_queue(config, cache)
        self.families = Families(self.queue)
        self.newcomers = Newcomers()
        self.programs = Programs()
        self.rows = Rows(config.max_num_seqs, cache)
        self.accounts = Accounts(config.policy)
        self.in_flight: deque[Launched] = deque()
        self.caution = Caution([pool.num_blocks for pool in cache.pools], config.watermark)
        self._config = config
        self._cache = cache
        self.on_end: Callable[[Sequence], None] = lambda _seq: None
        self._ways = Ways(config.preemption, cache, costs)
        self._next_id = 0

    @property
    def spare(self) -> list[int]:
        """Blocks of each group that who begins has to leave."""
        return self.caution.spare(len(self.rows.running))

    def is_in_flight(self, seq: Sequence) -> bool:
        """Whether a step in flight computes something of it."""
        return bool(self.in_flight) and seq.last_step >= self.in_flight[0].id

    def is_running(self, seq_id: int) -> bool:
        """Whether there is such a sequence, and it has a row."""
        return seq_id in self.sequences and self.sequences[seq_id].row >= 0

    def is_swapped(self, seq_id: int) -> bool:
        """Whether there is such a sequence, and it waits for what it has in host memory."""
        return seq_id in self.sequences and self.sequences[seq_id].swapped

    def add(self, request: Request, now: float, begin: Callable[[Sequence], None] | None = None) -> list[Sequence]:
        """A request comes: its sequences, but for those that have ended before. begin: called with each, before it
        queues.
        """
        of_class, first_id = class_of(self._config, request.terms.priority), self._next_id
        wanted = [i for i in range(request.num_sequences) if not (request.known and request.known[i].finished)]
        place = self.programs.place(request, first_id, now)
        sequences = [Sequence(first_id + i, request, i, now, of_class, place) for i in wanted]
        self._next_id += request.num_sequences
        if not sequences:
            return []
        if begin is not None:
            for seq in sequences:
                begin(seq)
        self.sequences.update((seq.id, seq) for seq in sequences)
        self.newcomers.add(request)
        self.accounts.arrived(request, now)
        for seq in self.families.add(request.id, sequences):
            self.accounts.waits(seq, now)
        return sequences

    def admit(self, seq: Sequence, admission: Admission, now: float) -> None:
        """The head of the queue has a block table and begins to run."""
        self.queue.remove(seq)
        self.newcomers.drop(seq.request.id)
        seq.swapped = False
        self.rows.take(seq, admission.table, admission.num_tokens)
        self.accounts.admitted(seq, admission, now)

    def preempt(self, seq: Sequence, reason: str, now: float) -> None:
        """Take the rows and blocks of a sequence and of all its relatives that run, but for those that just arrive.

        None of them may have a chunk in the step that is being planned.
        """
        family = self.families.members(seq.request.id)
        leaving = [one for one in family if one.row >= 0 and one.arriving < 0]
        if leaving:
            self._leave(leaving, reason, now)

    def preempt_alone(self, seq: Sequence, reason: str, now: float) -> None:
        """Take the row and blocks of one sequence, for relatives that came before it."""
        self._leave([seq], reason, now)

    def _leave(self, leaving: list[Sequence], reason: str, now: float) -> None:
        way = self._ways.take(leaving)
        for seq in leaving:
            seq.swapped = seq.id in self._cache.swapped
            is_bare = way.how == "swap" and not seq.swapped  # it had nothing that would have to be computed again
            self._note_preempted(seq, reason, NOTHING_LOST if is_bare else way, now)
            self.requeue(seq, seq.num_valid, now)

    def begin_again(self, seq: Sequence, now: float) -> None:
        """What a sequence began with was never written, since that step failed."""
        self._note_preempted(seq, "the step failed that computed what it began with", VOID, now)
        seq.epoch += 1
        seq.num_pending = seq.num_foreseen = 0
        self.requeue(seq, 0, now)

    def requeue(self, seq: Sequence, num_valid: int, now: float) -> None:
        """A sequence waits, without a row; so many positions of the one that it had may be found again."""
        aside = seq.request.beams is not None and seq.num_written >= seq.limit  # heard: until the next beams are chosen
        if seq.row >= 0:
            ask_nothing(seq)
            self.rows.give_up(seq, num_valid)
        seq.num_computed = seq.num_written = 0
        if aside:
            return
        self.queue.put(seq)
        self.accounts.waits(seq, now)

    def end(self, seq: Sequence, reason: str, now: float) -> None:
        """The sequence is over: its row and blocks are free, as soon as no step in flight needs them."""
        relatives = self.families.members(seq.request.id)
        if len(relatives) == seq.request.num_open:  # the first to end
            running = [one.id for one in relatives if one.row >= 0]
            self.accounts.shares(seq.request.id, *self._cache.sharing(running))
        seq.finished = True
        self.on_end(seq)
        if seq.row >= 0:
            self.rows.give_up(seq, seq.num_valid)
        elif seq in self.queue:
            self.queue.remove(seq)
        if seq.swapped:
            self._cache.forget_swapped(seq.id)
        del self.sequences[seq.id]
        if len(relatives) == 1:
            self.newcomers.drop(seq.request.id)
        queued = self.families.remove(seq)
        if queued is not None:
            self.accounts.waits(queued, now)
        self.accounts.ended(seq, reason, now, last=len(relatives) == 1)

    def end_all(self, request_id: str, reason: str, now: float) -> None:
        """All sequences of a request are over."""
        self.families.release(request_id)
        for seq in self.families.members(request_id):
            self.end(seq, reason, now)

    def end_program(self, tenant: str, program: str, branch: str | None) -> None:
        """Nobody goes on from what a branch left, and what those of it that run will leave; None: any branch."""
        if branch is None:
            self.programs.end(tenant, program)
        self._cache.end_program(tenant, program, branch)
        for seq in self.rows.running:
            if program_of(seq.request) != (tenant, program):
                continue
            assert seq.table is not None, "it runs"
            asked = seq.table.keep.program
            if asked is not None and branch in (None, asked.branch):
                ended = msgspec.structs.replace(asked, expects_more=False)
                seq.table.keep = seq.table.keep._replace(program=ended)

    def look_for_swapped(self) -> None:
        """A step failed: what some sequences had in host memory may be void."""
        for seq in self.sequences.values():
            seq.swapped = seq.swapped and seq.id in self._cache.swapped

    def _note_preempted(self, seq: Sequence, reason: str, way: Way, now: float) -> None:
        relatives = self.families.members(seq.request.id)
        last = not any(one.row >= 0 for one in relatives if one is not seq)
        self.accounts.preempted(seq, reason, way, now, last=last)

    # Sequences of one request: the prompt is computed once

    def branch_held(self, donor: Sequence, now: float) -> None:
        """The KV of a prompt is there: those of its request that were held go on from it, or queue."""
        for held in self.families.release(donor.request.id):
            if not self._branch(held, donor, now):
                self.queue.put(held)
                self.accounts.waits(held, now)

    def branch_waiting(self, now: float) -> None:
        """Start those at the head of the queue whose prompt is computed: never run yet, or preempted."""
        while (seq := self.queue.head) is not None:
            donor = self.families.donor(seq)
            if donor is None or self.is_in_flight(seq) or not self._branch(seq, donor, now):
                return
            self.queue.remove(seq)

    def _branch(self, seq: Sequence, donor: Sequence, now: float) -> bool:
        """Start a sequence on the KV of `donor`, up to the last token of their prompt, where there is room."""
        if not self.rows.has_free:
            return False
        table = self._cache.branch(
            donor.id,
            seq.id,
            seq.num_shared,
            tokens=seq.tokens,
            reserve=len(seq.tokens),
            spare=self.spare,
            cause=cause_of(seq, now),
        )
        if table is None:
            return False
        self.rows.take(seq, table, seq.num_shared)
        self.rows.meet(seq)
        self.accounts.branched(seq, seq.num_shared, now)
        return True


def keep_of(seq: Sequence) -> Keep:
    """What a sequence asks for the KV that it leaves behind."""
    request = seq.request
    terms = request.terms
    about = (terms.retention, request.id, request.namespace.tenant, len(request.prompt))
    return Keep(*about) if terms.program is None else Keep(*about, terms.program, seq.rank[2])


def ask_nothing(seq: Sequence) -> None:
    """A running sequence gives up its table, and has not ended: what it asks is for when it has."""
    assert seq.table is not None, "it runs"
    seq.table.keep = seq.table.keep._replace(retention=Retention(), program=None)


def cause_of(seq: Sequence, now: float) -> Cause:
    """Whom blocks are evicted for when they are taken for a sequence."""
    return Cause(now, seq.request.id, seq.request.namespace.tenant)
