"""Batch composition: schedules running sequences, then admits waiting ones while budget, rows and blocks last."""

from collections import Counter
from collections.abc import Iterable

from quire.cache.manager import KVCacheManager
from quire.config import SchedulerConfig
from quire.scheduler.budget_sharing import MAX_COMPARED, SHARING_RULES, Division, PromptSharing
from quire.scheduler.lifecycle import SchedulerState, cause_of, retention_of
from quire.scheduler.preemption import Victims, default_victim
from quire.scheduler.sequence import Sequence
from quire.scheduler.speculation import Speculator
from quire.scheduler.step_budget import StepBudget
from quire.scheduler.step_builder import StepBuilder


class BatchComposer:
    """Plans the chunks of a step within its budgets of tokens and of predicted time."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        state: SchedulerState,
        budget: StepBudget,
        speculator: Speculator | None,
    ) -> None:
        self._config = config
        self._cache = cache
        self._state = state
        self._budget = budget
        self._speculator = speculator
        self._sharing = SHARING_RULES.get(config.policy)
        self._most_per_prompt = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._prompts = PromptSharing(config.policy, cache, self._most_per_prompt)
        self._blocked = -1  # id of the last waiting sequence that lacked blocks; -1 after an admission
        self._last_victim: Sequence | None = None  # the sequence preempted last for budget sharing

    def schedule(self, builder: StepBuilder, now: float) -> None:
        """Plan chunks of all running sequences, and of waiting ones that can be admitted."""
        state = self._state
        if state.watermark.planned():
            state.request_stats.watermark_changed(state.watermark.blocks_per_sequence, now, more=False)
        state.queue.refresh()
        state.branch_waiting(now)
        self._preempt_for_head(now)
        left, first = self._schedule_running(state.running_queue.running, builder, now)
        watermark_blocks = state.watermark_blocks if state.running_queue.running else None
        left = self._admit(builder, left, now, watermark_blocks, first)
        for _ in range(len(state.running_queue.running) + 1):
            is_busy = builder.chunks or builder.swapped_in or state.in_flight or self._cache.has_moves_in_flight
            if is_busy or state.queue.head is None:
                break
            self._unblock(builder, left, now)
        if self._speculator is not None and left > 0:
            self._speculator.add_drafts(builder, left)

    def _preempt_for_head(self, now: float) -> None:
        """Preempt for the head of the queue by the rule of budget sharing, if rows are short or the head lacked blocks.

        One sequence is enough if only a row is missing. Blocks are freed by a whole request, because its sequences
        share most of them. Preempts nothing while the previous victim is still in an in-flight step. Under `fair` a
        request is not preempted again before it has a new token, or two tenants could preempt each other forever.
        """
        head, rows = self._state.queue.head, self._state.running_queue
        if self._sharing is None or head is None or (rows.num_free_rows and self._blocked != head.id):
            return
        last = self._last_victim
        if last is not None and last.row < 0 and self._state.is_in_flight(last):
            return
        requests, lacks_blocks = self._state.requests, self._blocked == head.id
        families = Counter(seq.request.id for seq in rows.running)

        def num_leaving(seq: Sequence) -> int:
            return families[seq.request.id] if lacks_blocks or self._leaves_together(seq) else 1

        victims = Victims(rows.running, lambda seq: requests[seq.request.id].has_progressed, num_leaving)
        victim = self._sharing.select_victim(victims, self._state.queue, head)
        if victim is not None and not victim.is_swapping_in:  # else after its swap-in
            self._last_victim = victim
            requests[victim.request.id].preempt_for_sharing()
            preempt = self._state.preempt if num_leaving(victim) > 1 else self._state.preempt_one
            preempt(victim, self._sharing.reason, now)

    def _divide(self, running: list[Sequence], num_tokens: int, *, decoding: bool) -> Division | None:
        """The division of `num_tokens` tokens among running and waiting prompts; None if they suffice for all."""
        waiting = self._state.queue.first(min(self._state.running_queue.num_free_rows, MAX_COMPARED))
        if any(seq.id == self._blocked for seq in waiting):
            waiting = []
        return self._prompts.divide(running, waiting, self._state.queue, max(num_tokens, 0), fills=decoding)

    def schedule_alone(self, seq: Sequence, builder: StepBuilder, now: float) -> None:
        """Plan a chunk of one running sequence only."""
        self._schedule_running([seq], builder, now, alone=True)
        self._state.request_stats.set_wait_cause("failure", now)

    def _schedule_running(
        self, sequences: list[Sequence], builder: StepBuilder, now: float, *, alone: bool = False
    ) -> tuple[int, list[Sequence]]:
        """Plan a chunk of each sequence that has work. Returns the tokens left, and the sequences to admit first.

        alone: whether the step is for these sequences only.

        Each sequence gets one token before any gets a second, so that a long prompt does not delay the others.
        """
        decoding = any(seq.decodes for seq in sequences)
        spare = int(self._budget.spare(len(sequences), decoding=decoding))
        division: Division | None = None
        is_divided = alone
        append_slot, add_token = self._cache.append_slot, builder.add_token
        speculator = self._speculator if self._config.steps_in_flight > 1 else None
        for seq in sequences:  # a preemption removes sequences behind this one
            start = seq.num_computed
            known = len(seq.tokens) + seq.num_pending
            skips = speculator is not None and speculator.skips(seq)
            if (
                start + 1 == known <= seq.limit
                and not skips
                and not (seq.num_to_report or seq.is_swapping_in)
                and append_slot(seq.table, start)  # type: ignore[arg-type]  # it runs
            ):
                add_token(seq, start)
                continue
            lacking = 0 if skips else min(known, seq.limit) - start
            if lacking <= 0 or seq.is_swapping_in:
                start = 0 if seq.is_swapping_in else start
                self._cache.cache_blocks(seq.table, min(start, len(seq.tokens)), 0)  # type: ignore[arg-type]  # it runs
                spare += 1
                continue
            take = 1
            if lacking > 1 and spare > 0:
                if not is_divided:
                    division, is_divided = self._divide(sequences, spare, decoding=decoding), True
                more = spare if division is None else division.running.get(seq.id, 0)
                take += min(lacking - 1, more, self._most_per_prompt - 1)
            if start + take > seq.table.capacity and not self._allocate_blocks(seq, start + take, builder, now):  # type: ignore[union-attr]
                if seq.row < 0:  # it was the last one itself, and is preempted
                    break
                spare += 1
            else:
                self._plan_chunk(seq, take, builder)
                spare -= take - 1
        if not is_divided and spare > 0 and self._state.queue.head is not None:
            division = self._divide([], spare, decoding=decoding)
        return (spare, []) if division is None else (spare - division.unused, division.waiting)

    def _allocate_blocks(self, seq: Sequence, num_tokens: int, builder: StepBuilder, now: float) -> bool:
        """Allocate blocks for the first `num_tokens` positions; preempt the last running ones while blocks are short.

        Sequences are preempted one by one, so that the others of their request continue, except for those of another
        request that leave together. Returns False if the sequence gets no chunk in this step.
        """
        assert seq.table is not None
        while (firsts := self._cache.grow(seq.table, num_tokens, cause=cause_of(seq, now))) is None:
            if self._cache.fits_once_collected(seq.table, num_tokens):
                return False  # in-flight steps will free enough blocks
            if self._cache.windowed and self._state.is_in_flight(seq):
                return False  # their commit frees its blocks behind the window
            victim = default_victim(self._state.running_queue.running)
            if victim.is_swapping_in:
                return False  # it can be preempted after its swap-in
            whose = " for its own request" if victim.request is seq.request else ""
            self._preempt(victim, seq, f"no free block{whose}", now)
            if victim is seq:
                return False
        builder.update_table(seq, firsts)
        return True

    def _admit(
        self,
        builder: StepBuilder,
        token_budget: int,
        now: float,
        watermark_blocks: list[int] | None,
        first: Iterable[Sequence] = (),
    ) -> int:
        """Admit `first` and then the queue in its order, while tokens, rows and blocks last.

        token_budget: tokens left. watermark_blocks: blocks per group to leave free, the admission watermark; None: no
        watermark. Returns the tokens left afterwards.
        """
        ahead = iter(first)
        while (seq := next(ahead, None) or self._state.queue.head) is not None:
            if token_budget <= 0 or not self._state.running_queue.num_free_rows:
                self._state.request_stats.set_wait_cause("tokens" if token_budget <= 0 else "rows", now)
                return token_budget
            if self._state.is_in_flight(seq) or self._cache.is_swapping_out(seq.id):  # preempted just now
                self._state.request_stats.set_wait_cause("in_flight", now)
                return token_budget
            if self._awaits_state(seq):
                self._state.request_stats.set_wait_cause("state", now)
                return token_budget
            limit = min(len(seq.tokens), seq.limit)
            admission = self._cache.admit(
                seq.id,
                seq.tokens,
                seq.request.namespace,
                reusable=seq.reusable,
                limit=limit,
                max_new_positions=token_budget,
                watermark_blocks=watermark_blocks,
                cause=cause_of(seq, now),
                retention=retention_of(seq),
            )
            if admission is None:
                self._state.request_stats.set_wait_cause("memory", now)
                self._blocked = seq.id
                return token_budget
            num_new = 0 if seq.has_run else max(0, len(seq.request.prompt) - admission.num_tokens)
            self._state.admit(seq, admission, now)
            builder.add_row(seq)
            if admission.is_swapping_in:
                builder.add_swapped_in(seq)
            else:
                take = min(limit - admission.num_tokens, token_budget, self._most_per_prompt)
                self._plan_chunk(seq, take, builder)
                token_budget -= take
            self._state.queue.admitted(seq, num_new)
            self._blocked = -1
            watermark_blocks = self._state.watermark_blocks
        self._state.request_stats.set_wait_cause("step", now)
        return token_budget

    def _awaits_state(self, seq: Sequence) -> bool:
        """Whether a sequence can start in the next step from a state that this step writes."""
        states, reusable = self._cache.states, seq.reusable
        if states is None or reusable <= 0 or seq.swapped:
            return False
        return states.leave_snapshot_for(seq.request.namespace, seq.tokens[:reusable])

    def _unblock(self, builder: StepBuilder, token_budget: int, now: float) -> None:
        """Admit the head without watermark, or preempt the last running sequence: idle beams hold the head's blocks."""
        self._admit(builder, token_budget, now, None)
        waiting = self._state.queue.head
        if waiting is not None and not (builder.chunks or builder.swapped_in) and self._state.running_queue.running:
            victim = default_victim(self._state.running_queue.running)
            self._preempt(victim, waiting, "another sequence of its request blocks the head of the queue", now)

    def _preempt(self, victim: Sequence, gainer: Sequence, reason: str, now: float) -> None:
        if self._state.watermark.preempted(len(self._state.running_queue.running)):
            self._state.request_stats.watermark_changed(self._state.watermark.blocks_per_sequence, now, more=True)
        if victim.request is gainer.request or not self._leaves_together(victim):
            self._state.preempt_one(victim, reason, now)
        else:
            self._state.preempt(victim, reason, now)

    def _leaves_together(self, seq: Sequence) -> bool:
        """Whether all sequences of a request are preempted together.

        Beams cannot continue alone. Of swapped sequences the shared blocks are copied once.
        """
        return seq.is_beam or self._config.preemption == "swap"

    def _plan_chunk(self, seq: Sequence, num_tokens: int, builder: StepBuilder) -> None:
        """Plan a chunk of up to `num_tokens`. The next token is sampled behind the last known or pending one."""
        start, num_prompt_outputs = seq.num_computed, 0
        if seq.num_to_report:
            behind = seq.num_reported < seq.num_to_report and seq.num_generated
            if behind and start < seq.num_to_report < start + num_tokens:
                num_tokens = seq.num_to_report - start  # logits exist for the last positions only, not forced tokens
            num_prompt_outputs = max(0, min(start + num_tokens, seq.num_to_report) - max(start, seq.num_reported))
        stop = start + num_tokens
        table = seq.table
        assert table is not None
        if (firsts := self._cache.cache_blocks(table, start, stop)) is not None:
            builder.update_table(seq, firsts)
        builder.add_chunk(seq, start, stop, num_prompt_outputs)
