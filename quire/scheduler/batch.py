"""Filling: what the next step computes. Everybody that runs goes on, then who waits begins, as far as there is room."""

from quire.cache.kv_cache import KVCache
from quire.config import SchedulerConfig
from quire.core.step import ChunkOutput
from quire.cost.step_time import Pace
from quire.scheduler.budget_sharing import SHARINGS, Shares
from quire.scheduler.lifecycle import Lives, cause_of, keep_of
from quire.scheduler.sequence import Sequence
from quire.scheduler.step_builder import StepBuilder

_NONE, _SAMPLE, _POOL = int(ChunkOutput.NONE), int(ChunkOutput.SAMPLE), int(ChunkOutput.POOL)


class Filling:
    """Puts chunks into a step, within its budgets of tokens and of predicted time."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, lives: Lives, pace: Pace) -> None:
        self._config = config
        self._cache = cache
        self._lives = lives
        self._pace = pace
        self._sharing = SHARINGS.get(config.policy)
        self._refused = -1  # the head for which memory was short in the step before
        self._gave_way: Sequence | None = None  # who was preempted for a better class lately

    def fill(self, builder: StepBuilder, now: float) -> None:
        """Chunks for all that run, and for those that can begin."""
        lives = self._lives
        if lives.caution.planned():
            lives.accounts.caution_changed(lives.caution.blocks_each, now, more=False)
        lives.queue.refresh()
        lives.branch_waiting(now)
        self._make_way(now)
        left = self._advance(lives.rows.running, builder, now)
        self._admit(builder, left, now, lives.spare if lives.rows.running else None)
        for _ in range(len(lives.rows.running) + 1):
            if builder.chunks or builder.arrivals or lives.in_flight or lives.queue.head is None:
                break
            self._unblock(builder, left, now)

    def _make_way(self, now: float) -> None:
        """The head takes the place of a worse class, or of a tenant that has or had more, where rows are short.

        Also where memory was, in the step before. One family a step, and not before the one before it has left.
        """
        head, rows = self._lives.queue.head, self._lives.rows
        if self._sharing is None or head is None or (rows.has_free and self._refused != head.id):
            return
        last = self._gave_way
        if last is not None and last.row < 0 and self._lives.is_in_flight(last):
            return
        victim = self._sharing.gives_way(rows.running, self._lives.queue, head)
        if victim is not None and victim.arriving < 0:  # or when it is there
            self._gave_way = victim
            self._lives.preempt(victim, self._sharing.reason, now)

    def _shares(self, running: list[Sequence], spare: int) -> Shares | None:
        """What those who run may have of the tokens left; None: whatever there are, as nobody else could have them."""
        head = self._lives.queue.head
        if self._sharing is None or head is None or not self._lives.rows.has_free or self._refused == head.id:
            return None
        return Shares(self._sharing, running, self._lives.queue, max(spare, 0))

    def fill_alone(self, seq: Sequence, builder: StepBuilder, now: float) -> None:
        """Chunks for one that runs; the others wait."""
        self._advance([seq], builder, now)
        self._lives.accounts.held_up("failure", now)

    def _advance(self, sequences: list[Sequence], builder: StepBuilder, now: float) -> int:
        """Give each sequence some of the tokens it lacks; returns the tokens left in the budget.

        Everybody gets one token before anybody gets a second, so that a long prompt delays no one.
        """
        budget = self._pace.tokens_within(self._config.step_seconds, self._config.max_num_batched_tokens)
        spare = budget - len(sequences)
        shares = self._shares(sequences, spare)
        i = 0
        while i < len(sequences):
            seq = sequences[i]
            start = seq.num_computed
            lacking = min(len(seq.tokens) + seq.num_pending, seq.limit) - start
            if lacking <= 0 or seq.arriving >= 0:
                seq.table.launched = 0 if seq.arriving >= 0 else start  # type: ignore[union-attr]  # it runs
                spare += 1
                i += 1
                continue
            take = min(lacking, 1 + max(spare, 0))
            if shares is not None and take > 1:
                take = 1 + shares.take(seq, take - 1)
            if start + take > seq.table.capacity and not self._grow(seq, start + take, builder, now):  # type: ignore[union-attr]
                if seq.row < 0:  # it was the latest arrival itself, and the last
                    break
                spare += 1
            else:
                self._plan_chunk(seq, take, builder)
                spare -= take - 1
            i += 1
        return spare

    def _grow(self, seq: Sequence, num_tokens: int, builder: StepBuilder, now: float) -> bool:
        """Back the first `num_tokens` positions, preempting the latest arrivals while blocks are short.

        Another family leaves as a whole; of its own the latest leaves alone, so that the first can always go on.
        """
        assert seq.table is not None
        while (firsts := self._cache.grow(seq.table, num_tokens, cause=cause_of(seq, now))) is None:
            if self._cache.fits_once_collected(seq.table, num_tokens):
                return False  # steps in flight are about to give back enough
            if self._cache.windowed and self._lives.is_in_flight(seq):
                return False  # when they are committed, blocks of its own leave the window
            victim = self._lives.rows.running[-1]
            if victim.arriving >= 0:
                return False  # when it is there it can be preempted
            whose = " for its own request" if victim.request is seq.request else ""
            self._preempt(victim, seq, f"no free block{whose}", now)
            if victim is seq:
                return False
        builder.give_blocks(seq, firsts)
        return True

    def _admit(self, builder: StepBuilder, left: int, now: float, spare: list[int] | None) -> None:
        """Start waiting sequences, in the order of the queue, while tokens, rows and blocks last.

        spare: blocks of each group to be left for growth.
        """
        while (seq := self._lives.queue.head) is not None:
            if left <= 0 or not self._lives.rows.has_free:
                self._lives.accounts.held_up("tokens" if left <= 0 else "rows", now)
                return
            if self._lives.is_in_flight(seq) or self._cache.is_leaving(seq.id):  # preempted a moment ago
                self._lives.accounts.held_up("in_flight", now)
                return
            limit = min(len(seq.tokens), seq.limit)
            admission = self._cache.admit(
                seq.id,
                seq.tokens,
                seq.request.namespace,
                reusable=seq.reusable,
                limit=limit,
                most=left,
                spare=spare,
                cause=cause_of(seq, now),
                keep=keep_of(seq),
            )
            if admission is None:
                self._lives.accounts.held_up("memory", now)
                self._refused = seq.id
                return
            num_new = 0 if seq.has_begun else max(0, len(seq.request.prompt) - admission.num_tokens)
            self._lives.admit(seq, admission, now)
            builder.open(seq)
            if admission.arriving:
                builder.arrive(seq)
            else:
                take = min(limit - admission.num_tokens, left)
                self._plan_chunk(seq, take, builder)
                left -= take
            self._lives.queue.admitted(seq, num_new)
            self._refused = -1
            spare = self._lives.spare
        self._lives.accounts.held_up("step", now)

    def _unblock(self, builder: StepBuilder, left: int, now: float) -> None:
        """Nothing runs and somebody waits: beams wait for each other, and hold what the one in the queue needs."""
        self._admit(builder, left, now, None)
        waiting = self._lives.queue.head
        if waiting is not None and not (builder.chunks or builder.arrivals) and self._lives.rows.running:
            victim = self._lives.rows.running[-1]
            self._preempt(victim, waiting, "its request waits for one that came before", now)

    def _preempt(self, victim: Sequence, gainer: Sequence, reason: str, now: float) -> None:
        if self._lives.caution.preempted(len(self._lives.rows.running)):
            self._lives.accounts.caution_changed(self._lives.caution.blocks_each, now, more=True)
        if victim.request is gainer.request:
            self._lives.preempt_alone(victim, reason, now)
        else:
            self._lives.preempt(victim, reason, now)

    def _plan_chunk(self, seq: Sequence, take: int, builder: StepBuilder) -> None:
        """The sequence's next `take` tokens; the last token known so far yields the next one."""
        start = seq.num_computed
        if start < seq.to_tell < start + take and seq.num_told < seq.to_tell and seq.num_generated:
            take = seq.to_tell - start  # logits are those of a chunk's last positions, and forced tokens come behind
        stop = seq.num_computed = start + take
        table = seq.table
        assert table is not None
        table.launched = start
        if stop >= table.due and (firsts := self._cache.record(table, start, stop)) is not None:
            builder.give_blocks(seq, firsts)
        told = max(0, min(stop, seq.to_tell) - max(start, seq.num_told)) if seq.to_tell else 0
        if stop == len(seq.tokens) + seq.num_pending and seq.samples:
            seq.num_pending += 1
            builder.chunks.append((seq.row, seq.id, start, stop, 0, told + 1, _SAMPLE))
        else:
            builder.chunks.append((seq.row, seq.id, start, stop, 0, told, _POOL if told and seq.pools else _NONE))
        builder.entries.append((seq, start, stop, seq.epoch, told))
        builder.num_tokens += take
        seq.last_step = builder.id
