"""The scheduler: requests in, Steps out, StepResults in, Outputs out.

The scheduler is a pure function of its inputs. It reads no clock (time is an argument), draws no random numbers, and
touches no bytes of KV.

There are no phases. Every step gives each running sequence some of its uncomputed tokens, within a budget of tokens
and of predicted time. Prefill, chunked prefill, decode and resumption after a preemption follow this one rule.

The policy orders the waiting queue (`queue/`). Running sequences are sorted by class and arrival; the last one is
preempted first.

A sequence starts with its prefix match. Its tokens enter the prefix index as soon as they are planned, so that of
requests that arrive together only the first computes their common prefix. Of a request's n sequences the first
computes the prompt. The others are held until that is committed. Then they branch: they share its blocks, and
compute only the last prompt token again, for its logits.

At most `steps_in_flight` steps are planned and not committed. A failed step is rolled back. Its sequences then run
one per step, and a sequence that fails again alone ends with an error.
"""

from collections import Counter, deque
from collections.abc import Mapping

from quire.cache.manager import KVCacheManager
from quire.cache.prefix.index import EvictionCause
from quire.cache.swap_planner import bytes_swapped
from quire.config import SchedulerConfig
from quire.core.adapter import ADAPTER, Adapter, AdapterLoad
from quire.core.constraint import Constraints
from quire.core.explanation import Explanation
from quire.core.output import NO_SEQUENCE, EndCause, Output
from quire.core.prompt_progress import PromptProgress
from quire.core.request import CONSTRAINT, Request
from quire.core.runner import RowProcessors
from quire.core.step import SamplingMasks, Step, StepResult
from quire.cost.step_time import Calibration, CostModel
from quire.errors import ConfigError, DeadlineUnreachable, QueueFull, RequestError
from quire.scheduler.batch import BatchComposer
from quire.scheduler.beam_search import check_search
from quire.scheduler.beam_sequences import BeamSequences
from quire.scheduler.constraints import StructuredOutputManager
from quire.scheduler.deadlines import Deadlines
from quire.scheduler.lifecycle import InFlightStep, SchedulerState
from quire.scheduler.output_processing import OutputProcessor
from quire.scheduler.queue_limit import QueueLimit
from quire.scheduler.request_state import RequestState
from quire.scheduler.sequence import Sequence
from quire.scheduler.speculation import Speculator
from quire.scheduler.step_budget import StepBudget
from quire.scheduler.step_builder import StepBuilder
from quire.scheduler.step_log import StepLog

_MOST_WITH_STATES = 2  # steps in flight
_MAX_FAILED_WITH_MOVES = 3  # failed steps in a row after which no sequence waits for Moves any more


class Scheduler:
    """Plans Steps from requests, and turns StepResults into Outputs."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager, constraints: Constraints | None = None) -> None:
        """constraints: None rejects constrained requests. Raises ConfigError if the cache cannot hold one sequence."""
        if not cache.config.fits_sequence(config.max_model_len, config.max_num_batched_tokens):
            raise ConfigError(
                f"{cache.config} cannot hold one sequence of max_model_len ({config.max_model_len}); give the cache "
                "more memory or lower max_model_len"
            )
        if cache.states is not None and config.steps_in_flight > _MOST_WITH_STATES:
            raise ConfigError(
                f"steps_in_flight ({config.steps_in_flight}) must be at most {_MOST_WITH_STATES} for a model with "
                "recurrent states, which keep room for one token that may be replaced; lower steps_in_flight"
            )
        self.config = config
        self.cache = cache
        self.costs = CostModel(has_states=cache.config.states is not None)
        cache.set_recompute_seconds(self.costs.recompute_seconds)
        self._structured_outputs = StructuredOutputManager(constraints)
        self.state = SchedulerState(config, cache, self.costs, self._forget)
        self.request_stats = self.state.request_stats
        self.speculator: Speculator | None = None
        if config.speculation:
            self.speculator = Speculator(config, cache, self.costs, self._structured_outputs, self.request_stats)
        self.step_budget = StepBudget(config, self.costs)
        self._batch = BatchComposer(config, cache, self.state, self.step_budget, self.speculator)
        self._deadlines = Deadlines(config, cache, self.state, self.costs)
        self._queue_limit = QueueLimit(config, cache, self.state, self.costs, self.step_budget)
        self._output_processor = OutputProcessor(
            cache,
            self.state,
            BeamSequences(cache, self.state),
            self._structured_outputs,
            self._queue_limit,
            self.speculator,
        )
        self.predicted_seconds = 0.0  # of the step planned last; 0 without observations
        self.step_log: StepLog | None = None  # see `log_steps`
        self._begun: list[str] = []  # see `take_begun`
        self._pending_outputs: list[Output] = []  # outputs of sequences that ended outside of a commit
        self._to_run_alone: deque[Sequence] = deque()
        self._next_step = 0
        self._num_failed_in_a_row = 0  # failed steps since the last successful one
        self._reset = True  # the next Step has to reset the runner: it has no rows, or its rows are invalid

    @property
    def num_running(self) -> int:
        """Number of sequences that have a row and blocks."""
        return len(self.state.running_queue.running)

    @property
    def num_waiting(self) -> int:
        """Number of unfinished sequences without a row: queued, held, or waiting for prerequisites."""
        waiting = len(self.state.sequences) - len(self.state.running_queue.running)
        if self.state.num_unready:
            waiting += sum(one.request.num_unfinished for one in self.state.requests.values() if one.waits_for)
        return waiting

    @property
    def prompt_progress(self) -> PromptProgress:
        """The progress of running prompts that take more than one step."""
        return self.state.running_queue.prompt_progress

    @property
    def num_counted(self) -> dict[str, int]:
        """The counted prompt tokens of unfinished requests whose prompt was counted in part, by request id."""
        return {name: one.num_prompt_done for name, one in self.request_stats.counted_in_part.items()}

    @property
    def has_unready(self) -> bool:
        """Whether a request waits for prerequisites, or an adapter is loaded."""
        return self.state.num_unready > 0 or self.state.adapters.has_work

    @property
    def last_step_positions(self) -> list[tuple[str, int]]:
        """(request id, stop) of each chunk of the step planned last, which must be in flight."""
        return [(chunk.seq.request.id, chunk.stop) for chunk in self.state.in_flight[-1].scheduled]

    @property
    def has_work(self) -> bool:
        """Whether there are unfinished requests, loads, steps or Moves in flight or planned, or pending outputs."""
        state, has_moves = self.state, self._waits_for_moves or self.cache.has_urgent_moves
        return bool(state.requests or state.in_flight or self._pending_outputs or has_moves or state.adapters.has_work)

    @property
    def _waits_for_moves(self) -> bool:
        """Whether Moves are in flight, and the runner may still complete them."""
        return self.cache.has_moves_in_flight and self._num_failed_in_a_row < _MAX_FAILED_WITH_MOVES

    def close(self) -> None:
        """Do nothing. A subclass that writes a journal closes it."""

    def calibrate(self, calibration: Calibration) -> None:
        """Fit the cost model to measurements on the runner, whose rows are invalid afterwards; choose the target TPOT.

        Raises ValueError if a step is in flight.
        """
        if self.state.in_flight:
            raise ValueError("a step is in flight: calibrate before or between steps")
        self.costs.calibrate(calibration)
        if calibration.decode:
            self.step_budget.choose_target()
        self._reset = True

    def log_steps(self, *, wanted: bool) -> None:
        """Start to record steps in `step_log`, or stop it."""
        self.step_log = StepLog(self.request_stats.num_preemptions, self.cache.num_evicted) if wanted else None
        self._output_processor.step_log = self.step_log

    @property
    def last_step(self) -> int:
        """Id of the step planned last; -1 before the first."""
        return self._next_step - 1

    # Inputs about requests

    def add(self, request: Request, now: float) -> None:
        """Queue a request. One that waits for prerequisites is queued by `ready`.

        Raises RequestError for an id that is in use, a beam search or an adapter that cannot fit, or a constraint that
        is not supported; QueueFull; DeadlineUnreachable. A request whose sequences have all finished before has no
        outputs.
        """
        if request.id in self.state.requests:
            raise RequestError(f"request id {request.id!r} is in use; choose another", "request_id")
        check_search(request, self.config, self.cache.config)
        self._structured_outputs.check(request)
        self.state.adapters.check_request(request)
        try:
            self._deadlines.check(request)
            self._queue_limit.check(request, now)
        except (DeadlineUnreachable, QueueFull) as error:
            self.request_stats.rejected(request, error, now)
            raise
        if not request.num_unfinished:
            return
        state = self.state.add(request, now)
        if state.waits_for:
            self._deadlines.add_unready(state)
        else:
            self._enqueue(state, now)

    def ready(self, request_id: str, what: str, error: str, now: float) -> bool:
        """Queue a request once the last of its prerequisites is ready, or end it if `error` is not empty.

        what: the name of a prerequisite. Ignores one for which the request does not wait, and an unknown id. Returns
        whether the request waits no longer.
        """
        return self._ready(request_id, what, error, now)

    def _ready(self, request_id: str, what: str, error: str, now: float) -> bool:
        """See `ready`."""
        state = self.state.requests.get(request_id)
        if state is None or what not in state.waits_for:
            return state is None or not state.waits_for
        if error:
            self._end_unready(state, EndCause.NOT_COMPILED if what == CONSTRAINT else EndCause.NOT_READY, error, now)
            return True
        self.request_stats.ready(state, what, now)
        if state.waits_for:
            return False
        self._enqueue(state, now)
        return True

    def take_adapter_loads(self) -> list[AdapterLoad]:
        """Return and clear the loads to be started. `plan` decides them; their bytes are reserved."""
        return self.state.adapters.take_loads()

    def adapter_loaded(self, digest: str, error: str, now: float) -> None:
        """A load has ended: an adapter is in memory, or `error` ends the requests that wait for it.

        Ignores an adapter that is not being loaded.
        """
        for request_id in self.state.adapters.loaded(digest, failed=bool(error)):
            self._adapter_ready(request_id, error, now)

    def pin_adapter(self, adapter: Adapter, now: float, *, pinned: bool) -> None:
        """Load an adapter and keep it in memory, or let it be evicted again.

        Raises RequestError for one that does not fit beside the other pinned ones.
        """
        del now
        if pinned:
            self.state.adapters.pin(adapter)
        else:
            self.state.adapters.unpin(adapter.digest)

    def take_begun(self) -> list[str]:
        """Return and clear the ids of requests with other prerequisites too that waited for their adapter last."""
        begun, self._begun = self._begun, []
        return begun

    def _adapter_ready(self, request_id: str, error: str, now: float) -> None:
        request = self.state.requests[request_id].request
        if self._ready(request_id, ADAPTER, error, now) and len(request.waits_for) > 1:
            self._begun.append(request_id)

    def _load_adapters(self, now: float) -> None:
        """Start the loads for which there is room, and queue requests whose adapter is not drained any more."""
        for request_id in self.state.adapters.advance(self._oldest_step):
            self._adapter_ready(request_id, "", now)

    @property
    def _oldest_step(self) -> int | None:
        """Id of the oldest step in flight."""
        return self.state.in_flight[0].id if self.state.in_flight else None

    def _end_unready(self, state: RequestState, cause: EndCause, error: str, now: float) -> None:
        """End a request that waits for prerequisites."""
        request = state.request
        self.state.end_all(request.id, cause, now)
        indices = range(request.num_sequences if request.beams is None else request.params.n)
        open_ones = [i for i, known in enumerate(request.known_outputs) if not known.finished]
        for i in open_ones if request.known_outputs else indices:
            self._pending_outputs.append(Output(request.id, i, NO_SEQUENCE, [], cause, error=error))

    def abort(self, request_id: str, now: float) -> None:
        """End all sequences of a request. It has no further outputs. Ignores an unknown id."""
        self.cache.advance_clock(now)
        self._pending_outputs = [output for output in self._pending_outputs if output.request_id != request_id]
        self.state.end_all(request_id, EndCause.ABORT, now)

    def finish(self, seq_id: int, num_tokens: int, now: float) -> None:
        """End a sequence after `num_tokens` output tokens, because the front end found a stop string.

        Later tokens are dropped. The sequence has no further outputs. Ignores beams, and an unknown id: the sequence
        may have ended before. Raises ValueError for a negative `num_tokens`.
        """
        self.cache.advance_clock(now)
        if num_tokens < 0:
            raise ValueError(f"a sequence cannot have ended after {num_tokens} tokens")
        seq = self.state.sequences.get(seq_id)
        if seq is not None and seq.request.beams is None:  # beams end with their search
            seq.truncate(num_tokens)
            self._output_processor.record_length(seq)
            self.state.end(seq, EndCause.STOP, now)

    def end_program(self, tenant: str, program: str, branch: str | None, now: float) -> None:
        """Mark a branch of a program as finished, or all its branches (None). Ignores unknown ones."""
        self.cache.advance_clock(now)
        self.state.end_program(tenant, program, branch)

    def served_elsewhere(self, service: Mapping[str, int]) -> None:
        """Count service that other engines of a fleet gave: weighted tokens by tenant. Only `fair` depends on it.

        Raises ValueError for negative service.
        """
        if any(tokens < 0 for tokens in service.values()):
            raise ValueError(f"service cannot be negative: {service}")
        self.state.queue.served_elsewhere(service)

    def report_service(self) -> None:
        """Begin to count the service of each tenant for `take_service`, under the policy `fair`."""
        self.state.queue.report_service()

    def take_service(self) -> dict[str, int]:
        """Return and clear the service of each tenant, in weighted tokens. See Queue."""
        return self.state.queue.take_service()

    def flush(self, now: float) -> int:
        """Evict all idle blocks, pinned ones included, and forget drafts. Returns the number of freed blocks."""
        if self.speculator is not None:
            self.speculator.flush()
        return self.cache.flush(EvictionCause(now))

    def explain(self, request_id: str, now: float) -> Explanation | None:
        """The explanation of a request; None if it is unknown or no longer kept."""
        self.request_stats.take_cache_events(self.cache, now)
        return self.request_stats.explain(request_id, [seq.id for seq in self.state.members(request_id)], now)

    # The loop: plan, late, commit

    def plan(self, now: float) -> Step | None:
        """The next step, or None if there is nothing to run before the next commit.

        Ends waiting requests that cannot meet their deadline; `take_ended` returns their outputs. Decides which
        adapters are loaded next; `take_adapter_loads` returns them.
        """
        self.cache.advance_clock(now)
        self._load_adapters(now)
        self._end_past_deadline(now)
        suspect = self._next_to_run_alone()
        alone = self._reset or suspect is not None  # no other step may be in flight
        in_flight = self.state.in_flight
        if len(in_flight) >= (1 if alone else self.config.steps_in_flight) or (in_flight and in_flight[-1].exclusive):
            return None
        builder = StepBuilder(self._next_step, len(self.cache.pools), self.cache.states, reset=self._reset)
        if suspect is None:
            self._batch.schedule(builder, now)
        else:
            self._batch.schedule_alone(suspect, builder, now)
        opened = {seq.id for seq in builder.new_rows}
        for seq in self.state.running_queue.running if self._reset else self.state.running_queue.unsent:
            if seq.id not in opened:
                builder.add_row(seq)
        for seq, first in () if self._reset else self.state.running_queue.corrected:
            builder.rewrite_tokens(seq, first)
        self.request_stats.take_cache_events(self.cache, now)
        waits_for_moves = not in_flight and self._waits_for_moves  # its result waits for them
        if not (builder.chunks or builder.swapped_in or self.cache.has_urgent_moves or waits_for_moves):
            return None
        self._reset = False
        self.state.running_queue.mark_sent()
        self._next_step += 1
        step = builder.build(self.cache.launched(builder.id), self.state.adapters)
        num_tokens = builder.num_tokens
        has_prompts = num_tokens - builder.num_drafts > len(step.chunks)
        num_pairs = step.chunks.num_attention_pairs if has_prompts else 0.0
        self.state.in_flight.append(
            InFlightStep(
                builder.id,
                builder.scheduled,
                num_tokens,
                num_pairs,
                alone,
                builder.swapped_in,
                builder.num_drafts,
                builder.num_proposals,
                builder.num_indexed_tokens,
            )
        )
        self.predicted_seconds = self.costs.predicted_step_seconds(num_tokens, num_pairs)
        if self.step_log is not None:
            counters = self.request_stats.num_preemptions, self.cache.num_evicted
            self.step_log.planned(self.state.in_flight[-1], now, self.predicted_seconds, self.num_waiting, counters)
        return step

    def take_ended(self) -> list[Output]:
        """Return and clear the outputs of sequences that ended outside of a commit.

        Such sequences cannot meet their deadline, have a prerequisite that could not be prepared, or end with their
        known or forced tokens.
        """
        outputs, self._pending_outputs = self._pending_outputs, []
        return outputs

    @property
    def samples_need_commits(self) -> bool:
        """Whether what the step planned last samples depends on the tokens of all steps before it."""
        scheduled = self.state.in_flight[-1].scheduled
        return any(chunk.seq.constrained or chunk.seq.request.params.logits_processors for chunk in scheduled)

    def sampling_masks(self, step: Step) -> SamplingMasks:
        """The sampling masks of the constrained rows of `step`, which must be the step planned last."""
        return self._structured_outputs.sampling_masks(step, self.state.in_flight[-1])

    def logits_processors(self, step: Step) -> list[RowProcessors]:
        """The logits processors of the rows of `step` that sample a token; `step` must be the step planned last."""
        samples = step.chunks.samples.tolist()
        return [
            RowProcessors(row, request.params.logits_processors, request.prompt, seq.tokens[len(request.prompt) :])
            for row, chunk, is_sampled in zip(
                step.chunks.rows.tolist(), self.state.in_flight[-1].scheduled, samples, strict=True
            )
            if is_sampled and chunk.is_valid and (request := (seq := chunk.seq).request).params.logits_processors
        ]

    def commit(self, result: StepResult, now: float) -> list[Output]:
        """Apply the result of the oldest in-flight step. Raises ValueError for the result of another step."""
        if not self.state.in_flight or self.state.in_flight[0].id != result.step_id:
            raise ValueError(f"step {result.step_id} was committed, but is not the oldest in flight")
        self.cache.advance_clock(now)
        launched = self.state.in_flight.popleft()
        if result.error:
            if self.speculator is not None:
                self.speculator.step_failed()
            if self.step_log is not None:
                self.step_log.committed(launched.id, None)
            alone = launched.scheduled[0].seq.id if len(launched.scheduled) == 1 else None
            starts = {seq.id: start for seq, start, _ in _alive(launched)}
            for seq_id in self.cache.failed(launched.id, starts):
                if seq_id != alone:  # which depends on no other sequence of this step
                    self.state.restart(self.state.sequences[seq_id], now)
            self.state.update_swapped()
            self._num_failed_in_a_row += 1
            if self._num_failed_in_a_row >= _MAX_FAILED_WITH_MOVES:
                self.state.restart_swapping(now)
            return self._roll_back(launched, result.error, now)
        self._num_failed_in_a_row = 0
        self.cache.collected(launched.id)
        if result.done_moves:
            bytes_out, bytes_in = bytes_swapped(self.cache.moves_done(result.done_moves), self.cache.config)
            seconds_out, seconds_in = result.swap_seconds
            self.costs.observe_copies(bytes_out, seconds_out, bytes_in, seconds_in)
        self.state.end_swap_ins(launched.swapped_in)
        if not result.captured:
            num_rows = len(launched.scheduled)
            self.costs.observe_step(launched.num_tokens, result.seconds, launched.num_pairs, num_rows=num_rows)
        if self.speculator is not None:
            self.speculator.observe_step(launched, None if result.captured else result.seconds, now)
        outputs = self._output_processor.process(launched, result, now)
        if result.proposals and self.speculator is not None:
            self.speculator.receive(launched, result.proposals)
        return outputs

    @property
    def leaks(self) -> bool:
        """Whether blocks are in use although there is no work. Cheap enough for a call after each step."""
        if self.has_work:
            return False
        used = self.cache.pools.num_blocks - self.cache.pools.num_available - self.cache.num_pinned
        used += self.cache.host_pools.num_blocks - self.cache.host_pools.num_free
        if self.cache.states is not None:
            used += self.cache.states.pool.num_blocks - self.cache.states.pool.num_available
        return used > 0

    def check(self) -> list[str]:
        """Errors in the block accounting, tables and host blocks of sequences, counts of pending samples, adapters."""
        wrong = self.cache.check()
        wrong += self.state.adapters.check([state.request for state in self.state.requests.values()])
        chunks = Counter(chunk.seq.id for step in self.state.in_flight for chunk in step.scheduled if chunk.is_valid)
        for seq in self.state.sequences.values():
            if seq.num_pending + seq.num_ignored_samples > chunks[seq.id]:
                wrong.append(
                    f"sequence {seq.id} waits for {seq.num_pending} samples and {seq.num_ignored_samples} to ignore, "
                    f"and has {chunks[seq.id]} chunks in flight"
                )
        strangers = [seq_id for seq_id in self.cache.tables if not self.state.is_running(seq_id)]
        if strangers:
            wrong.append(f"sequences {strangers} have tables, but are not running")
        strangers = [seq_id for seq_id in self.cache.swapped if not self.state.is_swapped(seq_id)]
        if strangers:
            wrong.append(f"sequences {strangers} are in the host pool, but are not waiting")
        return wrong

    def repair(self) -> None:
        """Repair reference counts, and release blocks without an owner. For an engine that has logged `check`."""
        self.cache.repair()  # first, because a release needs a consistent index
        for seq_id in list(self.cache.tables):
            if not self.state.is_running(seq_id):
                self.cache.release(seq_id)
        for seq_id in list(self.cache.swapped):
            if not self.state.is_swapped(seq_id):
                self.cache.drop_swapped(seq_id)

    def _forget(self, seq: Sequence) -> None:
        """Drop what is kept for a sequence that has ended."""
        self._structured_outputs.end(seq)
        if self.speculator is not None:
            self.speculator.end(seq)

    def _next_to_run_alone(self) -> Sequence | None:
        """A running sequence of a failed step that has not succeeded since. Drops suspects that do not run."""
        while self._to_run_alone:
            seq = self._to_run_alone[0]
            if seq.runs_alone and not seq.finished and seq.row >= 0:
                return seq
            self._to_run_alone.popleft()
        return None

    def _enqueue(self, state: RequestState, now: float) -> None:
        """Queue a request, and end its sequences that are complete with their known or forced tokens."""
        request = state.request
        ends: dict[int, tuple[EndCause | None, str]] = {}

        def begin(seq: Sequence) -> None:
            if seq.known_end is None:
                ends[seq.id] = self._structured_outputs.begin(seq)

        sequences = self.state.begin(state, now, begin if request.is_constrained else None)
        self._queue_limit.add(request, now)
        self._deadlines.add(state)
        for seq in sequences if request.known_outputs else ():
            if seq.id not in ends:
                self._end_known(seq, now)
        for seq in sequences if ends else ():
            cause, error = ends.get(seq.id, (None, ""))
            if cause is not None:
                self._end_forced(seq, cause, error, now)

    def _end_forced(self, seq: Sequence, cause: EndCause, error: str, now: float) -> None:
        """End a sequence with its first forced tokens. If it still has to output prompt data, it ends after those."""
        if seq.num_reported < seq.num_to_report:
            seq.finish_after_prompt(cause, error)
            return
        tokens = seq.take_unreported()
        self._output_processor.record_length(seq)
        self.state.end(seq, cause, now)
        stop_token = tokens[-1] if tokens and cause == EndCause.STOP and tokens[-1] in seq.stop_ids else None
        about = (seq.request.id, seq.index, seq.id, tokens, cause, stop_token)
        self._pending_outputs.append(Output(*about, error=error, forced=tuple(range(len(tokens)))))

    def _end_known(self, seq: Sequence, now: float) -> None:
        """End a sequence if the known tokens of its request complete it."""
        if (known := seq.known_end) is not None:
            cause, stop_token = known
            self.state.end(seq, cause, now)
            self._pending_outputs.append(Output(seq.request.id, seq.index, seq.id, [], cause, stop_token))

    def _end_past_deadline(self, now: float) -> None:
        """End waiting requests that cannot meet their deadline any more."""
        for state in self._deadlines.missed(now):
            request, members = state.request, state.sequences
            error = f"the request waited too long to meet its deadline of {request.scheduling_params.deadline:.3g} s"
            if state.waits_for:
                self._end_unready(state, EndCause.DEADLINE, error, now)
                continue
            ended = [(seq.index, seq.id) for seq in members]
            if request.beams is not None:
                ended = [(i, members[0].id) for i in range(request.params.n)]
            self._pending_outputs += [
                Output(request.id, i, seq_id, [], EndCause.DEADLINE, error=error) for i, seq_id in ended
            ]
            self.state.end_all(request.id, EndCause.DEADLINE, now)

    # Committing

    def _roll_back(self, failed: InFlightStep, error: str, now: float) -> list[Output]:
        """Undo a failed step. Its sequences become suspects. A suspect that fails again alone ends with the error."""
        self._reset = True
        self.request_stats.failed(failed.id, error, now)
        outputs = []
        for seq, start, stop in _alive(failed):
            failed_before = seq.runs_alone
            # with its state lost, too, a sequence may need several chunks to come to the failed one
            seq.roll_back(start, alone_until=0 if self.cache.states is None else stop)
            if failed_before and len(failed.scheduled) == 1:
                if seq.request.beams is not None:
                    return self._output_processor.fail_search(seq, EndCause.STEP_FAILED, error, now)
                self.state.end(seq, EndCause.STEP_FAILED, now)
                outputs.append(Output(seq.request.id, seq.index, seq.id, [], EndCause.STEP_FAILED, error=error))
            else:
                self._to_run_alone.append(seq)
                if self.cache.states is not None:
                    self.state.rewind(seq, now)
        return outputs


def _alive(launched: InFlightStep) -> list[tuple[Sequence, int, int]]:
    """The sequences of a step whose chunk still counts, with its positions [start, stop), drafts left out."""
    return [(chunk.seq, chunk.start, chunk.stop - len(chunk.drafts)) for chunk in launched.scheduled if chunk.is_valid]
