"""The scheduler: plan(), late(), commit(). Pure: no clock, no randomness, no bytes; time is an argument.

One rule, no phases. Every step gives each running sequence some of the tokens it lacks, so that
computed tokens catch up with known tokens, within a budget of tokens and of predicted time. Prefill,
chunked prefill, decode and coming back from preemption are the same rule with other numbers.

Who waits is ordered by the policy (`queues/`), who runs by class and arrival: the last one that runs is the first to
lose its blocks.

A sequence begins with what the prefix index has of its tokens, and what it computes enters the index as soon as
it is planned: of requests that arrive together only the first computes what they have in common. Of a request's n
sequences the first computes the prompt; the others are held until that is committed, then branch off: they share
its blocks, and compute only the last token of the prompt again, for its logits.

Up to `steps_in_flight` steps may be planned and not committed. A failed step is rolled back; its
sequences are then tried one to a step, and one that fails again, alone, ends with an error.
"""

from collections import deque

from quire.cache.index import Cause
from quire.cache.kv_cache import KVCache
from quire.cache.swapping import bytes_swapped
from quire.config import SchedulerConfig
from quire.core.explanation import Explanation
from quire.core.output import Output
from quire.core.request import Request
from quire.core.step import Late, Step, StepResult
from quire.cost.block_use import BlockUse
from quire.cost.costs import Calibration, Costs
from quire.errors import ConfigError, DeadlineUnreachable, QueueFull, RequestError
from quire.sched.builder import Entry, StepBuilder
from quire.sched.deadlines import Deadlines
from quire.sched.filling import Filling
from quire.sched.lives import Launched, Lives
from quire.sched.queue_bound import QueueBound
from quire.sched.results import NOTHING, Extras, News
from quire.sched.searches import Searches, check_search
from quire.sched.sequence import Sequence

_STEPS_PER_SAMPLE = 16  # of how full tables are


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
        self.costs = Costs()
        cache.predict_with(self.costs.recompute_seconds)
        self.block_use = BlockUse(cache.block_size)
        self._lives = Lives(config, cache, self.costs)
        self.accounts = self._lives.accounts
        self._searches = Searches(cache, self._lives)
        self._filling = Filling(config, cache, self._lives, self.costs.pace)
        self._deadlines = Deadlines(config, cache, self._lives, self.costs)
        self._bound = QueueBound(config, cache, self._lives, self.costs)
        self.predicted_seconds = 0.0  # of the step planned last; 0 where nothing is known
        self._unsaid: list[Output] = []  # of sequences that ended outside of a commit
        self._suspects: deque[Sequence] = deque()
        self._next_step = 0
        self._reset = True  # the runner has no rows yet, or cannot rely on those it has

    @property
    def num_running(self) -> int:
        """Sequences that have a row and blocks."""
        return len(self._lives.rows.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row and blocks."""
        return len(self._lives.sequences) - len(self._lives.rows.running)

    @property
    def newest_rows(self) -> list[tuple[str, int]]:
        """Of the step planned last: each chunk's request, and the position up to which it is computed."""
        return [(seq.request.id, stop) for seq, _, stop, _, _ in self._lives.in_flight[-1].entries]

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished, a step is in flight, or something is to be said."""
        return bool(self._lives.sequences or self._lives.in_flight or self._unsaid)

    def close(self) -> None:
        """Nothing is to be done here; a scheduler that writes a journal closes it."""

    def calibrate(self, calibration: Calibration) -> None:
        """Learn from what was measured through the runner, whose rows cannot be relied on after it. No step may run."""
        if self._lives.in_flight:
            raise ValueError("a step is in flight: a calibration comes before or between steps")
        self.costs.calibrate(calibration)
        self._reset = True

    # Inputs: what happens to requests

    def add(self, request: Request, now: float) -> None:
        """Queue a request.

        Raises RequestError for an id that is in use, and for a beam search that cannot fit; QueueFull,
        DeadlineUnreachable. Of one whose sequences have all ended before nothing more is said.
        """
        if request.id in self._lives.families:
            raise RequestError(f"request id {request.id!r} is in use; choose another", "request_id")
        check_search(request, self.config, self.cache.config)
        try:
            self._deadlines.check(request)
            self._bound.check(request, self._next_step, now)
        except (DeadlineUnreachable, QueueFull) as error:
            self.accounts.refused(request, error, now)
            raise
        sequences = self._lives.add(request, now)
        if not sequences:
            return
        self._bound.add(request, now)
        self._deadlines.add(sequences[0], now)
        if request.beams is not None:
            self._searches.add(sequences[0])
        for seq in sequences if request.known else ():
            self._end_known(seq, now)

    def abort(self, request_id: str, now: float) -> None:
        """Give up a request. Nothing more is said about it; an unknown id is ignored."""
        self.cache.at(now)
        self._unsaid = [output for output in self._unsaid if output.request_id != request_id]
        self._searches.drop(request_id)
        self._lives.end_all(request_id, "abort", now)

    def finish(self, seq_id: int, num_tokens: int, now: float) -> None:
        """The front end saw the end of a sequence after `num_tokens` output tokens (a stop string).

        Tokens after that do not belong to it. Nothing more is said about the sequence; an unknown one,
        which may have ended on its own meanwhile, is ignored.
        """
        self.cache.at(now)
        if num_tokens < 0:
            raise ValueError(f"a sequence cannot have ended after {num_tokens} tokens")
        seq = self._lives.sequences.get(seq_id)
        if seq is not None and seq.request.beams is None:  # beams end when all of them are heard
            del seq.tokens[len(seq.request.prompt) + num_tokens :]
            self._note_length(seq)
            self._lives.end(seq, "stop", now)

    def flush(self, now: float) -> int:
        """Evict all cached KV that nobody uses; how many blocks were freed."""
        return self.cache.flush(Cause(now))

    def explain(self, request_id: str, now: float) -> Explanation | None:
        """What became of a request and why; None where it is unknown or forgotten."""
        self.accounts.memory_told(self.cache, now)
        return self.accounts.explain(request_id, [seq.id for seq in self._lives.families.members(request_id)], now)

    # The loop: plan, late, commit

    def plan(self, now: float) -> Step | None:
        """The next step, or None when nothing can run before a commit. Requests may end meanwhile: see `missed`."""
        self.cache.at(now)
        self._end_missed(now)
        suspect = self._next_suspect()
        alone = self._reset or suspect is not None  # no other step is in flight beside it
        in_flight = self._lives.in_flight
        if len(in_flight) >= (1 if alone else self.config.steps_in_flight) or (in_flight and in_flight[-1].alone):
            return None
        builder = StepBuilder(self._next_step, len(self.cache.pools), reset=self._reset)
        if suspect is None:
            self._filling.fill(builder, now)
        else:
            self._filling.fill_alone(suspect, builder, now)
        opened = {seq.id for seq in builder.opened}
        for seq in self._lives.rows.running if self._reset else self._lives.rows.unmet:
            if seq.id not in opened:
                builder.open(seq)
        for seq in () if self._reset else self._lives.rows.corrected:
            builder.correct(seq)
        self.accounts.memory_told(self.cache, now)
        if not (builder.chunks or builder.arrivals or self.cache.has_urgent_moves):
            return None
        self._reset = False
        self._lives.rows.told()
        self._next_step += 1
        moves = self.cache.launched(builder.id)
        num_bytes = bytes_swapped(moves, self.cache.config)
        launched = Launched(builder.id, builder.entries, builder.num_tokens, alone, builder.arrivals, num_bytes)
        self._lives.in_flight.append(launched)
        self.predicted_seconds = self.costs.predicted_seconds(launched.num_tokens, _pairs(launched))
        return builder.build(moves)

    def missed(self) -> list[Output]:
        """What is to be said about sequences that ended outside of a commit.

        `plan` has ended them, since they cannot meet their deadline any more; or they were added with known tokens
        that nothing can follow.
        """
        outputs, self._unsaid = self._unsaid, []
        return outputs

    def late(self, step: Step) -> Late:
        """What sampling `step` needs that its plan could not contain: masks of constrained rows."""
        del step  # nothing is constrained yet
        return Late.nothing()

    def commit(self, result: StepResult, now: float) -> list[Output]:
        """Take in what came of the oldest step in flight."""
        if not self._lives.in_flight or self._lives.in_flight[0].id != result.step_id:
            raise ValueError(f"step {result.step_id} was committed, but is not the oldest in flight")
        self.cache.at(now)
        launched = self._lives.in_flight.popleft()
        if result.error:
            alone = launched.entries[0][0].id if len(launched.entries) == 1 else None
            for seq_id in self.cache.failed(launched.id):
                if seq_id != alone:  # nobody begins with what it writes itself
                    self._lives.begin_again(self._lives.sequences[seq_id], now)
            self._lives.look_for_swapped()
            return self._roll_back(launched, result.error, now)
        self.cache.collected(launched.id)
        for seq in launched.arrivals:
            if seq.arriving == launched.id:
                seq.arriving = -1
        (bytes_out, bytes_in), (seconds_out, seconds_in) = launched.num_bytes, result.swap_seconds
        self.costs.observe_copies(bytes_out, seconds_out, bytes_in, seconds_in)
        self.costs.observe_step(launched.num_tokens, result.seconds, _pairs(launched))
        if launched.id % _STEPS_PER_SAMPLE == 0:
            self.block_use.sample(*self._lives.rows.slots())
        outputs = []
        tokens, counts, extras, at = result.tokens.tolist(), result.counts.tolist(), Extras(result), 0
        self._lives.queue.served(launched.entries, counts)
        for entry, count in zip(launched.entries, counts, strict=True):
            seq, _, stop, epoch, num_told = entry
            news = extras.take(entry, at, count) if num_told or extras.has_logprobs else NOTHING
            if not seq.finished and seq.epoch == epoch:
                seq.suspect = False
                self._wrote(seq, stop, now)
                if seq.request.beams is not None:
                    outputs += self._hear(seq, tokens[at : at + count], news, now)
                elif count or num_told or seq.is_over:
                    outputs.append(self._take(entry, tokens[at : at + count], news, now))
            at += count
        return outputs

    @property
    def leaks(self) -> bool:
        """Whether nothing is left to do and yet somebody uses a block. Costs nothing: asked after each step."""
        used = self.cache.pools.num_blocks - self.cache.pools.num_available - self.cache.num_pinned
        used += self.cache.host_pools.num_blocks - self.cache.host_pools.num_free
        return used > 0 and not self.has_work

    def check(self) -> list[str]:
        """Complaints about memory that does not add up, or that nobody should own; empty when all is well."""
        wrong = self.cache.check()
        strangers = [seq_id for seq_id in self.cache.tables if not self._lives.is_running(seq_id)]
        if strangers:
            wrong.append(f"sequences {strangers} do not run and have tables")
        strangers = [seq_id for seq_id in self.cache.swapped if not self._lives.is_swapped(seq_id)]
        if strangers:
            wrong.append(f"sequences {strangers} do not wait and are in the host pool")
        return wrong

    def repair(self) -> None:
        """Give back what nobody should own, and make reference counts add up. For an engine that has logged `check`."""
        self.cache.repair()  # first: nothing can be given back to an index that makes no sense
        for seq_id in list(self.cache.tables):
            if not self._lives.is_running(seq_id):
                self.cache.release(seq_id)
        for seq_id in list(self.cache.swapped):
            if not self._lives.is_swapped(seq_id):
                self.cache.forget_swapped(seq_id)

    def _next_suspect(self) -> Sequence | None:
        """A running sequence that was part of a failed step and has not run since."""
        while self._suspects:
            seq = self._suspects[0]
            if seq.suspect and not seq.finished and seq.row >= 0:
                return seq
            seq.suspect = False
            self._suspects.popleft()
        return None

    def _end_known(self, seq: Sequence, now: float) -> None:
        """A sequence has nothing to come behind the tokens that it brought along."""
        if (known := seq.known_end) is not None:
            reason, stop_token = known
            self._lives.end(seq, reason, now)
            self._unsaid.append(Output(seq.request.id, seq.index, seq.id, [], reason, stop_token))

    def _end_missed(self, now: float) -> None:
        """Whoever waits and cannot be in time any more takes no rows and blocks."""
        for request_id in self._deadlines.missed(now):
            members = self._lives.families.members(request_id)
            request = members[0].request
            error = f"it waited too long to meet its deadline of {request.terms.deadline:.3g} s"
            ended = [(seq.index, seq.id) for seq in members]
            if request.beams is not None:
                ended = [(i, members[0].id) for i in range(request.params.n)]
            self._unsaid += [Output(request_id, i, seq_id, [], "abort", error=error) for i, seq_id in ended]
            self._searches.drop(request_id)
            self._lives.end_all(request_id, "deadline", now)

    # Committing

    def _note_length(self, seq: Sequence) -> None:
        """A sequence came to its end."""
        self.block_use.ended(len(seq.tokens))
        self._bound.ended(seq)

    def _wrote(self, seq: Sequence, num_tokens: int, now: float) -> None:
        """The KV of the first `num_tokens` positions is there, and stays unless the sequence is preempted."""
        if seq.row < 0:
            return
        seq.num_written = num_tokens
        if num_tokens >= seq.num_shared > 0:
            self._lives.branch_held(seq, now)
        if self.cache.windowed:
            assert seq.table is not None
            self.cache.trim(seq.table, num_tokens)

    def _take(self, entry: Entry, tokens: list[int], news: News, now: float) -> Output:
        """What came of a chunk: append sampled tokens, and see whether the sequence ends."""
        seq, _, stop, _, num_told = entry
        if num_told:
            seq.num_told = min(stop, seq.to_tell)
        kept, reason, error = seq.extend(tokens) if tokens else (tokens, None, "")
        logprobs, scored, pooled = news
        if logprobs is not None:
            logprobs = logprobs.slice(0, len(kept))
        total = seq.add_up(logprobs) if kept and seq.request.params.is_ranked else None
        begins = kept and len(kept) == seq.num_generated
        queued = self.accounts.queue_seconds(seq.request.id) if begins else None
        if not seq.samples and seq.is_over:
            reason = "stop" if seq.pools else "length"
        if reason is not None:
            self._note_length(seq)
            self._lives.end(seq, reason, now)
        stop_token = kept[-1] if kept and reason == "stop" else None
        about = (seq.request.id, seq.index, seq.id, kept, reason, stop_token)
        return Output(*about, logprobs, scored, pooled, seq.num_cached or 0, total, error, queued)

    def _hear(self, seq: Sequence, tokens: list[int], news: News, now: float) -> list[Output]:
        """What came of a chunk of a beam: its candidates, or nothing yet. The search may be over."""
        if not tokens:
            return []
        if tokens[0] < 0 or news.logprobs is None:
            return self._fail_search(seq, "no token could be chosen: the logits are not finite", now)
        outputs = self._searches.hear(seq, news.logprobs, now)
        if outputs:
            self._lives.end_all(seq.request.id, "stop", now)
        return outputs

    def _fail_search(self, seq: Sequence, error: str, now: float) -> list[Output]:
        """A beam failed, and with it the search."""
        request = seq.request
        self._searches.drop(request.id)
        self._lives.end_all(request.id, "error", now)
        return [Output(request.id, i, seq.id, [], "error", error=error) for i in range(request.params.n)]

    def _roll_back(self, failed: Launched, error: str, now: float) -> list[Output]:
        """Undo a failed step. Its sequences become suspects; one that fails again, alone, ends with the error."""
        self._reset = True
        self.accounts.failed(failed.id, error, now)
        alive = [(seq, start) for seq, start, _, epoch, _ in failed.entries if not seq.finished and seq.epoch == epoch]
        outputs = []
        for seq, start in alive:
            seq.epoch += 1  # chunks of it in later steps built on this one
            seq.num_pending = 0
            seq.num_computed = min(seq.num_computed, start)
            if seq.table is not None:
                seq.table.launched = min(seq.table.launched, start)
            if seq.suspect and len(failed.entries) == 1:
                if seq.request.beams is not None:
                    return self._fail_search(seq, error, now)
                self._lives.end(seq, "error", now)
                outputs.append(Output(seq.request.id, seq.index, seq.id, [], "error", error=error))
            else:
                seq.suspect = True
                self._suspects.append(seq)
        return outputs


def _pairs(launched: Launched) -> float:
    """Tokens and those they attend to, of a step that computes prompts; 0 of one that only generates."""
    if launched.num_tokens <= len(launched.entries):
        return 0.0
    return sum((stop - start) * (start + stop + 1) for _, start, stop, _, _ in launched.entries) / 2
