"""Batch composition: schedules running sequences, then admits waiting ones while budget, rows and blocks last."""

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
    """Plans the chunks of a step within its budgets of tokens and of predicted time."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, lives: Lives, pace: Pace) -> None:
        self._config = config
        self._cache = cache
        self._lives = lives
        self._pace = pace
        self._sharing = SHARINGS.get(config.policy)
        self._refused = -1  # id of the last head that lacked blocks; -1 after an admission
        self._gave_way: Sequence | None = None  # the sequence preempted last for budget sharing

    def fill(self, builder: StepBuilder, now: float) -> None:
        """Plan chunks of all running sequences, and of waiting ones that can be admitted."""
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
        """Preempt for the head of the queue by the rule of budget sharing, if rows are short or the head lacked blocks.

        Preempts at most one request per step, and none while the previous victim is still in an in-flight step.
        """
        head, rows = self._lives.queue.head, self._lives.rows
        if self._sharing is None or head is None or (rows.has_free and self._refused != head.id):
            return
        last = self._gave_way
        if last is not None and last.row < 0 and self._lives.is_in_flight(last):
            return
        victim = self._sharing.gives_way(rows.running, self._lives.queue, head)
        if victim is not None and victim.arriving < 0:  # else after its swap-in
            self._gave_way = victim
            self._lives.preempt(victim, self._sharing.reason, now)

    def _shares(self, running: list[Sequence], spare: int) -> Shares | None:
        """How `spare` tokens are shared; None without a limit, because no waiting sequence could use them."""
        head = self._lives.queue.head
        if self._sharing is None or head is None or not self._lives.rows.has_free or self._refused == head.id:
            return None
        return Shares(self._sharing, running, self._lives.queue, max(spare, 0))

    def fill_alone(self, seq: Sequence, builder: StepBuilder, now: float) -> None:
        """Plan a chunk of one running sequence only."""
        self._advance([seq], builder, now)
        self._lives.accounts.held_up("failure", now)

    def _advance(self, sequences: list[Sequence], builder: StepBuilder, now: float) -> int:
        """Plan a chunk of each sequence that has work. Returns the tokens left in the budget.

        Each sequence gets one token before any gets a second, so that a long prompt does not delay the others.
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
                if seq.row < 0:  # it was the last one itself, and is preempted
                    break
                spare += 1
            else:
                self._plan_chunk(seq, take, builder)
                spare -= take - 1
            i += 1
        return spare

    def _grow(self, seq: Sequence, num_tokens: int, builder: StepBuilder, now: float) -> bool:
        """Allocate blocks for the first `num_tokens` positions; preempt the last running ones while blocks are short.

        Another request is preempted as a whole. Of its own request only the last sequence is preempted, so that the
        first can always continue. Returns False if the sequence gets no chunk in this step.
        """
        assert seq.table is not None
        while (firsts := self._cache.grow(seq.table, num_tokens, cause=cause_of(seq, now))) is None:
            if self._cache.fits_once_collected(seq.table, num_tokens):
                return False  # in-flight steps will free enough blocks
            if self._cache.windowed and self._lives.is_in_flight(seq):
                return False  # their commit frees its blocks behind the window
            victim = self._lives.rows.running[-1]
            if victim.arriving >= 0:
                return False  # it can be preempted after its swap-in
            whose = " for its own request" if victim.request is seq.request else ""
            self._preempt(victim, seq, f"no free block{whose}", now)
            if victim is seq:
                return False
        builder.give_blocks(seq, firsts)
        return True

    def _admit(self, builder: StepBuilder, left: int, now: float, spare: list[int] | None) -> None:
        """Admit waiting sequences in the order of the queue, while tokens, rows and blocks last.

        left: tokens. spare: blocks per group to leave free, the admission watermark; None: no watermark.
        """
        while (seq := self._lives.queue.head) is not None:
            if left <= 0 or not self._lives.rows.has_free:
                self._lives.accounts.held_up("tokens" if left <= 0 else "rows", now)
                return
            if self._lives.is_in_flight(seq) or self._cache.is_leaving(seq.id):  # preempted just now
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
        """Admit the head without watermark, or preempt the last running sequence: idle beams hold the head's blocks."""
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
        """Plan a chunk of at most `take` tokens. Behind the last known or pending token the next one is sampled."""
        start = seq.num_computed
        if start < seq.to_tell < start + take and seq.num_told < seq.to_tell and seq.num_generated:
            take = seq.to_tell - start  # logits exist for the last positions only, here not forced tokens
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
