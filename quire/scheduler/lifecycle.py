"""Scheduler state: all unfinished sequences with their transitions between waiting, running, held, ended."""

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from quire.cache.block_table import BlockTable
from quire.cache.block_tables import Admission
from quire.cache.kv_cache import KVCache
from quire.cache.prefix.index import EvictionCause
from quire.cache.retention import SequenceRetention
from quire.config import SchedulerConfig
from quire.core.request import Request
from quire.core.scheduling_params import Retention
from quire.cost.step_time import CostModel
from quire.scheduler.admission_watermark import AdmissionWatermark
from quire.scheduler.preemption import KV_INVALID, NO_KV_LOST, PreemptionDecision, PreemptionPlanner
from quire.scheduler.queue.select import new_queue, priority_class
from quire.scheduler.queue.waiting_queue import RANK, Queue
from quire.scheduler.request_stats import RequestStats
from quire.scheduler.sequence import Programs, Sequence, program_of
from quire.scheduler.step_builder import Entry


class SequenceGroups:
    """Unfinished sequences by request.

    If sequences share a prompt or a beam search, only the first is queued. The others are held outside of the queue
    until the KV that they share is committed, or a beam is selected for them.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._members: dict[str, list[Sequence]] = {}
        self._held: dict[str, list[Sequence]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._members

    def members(self, request_id: str) -> list[Sequence]:
        """The unfinished sequences of a request; empty for an unknown one."""
        return list(self._members.get(request_id, ()))

    def add(self, request_id: str, sequences: list[Sequence]) -> list[Sequence]:
        """Add a request. Queues and returns the sequences that compute its prompt, and holds the others."""
        self._members[request_id] = list(sequences)
        held_back = sequences[0].num_shared or sequences[0].request.beams
        num_first = 1 if held_back else len(sequences)
        for seq in sequences[:num_first]:
            self._queue.put(seq)
        if sequences[num_first:]:
            self._held[request_id] = sequences[num_first:]
        return sequences[:num_first]

    def hold(self, seq: Sequence) -> None:
        """Hold a sequence."""
        self._held.setdefault(seq.request.id, []).append(seq)

    def release_held(self, request_id: str) -> list[Sequence]:
        """Stop holding the sequences of a request. Returns the unfinished ones."""
        return [seq for seq in self._held.pop(request_id, ()) if not seq.finished] if self._held else []

    def branch_source(self, seq: Sequence) -> Sequence | None:
        """A running sequence of the request with committed KV of the positions that `seq` shares; None without one."""
        if not seq.num_shared or seq.swapped:
            return None
        relatives = self._members[seq.request.id]
        return next((one for one in relatives if one.has_written(seq.num_shared)), None)

    def remove(self, seq: Sequence) -> Sequence | None:
        """Remove a sequence that has ended. If others of its request are held, queues and returns the next of them."""
        request_id = seq.request.id
        relatives = self._members[request_id]
        relatives.remove(seq)
        if not relatives:
            del self._members[request_id]
        held = self.release_held(request_id)
        if not held:
            return None
        self._queue.put(held[0])
        if held[1:]:
            self._held[request_id] = held[1:]
        return held[0]


class RunningQueue:
    """The running sequences and their rows.

    `running` is sorted by rank. The runner has no or wrong data of the sequences in `unsent`.
    """

    def __init__(self, num_rows: int, cache: KVCache) -> None:
        self.running: list[Sequence] = []
        self.unsent: list[Sequence] = []
        self.corrected: list[tuple[Sequence, int]] = []  # the runner has wrong tokens from this position
        self._cache = cache
        self._free = list(range(num_rows))[::-1]

    @property
    def has_free_row(self) -> bool:
        """Whether a row is free."""
        return bool(self._free)

    def allocate_row(self, seq: Sequence, table: BlockTable, num_computed: int) -> None:
        """Give a row to a sequence that has a block table, of which `num_computed` positions are computed."""
        seq.row = self._free.pop()
        insort(self.running, seq, key=RANK)
        self.set_table(seq, table, num_computed)

    def set_table(self, seq: Sequence, table: BlockTable, num_computed: int) -> None:
        """Set the block table of a running sequence, of which `num_computed` positions are computed."""
        seq.table = table
        seq.num_computed = seq.num_written = num_computed

    def mark_unsent(self, seq: Sequence) -> None:
        """Have the next step send all data of a running sequence to the runner."""
        if seq not in self.unsent:
            self.unsent.append(seq)

    def mark_sent(self) -> None:
        """Clear `unsent` and `corrected`, because the planned step sends them."""
        self.unsent.clear()
        self.corrected.clear()

    def free(self, seq: Sequence, num_valid: int) -> None:
        """Take row and blocks from a sequence. In-flight steps keep the blocks until they end.

        num_valid: leading positions with valid KV, which enter the prefix cache.
        """
        self.running.remove(seq)
        self.unsent = [one for one in self.unsent if one is not seq]
        self.corrected = [one for one in self.corrected if one[0] is not seq]
        self._cache.release(seq.id, num_valid)
        self._free.append(seq.row)
        seq.row, seq.table, seq.swap_in_step = -1, None, -1

    def count_slots(self) -> tuple[int, int]:
        """(slots, slots with a known token) of the block tables of group 0, without blocks behind a window."""
        slots = tokens = 0
        for seq in self.running:
            table = seq.table
            assert table is not None, "it runs"
            num_slots = len(table.blocks[0]) * self._cache.block_size
            gone = table.firsts[0] * self._cache.block_size
            slots += num_slots - gone
            tokens += min(num_slots, len(seq.tokens)) - gone
        return slots, tokens


class NewRequests:
    """Counts of requests that have never run, and of their prompt tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tokens

    def add(self, request: Request) -> None:
        """Count a request that arrives."""
        self._tokens[request.id] = len(request.prompt)
        self.num_tokens += len(request.prompt)

    def drop(self, request_id: str) -> None:
        """Stop counting a request that runs or has ended. Ignores one that is not counted."""
        self.num_tokens -= self._tokens.pop(request_id, 0)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """An in-flight step."""

    id: int
    entries: list[Entry]
    num_tokens: int
    exclusive: bool  # whether no other step may be in flight
    swapped_in: list[Sequence]  # sequences whose KV it swaps in
    num_swapped_bytes: tuple[int, int] = (0, 0)  # copied to the host, and from it


class SchedulerState:
    """All unfinished sequences. Each is queued, running or held."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, costs: CostModel) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.queue = new_queue(config, cache)
        self.sequence_groups = SequenceGroups(self.queue)
        self.new_requests = NewRequests()
        self.programs = Programs()
        self.running_queue = RunningQueue(config.max_num_seqs, cache)
        self.request_stats = RequestStats(config.policy)
        self.in_flight: deque[InFlightStep] = deque()
        self.watermark = AdmissionWatermark([pool.num_blocks for pool in cache.pools], config.watermark)
        self._config = config
        self._cache = cache
        self.on_end: Callable[[Sequence], None] = lambda _seq: None
        self._preemption = PreemptionPlanner(config.preemption, cache, costs)
        self._next_id = 0

    @property
    def watermark_blocks(self) -> list[int]:
        """Blocks per group that an admission has to leave free."""
        return self.watermark.watermark_blocks(len(self.running_queue.running))

    def is_in_flight(self, seq: Sequence) -> bool:
        """Whether an in-flight step has a chunk of a sequence."""
        return bool(self.in_flight) and seq.last_step >= self.in_flight[0].id

    def is_running(self, seq_id: int) -> bool:
        """Whether an unfinished sequence has this id and a row."""
        return seq_id in self.sequences and self.sequences[seq_id].row >= 0

    def is_swapped(self, seq_id: int) -> bool:
        """Whether an unfinished sequence has this id and is swapped."""
        return seq_id in self.sequences and self.sequences[seq_id].swapped

    def add(self, request: Request, now: float, begin: Callable[[Sequence], None] | None = None) -> list[Sequence]:
        """Add a request. Returns its sequences without those that have finished before.

        begin: called with each of them before the first is queued.
        """
        of_class, first_id = priority_class(self._config, request.terms.priority), self._next_id
        wanted = [i for i in range(request.num_sequences) if not (request.known and request.known[i].finished)]
        place = self.programs.arrival(request, first_id, now)
        sequences = [Sequence(first_id + i, request, i, now, of_class, place) for i in wanted]
        self._next_id += request.num_sequences
        if not sequences:
            return []
        if begin is not None:
            for seq in sequences:
                begin(seq)
        self.sequences.update((seq.id, seq) for seq in sequences)
        self.new_requests.add(request)
        self.request_stats.arrived(request, now)
        for seq in self.sequence_groups.add(request.id, sequences):
            self.request_stats.queued(seq, now)
        return sequences

    def admit(self, seq: Sequence, admission: Admission, now: float) -> None:
        """Move the head of the queue, which has got a block table, to the running sequences."""
        self.queue.remove(seq)
        self.new_requests.drop(seq.request.id)
        seq.swapped = False
        self.running_queue.allocate_row(seq, admission.table, admission.num_tokens)
        self.request_stats.admitted(seq, admission, now)

    def preempt(self, seq: Sequence, reason: str, now: float) -> None:
        """Preempt a sequence and all running sequences of its request, except for those that are being swapped in.

        None of them may have a chunk in the step that is being planned.
        """
        family = self.sequence_groups.members(seq.request.id)
        leaving = [one for one in family if one.row >= 0 and one.swap_in_step < 0]
        if leaving:
            self._preempt_all(leaving, reason, now)

    def preempt_one(self, seq: Sequence, reason: str, now: float) -> None:
        """Preempt one sequence only, for an earlier one of its request."""
        self._preempt_all([seq], reason, now)

    def _preempt_all(self, victims: list[Sequence], reason: str, now: float) -> None:
        decision = self._preemption.decide(victims)
        for seq in victims:
            seq.swapped = seq.id in self._cache.swapped
            is_bare = decision.mode == "swap" and not seq.swapped  # none of its KV would have to be computed again
            self._record_preempted(seq, reason, NO_KV_LOST if is_bare else decision, now)
            self.requeue(seq, seq.num_valid, now)

    def restart(self, seq: Sequence, now: float) -> None:
        """Requeue a sequence whose KV is invalid, because the step that was to write it failed."""
        self._record_preempted(seq, "the step that computed its prefix failed", KV_INVALID, now)
        seq.epoch += 1
        seq.num_pending = seq.num_ignored_samples = 0
        self.requeue(seq, 0, now)

    def requeue(self, seq: Sequence, num_valid: int, now: float) -> None:
        """Queue a sequence, and take its row and blocks if it has any.

        num_valid: leading positions with valid KV, which enter the prefix cache. A beam that has its candidates is not
        queued: it has nothing to compute until beams are selected.
        """
        is_complete_beam = seq.request.beams is not None and seq.num_written >= seq.limit
        if seq.row >= 0:
            clear_retention(seq)
            self.running_queue.free(seq, num_valid)
        seq.num_computed = seq.num_written = 0
        if is_complete_beam:
            return
        self.queue.put(seq)
        self.request_stats.queued(seq, now)

    def end(self, seq: Sequence, reason: str, now: float) -> None:
        """End a sequence. In-flight steps keep its blocks until they end."""
        relatives = self.sequence_groups.members(seq.request.id)
        if len(relatives) == seq.request.num_unfinished:  # the first to end
            running = [one.id for one in relatives if one.row >= 0]
            self.request_stats.record_blocks(seq.request.id, *self._cache.sharing(running))
        seq.finished = True
        self.on_end(seq)
        if seq.row >= 0:
            self.running_queue.free(seq, seq.num_valid)
        elif seq in self.queue:
            self.queue.remove(seq)
        if seq.swapped:
            self._cache.drop_swapped(seq.id)
        del self.sequences[seq.id]
        if len(relatives) == 1:
            self.new_requests.drop(seq.request.id)
        queued = self.sequence_groups.remove(seq)
        if queued is not None:
            self.request_stats.queued(queued, now)
        self.request_stats.ended(seq, reason, now, last=len(relatives) == 1)

    def end_all(self, request_id: str, reason: str, now: float) -> None:
        """End all sequences of a request."""
        self.sequence_groups.release_held(request_id)
        for seq in self.sequence_groups.members(request_id):
            self.end(seq, reason, now)

    def end_program(self, tenant: str, program: str, branch: str | None) -> None:
        """Mark a branch of a program as finished in the cache and in its running sequences; None: all branches."""
        if branch is None:
            self.programs.end(tenant, program)
        self._cache.end_program(tenant, program, branch)
        for seq in self.running_queue.running:
            if program_of(seq.request) != (tenant, program):
                continue
            assert seq.table is not None, "it runs"
            asked = seq.table.retention.program
            if asked is not None and branch in (None, asked.branch):
                ended = msgspec.structs.replace(asked, expects_more=False)
                seq.table.retention = seq.table.retention._replace(program=ended)

    def update_swapped(self) -> None:
        """Update `swapped` of all sequences after a failed step, which may have invalidated host blocks."""
        for seq in self.sequences.values():
            seq.swapped = seq.swapped and seq.id in self._cache.swapped

    def _record_preempted(self, seq: Sequence, reason: str, decision: PreemptionDecision, now: float) -> None:
        relatives = self.sequence_groups.members(seq.request.id)
        last = not any(one.row >= 0 for one in relatives if one is not seq)
        self.request_stats.preempted(seq, reason, decision, now, last=last)

    # Branching: the prompt of several sequences is computed once

    def branch_held(self, source: Sequence, now: float) -> None:
        """Branch a request's held sequences from `source`, which has the prompt's KV. Queue those that do not fit."""
        for held in self.sequence_groups.release_held(source.request.id):
            if not self._branch(held, source, now):
                self.queue.put(held)
                self.request_stats.queued(held, now)

    def branch_waiting(self, now: float) -> None:
        """Branch sequences at the head of the queue, as long as a running one of their request has the prompt's KV."""
        while (seq := self.queue.head) is not None:
            donor = self.sequence_groups.branch_source(seq)
            if donor is None or self.is_in_flight(seq) or not self._branch(seq, donor, now):
                return
            self.queue.remove(seq)

    def _branch(self, seq: Sequence, source: Sequence, now: float) -> bool:
        """Start a sequence with the prompt KV of `source`. False if rows or blocks are short, or KV left the window."""
        if not self.running_queue.has_free_row:
            return False
        table = self._cache.branch(
            source.id,
            seq.id,
            seq.num_shared,
            tokens=seq.tokens,
            reserve=len(seq.tokens),
            watermark_blocks=self.watermark_blocks,
            cause=cause_of(seq, now),
        )
        if table is None:
            return False
        self.running_queue.allocate_row(seq, table, seq.num_shared)
        self.running_queue.mark_unsent(seq)
        self.request_stats.branched(seq, seq.num_shared, now)
        return True


def retention_of(seq: Sequence) -> SequenceRetention:
    """Retention and program hints for the KV that a sequence leaves."""
    request = seq.request
    terms = request.terms
    about = (terms.retention, request.id, request.namespace.tenant, len(request.prompt))
    return SequenceRetention(*about) if terms.program is None else SequenceRetention(*about, terms.program, seq.rank[2])


def clear_retention(seq: Sequence) -> None:
    """Clear retention and program hints of a running sequence that loses its table: they apply at its end only."""
    assert seq.table is not None, "it runs"
    seq.table.retention = seq.table.retention._replace(params=Retention(), program=None)


def cause_of(seq: Sequence, now: float) -> EvictionCause:
    """The cause of evictions on behalf of a sequence."""
    return EvictionCause(now, seq.request.id, seq.request.namespace.tenant)
