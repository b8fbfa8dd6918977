"""The scheduler: plan(), late(), commit(). Pure: no clock, no randomness, no bytes; time is an argument.

One rule, no phases. Every step gives each running sequence some of the tokens it lacks, so that
computed tokens catch up with known tokens, within a budget of tokens and of predicted time. Prefill,
chunked prefill, decode and coming back from preemption are the same rule with other numbers.

Order is by arrival everywhere: `_running` and `_waiting` are sorted by it, and the latest arrival that
runs is always the one to lose its blocks.

Of a request's n sequences the first computes the prompt; the others are held until that is committed, then
branch off: they share its blocks, and compute only the last token of the prompt again, for its logits.

Up to `steps_in_flight` steps may be planned and not committed. A failed step is rolled back; its
sequences are then tried one to a step, and one that fails again, alone, ends with an error.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass

from quire.cache.kv_cache import KVCache
from quire.cache.table import BlockTable
from quire.config import SchedulerConfig
from quire.core.events import Admitted, Arrived, Event, Finished, Preempted, StepFailed
from quire.core.output import Output
from quire.core.request import Request
from quire.core.step import ChunkOutput, Late, Step, StepResult
from quire.cost.pace import Pace
from quire.errors import ConfigError, RequestError
from quire.sched.builder import Entry, StepBuilder
from quire.sched.families import Families
from quire.sched.queue import ARRIVAL, Queue
from quire.sched.results import NOTHING, Extras, News
from quire.sched.sequence import Sequence

_NONE, _SAMPLE, _POOL = int(ChunkOutput.NONE), int(ChunkOutput.SAMPLE), int(ChunkOutput.POOL)
_MOST_EVENTS = 4096


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step in flight."""

    id: int
    entries: list[Entry]
    num_tokens: int


class Scheduler:
    """Requests in, Steps out, StepResults in, Outputs out."""

    def __init__(self, config: SchedulerConfig, cache: KVCache) -> None:
        if not cache.config.holds_alone(config.max_model_len, config.max_num_batched_tokens):
            raise ConfigError(
                f"{cache.config} cannot hold one sequence of max_model_len ({config.max_model_len}); give the cache "
                "more memory or lower max_model_len"
            )
        self.config = config
        self.cache = cache
        self.pace = Pace()
        self.events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self.num_preemptions = 0
        self._sequences: dict[int, Sequence] = {}
        self._queue = Queue()
        self._families = Families(self._queue)
        self._running: list[Sequence] = []
        self._branched: list[Sequence] = []  # of those running, the ones that the runner has not met
        self._suspects: deque[Sequence] = deque()
        self._in_flight: deque[_Launched] = deque()
        self._free_rows = list(range(config.max_num_seqs))[::-1]
        self._spare = [int(pool.num_blocks * config.watermark) for pool in cache.pools]
        self._next_seq = 0
        self._next_step = 0
        self._reset = True  # the runner has no rows yet, or cannot rely on those it has

    @property
    def num_running(self) -> int:
        """Sequences that have a row and blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row and blocks."""
        return len(self._sequences) - len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished or a step is in flight."""
        return bool(self._sequences or self._in_flight)

    def close(self) -> None:
        """Nothing is to be done here; a scheduler that writes a journal closes it."""

    # Inputs: what happens to requests

    def add(self, request: Request, now: float) -> None:
        """Queue a request. Raises RequestError for an id that is in use."""
        if request.id in self._families:
            raise RequestError(f"request id {request.id!r} is in use; choose another", "request_id")
        sequences = []
        for index in range(request.params.n):
            seq = Sequence(self._next_seq, request, index, now)
            self._next_seq += 1
            self._sequences[seq.id] = seq
            sequences.append(seq)
        self._families.add(request.id, sequences)
        self.events.append(Arrived(now, request.id, len(request.prompt)))

    def abort(self, request_id: str, now: float) -> None:
        """Give up a request. Nothing more is said about it; an unknown id is ignored."""
        self._families.release(request_id)
        for seq in self._families.members(request_id):
            self._end(seq, "abort", now)

    def finish(self, seq_id: int, num_tokens: int, now: float) -> None:
        """The front end saw the end of a sequence after `num_tokens` output tokens (a stop string).

        Tokens after that do not belong to it. Nothing more is said about the sequence; an unknown one,
        which may have ended on its own meanwhile, is ignored.
        """
        if num_tokens < 0:
            raise ValueError(f"a sequence cannot have ended after {num_tokens} tokens")
        seq = self._sequences.get(seq_id)
        if seq is not None:
            del seq.tokens[len(seq.request.prompt) + num_tokens :]
            self._end(seq, "stop", now)

    # The loop: plan, late, commit

    def plan(self, now: float) -> Step | None:
        """The next step, or None when nothing can run before a commit."""
        suspect = self._next_suspect()
        alone = self._reset or suspect is not None  # such a step waits for those in flight
        if len(self._in_flight) >= (1 if alone else self.config.steps_in_flight):
            return None
        builder = StepBuilder(self._next_step, len(self.cache.pools), reset=self._reset)
        if suspect is None:
            self._branch_waiting(now)
        left = self._advance(self._running if suspect is None else [suspect], builder, now)
        for seq in self._running if self._reset else self._branched:
            builder.open(seq)  # after advancing, which may have preempted some
        if suspect is None:
            self._admit(builder, left, now)
        if not builder.chunks:
            return None
        self._reset = False
        self._branched = []
        self._next_step += 1
        self._in_flight.append(_Launched(builder.id, builder.entries, builder.num_tokens))
        return builder.build(self.cache.launched(builder.id))

    def late(self, step: Step) -> Late:
        """What sampling `step` needs that its plan could not contain: masks of constrained rows."""
        del step  # nothing is constrained yet
        return Late.nothing()

    def commit(self, result: StepResult, now: float) -> list[Output]:
        """Take in what came of the oldest step in flight."""
        if not self._in_flight or self._in_flight[0].id != result.step_id:
            raise ValueError(f"step {result.step_id} was committed, but is not the oldest in flight")
        launched = self._in_flight.popleft()
        if result.error:
            self.cache.failed(launched.id)
            return self._roll_back(launched, result.error, now)
        self.cache.collected(launched.id)
        self.pace.observe(launched.num_tokens, result.seconds)
        outputs = []
        tokens, extras, at = result.tokens.tolist(), Extras(result), 0
        for entry, count in zip(launched.entries, result.counts.tolist(), strict=True):
            seq, _, stop, epoch, num_told = entry
            news = extras.take(entry, at, count) if num_told or extras.has_logprobs else NOTHING
            if not seq.finished and seq.epoch == epoch:
                seq.suspect = False
                self._wrote(seq, stop, now)
                if count or num_told or seq.is_over:
                    outputs.append(self._take(entry, tokens[at : at + count], news, now))
            at += count
        return outputs

    @property
    def leaks(self) -> bool:
        """Whether nothing is left to do and yet not every block is free. Costs nothing: asked after each step."""
        return not self.has_work and self.cache.num_free < self.cache.num_blocks

    def check(self) -> list[str]:
        """Complaints about memory that does not add up, or that nobody should own; empty when all is well."""
        wrong = self.cache.check()
        strangers = [seq_id for seq_id in self.cache.tables if not self._is_running(seq_id)]
        if strangers:
            wrong.append(f"sequences {strangers} do not run and have tables")
        return wrong

    def repair(self) -> None:
        """Give back what nobody should own, and make reference counts add up. For an engine that has logged `check`."""
        for seq_id in list(self.cache.tables):
            if not self._is_running(seq_id):
                self.cache.release(seq_id)
        self.cache.repair()

    def _is_running(self, seq_id: int) -> bool:
        return seq_id in self._sequences and self._sequences[seq_id].row >= 0

    # Planning

    def _advance(self, sequences: list[Sequence], builder: StepBuilder, now: float) -> int:
        """Give each sequence some of the tokens it lacks; returns the tokens left in the budget.

        Everybody gets one token before anybody gets a second, so that a long prompt delays no one.
        """
        budget = self.pace.tokens_within(self.config.step_seconds, self.config.max_num_batched_tokens)
        spare = budget - len(sequences)
        i = 0
        while i < len(sequences):
            seq = sequences[i]
            start = seq.num_computed
            lacking = min(len(seq.tokens) + seq.num_pending, seq.limit) - start
            if lacking <= 0:
                spare += 1
                i += 1
                continue
            take = min(lacking, 1 + max(spare, 0))
            if start + take > seq.table.capacity and not self._grow(seq, start + take, builder, now):  # type: ignore[union-attr]
                if seq.row < 0:  # it was the latest arrival itself
                    continue
                spare += 1
            else:
                self._plan_chunk(seq, take, builder)
                spare -= take - 1
            i += 1
        return spare

    def _grow(self, seq: Sequence, num_tokens: int, builder: StepBuilder, now: float) -> bool:
        """Back the first `num_tokens` positions, preempting the latest arrivals while blocks are short."""
        assert seq.table is not None
        while (firsts := self.cache.grow(seq.table, num_tokens)) is None:
            if self.cache.fits_once_collected(seq.table, num_tokens):
                return False  # steps in flight are about to give back enough
            if self.cache.windowed and self._is_in_flight(seq):
                return False  # when they are committed, blocks of its own leave the window
            victim = self._running[-1]
            self._preempt(victim, f"no free block for sequence {seq.id}", now)
            if victim is seq:
                return False
        builder.give_blocks(seq, firsts)
        return True

    def _admit(self, builder: StepBuilder, left: int, now: float) -> None:
        """Start waiting sequences, first come first served, while tokens, rows and blocks last."""
        while left > 0 and self._free_rows and (seq := self._queue.head) is not None:
            if self._is_in_flight(seq):
                return  # preempted a moment ago: tokens of it are still under way
            take = min(len(seq.tokens), seq.limit, left)
            table = self.cache.open(seq.id)
            spare = self._spare if self._running else None
            if self.cache.grow(table, take, reserve=len(seq.tokens), spare=spare) is None:
                self.cache.release(seq.id)
                return
            self._queue.pop()
            self._run(seq, table, 0, now)
            builder.open(seq)
            self._plan_chunk(seq, take, builder)
            left -= take

    def _plan_chunk(self, seq: Sequence, take: int, builder: StepBuilder) -> None:
        """The sequence's next `take` tokens; the last token known so far yields the next one."""
        start = seq.num_computed
        stop = seq.num_computed = start + take
        told = max(0, min(stop, seq.to_tell) - max(start, seq.num_told)) if seq.to_tell else 0
        if stop == len(seq.tokens) + seq.num_pending and seq.samples:
            seq.num_pending += 1
            builder.chunks.append((seq.row, seq.id, start, stop, 0, told + 1, _SAMPLE))
        else:
            builder.chunks.append((seq.row, seq.id, start, stop, 0, told, _POOL if told and seq.pools else _NONE))
        builder.entries.append((seq, start, stop, seq.epoch, told))
        builder.num_tokens += take
        seq.last_step = builder.id

    def _run(self, seq: Sequence, table: BlockTable, num_computed: int, now: float) -> None:
        """A sequence that waited has blocks and gets a row."""
        seq.row = self._free_rows.pop()
        seq.table = table
        seq.num_computed = seq.num_written = num_computed
        insort(self._running, seq, key=ARRIVAL)
        self.events.append(Admitted(now, seq.request.id, seq.id, now - seq.since, num_computed))

    def _preempt(self, seq: Sequence, reason: str, now: float) -> None:
        """Take a sequence's row and blocks; it goes back to the queue and is computed again."""
        self.num_preemptions += 1
        self.events.append(Preempted(now, seq.request.id, seq.id, seq.num_computed, reason))
        self._free(seq)
        seq.num_computed = seq.num_written = 0
        seq.since = now
        self._queue.put(seq)

    def _is_in_flight(self, seq: Sequence) -> bool:
        return bool(self._in_flight) and seq.last_step >= self._in_flight[0].id

    # Sequences of one request: the prompt is computed once

    def _branch_waiting(self, now: float) -> None:
        """Start those at the head of the queue whose prompt is computed: never run yet, or preempted."""
        while (seq := self._queue.head) is not None:
            donor = self._families.donor(seq)
            if donor is None or self._is_in_flight(seq) or not self._branch(seq, donor, now):
                return
            self._queue.pop()

    def _branch(self, seq: Sequence, donor: Sequence, now: float) -> bool:
        """Start a sequence on the KV of `donor`, up to the last token of their prompt, where there is room."""
        if not self._free_rows:
            return False
        table = self.cache.branch(donor.id, seq.id, seq.num_shared, reserve=len(seq.tokens), spare=self._spare)
        if table is None:
            return False
        self._run(seq, table, seq.num_shared, now)
        self._branched.append(seq)
        return True

    def _next_suspect(self) -> Sequence | None:
        """A running sequence that was part of a failed step and has not run since."""
        while self._suspects:
            seq = self._suspects[0]
            if seq.suspect and not seq.finished and seq.row >= 0:
                return seq
            seq.suspect = False
            self._suspects.popleft()
        return None

    # Committing

    def _wrote(self, seq: Sequence, num_tokens: int, now: float) -> None:
        """The KV of the first `num_tokens` positions is there, and stays unless the sequence is preempted."""
        if seq.row < 0:
            return
        seq.num_written = num_tokens
        if num_tokens >= seq.num_shared > 0:
            for held in self._families.release(seq.request.id):
                if not self._branch(held, seq, now):
                    self._queue.put(held)
        if self.cache.windowed:
            assert seq.table is not None
            self.cache.trim(seq.table, num_tokens)

    def _take(self, entry: Entry, tokens: list[int], news: News, now: float) -> Output:
        """What came of a chunk: append sampled tokens, and see whether the sequence ends."""
        seq, _, stop, _, num_told = entry
        if num_told:
            seq.num_told = min(stop, seq.to_tell)
        kept, reason, error = seq.extend(tokens) if tokens else (tokens, None, "")
        if seq.is_over:
            reason = "stop" if seq.pools else "length"
        if reason is not None:
            self._end(seq, reason, now)
        stop_token = kept[-1] if kept and reason == "stop" else None
        request_id = seq.request.id
        if news is NOTHING:
            return Output(request_id, seq.index, seq.id, kept, reason, stop_token, error=error)
        logprobs, scored, pooled = news
        logprobs = None if logprobs is None else logprobs.slice(0, len(kept))
        return Output(request_id, seq.index, seq.id, kept, reason, stop_token, logprobs, scored, pooled, error=error)

    def _end(self, seq: Sequence, reason: str, now: float) -> None:
        """The sequence is over: its row and blocks are free, as soon as no step in flight needs them."""
        seq.finished = True
        if seq.row >= 0:
            self._free(seq)
        del self._sequences[seq.id]
        self._families.remove(seq)
        self.events.append(Finished(now, seq.request.id, seq.id, reason, seq.num_generated))

    def _free(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._branched = [one for one in self._branched if one is not seq]
        self.cache.release(seq.id)
        self._free_rows.append(seq.row)
        seq.row, seq.table = -1, None

    def _roll_back(self, failed: _Launched, error: str, now: float) -> list[Output]:
        """Undo a failed step. Its sequences become suspects; one that fails again, alone, ends with the error."""
        self._reset = True
        self.events.append(StepFailed(now, "", failed.id, error))
        alive = [(seq, start) for seq, start, _, epoch, _ in failed.entries if not seq.finished and seq.epoch == epoch]
        outputs = []
        for seq, start in alive:
            seq.epoch += 1  # chunks of it in later steps built on this one
            seq.num_pending = 0
            seq.num_computed = min(seq.num_computed, start)
            if seq.suspect and len(failed.entries) == 1:
                self._end(seq, "error", now)
                outputs.append(Output(seq.request.id, seq.index, seq.id, [], "error", error=error))
            else:
                seq.suspect = True
                self._suspects.append(seq)
        return outputs
