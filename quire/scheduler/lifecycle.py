"""Scheduler state: all unfinished sequences with their transitions between waiting, running, held, ended."""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from quire.cache.admission_check import Admission
from quire.cache.block_table import BlockTable
from quire.cache.manager import KVCacheManager
from quire.cache.prefix.index import EvictionCause
from quire.cache.retention import SequenceRetention
from quire.config import Policy, SchedulerConfig
from quire.core.adapter import ADAPTER
from quire.core.output import EndCause
from quire.core.prompt_progress import PromptProgress
from quire.core.request import Request
from quire.cost.step_time import CostModel
from quire.scheduler.adapters import AdapterSlots
from quire.scheduler.admission_watermark import AdmissionWatermark
from quire.scheduler.budget_sharing import Flow, flow_of
from quire.scheduler.preemption import KV_INVALID, NO_KV_LOST, PreemptionDecision, PreemptionPlanner
from quire.scheduler.queue.select import new_queue, priority_class
from quire.scheduler.queue.waiting_queue import RANK
from quire.scheduler.request_state import RequestState
from quire.scheduler.request_stats import RequestStats
from quire.scheduler.sequence import Programs, Sequence
from quire.scheduler.step_builder import ScheduledChunk


class RunningQueue:
    """The running sequences and their rows.

    `running` is sorted by rank. The runner has no or wrong data of the sequences in `unsent`. `prompts` has those whose
    prompt was committed in part.
    """

    def __init__(self, num_rows: int, cache: KVCacheManager) -> None:
        self.running: list[Sequence] = []
        self.unsent: list[Sequence] = []
        self.corrected: list[tuple[Sequence, int]] = []  # the runner has wrong tokens from this position
        self.prompts: dict[int, Sequence] = {}  # by sequence id
        self._cache = cache
        self._free = list(range(num_rows))[::-1]

    @property
    def num_free_rows(self) -> int:
        """Number of free rows."""
        return len(self._free)

    def allocate_row(self, seq: Sequence, table: BlockTable, num_computed: int, num_cached: int) -> None:
        """Give a row to a sequence that has got a block table. The other arguments are as in Sequence.start_running."""
        seq.start_running(self._free.pop(), table, num_computed, num_cached)
        insort(self.running, seq, key=RANK)

    def mark_unsent(self, seq: Sequence) -> None:
        """Have the next step send all data of a running sequence to the runner."""
        if seq not in self.unsent:
            self.unsent.append(seq)

    def correct_tokens(self, seq: Sequence, first: int) -> None:
        """Have the next step send the tokens of a sequence from position `first` on. Ignores one without a row."""
        if seq.row >= 0 and seq not in self.unsent:
            self.corrected.append((seq, first))

    def mark_sent(self) -> None:
        """Clear `unsent` and `corrected`, because the planned step sends them."""
        self.unsent.clear()
        self.corrected.clear()

    @property
    def prompt_progress(self) -> PromptProgress:
        """The progress of the prompts that were committed in part."""
        seqs = [seq for seq in self.prompts.values() if seq.num_written < seq.num_prompt_tokens]  # a fork may end one
        num_done = sum(seq.num_written for seq in seqs)
        return PromptProgress(len(seqs), num_done, sum(seq.num_prompt_tokens for seq in seqs))

    def update_prompts(self, seq: Sequence) -> None:
        """Update `prompts` after the commit of a chunk of a prompt. Ignores a sequence without a row."""
        if seq.row >= 0 and seq.num_written < min(seq.num_prompt_tokens, seq.limit):
            self.prompts[seq.id] = seq
        else:
            self.prompts.pop(seq.id, None)

    def free(self, seq: Sequence, num_valid: int, *, swapped: bool = False) -> None:
        """Take row and blocks from a sequence. In-flight steps keep the blocks until they end.

        num_valid: leading positions with valid KV, which enter the prefix cache. swapped: whether the host pool has a
        copy of its KV. The retention of its KV applies only if it has finished.
        """
        self.running.remove(seq)
        self.prompts.pop(seq.id, None)
        self.unsent = [one for one in self.unsent if one is not seq]
        self.corrected = [one for one in self.corrected if one[0] is not seq]
        self._cache.release(seq.id, num_valid, ended=seq.finished)
        self._free.append(seq.row)
        seq.stop_running(swapped=swapped)


class RequestCount(NamedTuple):
    """A number of requests, and of their prompt tokens."""

    num_requests: int = 0
    num_tokens: int = 0

    def changed(self, num_requests: int, num_tokens: int) -> "RequestCount":
        """The sum with other numbers."""
        return RequestCount(self.num_requests + num_requests, self.num_tokens + num_tokens)


class NewRequests:
    """Counts of requests that have never run, in total and of each flow that has some."""

    def __init__(self, policy: Policy) -> None:
        self.total = RequestCount()
        self.by_flow: dict[Flow, RequestCount] = {}
        self.flow_of = flow_of(policy)

    def __len__(self) -> int:
        return self.total.num_requests

    def add(self, request: Request) -> None:
        """Count a request that arrives."""
        self._change(request, 1)

    def drop(self, state: RequestState) -> None:
        """Stop counting a request that runs or has ended. Ignores one that is not new."""
        if state.is_new:
            state.stop_being_new()
            self._change(state.request, -1)

    def _change(self, request: Request, sign: int) -> None:
        flow, num_tokens = self.flow_of(request), sign * len(request.prompt)
        self.total = self.total.changed(sign, num_tokens)
        count = self.by_flow.get(flow, RequestCount()).changed(sign, num_tokens)
        if count.num_requests:
            self.by_flow[flow] = count
        else:
            del self.by_flow[flow]


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """An in-flight step."""

    id: int
    scheduled: list[ScheduledChunk]
    num_tokens: int
    num_pairs: float  # (token, attended token) pairs; 0 with one token per chunk, drafts not counted
    exclusive: bool  # whether no other step may be in flight
    swapped_in: list[Sequence]  # sequences whose KV it swaps in
    num_drafts: int = 0
    num_proposals: int = 0  # sequences whose drafters were asked
    num_indexed_tokens: int = 0  # for proposals


class SchedulerState:
    """All unfinished sequences. Each is queued, running or held."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        costs: CostModel,
        on_end: Callable[[Sequence], None],
    ) -> None:
        """on_end: called with each sequence that ends."""
        self.sequences: dict[int, Sequence] = {}
        self.queue = new_queue(config, cache)
        self.requests: dict[str, RequestState] = {}  # unfinished, by request id
        self.num_unready = 0  # requests that wait for prerequisites
        self.new_requests = NewRequests(config.policy)
        self.programs = Programs()
        self.running_queue = RunningQueue(config.max_num_seqs, cache)
        self.request_stats = RequestStats(config.policy, self.requests)
        self.in_flight: deque[InFlightStep] = deque()
        self.adapters = AdapterSlots(config)
        self._swapping_in: list[Sequence] = []  # of committed steps, with Moves in flight
        self.watermark = AdmissionWatermark([pool.num_blocks for pool in cache.pools], config.watermark)
        self._config = config
        self._cache = cache
        self._on_end = on_end
        self._preemption = PreemptionPlanner(config.preemption, cache, costs)
        self._next_id = 0

    @property
    def watermark_blocks(self) -> list[int]:
        """Blocks per group that an admission has to leave free."""
        return self.watermark.watermark_blocks(len(self.running_queue.running))

    def members(self, request_id: str) -> list[Sequence]:
        """The unfinished sequences of a request; empty for an unknown one."""
        state = self.requests.get(request_id)
        return [] if state is None else list(state.sequences)

    def is_in_flight(self, seq: Sequence) -> bool:
        """Whether an in-flight step has a chunk of a sequence."""
        return bool(self.in_flight) and seq.last_step >= self.in_flight[0].id

    def is_running(self, seq_id: int) -> bool:
        """Whether an unfinished sequence has this id and a row."""
        return seq_id in self.sequences and self.sequences[seq_id].row >= 0

    def is_swapped(self, seq_id: int) -> bool:
        """Whether an unfinished sequence has this id and is swapped."""
        return seq_id in self.sequences and self.sequences[seq_id].swapped

    def add(self, request: Request, now: float) -> RequestState:
        """Add a request that has unfinished sequences. `begin` queues it, once it waits for nothing."""
        state = RequestState(request, now - request.waited, *self.request_stats.arrived(request, now))
        self.requests[request.id] = state
        self.new_requests.add(request)
        self.num_unready += bool(request.waits_for)
        if request.adapter is not None and self.adapters.add(request):
            state.ready(ADAPTER, now)
        return state

    def begin(self, state: RequestState, now: float, begin: Callable[[Sequence], None] | None = None) -> list[Sequence]:
        """Queue a request. Returns its sequences without those that have finished before.

        begin: called with each of them before the first is queued.
        """
        request = state.request
        self.num_unready -= bool(request.waits_for)
        of_class, first_id = priority_class(self._config, request.scheduling_params.priority), self._next_id
        known = request.known_outputs
        wanted = [i for i in range(request.num_sequences) if not (known and known[i].finished)]
        place = self.programs.arrival(request, first_id, now)
        sequences = [Sequence(first_id + i, request, i, now, of_class, place) for i in wanted]
        self._next_id += request.num_sequences
        if begin is not None:
            for seq in sequences:
                begin(seq)
        self.sequences.update((seq.id, seq) for seq in sequences)
        for seq in state.begin(sequences):
            self._put(seq, now)
        return sequences

    def _put(self, seq: Sequence, now: float) -> None:
        """Queue a sequence."""
        seq.wait(now)
        self.queue.put(seq)
        self.request_stats.queued(seq, now)

    def admit(self, seq: Sequence, admission: Admission, now: float) -> None:
        """Move the head of the queue, which has got a block table, to the running sequences."""
        self.queue.remove(seq)
        self.new_requests.drop(self.requests[seq.request.id])
        num_cached = min(admission.num_tokens, len(seq.request.prompt))
        self.running_queue.allocate_row(seq, admission.table, admission.num_tokens, num_cached)
        self._want_branch_point(seq)
        self.request_stats.admitted(seq, admission, now)

    def prompt_computed(self, seq: Sequence, stop: int) -> None:
        """Record that a chunk which begins in the prompt of a sequence is committed up to position `stop`."""
        self.request_stats.computed(seq, stop)
        self.running_queue.update_prompts(seq)

    def preempt(self, seq: Sequence, reason: str, now: float) -> None:
        """Preempt a sequence and all running sequences of its request, except for those that are being swapped in.

        None of them may have a chunk in the step that is being planned.
        """
        family = self.requests[seq.request.id].sequences
        leaving = [one for one in family if one.row >= 0 and not one.is_swapping_in]
        if leaving:
            self._preempt_all(leaving, reason, now)

    def preempt_one(self, seq: Sequence, reason: str, now: float) -> None:
        """Preempt one sequence only. The others of its request continue."""
        self._preempt_all([seq], reason, now)

    def _preempt_all(self, victims: list[Sequence], reason: str, now: float) -> None:
        decision = self._preemption.decide(victims)
        for seq in victims:
            swapped = seq.id in self._cache.swapped
            is_bare = decision.mode == "swap" and not swapped  # none of its KV would have to be computed again
            self._record_preempted(seq, reason, NO_KV_LOST if is_bare else decision, now)
            self.requeue(seq, seq.num_valid, now, swapped=swapped)

    def restart(self, seq: Sequence, now: float) -> None:
        """Requeue a sequence whose KV is invalid, because the step that was to write it failed."""
        self._record_preempted(seq, "the step that computed its prefix failed", KV_INVALID, now)
        seq.discard_in_flight()
        self.requeue(seq, 0, now)

    def rewind(self, seq: Sequence, now: float) -> None:
        """Let a running sequence go on from a snapshot, or from its first token, because its state is void.

        It is queued again if there are not enough blocks for that.
        """
        until = seq.alone_until
        self.running_queue.free(seq, seq.num_valid)
        admission = self._cache.admit(
            seq.id,
            seq.tokens,
            seq.request.namespace,
            reusable=seq.reusable,
            limit=min(len(seq.tokens), seq.limit),
            max_new_positions=1,
            cause=cause_of(seq, now),
            retention=retention_of(seq),
        )
        if admission is None:
            self._record_preempted(seq, "the step that computed its state failed", KV_INVALID, now)
            self.requeue(seq, 0, now)
            return
        self.running_queue.allocate_row(seq, admission.table, admission.num_tokens, 0)
        self._want_branch_point(seq)
        seq.run_alone(until)

    def _want_branch_point(self, seq: Sequence) -> None:
        """Have a snapshot taken where the other sequences of a request branch, if the model has recurrent states."""
        if self._cache.states is not None and seq.num_shared and seq.table is not None:
            self._cache.states.want(seq.table, seq.num_shared)

    def restart_swapping(self, now: float) -> None:
        """Restart the sequences whose KV is being copied to or from the host, because the copies may never be done.

        The blocks of the copies stay allocated until the copies are done.
        """
        for seq in list(self.sequences.values()):
            if seq.is_swapping_in:
                self.restart(seq, now)
            elif self._cache.is_swapping_out(seq.id):
                self._cache.drop_swapped(seq.id)
                seq.drop_swapped()

    def requeue(self, seq: Sequence, num_valid: int, now: float, *, swapped: bool = False) -> None:
        """Queue a sequence, and take its row and blocks if it has any.

        num_valid: leading positions with valid KV, which enter the prefix cache. swapped: whether the host pool has a
        copy of its KV. A beam that has its candidates is not queued: it has nothing to compute until beams are
        selected.
        """
        is_complete_beam = seq.request.beams is not None and seq.num_written >= seq.limit
        if seq.row >= 0:
            self.running_queue.free(seq, num_valid, swapped=swapped)
        if not is_complete_beam:
            self._put(seq, now)

    def end(self, seq: Sequence, cause: EndCause, now: float) -> None:
        """End a sequence. In-flight steps keep its blocks until they end."""
        state = self.requests[seq.request.id]
        relatives = list(state.sequences)
        if len(relatives) == seq.request.num_unfinished:  # the first to end
            running = [one.id for one in relatives if one.row >= 0]
            self.request_stats.record_blocks(seq.request.id, *self._cache.sharing(running))
        seq.finish()
        self._on_end(seq)
        if seq.row >= 0:
            self.running_queue.free(seq, seq.num_valid)
        elif seq in self.queue:
            self.queue.remove(seq)
        if seq.swapped:
            self._cache.drop_swapped(seq.id)
        del self.sequences[seq.id]
        if len(relatives) == 1:
            self.new_requests.drop(state)
        queued = state.remove(seq)
        if queued is not None:
            self._put(queued, now)
        self.request_stats.ended(seq, cause, now, last=not state.sequences)
        if not state.sequences:
            self._drop(state)

    def end_all(self, request_id: str, cause: EndCause, now: float) -> None:
        """End a request with all its sequences. Ignores an unknown id."""
        state = self.requests.get(request_id)
        if state is None:
            return
        if state.waits_for:
            self.num_unready -= 1
            self.new_requests.drop(state)
            self.request_stats.request_ended(state, cause, now)
            self._drop(state)
            return
        state.release_held()
        for seq in list(state.sequences):
            self.end(seq, cause, now)

    def _drop(self, state: RequestState) -> None:
        """Drop a request that has ended, and release its adapter. In-flight steps keep that until they end."""
        del self.requests[state.request.id]
        self.adapters.release(state.request, self.in_flight[-1].id if self.in_flight else -1)

    def end_program(self, tenant: str, program: str, branch: str | None) -> None:
        """Mark a branch of a program as finished; None: all branches."""
        if branch is None:
            self.programs.end(tenant, program)
        self._cache.end_program(tenant, program, branch)

    def end_swap_ins(self, swapped_in: Iterable[Sequence]) -> None:
        """Let sequences run whose KV is on the device. swapped_in: those of the step that is being committed."""
        still = []
        for seq in (*self._swapping_in, *swapped_in):
            if seq.is_swapping_in:  # otherwise it has ended, or started again
                assert seq.table is not None
                if self._cache.is_swapping_in(seq.table):
                    still.append(seq)
                else:
                    seq.end_swap_in()
        self._swapping_in = still

    def update_swapped(self) -> None:
        """Update all sequences after a failed step, which may have invalidated their KV in the host pool."""
        for seq in self.sequences.values():
            if seq.swapped and seq.id not in self._cache.swapped:
                seq.drop_swapped()

    def _record_preempted(self, seq: Sequence, reason: str, decision: PreemptionDecision, now: float) -> None:
        relatives = self.requests[seq.request.id].sequences
        last = not any(one.row >= 0 for one in relatives if one is not seq)
        self.request_stats.preempted(seq, reason, decision, now, last=last)

    # Branching: the prompt of several sequences is computed once

    def branch_held(self, source: Sequence, now: float) -> None:
        """Branch a request's held sequences from `source`, which has the prompt's KV. Queue those that do not fit."""
        for held in self.requests[source.request.id].release_held():
            if not self._branch(held, source, now):
                self._put(held, now)

    def branch_waiting(self, now: float) -> None:
        """Branch sequences at the head of the queue, as long as a running one of their request has the prompt's KV."""
        while (seq := self.queue.head) is not None:
            donor = self.requests[seq.request.id].branch_source(seq)
            if donor is None or self.is_in_flight(seq) or not self._branch(seq, donor, now):
                return
            self.queue.remove(seq)

    def _branch(self, seq: Sequence, source: Sequence, now: float) -> bool:
        """Start a sequence with the prompt KV of `source`. False if rows or blocks are short, or KV left the window."""
        if not self.running_queue.num_free_rows:
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
        self.start_copy(seq, table, seq.num_shared, now)
        return True

    def start_copy(self, seq: Sequence, table: BlockTable, num_computed: int, now: float) -> None:
        """Start a sequence with a table branched or forked from another sequence of its request."""
        num_cached = self.requests[seq.request.id].explanation.num_cached_tokens
        self.running_queue.allocate_row(seq, table, num_computed, num_cached)
        self.running_queue.mark_unsent(seq)
        self.request_stats.branched(seq, num_computed, now)


def retention_of(seq: Sequence) -> SequenceRetention:
    """Retention and program hints for the KV that a sequence leaves."""
    request = seq.request
    params = request.scheduling_params
    about = (params.retention, request.id, request.namespace.tenant)
    return (
        SequenceRetention(*about) if params.program is None else SequenceRetention(*about, params.program, seq.rank[2])
    )


def cause_of(seq: Sequence, now: float) -> EvictionCause:
    """The cause of evictions on behalf of a sequence."""
    return EvictionCause(now, seq.request.id, seq.request.namespace.tenant)
